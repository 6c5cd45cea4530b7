"""Comparing runs: statistics against enumeration and scipy, and what is refused."""

import itertools
import json
import math

import eval_runs
import numpy as np
import pytest
from scipy import stats

from eval import compare as command
from eval.comparison import compare
from eval.paired import (
    Tally,
    bootstrap_interval,
    detectable,
    difference,
    holm,
    newcombe_interval,
    sign_flip,
    student_interval,
)
from eval.storage import RESULTS_FILE
from eval.summary import summarize
from recipes.errors import ConfigError


def tally(correct, n=8):
    counting = np.broadcast_to(n, len(correct)).astype(float)
    return Tally(np.asarray(correct, dtype=float), counting)


def results(rows, weights="aa", n=None, grader="1", **sections):
    key = {**eval_runs.KEY, "model": {"weights_sha256": weights}, **sections}
    return summarize(
        eval_runs.plan(rows, n, key), eval_runs.samples(rows), grader={"version": grader}, timing={}, provenance={},
        warnings=[],
    )  # fmt: skip


def write(folder, found):
    folder.mkdir()
    (folder / RESULTS_FILE).write_text(found.model_dump_json())
    return folder


# --- statistics


def test_sign_flip_is_exact_for_few_differences():
    for differences in ([0.5, 0.25, 0.25, -0.125], [1 / 3, 2 / 3, -1 / 3], [0.1] * 6, [0.1, -0.1]):
        values = np.array(differences)
        sums = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=len(values))]
        expected = np.mean([found >= abs(values.sum()) - 1e-9 for found in sums])
        p, exact = sign_flip(np.concatenate([values, np.zeros(20)]))
        assert exact
        assert p == pytest.approx(min(1, expected))


def test_six_differences_of_one_direction_are_needed():
    assert sign_flip(np.array([0.5, 0]))[0] == 1
    assert sign_flip(np.array([0.1] * 5))[0] == 0.0625
    assert sign_flip(np.array([0.1] * 6))[0] == 0.03125


def test_sign_flip_of_many_is_drawn_and_never_zero():
    p, exact = sign_flip(np.full(40, 0.5))
    assert not exact
    assert 0 < p < 1e-4
    assert sign_flip(np.full(40, 0.5)) == (p, exact)


def test_sign_flip_drawn_agrees_with_all(monkeypatch):
    values = np.array([3, -1, 2, 2, 1, -2, 4, 1, -1, 2]) / 8
    p, exact = sign_flip(values)
    assert exact
    monkeypatch.setattr("eval.paired.EXACT_UP_TO", 4)
    monkeypatch.setattr("eval.paired.RANDOM_SIGNS", 1000)  # below 2^10, else scipy tries all
    drawn, exact = sign_flip(values)
    assert not exact
    assert drawn == pytest.approx(p, abs=0.04)


def test_no_difference_is_no_evidence():
    assert sign_flip(np.zeros(30)) == (1.0, True)
    same = difference(tally([0] * 30), tally([0] * 30))
    bound = 1 - 0.025 ** (1 / 30)
    assert (same.population.low, same.population.high) == pytest.approx((-bound, bound))
    assert (same.mean, same.bootstrap, same.detectable, same.p) == (0, None, None, 1)
    assert same.sampling.low < 0 < same.sampling.high
    all_better = difference(tally([0] * 30), tally([8] * 30))
    assert (all_better.population.low, all_better.population.high) == pytest.approx((1 - 2 * bound, 1))


def test_student_interval_is_the_paired_t_test():
    a, b = tally([0, 8, 4, 2, 6, 8, 1, 3]), tally([1, 8, 6, 2, 7, 7, 4, 5])
    found = student_interval(b.means - a.means)
    expected = stats.ttest_rel(b.means, a.means).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert student_interval(np.array([0.5])) is None


