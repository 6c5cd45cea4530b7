"""Results of a matrix: mean over the seeds, table, plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

TABLE = (
    # heading, measure, format
    ("samples/s", "samples_per_s", "{:.2f}"),
    ("x sync", "speed", "{:.2f}"),
    ("step s", "step_s", "{:.0f}"),
    ("GPUs idle", "gpu_idle", "{:.0%}"),
    ("trainer idle", "trainer_idle", "{:.0%}"),
    ("wait", "wait", "{:.0%}"),
    ("drain", "drain", "{:.0%}"),
    ("rollout idle", "rollout_idle", "{:.0%}"),
    ("slots used", "slots_used", "{:.0%}"),
    ("wasted", "wasted", "{:.1%}"),
    ("mean length", "mean_length", "{:.0f}"),
    ("mean age", "mean_age", "{:.2f}"),
    ("oldest", "oldest", "{:.0f}"),
    ("mixed", "mixed", "{:.0%}"),
    ("queue peak GB", "queue_peak_gb", "{:.2f}"),
)


def over_seeds(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells of one name and number of GPUs as one, with means over the seeds.

    ``speed`` is samples/s relative to the synchronous cell of the same GPUs (None where that was not run).
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["gpus"], cell["name"]), []).append(cell)
    found = []
    for (gpus, name), members in groups.items():
        numbers = [key for key, value in members[0].items() if isinstance(value, float)]
        ages = sorted({int(age) for one in members for age in one["ages"]})
        mean_ages = {str(age): float(np.mean([one["ages"].get(str(age), 0.0) for one in members])) for age in ages}
        found.append(
            {"gpus": gpus, "name": name, "schedule": members[0]["schedule"], "lag_steps": members[0]["lag_steps"]}
            | {key: float(np.mean([one[key] for one in members])) for key in numbers}
            | {key: None for key, value in members[0].items() if value is None}
            | {"ages": mean_ages, "oldest": max(ages), "kept": all(one["lag"]["ok"] for one in members)}
        )
    base = {row["gpus"]: row["samples_per_s"] for row in found if row["name"] == "synchronous"}
    for row in found:
        row["speed"] = row["samples_per_s"] / base[row["gpus"]] if row["gpus"] in base else None
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One table per number of GPUs."""
    parts = []
    for gpus in sorted({row["gpus"] for row in rows}):
        lines = [
            f"### {gpus} GPUs",
            "",
            "| schedule | " + " | ".join(heading for heading, _, _ in TABLE) + " |",
            "|---|" + "---|" * len(TABLE),
        ]
        for row in rows:
            if row["gpus"] == gpus:
                values = ["" if row[key] is None else text.format(row[key]) for _, key, text in TABLE]
                lines.append(f"| {row['name']} | " + " | ".join(values) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _by_lag(rows: Sequence[dict[str, Any]], key: str, ylabel: str, path: Path) -> None:
    """A measure against the lag, one panel per number of GPUs, one line per schedule."""
    sizes = sorted({row["gpus"] for row in rows})
    names = dict.fromkeys(row["schedule"] for row in rows)
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    figure, panels = plt.subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.2), dpi=150, squeeze=False)
    for axes, gpus in zip(panels[0], sizes, strict=True):
        here = [row for row in rows if row["gpus"] == gpus]
        start = [row for row in here if row["name"] == "synchronous"]
        lag_one = [row for row in here if row["lag_steps"] == 1 and row["schedule"] in ("broadcast", "constant")]
        for name in dict.fromkeys(
            row["schedule"] for row in here if row["lag_steps"] or row["schedule"] == "colocated"
        ):
            if name == "colocated":
                value = next(row[key] for row in here if row["schedule"] == name)
                if value is not None:
                    axes.axhline(value, color="gray", ls=":", label=name)
                continue
            shared = lag_one if name in ("broadcast", "constant") else []
            own = [row for row in here if row["schedule"] == name and row["lag_steps"]]
            line = {row["lag_steps"]: row[key] for row in [*start, *shared, *own]}
            axes.plot(
                sorted(line),
                [line[lag] for lag in sorted(line)],
                marker="o",
                markersize=3.5,
                color=colours[name],
                label=name,
            )
        axes.set(
            xlabel="lag (optimizer steps)", title=f"{gpus} GPUs", xticks=sorted({row["lag_steps"] for row in here})
        )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(ylabel)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _histograms(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Ages of the tokens: one panel per number of GPUs, one bar per schedule, its parts the ages."""
    sizes = sorted({row["gpus"] for row in rows})
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(3.2 * len(sizes) + 1.4, 0.24 * len(rows) / len(sizes) + 1.5), dpi=150, squeeze=False,
        sharey=True,
    )  # fmt: skip
    oldest = max(row["oldest"] for row in rows)
    colours = plt.get_cmap("viridis")(np.linspace(0, 1, oldest + 1))
    for axes, gpus in zip(panels[0], sizes, strict=True):
        here = [row for row in rows if row["gpus"] == gpus][::-1]
        left = np.zeros(len(here))
        for age in range(oldest + 1):
            width = np.array([row["ages"].get(str(age), 0.0) for row in here])
            axes.barh([row["name"] for row in here], width, left=left, color=colours[age], label=str(age))
            left += width
        axes.set(xlabel="share of tokens", title=f"{gpus} GPUs", xlim=(0, 1))
        axes.tick_params(labelsize=7)
    panels[0][-1].legend(title="age", fontsize=6, title_fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


PLOTS = {
    "gpu_idle": ("gpu_idle", "idle share of all GPUs"),
    "throughput": ("samples_per_s", "samples/s"),
    "trainer_idle": ("trainer_idle", "idle share of the trainer"),
    "rollout_idle": ("rollout_idle", "idle share of the rollout"),
    "mean_age": ("mean_age", "mean age (optimizer steps)"),
    "queue_memory": ("queue_peak_gb", "peak memory of the queue (GB)"),
}


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Every plot as PNG."""
    for name, (key, ylabel) in PLOTS.items():
        _by_lag(rows, key, ylabel, folder / f"{name}.png")
    _histograms(rows, folder / "ages.png")
