"""SAT-GRPO and SAT-GSPO as verl policy losses (arXiv 2607.18722, eq. 13-20).

Each is verl's own loss (``vanilla``, ``gspo``) with the clip interval of :mod:`sat_verl.trust_region` in place of the
nominal one, and equals it bit for bit where SAT is off: value, gradient and the metrics that both report.

The ratio's denominator must be the rollout engine's log-probs (``old_log_prob`` of verl's bypass mode). With log-probs
that the trainer recomputes at the start of a one-update step every ratio is about 1, and neither PPO nor SAT clips.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.torch_functional import masked_mean

from sat_verl.batch_quantile import StepReference, step_tail_reference
from sat_verl.config import SAT_OPTIONS, SATPolicyLossConfig
from sat_verl.fresh import AGE_METRIC, Q_METRIC
from sat_verl.surrogate import aggregate, clip_radii, dual_clip, dual_clip_bound, share, token_ratio, zero_masked
from sat_verl.trust_region import (
    TrustRegion,
    clip_to_region,
    effective_radius,
    intercepted,
    negative_cap,
    sequence_mean,
    trust_region,
    widen,
)

__all__ = ["compute_policy_loss_sat_grpo", "compute_policy_loss_sat_gspo", "record_intercepted"]

NO_CAP = 1.0e9
"""A ratio that none reaches (verl bounds the log-ratio by 20)."""

_intercepted: ContextVar[list[torch.Tensor] | None] = ContextVar("sat_verl_intercepted", default=None)


@contextmanager
def record_intercepted() -> Iterator[list[torch.Tensor]]:
    """Inside the block every call of a SAT loss appends its mask of intercepted tokens, shape ``(B, T)``, bool.

    Those whose gradient SAT removes and the base loss keeps. The mask stays on its device; other losses append nothing.
    """
    masks: list[torch.Tensor] = []
    token = _intercepted.set(masks)
    try:
        yield masks
    finally:
        _intercepted.reset(token)


@register_policy_loss("sat_grpo")
def compute_policy_loss_sat_grpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GRPO: ``-min(r A, clip(r, 1 - eps_low c_minus, 1 + eps_high c_plus) A)`` with the token ratio ``r = exp(d)``.

    For ``A < 0`` the loss is capped at ``-clip_ratio_c A``, verl's dual clip (arXiv 1912.09729), as in ``vanilla``; the
    paper has none, which a very large ``clip_ratio_c`` reproduces. With ``negative_cap`` at the smaller of the two.

    Args:
        old_log_prob: log mu of the sampled tokens, shape ``(B, T)``, float.
        log_prob: log pi of the sampled tokens, shape ``(B, T)``, float; the gradient flows through it alone.
        advantages: A, shape ``(B, T)``, float.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float. At the others any input may be
            NaN or infinite, and the gradient is 0.
        loss_agg_mode: see :func:`verl.trainer.ppo.core_algos.agg_loss`.
        config: the :class:`~verl.workers.config.ActorConfig`. Without a :class:`SATPolicyLossConfig` in it, SAT's
            options have that class's defaults.
        rollout_is_weights: optional factor of each token's loss, shape ``(B, T)``, float.

    Returns:
        The aggregated loss, shape ``()``, and the metrics of :func:`_metrics`.

    Raises:
        ValueError: no config, or ``clip_ratio_c`` of 1 or less.
        MissingBatchQuantileError: ``quantile_scope=batch``, and nobody computed q (see :mod:`sat_verl.batch_quantile`).
    """
    options = _options(config)
    bound: float | torch.Tensor = dual_clip_bound(config)
    active = response_mask.bool()
    old_log_prob, log_prob, advantages = zero_masked(active, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    bounded_log_ratio, ratio = token_ratio(log_ratio)
    region, of_step = _region(log_ratio, active, options)
    nominal, clipped = clip_to_region(ratio, region, options.eps_low, options.eps_high)
    if options.negative_cap:
        of_step["actor/sat/cap"] = bound = negative_cap(region.q, options.eps_high, dual_clip_bound(config))

    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * clipped
    token_loss, capped = dual_clip(torch.maximum(unclipped_loss, clipped_loss), advantages, bound)
    loss = aggregate(token_loss, rollout_is_weights, response_mask, loss_agg_mode, config)

    with torch.no_grad():
        removed = _removed(ratio, nominal, clipped, advantages)
        base = {
            "actor/pg_clipfrac": share(clipped_loss > unclipped_loss, response_mask),
            "actor/ppo_kl": masked_mean(-bounded_log_ratio, response_mask),
            "actor/pg_clipfrac_lower": share(capped, response_mask),
        }
        return loss, _metrics(base | of_step, log_ratio, active, region, removed, options)


@register_policy_loss("sat_gspo")
def compute_policy_loss_sat_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GSPO: ``-min(rho A, clip(rho, 1 - eps_low c_minus, 1 + eps_high c_plus) A)``, ``rho = exp(mean_t d_t)``.

    The length-normalised sequence mean is the score as well: it stands on every active token of its response *before*
    the quantile, so q weighs a sequence by its length. The gradient is that of GSPO-token (arXiv 2507.18071), as in
    verl's ``gspo``: ``rho`` is the value, ``log_prob`` of the token alone carries the gradient.

    Arguments, result and errors as in :func:`compute_policy_loss_sat_grpo`, without the dual clip: unless
    ``negative_cap`` is set, ``actor/pg_clipfrac_lower`` is 0. ``actor/abs_log_ratio`` is that of the token ratios.
    """
    options = _options(config)
    active = response_mask.bool()
    old_log_prob, log_prob, advantages = zero_masked(active, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    mean_log_ratio = sequence_mean(log_ratio, response_mask)
    # sg[log rho] + log pi - sg[log pi]; the bound is verl's: no overflow in exp
    ratio = torch.exp(torch.clamp(log_prob - log_prob.detach() + mean_log_ratio, max=10.0))
    region, of_step = _region(mean_log_ratio.expand_as(log_ratio), active, options)
    nominal, clipped = clip_to_region(ratio, region, options.eps_low, options.eps_high)

    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * clipped
    token_loss = torch.maximum(unclipped_loss, clipped_loss)
    capped = None
    if options.negative_cap:
        of_step["actor/sat/cap"] = bound = negative_cap(region.q, options.eps_high, NO_CAP)
        token_loss, capped = dual_clip(token_loss, advantages, bound)
    loss = aggregate(token_loss, rollout_is_weights, response_mask, loss_agg_mode, config)

    with torch.no_grad():
        removed = _removed(ratio, nominal, clipped, advantages)
        base = {
            "actor/pg_clipfrac": share(clipped_loss > unclipped_loss, response_mask),
            "actor/ppo_kl": masked_mean(-log_ratio, response_mask),
            "actor/pg_clipfrac_lower": loss.new_zeros(()) if capped is None else share(capped, response_mask),
        }
        return loss, _metrics(base | of_step, log_ratio, active, region, removed, options)


class _Options(NamedTuple):
    eps_low: float
    eps_high: float
    alpha: float
    exponent: float
    whole_batch: bool
    reference: str | float
    negative_cap: bool


def _options(config: Any) -> _Options:
    """Radii from verl's actor config, the rest from its policy-loss config, checked by SATPolicyLossConfig."""
    if config is None:
        raise ValueError("the SAT losses need config, verl's ActorConfig, for their clip radii: got None")
    sat = config.policy_loss
    if not isinstance(sat, SATPolicyLossConfig):
        sat = SATPolicyLossConfig(**{name: sat.get(name, getattr(SATPolicyLossConfig, name)) for name in SAT_OPTIONS})
    eps_low, eps_high = clip_radii(config)
    return _Options(
        eps_low=eps_low,
        eps_high=eps_high,
        alpha=sat.alpha,
        exponent=sat.kernel_exponent,
        whole_batch=sat.quantile_scope == "batch",
        reference=sat.reference,
        negative_cap=sat.negative_cap,
    )


def _region(
    score: torch.Tensor, active: torch.Tensor, options: _Options
) -> tuple[TrustRegion, dict[str, torch.Tensor]]:
    """The trust region for scores of shape ``(B, T)``, and metrics of where its q comes from.

    q is that of these tokens, of the whole optimizer step, or a number.
    """
    step: StepReference | None = None
    if not isinstance(options.reference, str):
        q = torch.full((), options.reference, dtype=widen(score).dtype, device=score.device)
        step = StepReference(q)
    elif options.whole_batch:
        step = step_tail_reference(score, active, options.alpha, fresh=options.reference == "fresh")
    region = trust_region(score, active, options.alpha, options.exponent, step.q if step else None)
    if step is None or step.batch is None or step.fresh is None or step.age is None:
        return region, {}
    return region, {"actor/sat/q_batch": step.batch, Q_METRIC: step.fresh, AGE_METRIC: step.age}


def _removed(
    ratio: torch.Tensor, nominal: torch.Tensor, clipped: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The intercepted tokens, as :func:`intercepted` gives them, also for :func:`record_intercepted`."""
    positive, negative = intercepted(ratio, nominal, clipped, advantages)
    if (masks := _intercepted.get()) is not None:
        masks.append(positive | negative)
    return positive, negative


def _metrics(
    base: dict[str, torch.Tensor],
    log_ratio: torch.Tensor,
    active: torch.Tensor,
    region: TrustRegion,
    removed: tuple[torch.Tensor, torch.Tensor],
    options: _Options,
) -> dict[str, float]:
    """The metrics of one call, as floats; verl averages each over micro-batches and ranks.

    * those of the base loss (``base``), and ``actor/abs_log_ratio``: mean ``|d|`` of the token ratios;
    * ``actor/sat/q``: tail reference, with ``quantile_scope=batch`` that of the whole step;
      ``gate_rate``: gated share of the active tokens;
    * ``radius_low``, ``radius_high``: mean effective radii ``eps * c`` over the active tokens (paper, Table 10);
      ``strongest_contraction``: the smallest c;
    * ``intercepted``: share of the active tokens whose gradient SAT removes and the base loss keeps, of which
      ``intercepted_pos`` with A > 0, ``intercepted_neg`` with A < 0: shares of **all** active tokens, so they add up;
    * ``eps_eff_low``, ``eps_eff_high``: the one radius PPO would need for the same gradient, nominal if the gate is
      empty, unless q is a number.
    * with ``reference=fresh`` ``q_batch``, ``q_fresh``, ``fresh_age``: the quantile of all tokens of the step, of those
      of the least age, and that age; with ``negative_cap`` ``cap``, its value. Then ``pg_clipfrac_lower`` is the
      share of the tokens that it, or the dual clip, caps.

    With no active token all are 0, but the radii nominal and the contraction 1.
    """
    # Sums of 1 - c, so that tokens of full radius, masked ones included, add exactly 0. The stack is double, so that
    # counts beyond 2^24 and float64 input survive; its one transfer is the only wait for the device.
    on_device = [
        region.q,
        torch.count_nonzero(active),
        torch.count_nonzero(region.gate),
        (1 - region.c_minus).sum(),
        (1 - region.c_plus).sum(),
        torch.minimum(region.c_minus, region.c_plus).amin(),
        torch.count_nonzero(removed[0]),
        torch.count_nonzero(removed[1]),
        log_ratio.abs().sum(dtype=region.q.dtype),
        *base.values(),
    ]
    q, count, gated, cut_low, cut_high, strongest, removed_pos, removed_neg, drift, *base_values = torch.stack(
        [value.double() for value in on_device]
    ).tolist()
    n = max(count, 1.0)
    # An empty gate is nominal, but a q that is a number stays in force: nobody was beyond it.
    active_q = q if gated or not isinstance(options.reference, str) else 0.0
    eps_low, eps_high, exponent = options.eps_low, options.eps_high, options.exponent
    return {
        **dict(zip(base, base_values, strict=True)),
        "actor/abs_log_ratio": drift / n,
        "actor/sat/q": q,
        "actor/sat/gate_rate": gated / n,
        "actor/sat/radius_low": eps_low * (1 - cut_low / n),
        "actor/sat/radius_high": eps_high * (1 - cut_high / n),
        "actor/sat/strongest_contraction": strongest,
        "actor/sat/intercepted": (removed_pos + removed_neg) / n,
        "actor/sat/intercepted_pos": removed_pos / n,
        "actor/sat/intercepted_neg": removed_neg / n,
        "actor/sat/eps_eff_low": effective_radius(active_q, eps_low, exponent, upper=False),
        "actor/sat/eps_eff_high": effective_radius(active_q, eps_high, exponent, upper=True),
    }
