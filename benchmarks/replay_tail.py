"""What routing replay does to the tail of the log-ratio, through the real stack, by lag and backend.

``python -m benchmarks.replay_tail out=DIR [lags=0,1,8] [backends=cpu] [arms=replay,native] [KEY=VALUE ...]``

The rollout engine works in bfloat16, the trainer in float32, as engines of different kernels do. For each backend and
lag one run replays (and measures its batches without replay, too), and one does not. Each has its run folder below
``DIR`` (a finished one is kept); then a table, ``DIR/replay_tail.json`` and ``DIR/replay_tail.png`` of all that ``DIR``
holds: several commands may fill it.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes import provenance
from recipes.compose import compose, expand_short_forms
from recipes.errors import ConfigError
from recipes.launch import check, run
from recipes.resume import begin_or_go_on, with_earlier
from sat_verl.records import LAG_FILE, METRICS_FILE, read_rows

USAGE = (
    "usage: python -m benchmarks.replay_tail out=DIR [lags=0,1,8] [backends=cpu] [arms=replay,native] [KEY=VALUE ...]"
)
BASE = {
    "model": "tiny_moe",
    "algorithm": "sat_gspo",
    "steps": "24",
    "prompts_per_step": "8",
    "task.test_size": "32",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "checkpoint.every": "1000000",
}
ARMS = {
    "replay": ["routing_replay=r3", "routing_replay.compare=true"],
    "native": ["routing_replay=none"],
}
LEVELS = ("q50", "q90", "q99", "largest")
TAIL, NATIVE = "actor/log_ratio_tail/", "actor/log_ratio_tail_native/"


def train(run_dir: Path, words: list[str]) -> None:
    """Train a cell unless it is done."""
    if not (run_dir / "summary.json").is_file():
        words = begin_or_go_on(run_dir, words)
        run(compose(expand_short_forms(with_earlier(words))), command=["python", "-m", "recipes.train", *words])


def collect(out: Path) -> dict[str, dict[str, Any]]:
    """All finished cells of a folder, in the order of backends, lags and arms."""
    done = [path.parent for path in out.glob("*-lag*-*/summary.json")]

    def place(run_dir: Path) -> tuple[str, int, str]:
        backend, lag, arm = run_dir.name.rsplit("-", 2)
        return backend, int(lag.removeprefix("lag")), {"replay": "a", "native": "b"}[arm]

    return {run_dir.name: measure(run_dir) for run_dir in sorted(done, key=place)}


def measure(run_dir: Path) -> dict[str, Any]:
    """Means over the steps from the first update on; ``over all`` is the largest log-ratio of all of them."""
    rows = [row for row in read_rows(run_dir / METRICS_FILE) if row["step"] > 1]
    found: dict[str, Any] = {"steps": len(rows)}
    for prefix, name in ((TAIL, "tail"), (NATIVE, "same batch, native")):
        if prefix + "q50" in rows[0]:
            values = {level: [row[prefix + level] for row in rows] for level in LEVELS}
            found[name] = {level: fmean(values[level]) for level in LEVELS} | {"over all": max(values["largest"])}
    means = {
        "differing": "actor/routing/differing",
        "native": "actor/routing/native",
        "payload_bytes": "routing/payload_bytes",
        "abs_log_ratio": "actor/abs_log_ratio",
        "q": "actor/sat/q",
        "gate_rate": "actor/sat/gate_rate",
        "intercepted": "actor/sat/intercepted",
        "eps_eff_high": "actor/sat/eps_eff_high",
    }
    found |= {name: fmean(row[key] for row in rows) for name, key in means.items() if key in rows[0]}
    found["lag"] = json.loads((run_dir / LAG_FILE).read_text())["realised"]
    facts = json.loads((run_dir / "provenance.json").read_text())
    command = [word for word in facts["command"] if not word.startswith("run_dir=")]
    found |= {"command": command, "git": facts["git"]}
    return found


COLUMNS = ("50 %", "90 %", "99 %", "largest", "of all", "differing", "q", "intercepted")


def table(cells: dict[str, dict[str, Any]]) -> Table:
    """One row a measured tail: of a replaying run with and without replay, and of the run that does not."""
    out = Table("backend, lag", "steps", "routes", *COLUMNS)
    for name, cell in cells.items():
        backend_lag, arm = name.rsplit("-", 1)
        differing = f"{cell['differing']:.2%}" if arm == "replay" else ""
        sat = [differing, f"{cell['q']:.4f}", f"{cell['intercepted']:.2%}"]
        rows = {"replayed" if arm == "replay" else "native, own run": (cell["tail"], sat)}
        if arm == "replay":
            rows["same batch, native"] = (cell["same batch, native"], [""] * len(sat))
        for routes, (tail, rest) in rows.items():
            out.add_row(backend_lag, str(cell["steps"]), routes, *(f"{value:.4f}" for value in tail.values()), *rest)
    return out


def plot(cells: dict[str, dict[str, Any]], path: Path) -> None:
    """Quantiles of the log-ratio by lag, with and without replay of the same batches."""
    from matplotlib.figure import Figure

    replaying = {name.removesuffix("-replay"): cell for name, cell in cells.items() if name.endswith("-replay")}
    figure = Figure(figsize=(3.2 * len(replaying), 3.2), layout="constrained")
    axes = figure.subplots(1, len(replaying), sharey=True, squeeze=False)[0]
    for axis, (name, cell) in zip(axes, replaying.items(), strict=True):
        for label, style in (("same batch, native", "s--"), ("tail", "o-")):
            legend = "native" if label != "tail" else "replayed"
            axis.plot(LEVELS, [cell[label][level] for level in LEVELS], style, label=legend)
        axis.set_title(name, fontsize=9)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("|log pi - log mu|")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if "out" not in options or len(options) != len(arguments):
        print(USAGE, file=sys.stderr)
        return 2
    out = Path(options.pop("out")).absolute()
    lags = options.pop("lags", "0,1,8").split(",")
    backends = options.pop("backends", "cpu").split(",")
    arms = options.pop("arms", ",".join(ARMS)).split(",")
    if unknown := set(arms) - set(ARMS):
        print(f"error: arms={','.join(unknown)}: there is no such arm. Fix: choose among {', '.join(ARMS)}\n{USAGE}")
        return 2
    overrides = [f"{key}={value}" for key, value in (BASE | options).items()]
    try:
        cells = {
            out / f"{backend}-lag{lag}-{arm}": [*overrides, f"backend={backend}", f"lag={lag}", *ARMS[arm]]
            for backend, lag, arm in product(backends, lags, arms)
        }
        for words in cells.values():  # all of them, before any is trained
            check(compose(words))
        for run_dir, words in cells.items():
            train(run_dir, words)
    except ConfigError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    found = collect(out)
    report = {
        "overrides": overrides,
        "cells": found,
        "provenance": provenance.collect(["python", "-m", "benchmarks.replay_tail", *arguments]),
    }
    (out / "replay_tail.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(found, out / "replay_tail.png")
    Console(width=160 if not sys.stdout.isatty() else None).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
