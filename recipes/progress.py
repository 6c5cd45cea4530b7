"""The display of a run on the user's terminal, read from the run folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from sat_verl.records import METRICS_FILE, PHASES_FILE, WAIT_FILE

_PLAIN_LINES = 20
_LONG_WAIT_S = 60.0


class Tail:
    """The complete JSON lines that a growing file has gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [json.loads(line) for line in data[:end].splitlines()]


def _number(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return format(value, form) if isinstance(value, int | float) else "-"


class Progress:
    """Step, reward, mean |d|, intercepted share, tokens/s and ETA: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, run_dir: Path, cfg: DictConfig, console: Console) -> None:
        self._console = console
        self._total = cfg.steps
        self._wait_file = run_dir / WAIT_FILE
        self._metrics, self._phases = Tail(run_dir / METRICS_FILE), Tail(run_dir / PHASES_FILE)
        self._started = time.monotonic()
        self._last_wait: tuple[dict[str, Any], float] = ({}, self._started)
        self._phase = "start processes"
        self._next_notice = _LONG_WAIT_S
        self._row: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.update(self._view())
            self._live.stop()

    def update(self) -> None:
        """Read what is new and show it."""
        for row in self._phases.rows():
            self._phase = row["phase"]
            self._plain(f"{self._elapsed():6.1f} s  {self._phase}")
        for row in self._metrics.rows():
            self._row = row
            if self._first is None:
                self._first = (row["step"], time.monotonic())
            every = max(1, self._total // _PLAIN_LINES)
            if row["step"] % every == 0 or row["step"] in (1, self._total):
                self._plain(f"{self._elapsed():6.1f} s  " + "  ".join(f"{k} {v}" for k, v in self._cells()))
        self._announce_wait()
        if self._live:
            self._live.update(self._view())

    def _announce_wait(self) -> None:
        """Say what a long wait is for: after 60 s without progress, and whenever that time has doubled."""
        waiting_for, seconds = self.wait()
        if seconds < _LONG_WAIT_S:
            self._next_notice = _LONG_WAIT_S
        elif seconds > self._next_notice:
            self._next_notice *= 2
            self._plain(f"{self._elapsed():6.1f} s  still waiting for {waiting_for} ({seconds:.0f} s)")

    def wait(self) -> tuple[str, float]:
        """What the run waits for, and for how many seconds without progress (while this machine was awake)."""
        try:
            found = json.loads(self._wait_file.read_text())
        except FileNotFoundError:
            found = {"for": "the training processes to start"}
        if found != self._last_wait[0]:
            self._last_wait = found, time.monotonic()
        return found["for"] or "the next step", time.monotonic() - self._last_wait[1]

    def _plain(self, text: str) -> None:
        if not self._live:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _eta(self) -> str:
        step = self._row.get("step", 0)
        if self._first is None or step <= self._first[0]:
            return "-"
        seconds = (time.monotonic() - self._first[1]) / (step - self._first[0]) * (self._total - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def _cells(self) -> list[tuple[str, str]]:
        return [
            ("step", f"{self._row.get('step', 0)}/{self._total}"),
            ("reward", _number(self._row, "reward/mean", ".3f")),
            ("age", _number(self._row, "lag/age", ".1f")),
            ("mean|d|", _number(self._row, "actor/abs_log_ratio", ".4f")),
            ("intercepted", _number(self._row, "actor/sat/intercepted", ".2%")),
            ("tokens/s", _number(self._row, "perf/response_tokens_per_s", ".0f")),
            ("eta", self._eta()),
        ]

    def _view(self) -> Table:
        table = Table.grid(padding=(0, 2))
        head = [f"[bold]{name}[/]" for name, _ in self._cells()]
        table.add_row("", *head, "elapsed")
        bar = ProgressBar(total=self._total, completed=self._row.get("step", 0), width=24)
        elapsed = f"{int(self._elapsed()) // 60}:{int(self._elapsed()) % 60:02d}"
        if self._row:
            table.add_row(bar, *(value for _, value in self._cells()), elapsed)
        else:
            table.add_row(bar, f"[dim]{self._phase}[/]", *[""] * (len(head) - 1), elapsed)
        waiting_for, seconds = self.wait()
        if seconds > _LONG_WAIT_S:
            table.add_row("", f"[yellow]still waiting for {waiting_for} ({seconds:.0f} s)[/]")
        return table
