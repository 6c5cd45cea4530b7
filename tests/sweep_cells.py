"""Sweeps with scores that are made up, for tests of the report."""

import itertools

import numpy as np

from benchmarks.lag_sweep.store import Asked, Cell, Entry, Matched, Place, write_cell, write_json
from benchmarks.report import studies
from benchmarks.report.protocol import SETTING

PAIRS = ("grpo", "sat_grpo", "grpo_matched", "gspo", "sat_gspo", "gspo_matched")


def cell(place, final, **changes):
    metrics = {"final": final, "initial": 0.4, "peak": final + 0.05, "drop": 0.05, "auc": final - 0.1, "d_bar": 0.01,
               "d_bar_end": 0.02, "age": (place.lag + 1) / 2, "collapse_step": None, "seconds": 10.0}  # fmt: skip
    if place.arm.startswith("sat_"):
        metrics |= {"eps_eff_high": 0.05 * place.lag + 0.01, "intercepted": 0.03 / (place.lag + 1)}
    fields = {
        "key": f"{place.task}-{place.arm}-{place.lr:g}-{place.lag}-{place.seed}", "config_hash": "c", "engine": "lab",
        "code_version": 2, "model": "tiny", "schedule": "broadcast", "steps": 128, "words": [], "status": "done",
        "metrics": metrics, "evaluations": {"step": [0.0, 8.0, 16.0], "success": [0.4, 0.5, final]},
        "provenance": {"time": "2026-01-01T00:00:00Z", "versions": {"verl": "0.9.1"}, "git": {"commit": "abc"}},
    }  # fmt: skip
    if place.arm.endswith("_matched"):
        fields["matched"] = Matched(arm="sat_x", low=0.05, high=0.06, keys=["k"])
    return Cell(**place._asdict(), **{**fields, **changes})


def store(folder, cells, waiting=(), **settings):
    """Write a sweep: these cells, and places that nothing is known of."""
    for one in cells:
        write_cell(folder, one)
    entries = [Entry(**one.place._asdict(), key=one.key) for one in cells]
    entries += [Entry(**place._asdict()) for place in waiting]
    command = f"python -m benchmarks.lag_sweep out={folder.name} arms=x"
    calls = [{"command": command, "time": "2026-01-01T00:00:00Z", "git": {"commit": "abcdef012345", "dirty": False}}]
    asked = Asked(settings={**SETTING, **settings}, commands=calls, entries=entries)
    write_json(folder / "sweep.json", asked.model_dump_json())
    return folder


def study_of(folder, cells, waiting=(), **settings):
    return studies.read([store(folder, cells, waiting, **settings)])[0]


def places(arms=PAIRS, tasks=("chain", "sort"), lags=(1, 8, 32), seeds=range(10), lr=1e-3):
    return [Place(task, arm, lr, lag, seed) for seed, task, lag, arm in itertools.product(seeds, tasks, lags, arms)]


def whole(gain, arms=PAIRS, **axes):
    """Cells whose scores follow from their place; ``gain(place)`` is added."""
    rng = np.random.default_rng(0)
    noise = {(p.task, p.lag, p.seed): rng.normal(0, 0.02) for p in places(("x",), **axes)}
    own = np.random.default_rng(1)
    return [
        cell(p, 0.8 - 0.002 * p.lag + noise[p.task, p.lag, p.seed] + own.normal(0, 0.01) + gain(p))
        for p in places(arms, **axes)
    ]