def test_detectable_difference():
    values = np.random.default_rng(0).normal(size=30)
    values = 0.2 * (values - values.mean()) / values.std(ddof=1)
    assert detectable(values) == pytest.approx((2.04523 + 0.85419) * 0.2 / math.sqrt(30), rel=1e-4)
    # By simulation: the t test finds a true difference of that size in 80 % of the studies.
    random = np.random.default_rng(1)
    studies = random.normal(detectable(values), 0.2, size=(4000, 30))
    assert (stats.ttest_1samp(studies, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)
    assert detectable(np.full(5, 0.1)) is None


def test_paired_bootstrap():
    random = np.random.default_rng(0)
    skill = random.beta(0.5, 0.5, 40)
    a, b = tally(random.binomial(8, skill)), tally(random.binomial(8, np.minimum(1, skill + 0.1)))
    found = bootstrap_interval(a, b)
    assert found == bootstrap_interval(a, b)
    t = student_interval(b.means - a.means)
    assert (found.low, found.high) == pytest.approx((t.low, t.high), abs=0.02)
    order = random.permutation(40)
    shuffled = (Tally(run.correct[order], run.counting[order]) for run in (a, b))
    assert bootstrap_interval(*shuffled) == found
    wider = bootstrap_interval(a, b, resample="samples")
    assert wider.high - wider.low > found.high - found.low


def test_pairing_finds_what_two_separate_intervals_would_not():
    """Problems differ far more than the runs: by problem means the runs overlap, in pairs they do not."""
    hard = np.array([0, 0, 1, 1, 2, 3, 4, 5, 5, 6] * 3)
    found = difference(tally(hard), tally(hard + 1))
    assert found.mean == pytest.approx(1 / 8)
    assert found.p < 0.001
    assert hard.std(ddof=1) / 8 * 2.045 / math.sqrt(30) * 2 > 1 / 8


def test_false_alarms_are_as_rare_as_promised(monkeypatch):
    """Equal runs: the sign-flip test rejects in about 5 %, the sampling interval holds 0 in at least about 95 %."""
    monkeypatch.setattr("eval.paired.EXACT_UP_TO", 10)
    monkeypatch.setattr("eval.paired.RANDOM_SIGNS", 999)
    random = np.random.default_rng(5)
    rejected, held, runs = 0, 0, 300
    for _ in range(runs):
        skill = np.where(random.random(30) < 0.5, random.random(30), 0.0)
        a, b = (tally(random.binomial(8, skill)) for _ in "ab")
        rejected += sign_flip(b.means - a.means)[0] < 0.05
        interval = newcombe_interval(a, b)
        held += interval.low <= 0 <= interval.high
    assert 0.01 < rejected / runs < 0.09
    assert 0.93 < held / runs < 1


def test_unequal_numbers_of_samples():
    a, b = Tally(np.array([1.0, 2]), np.array([2.0, 8])), Tally(np.array([3.0, 4]), np.array([4.0, 8]))
    assert difference(a, b).mean == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no sample that counts"):
        difference(a, Tally(np.array([0.0, 1]), np.array([0.0, 8])))
    with pytest.raises(ValueError, match="must be the same"):
        difference(a, tally([1]))


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.02]) == [0.02]


# --- runs


def test_compare_by_problem():
    a, b = results(["+---", "++--", "----"]), results(["++--", "+---", "+++-"], weights="cc")
    found = compare({"base": a, "trained": b})
    one = found.comparisons[0]
    assert [problem.difference for problem in one.problems] == [0.25, -0.25, 0.75]
    assert (one.difference.mean, one.difference.better, one.difference.worse) == (0.25, 2, 1)
    assert (one.first, one.other, one.p_holm) == (0.25, 0.5, one.difference.p)
    assert one.bounds == (0.25, 0.25)
    assert found.warnings == ["all runs: of the benchmark"]


def test_problems_are_paired_by_id_whatever_their_order():
    a, b = results(["+---", "++--"]), results(["++--", "----"], weights="cc")
    turned = b.model_copy(update={"problems": b.problems[::-1]})
    assert compare({"a": a, "b": turned}).comparisons[0].problems == compare({"a": a, "b": b}).comparisons[0].problems


