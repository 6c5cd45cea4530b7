"""Tasks in single processes, each replaced when it dies. No heavy imports: every worker imports this module."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None  # loaded before a fork, not after it


def end_with_parent() -> None:
    """For ``Popen(preexec_fn=...)``: SIGTERM for the child when its parent dies, however that comes about (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _attend() -> None:
    """End a worker with its parent, also if that is killed: a spawned worker would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _executor() -> ProcessPoolExecutor:
    # One process each: if it dies, it is clear in which task.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_attend)


def run_all(
    run: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    workers: int,
    started: Callable[[Task], None],
    finished: Callable[[Task, Outcome | None], None],
) -> None:
    """Run tasks, ``workers`` at a time; with 0 in this process.

    Args:
        run: what is done with each, in the worker; importable there by its name.
        tasks: in this order.
        workers: processes.
        started: called here with a task before it runs.
        finished: called here with a task and its outcome; None if its process died.
    """
    if workers == 0:
        for task in tasks:
            started(task)
            finished(task, run(task))
        return
    waiting = list(reversed(tasks))
    executors = [_executor() for _ in range(min(workers, len(tasks)))]
    running: dict[Future[Outcome], tuple[int, Task]] = {}

    def give(slot: int) -> None:
        if waiting:
            task = waiting.pop()
            started(task)
            running[executors[slot].submit(run, task)] = (slot, task)

    try:
        for slot in range(len(executors)):
            give(slot)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                slot, task = running.pop(future)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    outcome = None
                    executors[slot].shutdown(wait=False)
                    executors[slot] = _executor()
                finished(task, outcome)
                give(slot)
    finally:
        for executor in executors:
            for process in list((executor._processes or {}).values()):  # a public way comes with Python 3.14
                process.terminate()  # interrupted in mid-task; idle otherwise
            executor.shutdown(wait=False, cancel_futures=True)
