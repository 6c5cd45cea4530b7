"""What the registered losses share: verl's radii, its dual clip, its aggregation, and one transfer for the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.torch_functional import masked_mean

__all__ = ["aggregate", "clip_radii", "dual_clip", "dual_clip_bound", "share", "to_host", "token_ratio", "zero_masked"]


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


def dual_clip(
    ppo_loss: torch.Tensor, advantages: torch.Tensor, bound: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's dual clip (arXiv 1912.09729): for ``A < 0`` a token's loss is at most ``-bound * A``.

    Args:
        ppo_loss: token losses, shape ``(B, T)``.
        advantages: A, shape ``(B, T)``.
        bound: ``clip_ratio_c``, above 1; a tensor has shape ``()``.

    Returns:
        The token losses, and where they were capped, bool, shape ``(B, T)`` both.
    """
    highest = -advantages * bound
    negative = advantages < 0
    return torch.where(negative, torch.minimum(highest, ppo_loss), ppo_loss), (ppo_loss > highest) & negative


def aggregate(
    token_loss: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
) -> torch.Tensor:
    """Weigh the token losses, shape ``(B, T)``, and aggregate them as verl does over the global batch."""
    if rollout_is_weights is not None:
        token_loss = token_loss * torch.where(response_mask.bool(), rollout_is_weights, 0.0)
    return agg_loss(token_loss, response_mask, loss_agg_mode, **config.global_batch_info)


def share(tokens: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Share of the active tokens that are in ``tokens``, bool, shape ``(B, T)``; as verl's own clip metrics are."""
    return masked_mean(tokens.float(), response_mask)


def to_host(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Scalars of the device as floats, in one transfer: the only wait for the device that a loss has."""
    return dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
