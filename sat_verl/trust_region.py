"""The SAT trust region as plain tensor code: tail reference, Hill kernel, gate and clip interval.

Source: "Stale but Stable: Staleness-Adaptive Trust Regions" (arXiv 2607.18722), eq. 13-20. ``d = log pi - log mu`` is
the staleness proxy, ``mu`` the rollout engine's sampling policy; B responses of at most T tokens. Only torch is needed
here, and nothing but :func:`effective_radius` (plain floats) runs on the host, so no call waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class TrustRegion(NamedTuple):
    """Per-token contraction of the clip interval to ``[1 - eps_low * c_minus, 1 + eps_high * c_plus]``.

    Attributes:
        q: tail reference of ``|d|``, shape ``()``, float32 (float64 for float64 input); 0 if no token is active.
        gate: tokens whose radius shrinks on one side, shape ``(B, T)``, bool.
        c_minus: factor of the lower radius, shape ``(B, T)``, dtype of ``q``; exactly 1 unless gated with ``d < 0``.
        c_plus: factor of the upper radius, shape ``(B, T)``, dtype of ``q``; exactly 1 unless gated with ``d > 0``.
    """

    q: torch.Tensor
    gate: torch.Tensor
    c_minus: torch.Tensor
    c_plus: torch.Tensor


def tail_reference(distance: torch.Tensor, active: torch.Tensor, alpha: float) -> torch.Tensor:
    """Inverse-CDF quantile ``q = inf{x >= 0 : ECDF(x) >= alpha}`` of ``distance`` over the active tokens.

    No interpolation: q is one of the observed values.

    Args:
        distance: ``|d|``, shape ``(B, T)``, float32 or float64.
        active: tokens that count, shape ``(B, T)``, bool.
        alpha: level in (0, 1].

    Returns:
        q, shape ``()``, dtype of ``distance``; 0 if no token is active.
    """
    count = torch.count_nonzero(active)
    ascending = torch.where(active, distance, torch.inf).flatten().sort().values
    # index_select, unlike ascending[rank], leaves the index on the device.
    q = ascending.index_select(0, quantile_rank(count, alpha).reshape(1) - 1).squeeze(0)
    return torch.where(count > 0, q, 0.0)


def quantile_rank(count: torch.Tensor, alpha: float) -> torch.Tensor:
    """Rank, from 1, of the inverse-CDF quantile among ``count`` values, 1 if there are none; int64, shape ``()``."""
    n = count.double().clamp(min=1)
    # The smallest k with k/n >= alpha, that division being the ECDF; ceil(alpha * n) alone can be one off
    # (0.07 * 100 = 7.000000000000001).
    rank = torch.ceil(alpha * n)
    rank = rank + (rank / n < alpha).double() - ((rank - 1) / n >= alpha).double()
    return rank.long()


def sequence_mean(log_ratio: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Length-normalised ``mean_t d_t`` of every response, shape ``(B, 1)``, detached; 0 if it has no active token.

    Args:
        log_ratio: ``d``, shape ``(B, T)``, any float dtype; finite on masked tokens.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float.
    """
    length = response_mask.sum(dim=-1).clamp(min=1)
    return ((log_ratio * response_mask).sum(dim=-1) / length).detach().unsqueeze(-1)


def widen(log_ratio: torch.Tensor) -> torch.Tensor:
    """The scores detached, and in float32 if narrower. Any shape."""
    d = log_ratio.detach()
    return d.to(torch.promote_types(d.dtype, torch.float32))


def hill(distance: torch.Tensor, q: torch.Tensor, exponent: float) -> torch.Tensor:
    """Hill kernel ``psi(u; q) = 1 / (1 + (u / q)^p)``: 1 at u = 0, 1/2 at u = q, 0 far away. Any shape."""
    return 1 / (1 + (distance / q) ** exponent)


def trust_region(
    log_ratio: torch.Tensor, active: torch.Tensor, alpha: float, exponent: float, q: torch.Tensor | None = None
) -> TrustRegion:
    """Contract the radius of the tokens whose ``|d|`` lies strictly beyond the tail reference.

    On such a token only the side that ``d`` is on shrinks, whatever the sign of the advantage: ``psi(0; q) = 1``.

    Args:
        log_ratio: ``d``, shape ``(B, T)``, any float dtype; detached here, and widened to float32 if narrower.
        active: tokens that count, shape ``(B, T)``, bool; the others are never gated. ``d`` must be finite or
            infinite there, not NaN.
        alpha: quantile level in (0, 1]; 1 leaves the gate empty.
        exponent: ``p > 0`` of the Hill kernel.
        q: tail reference of a larger batch, shape ``()``, dtype of the widened ``d``; None: that of these tokens.
    """
    d = widen(log_ratio)
    distance = d.abs()
    if q is None:
        q = tail_reference(distance, active, alpha)
    gate = active & (distance > q) & (q > 0)
    c = torch.where(gate, hill(distance, q, exponent), 1.0)
    return TrustRegion(q, gate, c_minus=torch.where(d < 0, c, 1.0), c_plus=torch.where(d > 0, c, 1.0))


