"""What is measured of a cell, from the metrics of its steps and its evaluations; the same for both engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.statistics import FINAL_EVALUATIONS
from recipes import signal
from recipes.clip import NO_DUAL_CLIP

Rows = Sequence[Mapping[str, Any]]

NAMES = {
    # here: (in the laboratory, in a run folder's metrics.jsonl)
    "step": ("step", "step"),
    "age": ("age", "lag/age"),
    "reward": ("success", "reward/mean"),
    "groups_with_signal": ("groups_with_signal", "reward/groups_with_signal"),
    "response_tokens": ("response_tokens", "response_length/average"),
    "entropy": ("entropy", "actor/entropy"),
    "d_bar": ("abs_log_ratio", "actor/abs_log_ratio"),
    "kl": ("kl", "rollout_corr/kl"),
    "k3_kl": ("k3_kl", "rollout_corr/k3_kl"),
    "ess": ("ess", "rollout_corr/rollout_is_eff_sample_size"),
    "grad_norm": ("grad_norm", "actor/grad_norm"),
    "clip": ("actor/pg_clipfrac", "actor/pg_clipfrac"),
    "dual_clip": ("actor/pg_clipfrac_lower", "actor/pg_clipfrac_lower"),
    "gate": ("actor/sat/gate_rate", "actor/sat/gate_rate"),
    "intercepted": ("actor/sat/intercepted", "actor/sat/intercepted"),
    "q": ("actor/sat/q", "actor/sat/q"),
    "cap": ("actor/sat/cap", "actor/sat/cap"),
    "eps_eff_low": ("actor/sat/eps_eff_low", "actor/sat/eps_eff_low"),
    "eps_eff_high": ("actor/sat/eps_eff_high", "actor/sat/eps_eff_high"),
}
"""Names of the series of a cell, and where each comes from."""

D_BAR_SPIKE = 0.03
"""The paper's sign of instability: mean ``|log pi - log mu|`` above this."""

COLLAPSE_SHARE, COLLAPSE_EVALUATIONS = 0.6, 3
"""A cell has collapsed where this many evaluations in a row are below this share of the best one until then."""

SPIKE_FACTOR, SPIKE_WINDOW = 5.0, 20
"""A step's gradient norm is a spike above this many times the median of up to that many steps before it."""
SPIKE_FROM = 5
"""Steps that must precede a spike."""

NO_INTERCEPTION = 1e-4
"""Mean intercepted share below which SAT was its base loss: less than one token in ten thousand."""


def series(rows: Rows, engine: str) -> dict[str, list[float | None]]:
    """One list a name, over the optimizer steps; names that no row has are left out, non-finite values are None."""
    column = {"lab": 0, "verl": 1}[engine]
    found = {}
    for name, places in NAMES.items():
        values = [_number(row.get(places[column])) for row in rows]
        if engine == "verl" and name == "kl":
            # verl reports it where it recomputes log-probs; else the ratio's denominator is the rollout.
            values = [_number(row.get(places[1], row.get("actor/ppo_kl"))) for row in rows]
        if any(value is not None for value in values):
            found[name] = values
    return found


def _number(value: Any) -> float | None:
    """To five digits; None for what is not a finite number."""
    usable = isinstance(value, int | float) and math.isfinite(value)
    return float(f"{value:.5g}") if usable else None


def collapse_step(steps: Sequence[float], scores: Sequence[float]) -> float | None:
    """Step of the first of three evaluations in a row below 60 % of the best one until then; None if there is none.

    The evaluation before the first step counts for the best. Whether the cell recovers later makes no difference:
    ``final`` says so.
    """
    below = 0
    for index, score in enumerate(scores):
        below = below + 1 if score < COLLAPSE_SHARE * max(scores[: index + 1]) else 0
        if below == COLLAPSE_EVALUATIONS:
            return steps[index - COLLAPSE_EVALUATIONS + 1]
    return None


