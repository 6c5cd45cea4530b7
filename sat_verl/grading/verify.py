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

DEFAULT_DEADLINE_S = 5.0
START_LIMIT_S = 120.0
WALL_CLOCK_FACTOR = 3.0
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
    """The worker has used up its CPU time."""


class _ClockError(Exception):
    """There is no answer in time, whoever is to blame."""


_TIMERS: dict[int, type[Exception]] = {signal.SIGPROF: _DeadlineError, signal.SIGALRM: _ClockError}


class Verifier:
    """One worker process, shared by all threads of the process that owns it.

    Requests are served one after another. The deadline of a request counts the CPU time that the worker spends on it,
    so neither waiting for a turn, nor the start of the worker, nor a busy machine uses it up. By the clock the worker
    gets at most ``WALL_CLOCK_FACTOR`` times as long. Who needs a hard limit by the clock names its ``end``, which
    covers waiting and starting too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._started = 0.0
        self._pending = b""
        self._request_id = 0

    def compare(
        self, gold: str, answer: str, deadline_s: float = DEFAULT_DEADLINE_S, end: float | None = None
    ) -> Verdict:
        """Compare two formulas.

        Args:
            gold: LaTeX of the gold answer, without a box around it.
            answer: LaTeX of the extracted answer, without a box around it.
            deadline_s: seconds of CPU time the worker may take.
            end: value of ``time.monotonic()`` at which the verdict must be there, whatever it is then.

        Returns:
            The verdict; "error" whenever the comparison was not carried through, with the detail "deadline" if the CPU
            time was used up and "clock" if only time has passed.

        Raises:
            MathVerifyMissingError: if math-verify is not installed.
        """
        if max(len(gold), len(answer)) > MAX_CHARS:
            return Verdict("error", "too_long")
        return _verdict(self._request({"gold": gold, "answer": answer}, deadline_s, end))

    def whole(
        self, gold: str, response: str, deadline_s: float = DEFAULT_DEADLINE_S, end: float | None = None
    ) -> dict[str, Any]:
        """What math-verify by itself makes of a whole response: its own extraction, settings and comparison.

        Args:
            gold: LaTeX of the gold answer, delimited.
            response: the response.
            deadline_s: seconds of CPU time the worker may take.
            end: as in :meth:`compare`.

        Returns:
            ``verdict`` ("equal", "different", "answer_unparsed", "gold_unparsed" or "error"), ``detail``, and
            ``answer``, the text of what it extracted, if anything.

        Raises:
            MathVerifyMissingError: if math-verify is not installed.
        """
        return self._request({"gold": gold, "response": response}, deadline_s, end)

    def start(self) -> None:
        """Have the worker ready, so that no comparison waits for its start.

        Raises:
            MathVerifyMissingError: if math-verify is not installed.
        """
        with self._lock:
            try:
                self._make_ready(None)
            except (_WorkerDiedError, OSError, ValueError):
                self._kill()

    def close(self) -> None:
        """End the worker; a later call starts a new one."""
        with self._lock:
            self._kill()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, or None while there is none."""
        return self._process.pid if self._process else None

    def _request(self, question: dict[str, str], deadline_s: float, end: float | None) -> dict[str, Any]:
        wait = -1.0 if end is None else max(0.0, end - time.monotonic())
        if not self._lock.acquire(timeout=wait):
            return _error("clock")
        try:
            for _ in range(2):
                try:
                    self._make_ready(end)
                except _ClockError:
                    return _error("clock")  # it goes on starting, for the next question
                except (_WorkerDiedError, OSError, ValueError):
                    self._kill()
                    continue
                try:
                    return self._ask(question, deadline_s, end)
                except (_DeadlineError, _ClockError) as error:
                    self._kill()
                    return _error("deadline" if isinstance(error, _DeadlineError) else "clock")
                except (_WorkerDiedError, OSError, ValueError):
                    # Perhaps killed from outside while idle; if the question itself is deadly, twice is enough.
                    self._kill()
            return _error("worker_died")
        finally:
            self._lock.release()

    def _ask(self, question: dict[str, str], deadline_s: float, end: float | None) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._request_id += 1
        limit_s = WALL_CLOCK_FACTOR * deadline_s if end is None else end - time.monotonic()
        if limit_s <= 0:
            return _error("clock")
        request = {"id": self._request_id, **question, "deadline_s": min(deadline_s, limit_s), "limit_s": limit_s}
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        reply = self._read(limit_s + (GRACE_S if end is None else 0.0))
        if reply.get("id") != self._request_id:
            raise _WorkerDiedError("answered another question")
        return reply

    def _make_ready(self, end: float | None) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._kill()  # from outside, while it was idle
        if self._process is None:
            self._start()
        if self._ready:
            return
        limit_s = self._started + START_LIMIT_S - time.monotonic()
        try:
            hello = self._read(limit_s if end is None else min(limit_s, end - time.monotonic()))
        except _ClockError:
            if time.monotonic() - self._started < START_LIMIT_S:
                raise
            raise _WorkerDiedError("did not start") from None
        if not hello.get("ready"):
            self._kill()
            raise MathVerifyMissingError(_missing(str(hello.get("error"))))
        self._ready = True

    def _start(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathVerifyMissingError(_missing("no module named math_verify"))
        # The worker must import what this process would, however its path came about; a fixed hash seed makes the
        # order of sympy's sets, and with it every verdict, the same in each worker.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *(entry for entry in sys.path if entry)])
        self._pending = b""
        self._ready, self._started = False, time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sat_verl.grading._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )

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
                raise _ClockError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                ended_by = -self._process.wait()
                raise _TIMERS.get(ended_by, _WorkerDiedError)
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


def _error(detail: str) -> dict[str, Any]:
    return {"verdict": "error", "detail": detail}


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


def compare(gold: str, answer: str, deadline_s: float = DEFAULT_DEADLINE_S, end: float | None = None) -> Verdict:
    """Compare two formulas with the worker of this process.

    Args:
        gold: LaTeX of the gold answer.
        answer: LaTeX of the extracted answer.
        deadline_s: seconds of CPU time the comparison may take.
        end: value of ``time.monotonic()`` at which the verdict must be there.

    Returns:
        The verdict (see :meth:`Verifier.compare`).

    Raises:
        MathVerifyMissingError: if math-verify is not installed.
    """
    return _shared.compare(gold, answer, deadline_s, end)


def whole(gold: str, response: str, deadline_s: float = DEFAULT_DEADLINE_S, end: float | None = None) -> dict[str, Any]:
    """:meth:`Verifier.whole` with the worker of this process."""
    return _shared.whole(gold, response, deadline_s, end)


def start() -> None:
    """Have the worker of this process ready (see :meth:`Verifier.start`)."""
    _shared.start()
