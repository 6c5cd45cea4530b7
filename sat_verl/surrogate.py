"""What the registered losses share: verl's radii, the clipped surrogate, verl's aggregation and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from verl.trainer.ppo.core_algos import agg_loss

from sat_verl.trust_region import indicator

__all__ = [
    "Surrogate",
    "aggregate",
    "clip_radii",
    "clipped_surrogate",
    "dual_clip_bound",
    "mask_size",
    "masked_total",
    "share",
    "to_host",
    "token_ratio",
    "zero_masked",
]


def clip_radii(config: Any) -> tuple[float, float]:
    """``eps_low``, ``eps_high`` of verl's actor config; ``clip_ratio`` where one is left out."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def dual_clip_bound(config: Any) -> float:
    """``clip_ratio_c`` of verl's actor config.

    Raises:
        ValueError: 1 or less.
    """
    bound = config.get("clip_ratio_c", 3.0)
    if not bound > 1:
        raise ValueError(f"clip_ratio_c must be above 1, got {bound}: use 3.0, or 1e9 for no dual clip")
    return bound


def zero_masked(active: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The values with 0 where ``active``, bool, is false; then NaN there reaches neither loss nor gradient."""
    return tuple(torch.where(active, value, 0.0) for value in values)


def token_ratio(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-ratio bounded as in verl, so that exp does not overflow, and its exp."""
    bounded = torch.clamp(log_ratio, min=-20.0, max=20.0)
    return bounded, torch.exp(bounded)


class Surrogate(NamedTuple):
    """Token losses of the clipped surrogate; all of shape ``(B, T)``.

    Attributes:
        loss: the losses, whose gradient flows to ``log_prob``.
        clipped: 1 where the clipped ratio's loss is the larger one, else 0, float32.
        capped: 1 where the dual clip acts, else 0, float32; None without one.
    """

    loss: torch.Tensor
    clipped: torch.Tensor
    capped: torch.Tensor | None


def clipped_surrogate(
    log_prob: torch.Tensor,
    ratio: torch.Tensor,
    derivative: torch.Tensor,
    clipped: torch.Tensor,
    slope: torch.Tensor,
    bound: float | torch.Tensor | None = None,
) -> Surrogate:
    """``max(-A r, -A clip(r))``, for ``A < 0`` at most ``-bound A``; value and gradient are verl's to the last bit.

    Without autograd's graph, which keeps eight tensors of this size: the derivative is written out.

    Args:
        log_prob: gets the gradient, shape ``(B, T)``, float.
        ratio: ``r``, shape ``(B, T)``, or ``(B, 1)`` where it is one for a response; detached.
        derivative: of ``r`` with respect to the token's log-prob where nothing is clipped: ``r``, or 0 where a bound of
            the log-ratio acts; shape and dtype of ``ratio``.
        clipped: ``r`` within its interval, shape and dtype of ``ratio``.
        slope: of the loss in the ratio, ``-A``, shape ``(B, T)``, float; 0 on masked tokens.
        bound: of verl's dual clip (arXiv 1912.09729), above 1; a tensor has shape ``()``. None: no dual clip.
    """
    with torch.no_grad():
        unclipped_loss, clipped_loss = slope * ratio, slope * clipped
        loss = torch.maximum(unclipped_loss, clipped_loss)
        is_clipped, is_capped = indicator(torch.gt, clipped_loss, unclipped_loss), None
        # The part of the gradient that passes. Autograd gives one half each to two equal arguments of a maximum: within
        # the interval both are the ratio's, 1; outside, where only rounding makes them equal, one is a constant, 1/2.
        passes = unclipped_loss.sub_(clipped_loss).sign_()
        del clipped_loss
        passes.sub_((ratio - clipped).abs_().sign_()).add_(2).mul_(0.5)
        if bound is not None:
            # |A| leaves the other tokens alone: where A is not negative the loss is 0 or less.
            highest = slope.abs() * bound
            is_capped = indicator(torch.gt, loss, highest)
            passes.mul_((highest - loss).sign_().add_(1).mul_(0.5))
            loss = torch.minimum(highest, loss)
        passes = passes.mul_(derivative).to(ratio.dtype)
    return Surrogate(_WithGradient.apply(log_prob, loss, slope, passes), is_clipped, is_capped)


class _WithGradient(torch.autograd.Function):
    """``value``, with the derivative ``slope * ratio_slope`` with respect to ``log_prob``; all of shape ``(B, T)``."""

    @staticmethod
    def forward(
        ctx: Any, log_prob: torch.Tensor, value: torch.Tensor, slope: torch.Tensor, ratio_slope: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slope, ratio_slope)
        ctx.dtype = log_prob.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        slope, ratio_slope = ctx.saved_tensors
        # In autograd's order, which rounds in this way.
        return (gradient * slope).to(ratio_slope.dtype).mul_(ratio_slope).to(ctx.dtype), None, None, None


def aggregate(
    token_loss: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
) -> torch.Tensor:
    """Weigh the token losses, and aggregate them as verl does over the global batch, to the last bit.

    verl's ``agg_loss`` applies the mask to every token, forward and backward. Here the losses are summed first, and
    verl's function normalises the sums: of all tokens, or of each response.

    Args:
        token_loss: shape ``(B, T)``, float; 0 on masked tokens, with a gradient that does not reach log-probs there.
        rollout_is_weights: factor of each token's loss, shape ``(B, T)``, or None.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float.
        loss_agg_mode: of ``agg_loss``.
        config: the actor config, whose ``global_batch_info`` has what it normalises by.
    """
    if rollout_is_weights is not None:
        token_loss = token_loss * torch.where(response_mask.bool(), rollout_is_weights, 0.0)
    info = dict(config.global_batch_info)
    if loss_agg_mode.startswith("token"):
        total, count = masked_total(token_loss, response_mask), _length(response_mask)
        if info.get("batch_num_tokens") is None and info.get("dp_size", 1) == 1:
            info["batch_num_tokens"] = count
        # Without a token it is masked, and the gradient 0 where verl's is.
        return agg_loss(total.view(1, 1), (count > 0).view(1, 1), loss_agg_mode, **info)
    totals, lengths = masked_total(token_loss, response_mask, dim=-1), _length(response_mask, dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        totals, loss_agg_mode = totals / (lengths + 1e-8), "seq-mean-token-sum"
    elif info.get("loss_scale_factor") is None:
        info["loss_scale_factor"] = response_mask.shape[-1]
    return agg_loss(totals.unsqueeze(-1), (lengths > 0).unsqueeze(-1), loss_agg_mode, **info)


def _length(response_mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The mask's sum in its own type, or int64."""
    if response_mask.is_floating_point():
        return response_mask.sum(dim)
    return torch.count_nonzero(response_mask, dim)


def mask_size(response_mask: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Number of active tokens as verl's ``masked_mean`` divides by it; ``count``: their number, int64; shape ``()``."""
    if count is None or response_mask.is_floating_point():
        count = _length(response_mask)
    return count + 1e-8


def masked_total(values: torch.Tensor, response_mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """verl's ``masked_sum`` of values, shape ``(B, T)``, that are 0 on masked tokens; over all, or along ``dim``."""
    # A mask of floats may widen the values, and the sum has to be taken in that type.
    return (values * response_mask if response_mask.is_floating_point() else values).sum(dim)


def share(tokens: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Share of the active tokens, of :func:`mask_size`, in which ``tokens`` is 1; 0 elsewhere and if masked, float32.

    As verl's own clip metrics to the last bit.
    """
    return tokens.sum() / size


def to_host(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Scalars of the device as floats, in one transfer: the only wait for the device that a loss has."""
    return dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
