"""From samples to results: nothing missing counts as wrong, nothing shifts, and what is odd is said."""

import json

import eval_runs
import pytest

from eval import storage
from eval.schema import Results, Verdict
from eval.statistics import Votes
from eval.summary import subset_sizes, summarize, votes_of
from recipes.errors import ConfigError


def summary(rows, n=None, key=eval_runs.KEY, found=None, warnings=()):
    found = eval_runs.samples(rows) if found is None else found
    return summarize(
        eval_runs.plan(rows, n, key), found, grader={"version": "1"}, timing={"generate": 1.0}, provenance={},
        warnings=warnings,
    )  # fmt: skip


def says(results, text):
    return any(text in warning for warning in results.warnings)


def test_a_complete_run():
    results = summary(["++--", "+++0", "---T", "++++"])
    score = results.scores["strict"]
    assert score.average == pytest.approx((0.5 + 0.75 + 0 + 1) / 4)
    assert score.bounds == (score.average, score.average)
    assert score.counts == {
        "correct": 9, "wrong": 5, "no_answer": 1, "truncated": 1, "request_error": 0, "grader_error": 0,
    }  # fmt: skip
    assert sorted(score.pass_at) == sorted(score.majority_at) == [1, 2, 4]
    assert (score.pass_at[1], score.majority_at[1]) == pytest.approx((score.average, score.average))
    assert score.pass_at[4] == 0.75
    assert score.majority_at[4] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert (results.received, results.expected, results.complete) == (16, 16, True)
    assert results.truncated_rate == 1 / 16
    assert results.warnings[0] == "of the benchmark"
    assert results.problems[2].statuses["lenient"] == ["wrong", "wrong", "wrong", "truncated"]
    assert results.problems[1].average == {"strict": 0.75, "lenient": 0.75}
    assert results.lengths.mean_correct == pytest.approx((10 + 11 + 10 + 11 + 12 + 10 + 11 + 12 + 13) / 9)
    assert (results.lengths.median, results.lengths.maximum) == (11.5, 13)


def test_results_survive_their_file(tmp_path):
    results = summary(["++!-", "+? -"])
    (tmp_path / storage.RESULTS_FILE).write_text(results.model_dump_json())
    assert storage.read_results(tmp_path) == results
    assert set(json.loads(results.model_dump_json())) == set(Results.model_fields)


@pytest.mark.parametrize("n", [8, 16, 32, 64])
def test_missing_samples_are_not_wrong(n):
    """A public harness halved pass@1 with each doubling of n, because it had 8 samples and divided by n."""
    results = summary(["+" * 6 + "--", "+" * 2 + "-" * 6], n)
    assert results.scores["strict"].average == 0.5
    assert results.scores["strict"].pass_at[1] == pytest.approx(0.5)
    assert results.complete is (n == 8)
    assert says(results, "incomplete: 16 of") is (n > 8)
    assert max(results.scores["strict"].pass_at) == 8  # never the planned n


def test_a_problem_not_yet_sampled_is_left_out():
    results = summary(["+-", "  "])
    assert results.scores["strict"].average == 0.5
    assert results.problems[1].average["strict"] is None
    assert not results.complete


def test_nothing_yet():
    results = summary(["  ", "  "])
    score = results.scores["strict"]
    assert (score.average, score.sampling, score.population, score.bootstrap) == (None, None, None, None)
    assert (score.bounds, score.pass_at, results.lengths, results.received) == ((0, 1), {}, None, 0)


def test_an_empty_answer_shifts_nothing():
    """A public harness appended two rewards for an empty answer, so that every later sample had its neighbour's."""
    rows = ["+0-+!+-+", "0+++----"]
    results = summary(rows)
    names = {letter: status for letter, (status, _) in eval_runs.LETTERS.items()}
    for problem, row in zip(results.problems, rows, strict=True):
        assert problem.statuses["strict"] == [names[letter] for letter in row]
        assert problem.answers["strict"] == [eval_runs.LETTERS[letter][1] for letter in row]
        assert problem.lengths == [None if letter == "!" else 10 + i for i, letter in enumerate(row)]


def test_a_gap_shifts_nothing():
    results = summary(["+ -+"])
    assert results.problems[0].statuses["strict"] == ["correct", None, "wrong", "correct"]
    assert results.scores["strict"].average == pytest.approx(2 / 3)


def test_errors_are_bounded_and_never_zero():
    results = summary(["++!?", "--!!", "!!!!"])
    score = results.scores["strict"]
    assert score.average == 0.5  # 2 of 2 and 0 of 2
    assert score.bounds == (pytest.approx(0.5 / 3), pytest.approx((1 + 0.5 + 1) / 3))
    assert sorted(score.pass_at) == [1, 2]
    assert results.complete  # they are there; nobody knows what they are
    assert results.errors == {"request_error: time limit": 7, "grader_error: too slow": 1}
    assert says(results, "strict: 8 of 12 samples left out, and with them 1 problem(s)")