def clip_to_region(
    ratio: torch.Tensor, region: TrustRegion, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the ratio to the nominal interval, then to the contracted one inside it.

    Two clips instead of one, because ``1 - eps * 1`` in float32 need not be the scalar bound that PPO clips with: where
    a side is not contracted its second bound is infinite, and value and gradient stay PPO's to the last bit.

    Args:
        ratio: ``r`` or ``rho``, shape ``(B, T)``, any float dtype; gradients flow.
        region: from :func:`trust_region`.
        eps_low: nominal lower radius.
        eps_high: nominal upper radius.

    Returns:
        The ratio clipped to the nominal and to the SAT interval, shape ``(B, T)`` and dtype of ``ratio`` both.
    """
    nominal = torch.clamp(ratio, 1 - eps_low, 1 + eps_high)
    low = torch.where(region.c_minus < 1, 1 - eps_low * region.c_minus, -torch.inf)
    high = torch.where(region.c_plus < 1, 1 + eps_high * region.c_plus, torch.inf)
    return nominal, torch.clamp(nominal, low.to(ratio.dtype), high.to(ratio.dtype))


def negative_cap(q: torch.Tensor, eps_high: float, bound: float) -> torch.Tensor:
    """The largest ratio that a token with ``A < 0`` is weighed with, ``C(q) = (1 + eps_high) e^q``; not in the paper.

    In logarithms: the upper end of the nominal interval, moved out by the tail reference. So nothing changes within the
    nominal interval, and all that is capped is gated. Beyond C the objective is ``C A`` and the gradient 0, a dual clip
    (arXiv 1912.09729) that knows the staleness: it bounds a tail that PPO's minimum leaves open, and there gives up
    that SAT's surrogate is never above PPO's, and that pull-back gradients are PPO's.

    Args:
        q: tail reference, shape ``()``, float; 0 (SAT is off) is no cap.
        eps_high: nominal upper radius.
        bound: the largest result: the dual clip that there is anyway.

    Returns:
        Shape ``()``, dtype of ``q``.
    """
    return torch.where(q > 0, (1 + eps_high) * q.exp(), bound).clamp(max=bound)


def intercepted(
    ratio: torch.Tensor, nominal: torch.Tensor, clipped: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose gradient SAT removes and PPO keeps: outward moves between the contracted and the nominal bound.

    Args:
        ratio: ``r`` or ``rho``, shape ``(B, T)``.
        nominal: ``ratio`` clipped to the nominal interval, shape ``(B, T)``.
        clipped: ``ratio`` clipped to the SAT interval, shape ``(B, T)``.
        advantages: A, shape ``(B, T)``; 0 on masked tokens.

    Returns:
        Those with A > 0 and those with A < 0, shape ``(B, T)``, bool.
    """
    inside = nominal == ratio
    return inside & (clipped < ratio) & (advantages > 0), inside & (clipped > ratio) & (advantages < 0)


def effective_radius(q: float, eps: float, exponent: float, *, upper: bool) -> float:
    """The one radius with which PPO would have SAT's gradient on this side, in plain floats.

    The clipped ratio and the score are the same quantity: ``|e^{+-u} - 1|`` rises with ``u = |d|`` and
    ``eps * psi(u; q)`` falls, so they cross once, at ``u*``. A token is clipped beyond ``max(q, u*)`` (gated, and
    outside its own interval) or beyond the nominal radius, whichever comes first.

    Args:
        q: tail reference; 0 (also: an empty gate) means the nominal radius.
        eps: nominal radius; a lower one of 1 or more never clips.
        exponent: ``p`` of the Hill kernel.
        upper: the side, ``e^u - 1`` above and ``1 - e^-u`` below.
    """
    sign = 1.0 if upper else -1.0
    if upper or eps < 1:
        nominal = sign * math.log1p(sign * eps)
    else:
        nominal = math.inf
    if not 0 < q < nominal:
        return eps
    at_q = sign * math.expm1(sign * q)
    if at_q >= eps / 2:  # psi(q; q) = 1/2, so u* <= q
        return min(at_q, eps)
    # Bisection of log u, as u* may be tiny; e^-64 is as good as 0.
    log_q = math.log(q)
    low, high = log_q, math.log(min(nominal, 64.0))
    for _ in range(50):
        log_u = (low + high) / 2
        # The power is capped, as math.exp raises where a tensor would overflow to infinity.
        psi = 1 / (1 + math.exp(min(exponent * (log_u - log_q), 700.0)))
        if sign * math.expm1(sign * math.exp(log_u)) < eps * psi:
            low = log_u
        else:
            high = log_u
    return min(sign * math.expm1(sign * math.exp(high)), eps)
