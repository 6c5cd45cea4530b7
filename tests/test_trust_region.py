"""The rule by itself: quantile, kernel, gate, interval and effective radius, against the equations."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis.extra import numpy as hnp

from sat_verl.trust_region import (
    _on_device,
    clip_to_region,
    effective_radius,
    hill,
    intercepted,
    tail_reference,
    trust_region,
    weighted_tail_reference,
)

properties = settings(deadline=None, max_examples=100, derandomize=True)

ALPHAS = st.sampled_from([0.07, 0.1, 0.5, 0.7, 0.9, 0.95, 1.0]) | st.floats(0.01, 1.0)
EPS = st.sampled_from([3e-4, 0.05, 0.2, 0.28, 1.0])
EXPONENTS = st.sampled_from([1.0, 2.0, 3.5])


@st.composite
def score_batches(draw):
    """Scores on a grid, so that ties and zeros are common, 0 if masked, and the mask; shape (B, T), float64."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 12)))
    grid = draw(hnp.arrays(np.int64, shape, elements=st.integers(-30, 30)))
    step = draw(st.sampled_from([2.0**-12, 2.0**-7, 2.0**-4]))
    active = draw(hnp.arrays(bool, shape))
    return torch.from_numpy(grid * step * active), torch.from_numpy(active)


def q_of(values, alpha, dtype=torch.float64):
    distance = torch.tensor([values], dtype=dtype)
    return tail_reference(distance, torch.ones_like(distance, dtype=torch.bool), alpha).item()


@properties
@given(score_batches(), ALPHAS)
def test_quantile_is_the_inverse_cdf_of_the_active_tokens(batch, alpha):
    d, active = batch
    expected = reference.quantile(d.abs()[active].tolist(), alpha)
    assert tail_reference(d.abs(), active, alpha).item() == expected
    assert tail_reference(d.abs().float(), active, alpha).item() == np.float32(expected)
    junk = torch.where(active, d.abs(), math.nan)
    assert tail_reference(junk, active, alpha).item() == expected
    assert junk.isnan().equal(~active)  # left as it was
    assert _on_device(junk, active, alpha).item() == expected


@properties
@given(score_batches(), ALPHAS)
def test_weighted_quantile_is_that_of_all_tokens(batch, alpha):
    d, active = batch
    of_response, lengths = d[:, :1].abs(), active.sum(-1, keepdim=True)
    every = of_response.expand_as(d)
    assert weighted_tail_reference(of_response, lengths, alpha) == tail_reference(every, active, alpha)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 100, 1000])
def test_quantile_rank_survives_rounding(n):
    values = [float(x) for x in range(1, n + 1)]
    for k in range(1, n + 1):
        # alpha = k/n in double is reached by exactly k of n values; the next double is not.
        assert q_of(values, k / n) == k
        assert q_of(values, math.nextafter(k / n, 0)) == k
        if k < n:
            assert q_of(values, math.nextafter(k / n, 2)) == k + 1


def test_quantile_of_known_cases():
    values = [float(x) for x in range(1, 101)]
    assert q_of(values, 0.07) == 7  # ceil(0.07 * 100) is 8 in double
    assert q_of(values, 0.9) == 90
    assert q_of([5.0, 1.0, 2.0], 0.5) == 2.0  # observed, not interpolated (as would be 0.9 below)
    assert q_of([1.0, 2.0], 0.9) == 2.0
    assert q_of([3.0], 0.01) == 3.0
    assert q_of([0.0] * 9 + [1.0], 0.9) == 0.0
    assert q_of([1.0, math.inf], 0.5) == 1.0


def test_quantile_of_no_active_token_is_zero():
    assert tail_reference(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), 0.9).item() == 0.0


@properties
@given(st.floats(0, 1e3), st.floats(1e-6, 1e3), EXPONENTS)
def test_kernel(u, q, p):
    psi = hill(torch.tensor(u, dtype=torch.float64), torch.tensor(q, dtype=torch.float64), p).item()
    assert psi == pytest.approx(1 / (1 + (u / q) ** p), rel=1e-12, abs=0)
    assert (psi < 0.5) == (u > q) or u == pytest.approx(q, rel=1e-9)


