"""The overlap curve: what :mod:`benchmarks.speed.overlap` measured, by lag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def series(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Rows by schedule (``broadcast``, ``constant``, ``bounded``), each with its lag in optimizer steps, in order.

    Lag 0 is the same in all and stands in each, as lag 1 in both exact ones; verl's synchronous trainer in none.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        name, lag = re.fullmatch(r"(\D*)(\d*)", str(row["lag"])).groups()  # type: ignore[union-attr]
        if lag:
            found.setdefault(name or "broadcast", {})[int(lag)] = row
    exact = found.get("broadcast", {})
    for name, points in found.items():
        same = (0, 1) if name == "constant" else (0,)
        found[name] = {lag: exact[lag] for lag in same if lag in exact} | points
    return {name: sorted(points.items(), key=lambda point: point[0]) for name, points in found.items()}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Against the lag: responses per second over the first row's, and how long neither side has to wait.

    Bars are the quartiles of the windows between two weight syncs.
    """
    base = rows[0]["all_responses_per_s"]
    panels = {
        f"responses/s, over {rows[0]['lag']} ({base:.0f}/s)": lambda row: row["all_responses_per_s"] / base,
        "trainer does not wait, share of time": lambda row: 1 - row["trainer_waits"] - row["drain"],
        "rollout has requests, share of time": lambda row: row["rollout_has_requests"],
    }
    found = series(rows)
    lags = sorted({lag for points in found.values() for lag, _ in points})
    figure, places = plt.subplots(1, len(panels), figsize=(10, 3.2), dpi=150)
    for axes, (title, value) in zip(places, panels.items(), strict=True):
        for index, (name, points) in enumerate(found.items()):
            at = [lags.index(lag) for lag, _ in points]
            axes.plot(at, [value(row) for _, row in points], "o-", markersize=4, color=f"C{index}", label=name)
            if axes is places[0]:
                ends = ([row["responses_per_s"][end] / base for _, row in points] for end in ("low", "high"))
                axes.vlines(at, *ends, color=f"C{index}", alpha=0.35, lw=4)
            else:
                axes.set_ylim(0, 1.03)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="lag (optimizer steps)", xticks=range(len(lags)), xticklabels=[str(lag) for lag in lags])
        axes.grid(alpha=0.3)
    places[0].axhline(1, color="gray", ls=":")
    places[0].set_ylim(bottom=0)
    places[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