def gradient_spikes(norms: Sequence[float | None]) -> int:
    """Steps whose gradient norm, before the clip, is above five times the median of up to 20 steps before it.

    A norm that is not finite is a spike. Steps with a norm of 0 and the first five are neither spikes nor counted in
    the median.
    """
    spikes = 0
    before: list[float] = []
    for norm in norms:
        if norm is None or (len(before) >= SPIKE_FROM and norm > SPIKE_FACTOR * median(before[-SPIKE_WINDOW:])):
            spikes += 1
        if norm:
            before.append(norm)
    return spikes


def area(steps: Sequence[float], scores: Sequence[float]) -> float:
    """Mean score over the steps, by the trapezoidal rule."""
    if len(steps) < 2:
        return scores[0]
    pairs = zip(zip(steps, scores, strict=True), zip(steps[1:], scores[1:], strict=True), strict=False)
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairs) / (steps[-1] - steps[0])


def measure(found: Mapping[str, Sequence[float | None]], evaluations: Rows) -> dict[str, float | None]:
    """The numbers of a cell; None where an engine or a loss does not report what they need.

    ``initial``, ``final`` (mean of the last three evaluations), ``peak``, ``peak_step``, ``auc``, ``drop`` (peak
    minus final), ``collapse_step``. Means over the steps: ``d_bar``, ``kl``, ``k3_kl``, ``ess``, ``clip``,
    ``dual_clip``, ``gate``, ``intercepted``, ``q``, ``cap`` (where there is one), ``eps_eff_low``, ``eps_eff_high``,
    ``age``. ``d_bar_max`` and ``d_bar_spikes``, steps above .03; ``ess_min``; ``entropy_end`` and ``d_bar_end``, over
    the last tenth of the steps; ``grad_norm_median``, ``grad_norm_max``, ``grad_norm_spikes``;
    ``groups_with_signal``; ``lost_values``, numbers of the series that were not finite.
    """
    steps = [row["step"] for row in evaluations]
    scores = [row["success"] for row in evaluations]
    final, peak = fmean(scores[-FINAL_EVALUATIONS:]), max(scores)
    values = {name: [value for value in column if value is not None] for name, column in found.items()}
    if "cap" in values:
        values["cap"] = [value for value in values["cap"] if value < NO_DUAL_CLIP]

    def mean(name: str) -> float | None:
        return fmean(values[name]) if values.get(name) else None

    def end(name: str) -> float | None:
        return fmean(values[name][-max(1, len(values[name]) // 10) :]) if values.get(name) else None

    d_bar, norms = values.get("d_bar", []), values.get("grad_norm", [])
    means = (
        "age", "d_bar", "kl", "k3_kl", "ess", "clip", "dual_clip", "gate", "intercepted", "q", "cap",
        "eps_eff_low", "eps_eff_high", "groups_with_signal", "response_tokens",
    )  # fmt: skip
    return {
        "initial": scores[0],
        "final": final,
        "peak": peak,
        "peak_step": steps[scores.index(peak)],
        "auc": area(steps, scores),
        "drop": peak - final,
        "collapse_step": collapse_step(steps, scores),
        **{name: mean(name) for name in means},
        "d_bar_end": end("d_bar"),
        "d_bar_max": max(d_bar, default=None),
        "d_bar_spikes": sum(value > D_BAR_SPIKE for value in d_bar) if d_bar else None,
        "ess_min": min(values.get("ess", []), default=None),
        "entropy_end": end("entropy"),
        "grad_norm_median": median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "grad_norm_spikes": gradient_spikes(found.get("grad_norm", [])),
        "lost_values": sum(value is None for column in found.values() for value in column),
    }


def no_signal(found: Mapping[str, Sequence[float | None]], measures: Mapping[str, float | None]) -> list[str]:
    """Why a cell says nothing of its method: :mod:`recipes.signal`, and a SAT that intercepts nothing."""
    columns = {places[1]: found[name] for name, places in NAMES.items() if name in found}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    marks = [text.removeprefix("no signal: ") for text in signal.warnings(rows)]
    share = measures["intercepted"]
    if share is not None and share < NO_INTERCEPTION:
        marks.append(f"SAT intercepted {share:.2g} of the tokens: it was its base loss")
    return marks
