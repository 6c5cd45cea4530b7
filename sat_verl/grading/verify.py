"""Ask math-verify in a process of its own, so that no answer can hang, crash or flood the caller.

Each process that grades owns at most one worker, started at the first need and kept. The worker is a plain
subprocess and speaks JSON lines, so it works from any thread and from daemonic processes (which may not have
``multiprocessing`` children), and nothing is unpickled. A worker that misses its deadline dies, and the next call
starts a new one. It ends with its parent (see :mod:`sat_verl.grading._worker`). POSIX only.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sat_verl.grading._worker import WALL_CLOCK_FACTOR

DEFAULT_DEADLINE_S = 5.0
START_LIMIT_S = 120.0
GRACE_S = 1.0
MAX_CHARS = 2000


class MathVerifyMissingError(ImportError):
    """math-verify is needed to compare two formulas but is not installed."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison of two formulas came to.

    Attributes:
        kind: "equal", "different", or "error" if there is no verdict.
        detail: why, in one word ("deadline", "worker_died", "gold_unparsed", "answer_unparsed", ...), or "".
    """

    kind: str
    detail: str = ""


class _WorkerDiedError(Exception):
    pass


class _DeadlineError(Exception):
    pass


class Verifier:
    """One worker process, shared by all threads of the process that owns it.

    Requests are served one after another. The deadline of a request counts the CPU time that the worker spends on it,
    so neither waiting for a turn, nor the start of the worker, nor a busy machine uses it up. By the clock the worker
    gets at most ``WALL_CLOCK_FACTOR`` times as long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._request_id = 0

    def compare(self, gold: str, answer: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Verdict:
        """Compare two formulas.

        Args:
            gold: LaTeX of the gold answer, without a box around it.
            answer: LaTeX of the extracted answer, without a box around it.
            deadline_s: seconds of CPU time the worker may take.

        Returns:
            The verdict; "error" whenever the comparison was not carried through.

        Raises:
            MathVerifyMissingError: if math-verify is not installed.
        """
        if max(len(gold), len(answer)) > MAX_CHARS:
            return Verdict("error", "too_long")
        with self._lock:
            for attempt in (1, 2):
                try:
                    return _verdict(self._ask(gold, answer, deadline_s))
                except _DeadlineError:
                    self._kill()
                    return Verdict("error", "deadline")
                except (_WorkerDiedError, OSError, ValueError):
                    # Perhaps killed from outside while idle; if the question itself is deadly, twice is enough.
                    self._kill()
                    if attempt == 2:
                        return Verdict("error", "worker_died")
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the worker; a later call starts a new one."""
        with self._lock:
            self._kill()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, or None while there is none."""
        return self._process.pid if self._process else None

    def _ask(self, gold: str, answer: str, deadline_s: float) -> dict[str, Any]:
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._request_id += 1
        request = {"id": self._request_id, "gold": gold, "answer": answer, "deadline_s": deadline_s}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        reply = self._read(WALL_CLOCK_FACTOR * deadline_s + GRACE_S)
        if reply.get("id") != self._request_id:
            raise _WorkerDiedError("answered another question")
        return reply

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathVerifyMissingError(_missing("no module named math_verify"))
        # The worker must import what this process would, however its path came about; a fixed hash seed makes the
        # order of sympy's sets, and with it every verdict, the same in each worker.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *(entry for entry in sys.path if entry)])
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sat_verl.grading._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            hello = self._read(START_LIMIT_S)
        except _DeadlineError as error:
            raise _WorkerDiedError("did not start") from error
        if not hello.get("ready"):
            self._kill()
            raise MathVerifyMissingError(_missing(str(hello.get("error"))))

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()  # select.select fails for descriptors above 1023, which Ray workers have
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
        end = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise _DeadlineError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                timed_out = self._process.wait() in (-signal.SIGPROF, -signal.SIGALRM)
                raise _DeadlineError if timed_out else _WorkerDiedError
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        _close_pipes(process)

    def _forget(self) -> None:
        """In a forked child: the worker and the lock belong to the parent. Leave both alone and start afresh."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # keeps Popen from waiting for a process that is no child of this one


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue


def _missing(reason: str) -> str:
    return (
        f"comparing two formulas needs math-verify, which cannot be imported ({reason}); install it with "
        "`pip install math-verify`"
    )


def _verdict(reply: dict[str, Any]) -> Verdict:
    kind, detail = str(reply["verdict"]), str(reply["detail"])
    if kind in ("equal", "different"):
        return Verdict(kind, detail)
    if kind == "answer_unparsed":
        return Verdict("different", kind)
    return Verdict("error", detail if kind == "error" else kind)


_shared = Verifier()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared._forget)


def compare(gold: str, answer: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Verdict:
    """Compare two formulas with the worker of this process.

    Args:
        gold: LaTeX of the gold answer.
        answer: LaTeX of the extracted answer.
        deadline_s: seconds of CPU time the comparison may take.

    Returns:
        The verdict (see :meth:`Verifier.compare`).

    Raises:
        MathVerifyMissingError: if math-verify is not installed.
    """
    return _shared.compare(gold, answer, deadline_s)
