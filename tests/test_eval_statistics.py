"""Averages, intervals, pass@k and maj@k against tables made by hand, enumeration and simulation."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eval.statistics import (
    Votes,
    average,
    bootstrap_interval,
    bounds,
    majority_at_k,
    never_seen,
    pass_at_k,
    population_interval,
    sampling_interval,
)


@st.composite
def tables(draw, smallest=0):
    counting = draw(st.lists(st.integers(smallest, 8), min_size=1, max_size=12))
    return [draw(st.integers(0, m)) for m in counting], counting


# --- averages and bounds


def test_average_is_the_mean_over_problems_not_over_samples():
    assert average([1, 0], [1, 3]) == 0.5
    assert average([2, 4, 0], [8, 8, 0]) == 0.375  # the third has no sample that counts
    assert average([0, 0], [0, 0]) is None


def test_numbers_that_cannot_be_are_refused():
    for correct, counting in (([3], [2]), ([-1], [2]), ([1, 2], [2])):
        with pytest.raises(ValueError, match=r"problem"):
            average(correct, counting)


def test_bounds_cover_what_was_left_out():
    # 2 of 4, where 4 more are unknown, and a problem of which nothing is known.
    assert bounds([2, 0], [4, 0], [4, 8]) == (0.125, 0.875)
    assert bounds([2], [4], [0]) == (0.5, 0.5)
    assert bounds([0], [0], [0]) == (0, 1)


@settings(deadline=None, max_examples=50)
@given(tables(), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_bounds_hold_every_outcome_of_the_excluded(table, excluded):
    correct, counting = map(np.array, table)
    excluded = np.array(excluded[: len(correct)])
    low, high = bounds(correct, counting, excluded)
    for share in (0, 0.5, 1):
        found = average(correct + share * excluded, counting + excluded)
        assert found is None or low - 1e-12 <= found <= high + 1e-12


# --- intervals


def test_sampling_interval_by_hand():
    # p = 1/4 and 1/2 of 4: variances 3/48 and 4/48, SE = sqrt(7/48)/2; no problem agrees, so nothing is added.
    found = sampling_interval([1, 2], [4, 4])
    error = math.sqrt(7 / 48) / 2
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((0.375 - 1.959964 * error, 0.375 + 1.959964 * error), abs=1e-7)


def test_sampling_interval_with_agreeing_problems_by_hand():
    # Problem 1 is always wrong (8 samples), problem 2 always right: each could move the mean by half its bound.
    bound = 1 - 0.025 ** (1 / 8)
    found = sampling_interval([0, 8, 4], [8, 8, 8])
    half = 1.959964 * math.sqrt(0.25 / 7) / 3
    assert found.high == pytest.approx(0.5 + math.hypot(half, bound / 3))
    assert found.low == pytest.approx(0.5 - math.hypot(half, bound / 3))


def test_sampling_interval_without_variance_is_not_a_point():
    zero = sampling_interval([0] * 30, [8] * 30)
    # The interval of Clopper and Pearson for 0 of 240.
    assert (zero.low, zero.high) == pytest.approx((0, stats.binomtest(0, 240).proportion_ci().high))
    assert (zero.method, zero.standard_error) == ("Clopper-Pearson", None)
    half = sampling_interval([0] * 15 + [8] * 15, [8] * 30)
    assert half.high - 0.5 == pytest.approx(0.5 - half.low)
    assert 0.005 < half.high - 0.5 < 0.03


def test_one_sample_shows_no_sampling_noise():
    assert sampling_interval([1, 0, 1], [1, 1, 1]) is None
    assert sampling_interval([], []) is None
    # Beside problems with more samples it gets the largest variance there is, 1/4.
    assert sampling_interval([1, 2], [1, 4]).standard_error == pytest.approx(math.sqrt(0.25 + 0.25 / 3) / 2)


def test_population_interval_is_students_over_problem_means():
    correct = np.array([0, 8, 4, 2, 6, 8, 1, 3] * 4)[:30]
    found = population_interval(correct, [8] * 30)
    expected = stats.ttest_1samp(correct / 8, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert (found.method, found.degrees_of_freedom) == ("t, clustered by problem", 29)


def test_population_interval_is_not_that_of_independent_samples():
    # The score and size of a published AIME24 run (lighteval#771: 0.4375 at n=8, standard error 0.064).
    correct = [8] * 7 + [7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1] + [0] * 10
    found = population_interval(correct, [8] * 30)
    assert average(correct, [8] * 30) == pytest.approx(0.4375)
    assert found.standard_error > 2 * math.sqrt(0.4375 * 0.5625 / 240)


@pytest.mark.parametrize("value", [0, 8])
def test_population_interval_at_the_edges_is_exact(value):
    found = population_interval([value] * 30, [8] * 30)
    exact = stats.binomtest(30 * value // 8, 30).proportion_ci()
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.method == "Clopper-Pearson"
    assert never_seen(30) == pytest.approx(0.1157, abs=1e-4)


def test_population_interval_near_the_edge_is_wider_than_students():
    found = population_interval([1] + [0] * 29, [8] * 30)
    student = 1 / 240 + 2.0452 * (1 / 240)
    assert found.high > student * 1.5
    assert found.method == "t, widened to Clopper-Pearson"
    mirrored = population_interval([7] + [8] * 29, [8] * 30)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high))


def test_one_problem_says_nothing_about_others():
    assert population_interval([3, 0], [8, 0]) is None
    assert bootstrap_interval([3, 0], [8, 0]) is None


def test_bootstrap_repeats_and_agrees_with_the_t_interval():
    correct, counting = [0, 8, 4, 2, 6, 8, 1, 3, 5, 7] * 3, [8] * 30
    found = bootstrap_interval(correct, counting)
    assert found == bootstrap_interval(correct, counting)
    assert found != bootstrap_interval(correct, counting, seed=1)
    t = population_interval(correct, counting)
    assert found.standard_error == pytest.approx(t.standard_error * math.sqrt(29 / 30), rel=0.05)
    assert (found.low, found.high) == pytest.approx((t.low, t.high), abs=0.02)


def test_bootstrap_of_equal_means_says_nothing():
    assert bootstrap_interval([0] * 30, [8] * 30) is None


@settings(deadline=None, max_examples=50)
@given(tables(), st.randoms(use_true_random=False))
def test_order_of_problems_does_not_matter_and_intervals_hold_the_mean(table, random):
    correct, counting = table
    mean = average(correct, counting)
    order = list(range(len(correct)))
    random.shuffle(order)
    shuffled = [correct[i] for i in order], [counting[i] for i in order]
    for interval in (sampling_interval, population_interval, bootstrap_interval):
        found, again = interval(correct, counting), interval(*shuffled)
        if found is None:
            assert again is None
            continue
        assert (found.low, found.high) == pytest.approx((again.low, again.high))
        assert 0 <= found.low <= mean + 1e-12
        assert mean - 1e-12 <= found.high <= 1


def _share_covered(interval, draw, truth, runs=400):
    """How often an interval holds the truth; its own Monte Carlo error is about 0.011 at 0.95."""
    random = np.random.default_rng(7)
    held = 0
    for _ in range(runs):
        p, n = draw(random)
        found = interval(random.binomial(n, p), np.full(len(p), n))
        held += found.low <= truth(p) + 1e-12 and truth(p) - 1e-12 <= found.high
    return held / runs


@pytest.mark.parametrize(
    ("draw", "most"),
    [
        (lambda r: (r.beta(0.3, 0.5, 30), 8), 0.99),  # many easy, many hopeless
        (lambda r: (np.full(30, 0.5), 8), 0.98),
        (lambda r: (np.full(30, 0.01), 8), 1),  # 1.96 SE alone holds it in 91 %
        (lambda r: (r.beta(0.05, 2, 30), 8), 1),  # 85 %
        (lambda r: (np.repeat([0.0, 1.0, 0.9], [14, 14, 2]), 8), 1),  # 57 %
        (lambda r: (r.beta(0.3, 0.5, 5), 4), 1),  # 84 %
    ],
)
def test_sampling_interval_covers_these_problems(draw, most):
    assert 0.93 <= _share_covered(sampling_interval, draw, lambda p: p.mean()) <= most


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (lambda r: (r.beta(0.3, 0.5, 30), 8), 0.375),
        (lambda r: (r.beta(2, 2, 30), 8), 0.5),
        (lambda r: (r.beta(0.05, 2, 30), 8), 0.05 / 2.05),  # t alone: 86 %
        (lambda r: ((r.random(30) < 0.1) * 0.3, 8), 0.03),  # t alone: 89 %
        (lambda r: (np.full(30, 0.002), 8), 0.002),
    ],
)
def test_population_interval_covers_the_population(draw, truth):
    assert 0.92 <= _share_covered(population_interval, draw, lambda p: truth) <= 1


def test_sampling_noise_alone_does_not_cover_the_population():
    """The two are different things: one taken for the other would be wrong more than every second time."""
    held = _share_covered(sampling_interval, lambda r: (r.beta(0.3, 0.5, 30), 8), lambda p: 0.375)
    assert held < 0.6


# --- pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (8, 0, 4, 0),
        (8, 1, 1, 1 / 8),
        (8, 1, 4, 1 / 2),
        (8, 1, 8, 1),  # by resampling with replacement it would be 1 - (7/8)^8 = 0.656
        (8, 2, 2, 1 - 15 / 28),
        (8, 5, 4, 1),  # fewer than 4 wrong ones: each subset has a right one
        (4, 2, 2, 5 / 6),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k_table(n, c, k, expected):
    assert pass_at_k([c], [n], k) == pytest.approx(expected)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k([c], [n], k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_pass_at_k_does_not_overflow():
    assert pass_at_k([1], [4096], 2048) == pytest.approx(0.5)


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="k=9: it must be from 1 to 8"):
        pass_at_k([1, 2], [8, 9], 9)
    with pytest.raises(ValueError, match="k=0"):
        pass_at_k([1], [8], 0)
    with pytest.raises(ValueError, match="k=9: it must be from 1 to 8"):
        majority_at_k([Votes(8), Votes(9)], 9)
    with pytest.raises(ValueError, match="k=1"):
        pass_at_k([0], [0], 1)


@settings(deadline=None, max_examples=50)
@given(tables(smallest=1))
def test_pass_at_1_is_the_average_and_grows_with_k(table):
    correct, counting = table
    values = [pass_at_k(correct, counting, k) for k in range(1, min(counting) + 1)]
    assert values[0] == pytest.approx(average(correct, counting))
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(values))


# --- maj@k


def _by_enumeration(votes, k):
    answers = [0] * votes.correct + [None] * votes.abstained
    for number, size in enumerate(votes.others, start=1):
        answers += [number] * size
    scores = []
    for subset in itertools.combinations(answers, k):
        counts = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        scores.append((0 in winners) / len(winners) if winners else 0)
    return float(np.mean(scores))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4), st.lists(st.integers(1, 3), max_size=3).map(tuple), st.integers(0, 2), st.integers(1, 15))
def test_majority_is_exact_over_subsets(correct, others, abstained, k):
    votes = Votes(correct, others, abstained)
    n = correct + sum(others) + abstained
    if k <= n <= 10:
        assert majority_at_k([votes], k) == pytest.approx(_by_enumeration(votes, k), abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        (Votes(3, (2,)), 5, 1),
        (Votes(2, (3,)), 5, 0),
        (Votes(2, (2,)), 4, 1 / 2),  # a tie of two
        (Votes(1, (1, 1)), 3, 1 / 3),  # of three
        (Votes(1, (), 7), 8, 1),  # the only vote
        (Votes(0, (), 8), 8, 0),  # nobody votes
        (Votes(2, (1,), 1), 3, 3 / 4),  # A A B x: without x or B all of the score, without either A half of it
    ],
)
def test_majority_table(votes, k, expected):
    assert majority_at_k([votes], k) == pytest.approx(expected)


def test_majority_of_many_samples_is_fast_and_right():
    votes = Votes(16, (8, 8, 8, 4, 4, 4, 2, 2, 1, 1, 1), 5)
    assert majority_at_k([votes], 64) == 1
    answers = np.repeat(np.arange(13), [16, *votes.others, 5])
    random = np.random.default_rng(0)
    scores = []
    for _ in range(4000):
        counts = np.bincount(random.permutation(answers)[:32], minlength=13)[:12]
        scores.append((counts[0] == counts.max()) / (counts == counts.max()).sum())
    assert majority_at_k([votes], 32) == pytest.approx(np.mean(scores), abs=4 * np.std(scores) / 4000**0.5)
    # No overflow where C(1024, 512) has 307 digits; two equal classes share the score.
    assert majority_at_k([Votes(512, (512,))], 512) == pytest.approx(0.5)


@settings(deadline=None, max_examples=50)
@given(tables(smallest=1))
def test_majority_of_one_is_the_average(table):
    correct, counting = table
    votes = [Votes(c, (n - c,) if n > c else ()) for c, n in zip(correct, counting, strict=True)]
    assert majority_at_k(votes, 1) == pytest.approx(average(correct, counting))


def test_a_problem_without_samples_has_no_vote():
    assert majority_at_k([Votes(2), Votes(0)], 2) == 1
