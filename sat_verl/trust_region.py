"""The SAT trust region as tensor code: tail reference, Hill kernel, gate and clip interval.

Source: "Stale but Stable: Staleness-Adaptive Trust Regions" (arXiv 2607.18722), eq. 13-20. ``d = log pi - log mu`` is
the staleness proxy, ``mu`` the rollout engine's sampling policy; B responses of at most T tokens. No call waits for the
device: of what runs on the host, :func:`effective_radius` has plain floats, and selection tensors that are there.

Masks are applied by arithmetic where that is exact, as ``torch.where`` takes several times as long on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch


class TrustRegion(NamedTuple):
    """Per-token contraction of the clip interval to ``[1 - eps_low * c_minus, 1 + eps_high * c_plus]``.

    Attributes:
        q: tail reference of ``|d|``, shape ``()``, float32 (float64 for float64 input); 0 if no token is active.
        c_minus: factor of the lower radius, shape ``(B, T)``, dtype of ``q``; exactly 1 unless gated with ``d < 0``.
        c_plus: factor of the upper radius, shape ``(B, T)``, dtype of ``q``; exactly 1 unless gated with ``d > 0``.
    """

    q: torch.Tensor
    c_minus: torch.Tensor
    c_plus: torch.Tensor

    @property
    def contraction(self) -> torch.Tensor:
        """The factor of the side that ``d`` is on, shape and dtype of the others."""
        return torch.minimum(self.c_minus, self.c_plus)

    @property
    def gate(self) -> torch.Tensor:
        """Tokens whose radius shrinks on one side, shape of the others, bool."""
        return self.contraction < 1


def tail_reference(distance: torch.Tensor, active: torch.Tensor, alpha: float) -> torch.Tensor:
    """Inverse-CDF quantile ``q = inf{x >= 0 : ECDF(x) >= alpha}`` of ``distance`` over the active tokens.

    No interpolation: q is one of the observed values.

    Args:
        distance: ``|d|`` of at least one token, any shape, float32 or float64.
        active: tokens that count, same shape, bool.
        alpha: level in (0, 1].

    Returns:
        q, shape ``()``, dtype of ``distance``; 0 if no token is active.
    """
    distance = distance.detach()
    if distance.device.type == "cpu":
        # There is no device to wait for, and numpy's sort takes 1 ms for 262,144 values: torch's 24, its kthvalue 2.5,
        # numpy's partition 0.2 to 15 by the pattern of equal values.
        values = distance.numpy()[active.numpy()]
        values.sort()
        return distance.new_tensor(values[quantile_rank(len(values), alpha) - 1] if len(values) else 0.0)
    return _on_device(distance, active, alpha)


def _on_device(distance: torch.Tensor, active: torch.Tensor, alpha: float) -> torch.Tensor:
    """:func:`tail_reference` where no number may come to the host."""
    # As zeros the others come first, so that they shift the rank by their number.
    ascending = torch.where(active, distance, 0.0).flatten().sort().values
    count = torch.count_nonzero(active)
    at = (ascending.numel() - count + quantile_rank(count, alpha)).clamp(max=ascending.numel()) - 1
    # index_select, unlike ascending[at], leaves the index on the device.
    return ascending.index_select(0, at.reshape(1)).squeeze(0)


def weighted_tail_reference(distance: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """:func:`tail_reference` of values that stand on several tokens each, bit for bit that of all these tokens.

    Args:
        distance: at least one value, any shape, float32 or float64.
        weight: number of tokens that each value stands on, same shape, int64; may be 0.
        alpha: level in (0, 1].

    Returns:
        q, shape ``()``, dtype of ``distance``; 0 if there is no token.
    """
    ascending, order = distance.flatten().sort()
    tokens = weight.flatten().index_select(0, order).cumsum(0)
    count = tokens[-1]
    at = torch.count_nonzero(tokens < quantile_rank(count, alpha)).clamp(max=len(tokens) - 1)
    return torch.where(count > 0, ascending.index_select(0, at.reshape(1)).squeeze(0), 0.0)


@overload
def quantile_rank(count: int, alpha: float) -> int: ...
@overload
def quantile_rank(count: torch.Tensor, alpha: float) -> torch.Tensor: ...
def quantile_rank(count: Any, alpha: float) -> Any:
    """Rank, from 1, of the inverse-CDF quantile among ``count`` values, 1 if there are none.

    An int for an int; int64 of shape ``()``, on the device, for a tensor of that shape.
    """
    on_device = isinstance(count, torch.Tensor)
    n: Any = count.double().clamp(min=1) if on_device else float(max(count, 1))
    # The smallest k with k/n >= alpha, that division being the ECDF; the ceiling of alpha * n alone can be one off
    # (0.07 * 100 = 7.000000000000001).
    rank = -(-(alpha * n) // 1)
    rank = rank + 1.0 * (rank / n < alpha) - 1.0 * ((rank - 1) / n >= alpha)
    return rank.long() if on_device else int(rank)


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
    return (distance / q).pow_(exponent).add_(1).reciprocal_()


def trust_region(
    log_ratio: torch.Tensor, active: torch.Tensor, alpha: float, exponent: float, q: torch.Tensor | None = None
) -> TrustRegion:
    """Contract the radius of the tokens whose ``|d|`` lies strictly beyond the tail reference.

    On such a token only the side that ``d`` is on shrinks, whatever the sign of the advantage: ``psi(0; q) = 1``.

    Args:
        log_ratio: ``d``, shape ``(B, T)``, any float dtype; detached here, and widened to float32 if narrower. It must
            be 0 on masked tokens, which so are never gated. Where it is NaN so are the factors.
        active: tokens that count, shape ``(B, T)``, bool.
        alpha: quantile level in (0, 1]; 1 leaves the gate empty.
        exponent: ``p > 0`` of the Hill kernel.
        q: tail reference of a larger batch, shape ``()``, dtype of the widened ``d``; None: that of these tokens.
    """
    d = widen(log_ratio)
    distance = d.abs()
    if q is None:
        q = tail_reference(distance, active, alpha)
    beyond = torch.where(q > 0, q, torch.inf)
    c = hill(distance, beyond.clamp(max=torch.finfo(d.dtype).max), exponent)
    # c is at most 1, so its maximum with 1 or 0 chooses: 1 on a side where d does not lie beyond q, else c.
    c_minus = torch.maximum(c, torch.ge(d, -beyond, out=torch.empty_like(d)))
    c_plus = torch.maximum(c, torch.le(d, beyond, out=torch.empty_like(d)))
    return TrustRegion(q, c_minus, c_plus)


def clip_to_region(
    ratio: torch.Tensor, region: TrustRegion, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the ratio to the nominal interval, then to the contracted one inside it.

    Two clips instead of one, because ``1 - eps * 1`` in float32 need not be the scalar bound that PPO clips with: where
    a side is not contracted its second bound lies outside the first, and value and gradient stay PPO's to the last bit.

    Args:
        ratio: ``r`` or ``rho``, shape ``(B, T)``, or ``(B, 1)`` like the region, any float dtype; gradients flow.
        region: from :func:`trust_region`.
        eps_low: nominal lower radius.
        eps_high: nominal upper radius.

    Returns:
        The ratio clipped to the nominal and to the SAT interval, shape and dtype of ``ratio`` both.
    """
    nominal = torch.clamp(ratio, 1 - eps_low, 1 + eps_high)
    # floor(c) is 1 where a side is not contracted, which doubles its radius, and 0 where it is.
    low = region.c_minus.floor().add_(region.c_minus).mul_(-eps_low).add_(1)
    high = region.c_plus.floor().add_(region.c_plus).mul_(eps_high).add_(1)
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
    ratio: torch.Tensor, nominal: torch.Tensor, clipped: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose gradient SAT removes and PPO keeps: outward moves between the contracted and the nominal bound.

    Args:
        ratio: ``r`` or ``rho``, shape ``(B, T)`` or ``(B, 1)``.
        nominal: ``ratio`` clipped to the nominal interval, same shape.
        clipped: ``ratio`` clipped to the SAT interval, same shape.
        slope: -A, shape ``(B, T)``; 0 on masked tokens.

    Returns:
        1 on those with A > 0, and on those with A < 0, else 0; shape ``(B, T)``, float32.
    """
    inside = indicator(torch.eq, nominal, ratio)
    above = inside * indicator(torch.lt, clipped, ratio)
    below = inside.mul_(indicator(torch.gt, clipped, ratio))
    return (
        indicator(torch.lt, slope, 0.0).mul_(above),
        indicator(torch.gt, slope, 0.0).mul_(below),
    )


def indicator(compare: Callable[..., torch.Tensor], values: torch.Tensor, others: torch.Tensor | float) -> torch.Tensor:
    """1 where ``compare(values, others)`` (``torch.gt`` and the like) holds, else 0; shape of ``values``, float32.

    A bool takes three times as long to write on a CPU, and more to count.
    """
    return compare(values, others, out=torch.empty_like(values, dtype=torch.float32))


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
