"""The arms of the lag sweep: what each is called, how it is started, and what the paper says of it. Data only.

An arm is a method: words for ``python -m recipes.train``, to which a sweep adds task, model, lag, seed and size. All
arms share denominator, data, samples, updates and start weights, unless their ``needs`` and ``note`` say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BASE_MODEL_SCORE = 9.38
"""AIME24 of the paper's base model, Qwen3-30B-A3B-Base, in per cent."""


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 1 of the SAT paper (arXiv 2607.18722): one seed, best checkpoint.

    Attributes:
        score_lag1, score_lag8: AIME24 in per cent.
        dbar_lag1, dbar_lag8: mean ``|log pi - log mu|`` per token in the last epoch.
        collapses_lag8: the paper calls the run at lag 8 collapsed.
    """

    score_lag1: float
    score_lag8: float
    dbar_lag1: float
    dbar_lag8: float
    collapses_lag8: bool = False


@dataclass(frozen=True)
class Arm:
    """One method of a sweep.

    Attributes:
        name: key in :data:`ARMS`.
        words: for ``python -m recipes.train``.
        label: for tables and plots.
        base: name of the arm that it is compared with, seed by seed; None for the bases themselves.
        paper: its row in the paper, if it has one.
        needs: what it cannot do without: ``experts`` (a mixture-of-experts model), ``recompute`` (its ratio is to the
            trainer's own log-probs, recomputed before each step), ``critic``.
        note: what it does not share with the others, for its row; empty if it shares all.
    """

    name: str
    words: tuple[str, ...]
    label: str
    base: str | None = None
    paper: PaperRow | None = None
    needs: tuple[str, ...] = ()
    note: str = ""


R3 = ("routing_replay=r3",)
TIS = ("correction=tis",)
DUAL_CLIP = ("dual_clip=3",)
LAG_1_Q = 0.0087
"""Mean q of ``sat_grpo`` at lag 1 over both tasks of the lag sweep (benchmarks/lag_sweep/PROTOCOL.md, Variants)."""
MICRO_BATCH = ("actor_rollout_ref.actor.policy_loss.quantile_scope=microbatch",)

TIS_NOTE = (
    "the ratio is to log-probs that the trainer recomputes before each step, so it is about 1 and nothing clips; "
    "the loss is weighed by min(pi/mu, 2) per token instead"
)
NO_RADII_NOTE = "has no clip radii"

_PAPER_ARMS = (
    Arm("grpo", ("algorithm=grpo",), "GRPO", None, PaperRow(31.25, 30.17, 0.0103, 0.0110, True)),
    Arm("gspo", ("algorithm=gspo",), "GSPO", None, PaperRow(32.25, 31.46, 0.0097, 0.0109, True)),
    Arm("grpo_r3", ("algorithm=grpo", *R3), "GRPO + R3", "grpo", PaperRow(31.83, 29.58, 0.0058, 0.0218), ("experts",)),
    Arm("gspo_r3", ("algorithm=gspo", *R3), "GSPO + R3", "gspo", PaperRow(34.00, 33.13, 0.0091, 0.0158), ("experts",)),
    Arm(
        "grpo_tis", ("algorithm=grpo", *TIS), "GRPO + TIS", "grpo",
        PaperRow(31.62, 31.46, 0.0108, 0.0169), ("recompute",), TIS_NOTE,
    ),
    Arm(
        "gspo_tis", ("algorithm=gspo", *TIS), "GSPO + TIS", "gspo",
        PaperRow(32.88, 31.21, 0.0151, 0.0208), ("recompute",), TIS_NOTE,
    ),
    Arm(
        "grpo_tis_r3", ("algorithm=grpo", *TIS, *R3), "GRPO + TIS + R3", "grpo_r3",
        PaperRow(31.79, 31.79, 0.0048, 0.0081), ("experts", "recompute"), TIS_NOTE,
    ),
    Arm(
        "gspo_tis_r3", ("algorithm=gspo", *TIS, *R3), "GSPO + TIS + R3", "gspo_r3",
        PaperRow(31.88, 32.92, 0.0054, 0.0068), ("experts", "recompute"), TIS_NOTE,
    ),
    Arm("dppo", ("algorithm=dppo",), "DPPO (TV)", "grpo", PaperRow(33.96, 32.71, 0.0108, 0.0118)),
    Arm("sat_grpo", ("algorithm=sat_grpo",), "SAT-GRPO", "grpo", PaperRow(32.71, 32.08, 0.0101, 0.0108)),
    Arm("sat_gspo", ("algorithm=sat_gspo",), "SAT-GSPO", "gspo", PaperRow(34.17, 32.71, 0.0095, 0.0107)),
    Arm(
        "sat_grpo_r3", ("algorithm=sat_grpo", *R3), "SAT-GRPO + R3", "grpo_r3",
        PaperRow(33.75, 33.13, 0.0056, 0.0079), ("experts",),
    ),
    Arm(
        "sat_gspo_r3", ("algorithm=sat_gspo", *R3), "SAT-GSPO + R3", "gspo_r3",
        PaperRow(35.83, 34.79, 0.0056, 0.0076), ("experts",),
    ),
)  # fmt: skip

_FURTHER_ARMS = (
    Arm(
        "dppo_tv", ("algorithm=dppo_tv",), "DPPO (verl)", "grpo",
        note="no ratio clip: its radii bound the probability difference |pi - mu| (0.15); ratio weight capped at 1e4",
    ),
    Arm("cispo", ("algorithm=cispo",), "CISPO", "grpo", note="clips the weight, not the gradient; no lower bound"),
    Arm("sapo", ("algorithm=sapo",), "SAPO", "grpo", note=f"{NO_RADII_NOTE}; mean over each response first"),
    Arm("m2po", ("algorithm=m2po",), "M2PO", "grpo", note=f"{NO_RADII_NOTE}, but a bound of the second moment (0.04)"),
    Arm(
        "ppo", ("algorithm=ppo",), "PPO + critic", "grpo", needs=("critic",),
        note="advantages from a critic (GAE), not from the group; one more network to train",
    ),
)  # fmt: skip

_CONTROLS = (
    Arm("is", ("algorithm=is",), "unclipped IS", "grpo", note="never clips"),
    Arm("grpo_dual", ("algorithm=grpo", *DUAL_CLIP), "GRPO, dual clip", "grpo"),
    Arm("dppo_dual", ("algorithm=dppo", *DUAL_CLIP), "DPPO (TV), dual clip", "grpo_dual"),
    Arm("sat_grpo_dual", ("algorithm=sat_grpo", *DUAL_CLIP), "SAT-GRPO, dual clip", "grpo_dual"),
    Arm("is_dual", ("algorithm=is", *DUAL_CLIP), "unclipped IS, dual clip", "grpo_dual", note="dual clip only"),
    Arm("gspo_canonical", ("algorithm=gspo_canonical",), "GSPO, 3e-4/4e-4", "gspo", note="radii of the GSPO paper"),
    Arm(
        "sat_gspo_canonical", ("algorithm=sat_gspo_canonical",), "SAT-GSPO, 3e-4/4e-4", "gspo_canonical",
        note="radii of the GSPO paper",
    ),
    Arm(
        "sat_grpo_microbatch", ("algorithm=sat_grpo", *MICRO_BATCH), "SAT-GRPO, micro-batch q", "sat_grpo",
        note="its quantile depends on how the batch is split",
    ),
    Arm(
        "sat_gspo_microbatch", ("algorithm=sat_gspo", *MICRO_BATCH), "SAT-GSPO, micro-batch q", "sat_gspo",
        note="its quantile depends on how the batch is split",
    ),
)  # fmt: skip

_VARIANTS = (
    Arm(
        "sat_grpo_fresh", ("algorithm=sat_grpo_fresh",), "SAT-GRPO, fresh q", "sat_grpo",
        note="its q is that of the freshest tokens",
    ),
    Arm(
        "sat_grpo_absolute", ("algorithm=sat_grpo", f"reference={LAG_1_Q}"), f"SAT-GRPO, q = {LAG_1_Q}", "sat_grpo",
        note="its q is a number: the gradient is that of GRPO at one fixed radius",
    ),
    Arm(
        "sat_grpo_capped", ("algorithm=sat_grpo_capped",), "SAT-GRPO, capped for A < 0", "sat_grpo",
        note="caps the ratio for A < 0 at (1 + eps_high) e^q",
    ),
    Arm(
        "sat_gspo_fresh", ("algorithm=sat_gspo_fresh",), "SAT-GSPO, fresh q", "sat_gspo",
        note="its q is that of the freshest tokens",
    ),
)  # fmt: skip

ARMS: Mapping[str, Arm] = MappingProxyType(
    {arm.name: arm for arm in (*_PAPER_ARMS, *_FURTHER_ARMS, *_CONTROLS, *_VARIANTS)}
)
"""All arms by name: the rows of the paper's Table 1, further baselines, controls, variants of SAT beyond the paper."""


def matched(base: Arm, low: float, high: float, cap: float | None = None) -> Arm:
    """The control for "adaptive or only smaller?": ``base`` at fixed radii, those that a SAT arm had on average.

    Args:
        base: an arm that clips a ratio, ``ARMS["grpo"]`` for ``sat_grpo``.
        low, high: mean ``actor/sat/eps_eff_low`` and ``_high`` of that SAT arm; above 0, ``low`` below 1.
        cap: mean ``actor/sat/cap`` of one that has it, above 1: the dual clip of the control.

    Raises:
        ValueError: radii or cap out of range.
    """
    if not (0 < low < 1 and 0 < high < math.inf):
        raise ValueError(f"matched radii must be 0 < low < 1 and 0 < high, got {low}, {high}: give SAT's mean eps_eff")
    if cap is not None and not 1 < cap < math.inf:
        raise ValueError(f"a matched cap must be a number above 1, got {cap}: give the mean of actor/sat/cap")
    own = ("clip_ratio",) if cap is None else ("clip_ratio", "dual_clip")
    words = [word for word in base.words if not word.startswith(own)]
    capped = [] if cap is None else [f"dual_clip={cap!r}"]
    return Arm(
        name=f"{base.name}_matched_{low:g}_{high:g}" + ("" if cap is None else f"_{cap:g}"),
        words=(*words, f"clip_ratio_low={low!r}", f"clip_ratio_high={high!r}", *capped),
        label=f"{base.label}, fixed {low:.3g}/{high:.3g}" + ("" if cap is None else f", dual clip {cap:.3g}"),
        base=base.name,
        needs=base.needs,
        note="; ".join(filter(None, (base.note, "radii matched to SAT's mean effective radius"))),
    )