@properties
@given(score_batches(), ALPHAS, EXPONENTS, EPS, EPS)
def test_interval_is_contained_and_moves_one_endpoint_on_the_side_of_d(batch, alpha, p, eps_low, eps_high):
    d, active = batch
    region = trust_region(d, active, alpha, p)
    # The endpoints as the clip sees them: where it sends ratios far outside.
    bounds = [clip_to_region(torch.full_like(d, r), region, eps_low, eps_high) for r in (-100.0, 100.0)]
    (nominal_low, low), (nominal_high, high) = bounds
    assert (nominal_low == 1 - eps_low).all()
    assert (nominal_high == 1 + eps_high).all()
    for i, t in np.ndindex(*d.shape):
        gated = bool(active[i, t]) and region.q > 0 and abs(d[i, t]) > region.q
        assert bool(region.gate[i, t]) == gated
        expected = (1 - eps_low, 1 + eps_high)
        if gated:
            expected = reference.interval(d[i, t].item(), region.q.item(), eps_low, eps_high, p)
        assert low[i, t].item() == pytest.approx(expected[0], rel=1e-12)
        assert high[i, t].item() == pytest.approx(expected[1], rel=1e-12)
        assert (low[i, t] > nominal_low[i, t]) == (gated and d[i, t] < 0)
        assert (high[i, t] < nominal_high[i, t]) == (gated and d[i, t] > 0)
        assert low[i, t] >= nominal_low[i, t]
        assert high[i, t] <= nominal_high[i, t]
        assert region.c_minus[i, t] < 0.5 if gated and d[i, t] < 0 else region.c_minus[i, t] == 1
        assert region.c_plus[i, t] < 0.5 if gated and d[i, t] > 0 else region.c_plus[i, t] == 1


@properties
@given(score_batches(), ALPHAS, EPS, EPS, st.floats(-3, 3), st.floats(-2, 2))
def test_surrogate_is_never_above_that_of_ppo(batch, alpha, eps_low, eps_high, advantage, log_r):
    # For every r, not only for the one that belongs to the score.
    d, active = batch
    ratio = torch.full_like(d, math.exp(log_r))
    nominal, clipped = clip_to_region(ratio, trust_region(d, active, alpha, 2.0), eps_low, eps_high)
    sat = torch.minimum(ratio * advantage, clipped * advantage)
    ppo = torch.minimum(ratio * advantage, nominal * advantage)
    assert (sat <= ppo).all()


@properties
@given(score_batches(), ALPHAS)
def test_at_most_one_minus_alpha_is_gated(batch, alpha):
    d, active = batch
    n = int(active.sum())
    gated = int(trust_region(d, active, alpha, 2.0).gate.sum())
    # In integers, as alpha is a double: gated / n <= 1 - alpha, up to that double's own rounding.
    assert Fraction(gated, max(n, 1)) <= 1 - Fraction(alpha) + Fraction(1, 2**52)
    # With distinct values the bound is reached: only ties (and q = 0) make the share smaller.
    distinct = d.abs()[active]
    if n and len(set(distinct.tolist())) == n and trust_region(d, active, alpha, 2.0).q > 0:
        assert gated == n - math.ceil(Fraction(alpha) * n - Fraction(n, 2**52))


@properties
@given(score_batches())
def test_alpha_one_gates_nothing(batch):
    d, active = batch
    region = trust_region(d, active, 1.0, 2.0)
    assert not region.gate.any()
    assert (region.c_minus == 1).all()
    assert (region.c_plus == 1).all()


@properties
@given(score_batches(), ALPHAS, EXPONENTS, st.integers(-8, 8), st.sampled_from([0.3, 1.7, 11.0]))
def test_scaling_the_scores_changes_neither_gate_nor_contraction(batch, alpha, p, power, factor):
    d, active = batch
    one = trust_region(d, active, alpha, p)
    two = trust_region(d * 2.0**power, active, alpha, p)
    assert two.q == one.q * 2.0**power
    for name in ("gate", "c_minus", "c_plus"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    three = trust_region(d * factor, active, alpha, p)  # rounds alike for equal scores, so ties stay ties
    assert torch.equal(one.gate, three.gate)
    torch.testing.assert_close(three.c_plus, one.c_plus, rtol=1e-12, atol=0)


@properties
@given(score_batches(), ALPHAS, EXPONENTS)
def test_a_given_q_takes_the_place_of_the_batches_own(batch, alpha, p):
    d, active = batch
    own = trust_region(d, active, alpha, p)
    for q in (own.q, own.q * 2, torch.zeros_like(own.q)):
        region = trust_region(d, active, 0.5, p, q)  # alpha has no part then
        assert torch.equal(region.gate, active & (d.abs() > q) & (q > 0))
        gated = [(abs(x) / q.item()) ** p for x in d[region.gate].tolist()]
        c = torch.minimum(region.c_plus, region.c_minus)[region.gate]
        assert c.tolist() == pytest.approx([1 / (1 + x) for x in gated], rel=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(own, trust_region(d, active, alpha, p, own.q), strict=True))


def test_ties_at_the_quantile_are_not_gated():
    d = torch.tensor([[1.0, -2.0, 2.0, -2.0, 2.0]])
    active = torch.ones_like(d, dtype=torch.bool)
    assert trust_region(d, active, 0.4, 2.0).q == 2.0
    assert not trust_region(d, active, 0.4, 2.0).gate.any()
    assert trust_region(d, active, 0.2, 2.0).gate.tolist() == [[False, True, True, True, True]]


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)])
def test_narrow_scores_are_widened_to_float32(dtype, wide):
    d = torch.tensor([[0.011, -0.013, 0.5, 0.03]], dtype=dtype)
    region = trust_region(d, torch.ones_like(d, dtype=torch.bool), 0.5, 2.0)
    same = trust_region(d.to(wide), torch.ones_like(d, dtype=torch.bool), 0.5, 2.0)
    assert region.q.dtype == region.c_plus.dtype == wide
    assert torch.equal(region.c_plus, same.c_plus)


