"""The plots of one run: reward; mean |d| and q; gate and intercepted share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PLOTS = {
    "reward": ("mean reward of the batch", [("reward/mean", "reward")]),
    "staleness": (
        "log-ratio to the rollout policy",
        [("actor/abs_log_ratio", "mean |d|"), ("actor/sat/q", "q (90 % quantile)")],
    ),
    "trust_region": (
        "share of active tokens",
        [
            ("actor/sat/gate_rate", "gated"),
            ("actor/sat/intercepted", "newly intercepted"),
            ("actor/pg_clipfrac", "clipped"),
        ],
    ),
}


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average; the window shrinks at the ends."""
    half = window // 2
    spans = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _line(axes: Axes, rows: Sequence[dict[str, Any]], key: str, label: str) -> bool:
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    (drawn,) = axes.plot(steps, values, linewidth=0.8, alpha=0.35)
    # Dashed where a second line may lie exactly on it: what is clipped is often just what SAT intercepts.
    style = "--" if key == "actor/pg_clipfrac" else "-"
    axes.plot(steps, _smooth(values, 7), style, color=drawn.get_color(), linewidth=1.8, label=label)
    return True


def draw(rows: Sequence[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Draw every plot for which the run has numbers (thin: every step; thick: average over 7 steps)."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, (ylabel, series) in _PLOTS.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150)
        drawn = [_line(axes, rows, key, label) for key, label in series]
        if any(drawn):
            axes.set(xlabel="optimizer step", ylabel=ylabel, title=title)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png")
            written.append(folder / f"{name}.png")
        plt.close(figure)
    return written


def draw_curve(points: Sequence[dict[str, Any]], folder: Path, ylabel: str, title: str) -> Path:
    """Draw the validation score by optimizer step, with its interval where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150)
    steps, rates = [point["step"] for point in points], [point["rate"] for point in points]
    below = [point["rate"] - point.get("low", point["rate"]) for point in points]
    above = [point.get("high", point["rate"]) - point["rate"] for point in points]
    axes.errorbar(steps, rates, yerr=[below, above], marker="o", capsize=3)
    axes.set(xlabel="optimizer step", ylabel=ylabel, title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path = folder / "learning_curve.png"
    figure.savefig(path)
    plt.close(figure)
    return path
