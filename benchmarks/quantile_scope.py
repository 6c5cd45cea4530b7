"""Does it matter over which tokens SAT takes its quantile? ``python -m benchmarks.quantile_scope task=chain,sort``.

The optimizer step is split into micro-batches, and q is taken over each (``policy_loss.quantile_scope=microbatch``) or
over the whole step (``batch``). Same seed: same prompts, same start and same noise in every arm. The arm ``batch``
calls the loss once per step, where the two scopes are the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cells import Cells, run_cells
from benchmarks.lab import LabConfig
from benchmarks.statistics import paired
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m benchmarks.quantile_scope [task=chain,sort] [base=gspo,grpo] [splits=16,4] [seeds=5]
           [steps=60] [lag=8] [eval_every=6] [cache=.cache] [out=FILE.json]
Runs that FILE holds already are not done again."""

DEFAULTS: dict[str, Any] = {
    "task": "chain,sort",
    "base": "gspo,grpo",
    "splits": "16,4",
    "seeds": 5,
    "steps": 60,
    "lag": 8,
    "eval_every": 6,
    "cache": ".cache",
    "out": "benchmarks/results/quantile_scope.json",
}
BATCH = "batch"
SCOPE = "actor_rollout_ref.actor.policy_loss.quantile_scope=microbatch"


def arms(task: str, base: str, settings: dict[str, Any]) -> dict[str, list[LabConfig]]:
    """The runs of one task and one base loss: the base itself, SAT with one q per step, and with one per part of it."""

    def runs(algorithm: str, micro_batches: int) -> list[LabConfig]:
        return [
            LabConfig(
                algorithm=algorithm,
                overrides=(SCOPE,) if algorithm.startswith("sat_") else (),
                task=task,
                lag=settings["lag"],
                steps=settings["steps"],
                micro_batches=micro_batches,
                seed=seed,
                eval_every=settings["eval_every"],
                cache_dir=settings["cache"],
            )
            for seed in range(settings["seeds"])
        ]

    splits = [int(split) for split in str(settings["splits"]).split(",")]
    parts = {f"{split} parts": runs(f"sat_{base}", split) for split in splits}
    return {base: runs(base, 1), BATCH: runs(f"sat_{base}", 1), **parts}


def show(title: str, base: str, done: list[tuple[str, str, int]], cells: Cells) -> Table:
    """Means over the seeds, and differences to the base loss and to one q per step."""
    by_arm: dict[str, list[dict[str, float]]] = {}
    for arm, key, _ in done:
        by_arm.setdefault(arm, []).append(cells[key]["summary"])
    table = Table(title=title)
    for column in ("arm", "final", "AUC", "gate", "empty gates", "intercepted", "q", "q spread", "eps_eff"):
        table.add_column(column)
    for other in (base, BATCH):
        table.add_column(f"final - {other}")
        table.add_column(f"AUC - {other}")
    for arm, summaries in by_arm.items():
        mean = {name: fmean(one[name] for one in summaries) for name in summaries[0]}
        cells_of_row = [arm, f"{mean['final']:.3f}", f"{mean['auc']:.3f}"]
        if arm == base:
            cells_of_row += ["-"] * 6
        else:
            shares = [f"{100 * mean[name]:.2f} %" for name in ("gate_rate", "empty_gates", "intercepted")]
            cells_of_row += [*shares, f"{mean['q']:.4f}", f"{mean['q_spread']:.2f}", f"{mean['eps_eff_high']:.3f}"]
        for other in (base, BATCH):
            cells_of_row += [
                "" if arm == other else str(paired(*([one[name] for one in by_arm[which]] for which in (arm, other))))
                for name in ("final", "auc")
            ]
        table.add_row(*cells_of_row)
    return table


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        settings = parse_settings(words, DEFAULTS, ())
        if settings["difficulty"]:
            name, value = next(iter(settings["difficulty"].items()))
            raise ConfigError(name, value, "there is no such setting", f"choose among {', '.join(DEFAULTS)}")
        groups = {
            (task, base): arms(task, base, settings)
            for task in settings["task"].split(",")
            for base in settings["base"].split(",")
        }
        tables = []
        for (task, base), runs in groups.items():
            title = f"{task}, SAT on {base}, broadcast {settings['lag']}, {settings['steps']} steps"
            tables.append(show(f"{title}, {settings['seeds']} seeds", base, *run_cells(Path(settings["out"]), runs)))
    except ConfigError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    console = Console(width=200 if not sys.stdout.isatty() else None)
    for table in tables:
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