def test_score_is_detached():
    d = torch.tensor([[0.1, -0.2, 0.3]], requires_grad=True)
    region = trust_region(d, torch.ones_like(d, dtype=torch.bool), 0.5, 2.0)
    assert not any(x.requires_grad for x in region)


def test_intercepted_counts_outward_moves_only():
    # Score +0.15 is gated (q = 0.1): the upper bound is 1 + 0.2 / 3.25, the ratio 1.16 lies between it and 1.2.
    d = torch.tensor([[0.15, -0.15, 0.1, 0.1, 0.1]], dtype=torch.float64)
    region = trust_region(d, torch.ones_like(d, dtype=torch.bool), 0.5, 2.0)
    nominal, clipped = clip_to_region(d.exp(), region, 0.2, 0.2)
    for signs, pos, neg in [
        ((1.0, -1.0), [True, False], [False, True]),
        ((-1.0, 1.0), [False, False], [False, False]),
        ((0.0, 0.0), [False, False], [False, False]),
    ]:
        advantages = torch.tensor([[*signs, 1.0, -1.0, 1.0]], dtype=torch.float64)
        got_pos, got_neg = intercepted(d.exp(), nominal, clipped, -advantages)
        assert got_pos.bool().tolist() == [[*pos, False, False, False]]
        assert got_neg.bool().tolist() == [[*neg, False, False, False]]


@properties
@given(st.floats(1e-9, 2.0), st.floats(1e-5, 3.0), EXPONENTS, st.booleans())
def test_effective_radius_is_the_crossing(q, eps, p, upper):
    sign = 1 if upper else -1
    radius = effective_radius(q, eps, p, upper=upper)
    assume(radius < eps)
    u = sign * math.log1p(sign * radius)
    assert u >= q * (1 - 1e-12)
    own = eps / (1 + (u / q) ** p)  # the radius that a gated token there has: equal to it, or smaller if u = q
    assert radius == pytest.approx(own, rel=1e-6) or (u == pytest.approx(q, rel=1e-9) and own < radius)


def test_effective_radius_of_known_cases():
    for q, expected in [(0.013, 0.031), (0.043, 0.065), (0.217, 0.2)]:
        assert effective_radius(q, 0.2, 2.0, upper=True) == pytest.approx(expected, abs=1e-3)
    for upper in (True, False):
        assert effective_radius(0.0, 0.2, 2.0, upper=upper) == 0.2
        assert effective_radius(math.nan, 0.2, 2.0, upper=upper) == 0.2
        assert effective_radius(math.inf, 0.2, 2.0, upper=upper) == 0.2
        assert effective_radius(1e-6, 0.2, 2.0, upper=upper) == pytest.approx((0.2 * 1e-12) ** (1 / 3), rel=1e-2)
        assert 0 <= effective_radius(1e-45, 0.2, 50.0, upper=upper) < 1e-40
    # The upper side ends at log 1.2, the lower at -log 0.8.
    assert effective_radius(0.183, 0.2, 2.0, upper=True) == 0.2
    assert effective_radius(0.222, 0.2, 2.0, upper=False) < 0.2
    assert effective_radius(0.224, 0.2, 2.0, upper=False) == 0.2
    # A lower radius of 1 or more never clips by itself, but a contracted one may.
    assert effective_radius(0.1, 1.0, 2.0, upper=False) == pytest.approx(0.2, abs=0.05)
    assert effective_radius(0.1, 5.0, 2.0, upper=False) < 1.0
    assert effective_radius(0.0, 5.0, 2.0, upper=False) == 5.0
    assert effective_radius(100.0, 5.0, 2.0, upper=False) == pytest.approx(1.0)
