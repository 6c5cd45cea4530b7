"""What the terminal shows while samples come in."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUIET_EVERY_S = 30.0
"""Seconds between two lines where the output is no terminal."""


class SampleProgress:
    """A bar with tokens per second and the time that is left; plain lines where the output is no terminal."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._done, self._before = console, total, done, done
        self._tokens, self._correct, self._graded = 0, 0, 0
        self._begin = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, facts="")

    def __enter__(self) -> SampleProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def add(self, tokens: int, correct: bool | None) -> None:
        """One more sample; ``correct`` is None where nobody knows."""
        self._done += 1
        self._tokens += tokens
        self._graded += correct is not None
        self._correct += bool(correct)
        facts = self._facts()
        self._bar.update(self._task, completed=self._done, facts=facts)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last > QUIET_EVERY_S or self._done == self._total):
            self._last = now
            self._console.print(f"{self._done}/{self._total} samples  {facts}", soft_wrap=True, highlight=False)

    def _facts(self) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-9)
        left = (self._total - self._done) * seconds / max(1, self._done - self._before)
        minutes, rest = divmod(round(left), 60)
        share = f"  correct {self._correct / self._graded:.1%}" if self._graded else ""
        return f"{self._tokens / seconds:,.0f} tokens/s  ETA {minutes}:{rest:02d}{share}"