def test_several_runs_are_adjusted():
    rows = ["+---"] * 8
    runs = {"a": results(rows), "b": results(["++--"] * 8, "cc"), "c": results(["+++-"] * 8, "dd")}
    found = compare(runs)
    assert [one.name for one in found.comparisons] == ["b", "c"]
    assert [one.difference.p for one in found.comparisons] == [2 / 256, 2 / 256]
    assert [one.p_holm for one in found.comparisons] == [4 / 256, 4 / 256]


def test_excluded_samples_are_bounded_and_named():
    a, b = results(["++--", "+---"]), results(["++!!", "!!!!"], weights="cc")
    found = compare({"a": a, "b": b})
    one = found.comparisons[0]
    assert one.difference.problems == 1
    assert one.difference.mean == 0.5  # 2 of 2 against 2 of 4
    assert one.bounds == (0.25 - 0.375, 1 - 0.375)
    assert one.problems[1].difference is None
    assert any("6 samples do not count" in text and "1 problem(s)" in text for text in found.warnings)
    with pytest.raises(ConfigError, match="no problem has samples that count in both"):
        compare({"a": results(["!!--"]), "b": results(["!!!!"], weights="cc")})


@pytest.mark.parametrize(
    ("section", "value", "text"),
    [
        ("benchmark", {"name": "hand", "answers_sha256": "zz"}, "benchmark.answers_sha256: bb in a, zz in b"),
        ("prompt", {"template": "{statement}", "system": "Think."}, "prompt.system: none in a, Think. in b"),
        ("sampling", {"temperature": 0.6, "top_p": 1.0, "context": 4096}, "sampling.temperature: 1.0 in a, 0.6 in b"),
        (
            "sampling",
            {**eval_runs.KEY["sampling"], "extra_body": {"min_p": 0.1}},
            "sampling.extra_body.min_p: absent in a, 0.1 in b",
        ),
        ("something_new", 3, "something_new: absent in a, 3 in b"),
    ],
)
def test_runs_of_something_else_are_refused(section, value, text):
    rows = ["+-", "--"]
    with pytest.raises(ConfigError) as caught:
        compare({"a": results(rows), "b": results(rows, weights="cc", **{section: value})})
    assert text in str(caught.value)
    assert "weights" not in str(caught.value)


def test_every_differing_field_is_named():
    sampling = {"temperature": 0.6, "top_p": 0.95, "context": 4096}
    with pytest.raises(ConfigError) as caught:
        compare({"a": results(["+-"]), "b": results(["+---"], weights="cc", sampling=sampling)})
    for text in ("n: 2 in a, 4 in b", "sampling.temperature: 1.0 in a", "sampling.top_p: 1.0 in a, 0.95 in b"):
        assert text in str(caught.value)


def test_other_problems_and_graders_are_refused():
    with pytest.raises(ConfigError, match="problems: no p1 in a, p1 in b"):
        compare({"a": results(["+-"]), "b": results(["+-", "--"])})
    with pytest.raises(ConfigError, match=r"grader.version: 1 in a, 2 in b.*eval.regrade"):
        compare({"a": results(["+-"]), "b": results(["+-"], grader="2")})


def test_incomplete_runs_are_refused():
    with pytest.raises(ConfigError, match="b=models/x: the run is incomplete: 3 of 4 samples are there"):
        compare({"a": results(["++", "--"]), "b": results(["+ ", "--"], weights="cc")})


@pytest.mark.parametrize(
    ("section", "value", "text"),
    [
        ("engine", {"name": "vllm", "version": "0.30.0"}, "engine.version: 0.27.1 in a, 0.30.0 in b"),
        ("seed", 7, "seed: 0 in a, 7 in b"),
        ("sampling", {**eval_runs.KEY["sampling"], "context": 8192}, "sampling.context: 4096 in a, 8192 in b"),
    ],
)
def test_engine_seed_and_context_only_warn(section, value, text):
    found = compare({"a": results(["+-"]), "b": results(["++"], weights="cc", **{section: value})})
    assert any(text in warning for warning in found.warnings)


