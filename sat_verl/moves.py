"""How far tokens or responses have moved from the policy that sampled them, and how far SAT lets them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sat_verl.batch_quantile import StepReference, step_tail_reference
from sat_verl.fresh import AGE_METRIC, Q_METRIC
from sat_verl.surrogate import mask_size, masked_total, token_ratio, zero_masked
from sat_verl.trust_region import (
    TrustRegion,
    clip_to_region,
    indicator,
    sequence_mean,
    trust_region,
    weighted_tail_reference,
    widen,
)

__all__ = ["Moves", "Options", "response_moves", "token_moves"]


class Options(NamedTuple):
    """Settings of a SAT loss: nominal radii, and those of :class:`sat_verl.config.SATPolicyLossConfig`."""

    eps_low: float
    eps_high: float
    alpha: float
    exponent: float
    whole_batch: bool
    reference: str | float
    negative_cap: bool


class Moves(NamedTuple):
    """Of tokens, shape ``(B, T)``, or of responses, shape ``(B, 1)``; detached.

    Attributes:
        ratio: ``r`` or ``rho``.
        derivative: of the ratio with respect to a token's log-prob: the ratio, or 0 beyond verl's bound of its log.
        nominal, clipped: the ratio within PPO's interval and within SAT's.
        q: tail reference, shape ``()``.
        size: of the mask, for verl's means, shape ``()``.
        of_step: metrics of where q comes from, each of shape ``()``.
        sums: what the other metrics are made of, each of shape ``()``.
    """

    ratio: torch.Tensor
    derivative: torch.Tensor
    nominal: torch.Tensor
    clipped: torch.Tensor
    q: torch.Tensor
    size: torch.Tensor
    of_step: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]


@torch.no_grad()
def token_moves(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, options: Options
) -> Moves:
    """Of SAT-GRPO, whose score is the token's log-ratio.

    Args:
        log_prob, old_log_prob: of the sampled tokens, shape ``(B, T)``, float; anything on masked tokens.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float.
        options: of the loss.
    """
    active = response_mask.bool()
    (log_ratio,) = zero_masked(active, log_prob - old_log_prob)
    step = _step_reference(log_ratio, active, options)
    region = trust_region(log_ratio, active, options.alpha, options.exponent, step.q if step else None)
    sums = _sums(region, torch.count_nonzero(active))
    size = mask_size(response_mask, sums["count"])
    bounded, ratio = token_ratio(log_ratio)
    sums["actor/ppo_kl"] = -masked_total(bounded, response_mask) / size
    derivative = ratio * indicator(torch.eq, bounded, log_ratio).to(ratio.dtype)
    derivative.nan_to_num_(0.0, posinf=torch.inf)  # of NaN, 0 like autograd's of a clamp: no step on what is no number
    sums["distance"] = log_ratio.abs_().sum(dtype=region.q.dtype)
    del log_ratio, bounded
    nominal, clipped = clip_to_region(ratio, region, options.eps_low, options.eps_high)
    return Moves(ratio, derivative, nominal, clipped, region.q, size, _of_step(step), sums)


@torch.no_grad()
def response_moves(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor, options: Options
) -> Moves:
    """Of SAT-GSPO, whose score is the response's mean: one value a response, which stands on all its tokens.

    Arguments as in :func:`token_moves`.
    """
    active = response_mask.bool()
    (log_ratio,) = zero_masked(active, log_prob - old_log_prob)
    mean, length = sequence_mean(log_ratio, response_mask), torch.count_nonzero(active, dim=-1).unsqueeze(-1)
    step = _step_reference(mean.expand_as(log_ratio), active, options)
    q = step.q if step else weighted_tail_reference(widen(mean).abs(), length, options.alpha)
    region = trust_region(mean, length > 0, options.alpha, options.exponent, q)
    sums = _sums(region, length.sum(), length)
    size = mask_size(response_mask, sums["count"])
    sums["actor/ppo_kl"] = -masked_total(log_ratio, response_mask) / size
    sums["distance"] = log_ratio.abs_().sum(dtype=q.dtype)
    # sg[log rho] + log pi - sg[log pi]; the bound is verl's: no overflow in exp
    ratio = torch.exp(torch.clamp(mean, max=10.0))
    derivative = torch.where(mean <= 10.0, ratio, 0.0)
    nominal, clipped = clip_to_region(ratio, region, options.eps_low, options.eps_high)
    return Moves(ratio, derivative, nominal, clipped, q, size, _of_step(step), sums)


def _step_reference(score: torch.Tensor, active: torch.Tensor, options: Options) -> StepReference | None:
    """q for scores of shape ``(B, T)`` where it is not theirs: of the whole optimizer step, or a number."""
    if not isinstance(options.reference, str):
        return StepReference(torch.full((), options.reference, dtype=widen(score[:0]).dtype, device=score.device))
    if options.whole_batch:
        return step_tail_reference(score, active, options.alpha, fresh=options.reference == "fresh")
    return None


def _of_step(step: StepReference | None) -> dict[str, torch.Tensor]:
    if step is None or step.batch is None or step.fresh is None or step.age is None:
        return {}
    return {"actor/sat/q_batch": step.batch, Q_METRIC: step.fresh, AGE_METRIC: step.age}


def _sums(region: TrustRegion, count: torch.Tensor, length: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Sums over the tokens; ``length``: how many of them each value of the region stands on, None for one."""

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.sum() if length is None else (values.double() * length).sum()

    contraction = region.contraction
    return {
        "q": region.q,
        "count": count,
        "gated": total(indicator(torch.lt, contraction, 1.0)),
        # Sums of 1 - c, so that tokens of full radius, masked ones included, add exactly 0.
        "cut_low": total(1 - region.c_minus),
        "cut_high": total(1 - region.c_plus),
        "strongest": contraction.amin(),
    }
