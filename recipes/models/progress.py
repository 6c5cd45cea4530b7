"""Progress of a warm start: a bar on a terminal, one line per evaluation otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recipes.models.warm_start import Progress


@contextmanager
def reporter(label: str) -> Iterator[Callable[[Progress], None]]:
    """Open a progress display on standard error.

    Args:
        label: what is being built.

    Yields:
        A function to call at every evaluation.
    """
    if not sys.stderr.isatty():
        yield _plain(label)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:  # rich is optional
        yield lambda at: print(f"\r{label}: {_describe(at)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        # The bar shows the way to the target success: the step at which it is reached is not known beforehand.
        shown = bar.add_task(label, total=1.0, state="starting")

        def update(at: Progress) -> None:
            bar.update(shown, completed=min(1.0, at.success / at.target), state=_describe(at))

        yield update


def _plain(label: str, every_seconds: float = 5.0) -> Callable[[Progress], None]:
    """A report that prints one line every few seconds, and the last one."""
    printed = -every_seconds

    def update(at: Progress) -> None:
        nonlocal printed
        if at.seconds - printed >= every_seconds or at.success >= at.target:
            printed = at.seconds
            print(f"{label}: {_describe(at)}", file=sys.stderr, flush=True)

    return update


def _describe(at: Progress) -> str:
    return (
        f"step {at.step} (at most {at.max_steps}), loss {at.loss:.3f}, "
        f"success {at.success:.3f} (stops at {at.target:.2f}), {at.seconds:.0f} s"
    )