def test_a_copy_is_called_one():
    found = compare({"a": results(["+-", "++"]), "b": results(["+-", "++"])})
    assert any("runs of the same model" in text for text in found.warnings)
    assert any("probably copies" in text for text in found.warnings)


# --- command line


def test_command(tmp_path, capsys):
    rows = ["+---", "++--", "----", "-0T-", "+++-", "----", "+---"]
    better = ["++--", "+++-", "+---", "+0T-", "++++", "+---", "++--"]
    a = write(tmp_path / "a", results(rows))
    b = write(tmp_path / "b", results(better, weights="cc"))
    out = tmp_path / "new" / "found.json"
    assert command.main([f"base={a}", f"trained={b}", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert f"trained = {b} (model models/x)" in printed.replace("\n", "")
    assert f"against base = {a} (model models/x)" in printed.replace("\n", "")
    assert "trained is better than base: +25.0 points, p = 0.016" in printed
    assert "problems that differ (all 7)" in printed
    assert "p of no difference (sign flips, exact)" in printed
    found = json.loads(out.read_text())
    assert found["comparisons"][0]["difference"]["p"] == 2 / 128
    assert [row["difference"] for row in found["comparisons"][0]["problems"]] == [0.25] * 7


def test_command_says_what_would_have_been_missed(tmp_path, capsys):
    rows, other = ["+---", "++--", "----", "+++-"], ["++--", "+---", "----", "+++-"]
    folders = [write(tmp_path / "a", results(rows)), write(tmp_path / "b", results(other, weights="cc"))]
    assert command.main([f"a={folders[0]}", f"b={folders[1]}"]) == 0
    # Differences 1/4, -1/4, 0, 0: sd 0.204, and (3.182 + 0.978) 0.204 / 2 = 42.5 points.
    assert "no difference shown; a true one under 42.5 points had less than an 80% chance" in capsys.readouterr().out
    assert command.main([f"a={folders[0]}", f"b={folders[0]}"]) == 0
    printed = capsys.readouterr().out
    assert "all problems agree in it" in printed
    assert "nothing can be said" not in printed


def test_command_prints_brackets_as_they_are(tmp_path, capsys):
    a, b = write(tmp_path / "a", results(["+-"])), write(tmp_path / "b", results(["++"], weights="cc"))
    assert command.main([f"a={a}", f"[bold]b={b}"]) == 0
    assert "[bold]b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a={a}"], "1 run(s) to compare"),
        (["a={a}", "b={a}/missing"], "there is no such folder"),
        (["a={a}", "polcy=strict"], "polcy=strict: there is no such folder"),
        (["a={a}", "b={empty}"], "it has no results.json"),
        (["a={a}", "b={a}", "policy=loose"], "policy=loose: there is no such value"),
        (["a={a}", "b={a}", "resample=tokens"], "choose problems or samples"),
        (["a={a}", "b={a}", "seed=-1"], "it is negative"),
        (["a={a}", "b"], "not of the form name=value"),
        (["a={a}", "b={n4}"], "n: 2 in a, 4 in b"),
        (["a={a}", "b={n4}"], "error: b={n4}: it cannot be compared with a"),
        (["a={a}", "b={half}"], "error: b={half}: the run is incomplete"),
        (["a={a}", "b={a}", "out={empty}"], "out={empty}: it is a folder"),
        (["a={a}", "b={a}", "out={a}/results.json/x.json"], "its folder cannot be made"),
    ],
)
def test_command_refuses_in_one_line(tmp_path, capsys, words, text):
    folders = {
        "a": write(tmp_path / "a", results(["+-"])),
        "n4": write(tmp_path / "n4", results(["+-++"])),
        "half": write(tmp_path / "half", results(["+ "])),
        "empty": tmp_path / "empty",
    }
    folders["empty"].mkdir()
    assert command.main([word.format(**folders) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text.format(**folders) in captured.err
    assert captured.err.count("\n") == 1
    assert "Fix:" in captured.err
