"""The overlap curve: what :mod:`benchmarks.speed.overlap` measured, by lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SYNC, BOUNDED = "sync", "bounded"
# What each row's shares are called; the trainer's side and the rollout's.
SIDES = {"trainer does not wait": ("trainer_waits", True), "rollout has requests": ("rollout_has_requests", False)}


def series(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Rows by kind of schedule, ``exact`` and ``bounded``, each with its lag in optimizer steps, in order.

    Lag 0 stands in both: there they are the same.
    """
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {"exact": [], "bounded": []}
    for row in rows:
        name = str(row["lag"])
        if name.startswith(BOUNDED):
            found["bounded"].append((int(name.removeprefix(BOUNDED)), row))
        elif name.isdigit():
            found["exact"].append((int(name), row))
            if name == "0":
                found["bounded"].append((0, row))
    kept = {kind: sorted(points, key=lambda point: point[0]) for kind, points in found.items()}
    return {kind: points for kind, points in kept.items() if any(lag for lag, _ in points) or kind == "exact"}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Responses per second over those of the first row, and how busy both sides are, against the lag.

    Bars are the quartiles of the windows between two weight syncs.
    """
    base = rows[0]
    figure, (speed, busy) = plt.subplots(1, 2, figsize=(8, 3.2), dpi=150)
    lags = sorted({lag for points in series(rows).values() for lag, _ in points})
    for (kind, points), style in zip(series(rows).items(), ("-", "--"), strict=False):
        at = [lags.index(lag) for lag, _ in points]
        middle = [row["all_responses_per_s"] / base["all_responses_per_s"] for _, row in points]
        speed.plot(at, middle, marker="o", markersize=4, ls=style, color="C0", label=kind)
        ends = [
            [row["responses_per_s"][end] / base["all_responses_per_s"] for _, row in points] for end in ("low", "high")
        ]
        speed.vlines(at, *ends, color="C0", alpha=0.4, lw=4)
        for colour, (side, (name, rest)) in zip(("C1", "C2"), SIDES.items(), strict=True):
            shares = [1 - row[name] if rest else row[name] for _, row in points]
            busy.plot(at, shares, marker="o", markersize=4, ls=style, color=colour, label=f"{side}, {kind}")
    speed.axhline(1, color="gray", ls=":", label=f"{base['lag']} (1 = {base['all_responses_per_s']:.1f} responses/s)")
    speed.set(ylabel=f"responses/s, over {base['lag']}", ylim=(0, None))
    busy.set(ylabel="share of the time", ylim=(0, 1.03))
    for axes in (speed, busy):
        axes.set(xlabel="lag (optimizer steps)", xticks=range(len(lags)), xticklabels=[str(lag) for lag in lags])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
