"""The SAT paper's Table 1 beside a study of ours, and what differs in the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.arms import ARMS, BASE_MODEL_SCORE, Arm
from benchmarks.report.answer import interval
from benchmarks.report.estimates import difference, estimate
from benchmarks.report.protocol import primary_blocks
from benchmarks.report.studies import Block, Study
from benchmarks.report.tables import Shown, Table, number, with_spread

LAGS = (1, 8)
NOT_RUN = Shown("not run", "", "muted")
ROWS = [arm for arm in ARMS.values() if arm.paper is not None]


def _paper_numbers(arm: Arm) -> tuple[tuple[float, float], tuple[float, float]]:
    row = arm.paper
    assert row is not None
    return (row.score_lag1, row.score_lag8), (row.dbar_lag1, row.dbar_lag8)


def _has(study: Study, block: Block) -> bool:
    return any(study.values(block, arm.name, lag) for arm in ROWS for lag in LAGS)


def _columns(studies: Sequence[Study]) -> list[tuple[Study, Block]]:
    return [(study, block) for study in studies for block in primary_blocks(study) if _has(study, block)]


def _title(study: Study, block: Block, several: bool) -> str:
    rate = f" {block.lr:g}" if len(study.blocks) > 2 else ""
    return f"{f'study {study.number} ' if several else ''}{block.task}{rate}"


def tables(studies: Sequence[Study]) -> list[Table]:
    """Scores, d-bar, and SAT's gain over its base, the paper's beside ours.

    Args:
        studies: whatever has a row of the paper at lag 1 or 8 becomes columns; GPU cells of the paper's setting that
            nobody ran are named as such.
    """
    columns = _columns(studies)
    several = len({study.number for study, _ in columns}) > 1
    names = [_title(*column, several) for column in columns]
    return [
        _without_gpu(_scores(columns, names), studies),
        _without_gpu(_d_bars(columns, names), studies),
        _gains(columns, names),
    ]


GPU_COLUMN = "the paper's setting on GPUs, here"


def _without_gpu(table: Table, studies: Sequence[Study]) -> Table:
    """The table without its "not run" column where a study did run on GPUs: it has columns of its own."""
    if not any(study.gpu and len(study.done) for study in studies):
        return table
    at = table.head.index(GPU_COLUMN)
    return replace(table, head=table.head[:at] + table.head[at + 1 :],
                   rows=[row[:at] + row[at + 1 :] for row in table.rows])  # fmt: skip


def _ours(columns: Sequence[tuple[Study, Block]], arm: str, metric: str) -> list[Shown]:
    shown = []
    for study, block in columns:
        for lag in LAGS:
            values = list(study.values(block, arm, lag, metric).values())
            if not values:
                shown.append(NOT_RUN)
            elif metric == "final":
                found = estimate(values)
                shown.append(Shown(with_spread(found), f"n {len(values)}"))
            else:
                shown.append(Shown(number(float(np.mean(values))), f"n {len(values)}"))
    return shown


def _heads(names: Sequence[str]) -> list[str]:
    return [f"{name}, lag {lag}" for name in names for lag in LAGS]


def _scores(columns: Sequence[tuple[Study, Block]], names: Sequence[str]) -> Table:
    rows = [[Shown("base model"), Shown(f"{BASE_MODEL_SCORE:g}"), Shown(f"{BASE_MODEL_SCORE:g}"), NOT_RUN,
             *[Shown("–")] * (len(columns) * 2)]]  # fmt: skip
    for arm in ROWS:
        (one, eight), _ = _paper_numbers(arm)
        assert arm.paper is not None
        collapses = "collapses" if arm.paper.collapses_lag8 else ""
        rows.append([Shown(arm.label), Shown(f"{one:.2f}"), Shown(f"{eight:.2f}", collapses), NOT_RUN,
                     *_ours(columns, arm.name, "final")])  # fmt: skip
    head = ["method", "paper, AIME24 %, lag 1", "paper, lag 8", GPU_COLUMN, *_heads(names)]
    return Table("paper-scores", "Scores", head, rows,
                 note="The paper's: one seed, best checkpoint. Ours: mean over seeds of the final score.")  # fmt: skip


def _d_bars(columns: Sequence[tuple[Study, Block]], names: Sequence[str]) -> Table:
    rows = []
    for arm in ROWS:
        _, (one, eight) = _paper_numbers(arm)
        rows.append([Shown(arm.label), Shown(f"{one:.4f}"), Shown(f"{eight:.4f}"), NOT_RUN,
                     *_ours(columns, arm.name, "d_bar_end")])  # fmt: skip
    head = ["method", "paper, lag 1", "paper, lag 8", GPU_COLUMN, *_heads(names)]
    return Table("paper-dbar", "d-bar", head, rows,
                 note="The paper's over the last epoch; ours over the last tenth of the steps.")  # fmt: skip


def _gains(columns: Sequence[tuple[Study, Block]], names: Sequence[str]) -> Table:
    rows = []
    for arm in ROWS:
        if not arm.name.startswith("sat_") or arm.base is None:
            continue
        (ours, base) = _paper_numbers(arm)[0], _paper_numbers(ARMS[arm.base])[0]
        row = [Shown(f"{arm.label} − {ARMS[arm.base].label}"),
               *(Shown(f"{a - b:+.2f}".replace("-", "−")) for a, b in zip(ours, base, strict=True))]  # fmt: skip
        for study, block in columns:
            for lag in LAGS:
                found = difference(study.values(block, arm.name, lag), study.values(block, arm.base, lag))
                row.append(Shown(interval(found), f"n {found.n}") if found else NOT_RUN)
        rows.append(row)
    head = ["difference", "paper, points, lag 1", "paper, lag 8", *_heads(names)]
    return Table("paper-gains", "What SAT adds to its base loss", head, rows,
                 note="The paper's in points of AIME24, without an interval; ours in shares, "
                 "paired by seed, 95 % interval, uncorrected.")  # fmt: skip


def _ages(study: Study, lag: int) -> str:
    ages = [age for block in study.blocks for arm in study.arms(block)
            for age in study.values(block, arm, lag, "age").values()]  # fmt: skip
    return f"{np.mean(ages):.2f}" if ages else "not run"


def differences(study: Study) -> list[tuple[str, str, str]]:
    """(what, the paper's, this study's); the paper's figures are those of arXiv 2607.18722."""
    s = study.settings
    seeds = sorted({len(seeds) for seeds in study.asked.values()})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    rates = ", ".join(f"{block.lr:g} ({block.task})" for block in study.blocks)
    stack = {
        "lab": "one process: sampler and trainer are one engine, their log-probs differ by rounding"
        + (f" and by normal noise of {s['noise']:g}" if s.get("noise") else ""),
        "verl": "verl's asynchronous stack: rollout engine and trainer are separate",
    }[s["engine"]]
    return [
        ("model", "Qwen3-30B-A3B-Base, 128 experts, top 8", f"{s['model']}, warm-started"),
        ("data and score", "DAPO-Math and Dolci-RL-Zero-Math; AIME24, avg@8",
         f"{', '.join(dict.fromkeys(block.task for block in study.blocks))}; "
         f"{s['eval_problems']} held-out problems, every {s['eval_every']} steps"),
        ("what is reported", "one seed, the best checkpoint", f"{count} seeds, the mean of the last evaluations"),
        ("size", "544 iterations of 256 prompts x 16 responses, up to 32k tokens",
         f"{s['steps']} steps of {s['prompts_per_step']} prompts x {s['responses_per_prompt']} responses"),
        ("lag n", "weights are broadcast every n steps: the age is a sawtooth 1 .. n, mean (n + 1)/2",
         ("the same sawtooth" if s["schedule"] == "broadcast" else "every batch is n steps old")
         + f"; realised mean age {_ages(study, 1)} at lag 1, {_ages(study, 8)} at lag 8"),
        ("radii", "0.2 / 0.2 for all methods, GSPO too", "0.2 / 0.2 unless the arm's name says otherwise"),
        ("dual clip", "none", "none unless the arm's name says otherwise" if s.get("dual_clip") is None
         else f"{s['dual_clip']:g} for all arms that have one"),
        ("optimizer", "Adam (0.9, 0.98), learning rate 1e-6, low-variance KL loss 1e-3",
         f"AdamW, learning rate {rates}; no KL loss"),
        ("sampler and trainer", "SGLang and Megatron, bf16: they disagree without any lag", stack),
    ]  # fmt: skip
