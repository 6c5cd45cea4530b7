"""Runs one command and leaves nothing of it behind, however it ends.

``python -m recipes.supervisor FOLDERS LOG COMMAND...`` (folders separated by the path separator) starts the command in
a session of its own, as the reaper of everything that it starts (Ray and vLLM detach their processes). When the command
ends, or when whoever started the supervisor goes away (its end of the supervisor's standard input closes, as it does on
kill -9), the supervisor stops every process below it and removes the shared-memory segments that they held, and the
folders. It stops no other process: only its own descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")
GRACE_SECONDS = 10.0
_TICK_SECONDS = 0.25
_SCAN_EVERY = 4


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's (Linux; elsewhere a no-op)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files under /dev/shm that the processes have mapped."""
    found: set[Path] = set()
    for process in processes:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{process.pid}/maps", encoding="utf-8", errors="replace") as maps,
        ):
            for line in maps:
                start = line.find("/dev/shm/")
                if start >= 0:
                    found.add(Path(line[start:].rstrip("\n").removesuffix(" (deleted)")))
    return found


def _is_resource_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in part for part in process.cmdline())
    return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def stop_descendants() -> set[Path]:
    """Kill every process below this one; returns the shared-memory files they had mapped.

    Python's resource trackers go last: each removes the segments of its dead parent by itself.
    """
    segments: set[Path] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while processes := descendants():
        segments |= shared_memory_of(processes)
        trackers = [process for process in processes if _is_resource_tracker(process)]
        others = [process for process in processes if process not in trackers]
        _signal(others, signal.SIGKILL)
        if not others and time.monotonic() > deadline - GRACE_SECONDS / 2:
            _signal(trackers, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=0.5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            break
    return segments


def reap_orphans(own_child: int) -> None:
    """Collect the exit status of adopted processes that have ended; ``own_child`` is collected by its Popen."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid != own_child and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _remove(segments: Iterable[Path]) -> None:
    for segment in segments:
        if segment.parent == _SHM:
            segment.unlink(missing_ok=True)


def _parent_is_gone(stdin: int) -> bool:
    ready, _, _ = select.select([stdin], [], [], 0)
    return bool(ready) and os.read(stdin, 4096) == b""


def supervise(folders: list[Path], log: Path, command: list[str]) -> int:
    """Run ``command`` with its output in ``log``; returns its exit code (128 + signal when it was stopped)."""
    become_subreaper()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    segments: set[Path] = set()
    with open(log, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        tick = 0
        while child.poll() is None and not stopping and not _parent_is_gone(sys.stdin.fileno()):
            time.sleep(_TICK_SECONDS)
            tick += 1
            if tick % _SCAN_EVERY == 0:
                segments |= shared_memory_of(descendants())
                reap_orphans(child.pid)
        if child.poll() is None:
            # Asked nicely first: Ray then shuts its own processes down.
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_SECONDS)
        segments |= stop_descendants()
    _remove(segments)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if stopping:
        return 128 + stopping[0]
    return (
        child.returncode if child.returncode is not None and child.returncode >= 0 else 128 + abs(child.returncode or 9)
    )


def main(arguments: list[str]) -> int:
    folders, log, *command = arguments
    return supervise([Path(folder) for folder in folders.split(os.pathsep)], Path(log), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