def test_a_sample_counts_by_policy():
    rows = ["+-"]
    found = eval_runs.samples(rows)
    odd = Verdict(status="no_answer")
    found["p0", 0] = eval_runs.sample("p0", 0, "+", verdicts={**found["p0", 0].verdicts, "strict": odd})
    results = summary(rows, found=found)
    assert (results.scores["strict"].average, results.scores["lenient"].average) == (0, 0.5)


def test_votes_are_canonical():
    def graded(number, status, answer):
        verdict = Verdict(status=status, answer=answer)
        return eval_runs.sample("p0", number, "-", verdicts={"strict": verdict, "lenient": verdict})

    row = [
        graded(0, "correct", "204"),
        graded(1, "correct", r"\frac{408}{2}"),
        graded(2, "wrong", "017"),
        graded(3, "wrong", r" 17^\circ"),
        graded(4, "wrong", "x+1"),
        graded(5, "wrong", " x+1 "),
        graded(6, "no_answer", None),
        graded(7, "truncated", None),
        graded(8, "grader_error", "204"),
        None,
    ]
    assert votes_of(row, "strict") == Votes(correct=2, others=(2, 2), abstained=2)


def test_votes_on_digits_are_as_written():
    """To the sort task 012 and 12 are two answers; to mathematics they are one."""

    def graded(number, answer, method):
        verdict = Verdict(status="wrong", answer=answer, method=method)
        return eval_runs.sample("p0", number, "-", verdicts={"strict": verdict, "lenient": verdict})

    for method, others in (("digits", (1, 2)), ("integer", (3,))):
        row = [graded(number, answer, method) for number, answer in enumerate(("012", "12", "12"))]
        assert votes_of(row, "strict") == Votes(correct=0, others=others, abstained=0)


def test_sizes_of_subsets():
    assert [subset_sizes(n) for n in (0, 1, 6, 8)] == [[], [1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_samples_beyond_n_are_not_read():
    rows = ["+++-"]
    assert summary(rows, n=2).scores["strict"].average == 1
    assert summary(rows, n=2).complete


def test_duplicates_are_counted_within_a_problem():
    rows = ["+++-", "++++"]
    found = eval_runs.samples(rows)
    for number in (0, 1, 2):
        found["p0", number] = eval_runs.sample("p0", number, "+", response="the same")
    found["p1", 0] = eval_runs.sample("p1", 0, "+", response="the same")  # of another problem: no duplicate
    results = summary(rows, found=found)
    assert ([problem.duplicates for problem in results.problems], results.duplicates) == ([2, 0], 2)
    assert not says(results, "identical")


@pytest.mark.parametrize(("temperature", "warned"), [(1.0, True), (0.6, True), (0, False), (0.0, False)])
def test_samples_that_are_all_the_same_are_reported(temperature, warned):
    rows = ["++++", "----"]
    found = {
        place: sample.model_copy(update={"response": f"of {place[0]}"})
        for place, sample in eval_runs.samples(rows).items()
    }
    key = {**eval_runs.KEY, "sampling": {"temperature": temperature}}
    results = summary(rows, key=key, found=found)
    assert says(results, "all samples of every problem are identical") is warned
    assert results.duplicates == 6


def test_shared_seeds_are_reported():
    rows = ["++", "+-"]
    assert not says(summary(rows), "share a seed")  # the same seeds in another problem are no fault
    found = eval_runs.samples(rows)
    found["p1", 1] = eval_runs.sample("p1", 1, "-", seed=1000)
    assert says(summary(rows, found=found), "samples share a seed (problem p1, seed 1000)")


def test_many_truncated_responses_are_reported():
    assert says(summary(["TT--"]), "50.0% of the responses were cut")
    assert not says(summary(["+" * 30 + "T"]), "were cut")
    # A response that was cut counts as truncated in the rate even where its answer was right.
    found = eval_runs.samples(["+-"])
    found["p0", 0] = eval_runs.sample("p0", 0, "+", finish_reason="length")
    assert summary(["+-"], found=found).truncated_rate == 0.5


def test_warnings_are_not_repeated():
    results = summary(["+-"], warnings=["of the benchmark", "of the engine"])
    assert results.warnings == ["of the benchmark", "of the engine"]


def test_samples_of_something_else_are_refused():
    found = {**eval_runs.samples(["+-"]), ("other", 0): eval_runs.sample("other", 0, "+")}
    with pytest.raises(ConfigError, match="which hand does not have"):
        summary(["+-"], found=found)
    found = eval_runs.samples(["+-"])
    found["p0", 1] = eval_runs.sample("p0", 1, "-", verdicts={"strict": Verdict(status="wrong")})
    with pytest.raises(ConfigError, match="no verdict of policy=lenient"):
        summary(["+-"], found=found)
