"""Baselines of the lag sweep that verl lacks, as policy losses: the SAT paper's DPPO, and M2PO.

As with SAT, the ratio's denominator must be the rollout engine's log-probs (``old_log_prob`` of verl's bypass mode):
both bound how far the policy has moved from the one that sampled.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from sat_verl.config import DPPOPolicyLossConfig, M2POPolicyLossConfig
from sat_verl.surrogate import (
    aggregate,
    clip_radii,
    clipped_surrogate,
    dual_clip_bound,
    mask_size,
    masked_total,
    share,
    to_host,
    token_ratio,
    zero_masked,
)
from sat_verl.trust_region import widen

__all__ = ["compute_policy_loss_dppo_clip", "compute_policy_loss_m2po", "second_moment_mask"]


@register_policy_loss("dppo_clip")
def compute_policy_loss_dppo_clip(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """DPPO as the baseline of the SAT paper (arXiv 2607.18722): PPO's clip times a hard mask on probabilities.

    ``-M min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)``, where ``M`` is 0 on outward tokens, ``A (pi - mu) > 0``, with
    ``|pi - mu| > delta``, else 1. Not DPPO's own objective (arXiv 2602.04879; verl's ``dppo_tv``), which has no ratio
    clip, and a delta of 0.15.

    Where no token is masked it is verl's ``vanilla``, dual clip included, bit for bit.

    Args:
        old_log_prob: log mu of the sampled tokens, shape ``(B, T)``, float.
        log_prob: log pi of the sampled tokens, shape ``(B, T)``, float; the gradient flows through it alone.
        advantages: A, shape ``(B, T)``, float.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float. At the others any input may be
            NaN or infinite, and the gradient is 0.
        loss_agg_mode: see :func:`verl.trainer.ppo.core_algos.agg_loss`; masked tokens count in its means.
        config: the :class:`~verl.workers.config.ActorConfig`. Without a :class:`DPPOPolicyLossConfig` in it, delta is
            that class's default.
        rollout_is_weights: optional factor of each token's loss, shape ``(B, T)``, float.

    Returns:
        The aggregated loss, shape ``()``, and metrics: those of ``vanilla`` (of the clip alone),
        ``actor/abs_log_ratio``, and shares of the active tokens: ``actor/dppo/masked``, and ``actor/dppo/removed``,
        those whose gradient the mask removes and the clip would have kept.

    Raises:
        ValueError: no config, ``clip_ratio_c`` of 1 or less, or a delta out of range.
    """
    delta = _options(config, DPPOPolicyLossConfig).delta
    bound = dual_clip_bound(config)
    with torch.no_grad():
        active, size = response_mask.bool(), mask_size(response_mask)
        old, new, advantages = zero_masked(active, old_log_prob, log_prob, advantages)
        log_ratio = new - old
        bounded_log_ratio, ratio = token_ratio(log_ratio)
        eps_low, eps_high = clip_radii(config)
        moved = widen(new).exp() - widen(old).exp()
        masked = torch.where(advantages > 0, moved > delta, (moved < -delta) & (advantages < 0))

    clip = clipped_surrogate(
        log_prob,
        ratio,
        torch.where(bounded_log_ratio == log_ratio, ratio, 0.0),
        torch.clamp(ratio, 1 - eps_low, 1 + eps_high),
        -advantages,
        bound,
    )
    token_loss = torch.where(masked, 0.0, clip.loss)
    loss = aggregate(token_loss, rollout_is_weights, response_mask, loss_agg_mode, config)

    with torch.no_grad():
        assert clip.capped is not None
        return loss, to_host(
            {
                "actor/pg_clipfrac": share(clip.clipped, size),
                "actor/ppo_kl": -masked_total(bounded_log_ratio, response_mask) / size,
                "actor/pg_clipfrac_lower": share(clip.capped, size),
                "actor/abs_log_ratio": _mean_distance(log_ratio, active),
                "actor/dppo/masked": share(masked.float(), size),
                "actor/dppo/removed": share(masked.float() * (1 - clip.clipped), size),
            }
        )


@register_policy_loss("m2po")
def compute_policy_loss_m2po(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """M2PO (arXiv 2510.01161): ``-M r A``, where ``M`` drops the outward tokens that have moved farthest.

    Outward tokens have ``A > 0, r > 1`` or ``A < 0, r < 1``. Of them those with the largest ``(log r)^2`` are dropped
    until the mean of ``(log r)^2`` over the kept ones is at most ``second_moment`` (0.04); all others are kept, and
    nothing is clipped. With no token dropped it is unclipped importance sampling.

    The text leaves open, and this is what is done here:

    * what the mean is over: the kept outward tokens, not all kept tokens;
    * the batch: the tokens of one call, so the mask depends on how a step is split into micro-batches;
    * ties: tokens as far as the nearest dropped one are dropped too, so that the order of tokens does not matter;
    * the authors' released code differs from their text: it clips at the distance tau at which the mean of
      ``min((log r)^2, tau^2)`` meets the bound, and never inside the ratios 0.7 to 1.5.

    Arguments as in :func:`compute_policy_loss_dppo_clip`; the option is of :class:`M2POPolicyLossConfig`, and clip
    radii and dual clip play no part.

    Returns:
        The aggregated loss, shape ``()``, and metrics: ``actor/pg_clipfrac``, the share of the active tokens that was
        dropped; ``actor/ppo_kl``, ``actor/abs_log_ratio``; ``actor/pg_clipfrac_lower``, 0; and
        ``actor/m2po/second_moment`` of all outward tokens, ``actor/m2po/second_moment_kept`` of the kept ones.

    Raises:
        ValueError: no config, or a bound out of range.
    """
    options = _options(config, M2POPolicyLossConfig)
    active = response_mask.bool()
    old_log_prob, log_prob, advantages = zero_masked(active, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    bounded_log_ratio, ratio = token_ratio(log_ratio)
    square = widen(bounded_log_ratio).double().square()
    outward = torch.where(advantages > 0, log_ratio > 0, (log_ratio < 0) & (advantages < 0))
    dropped = second_moment_mask(square, outward, options.second_moment)
    token_loss = torch.where(dropped, 0.0, -advantages * ratio)
    loss = aggregate(token_loss, rollout_is_weights, response_mask, loss_agg_mode, config)

    with torch.no_grad():
        size = mask_size(response_mask)
        return loss, to_host(
            {
                "actor/pg_clipfrac": share(dropped.float(), size),
                "actor/ppo_kl": -masked_total(bounded_log_ratio, response_mask) / size,
                "actor/pg_clipfrac_lower": torch.zeros((), device=loss.device),
                "actor/abs_log_ratio": _mean_distance(log_ratio, active),
                "actor/m2po/second_moment": _mean(square, outward),
                "actor/m2po/second_moment_kept": _mean(square, outward & ~dropped),
            }
        )


def second_moment_mask(square: torch.Tensor, candidates: torch.Tensor, bound: float) -> torch.Tensor:
    """The candidates to drop, largest first, until the mean of the kept ones' squares is at most ``bound``.

    Args:
        square: ``(log r)^2``, shape ``(B, T)``, float64; at least 0 and finite.
        candidates: tokens that may be dropped, shape ``(B, T)``, bool.
        bound: above 0 and finite.

    Returns:
        Shape ``(B, T)``, bool. Of candidates with equal squares all are dropped, or none.
    """
    ascending = torch.where(candidates, square, torch.inf).flatten().sort().values
    count = torch.count_nonzero(candidates)
    position = torch.arange(1, ascending.numel() + 1, device=ascending.device)
    # The mean of the smallest k rises with k, so the longest prefix within the bound is all that fit it.
    fits = ascending.cumsum(0) / position <= bound
    nearest_dropped = ascending.index_select(0, fits.sum().clamp(max=ascending.numel() - 1).reshape(1))
    return candidates & (square >= nearest_dropped) & (fits.sum() < count)


def _options(config: Any, cls: type[DPPOPolicyLossConfig] | type[M2POPolicyLossConfig]) -> Any:
    """The loss's typed options, checked by their class; its defaults for what a plain config does not name."""
    if config is None:
        raise ValueError(f"the loss needs config, verl's ActorConfig, for {cls.__name__}: got None")
    options = config.policy_loss
    if isinstance(options, cls):
        return options
    return cls(**{name: options.get(name, getattr(cls, name)) for name in cls.OWN})


def _mean(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over ``tokens``, bool; 0 if there are none."""
    return torch.where(tokens, values, 0.0).sum() / torch.count_nonzero(tokens).clamp(min=1)


def _mean_distance(log_ratio: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """d-bar, mean ``|d|`` of the token ratios."""
    return _mean(widen(log_ratio).abs(), active)
