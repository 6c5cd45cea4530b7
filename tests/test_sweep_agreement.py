"""Does the laboratory predict the real stack? The rule, who is compared with whom, and what the page says."""

import numpy as np
import pytest
from sweep_cells import PAIRS, cell, places, store, whole

from benchmarks.report import __main__ as command_line
from benchmarks.report import estimates, page, studies
from benchmarks.report.agreement import Comparison, pairs
from benchmarks.report.agreement_view import finding, sections
from benchmarks.report.protocol import Block, claim, families

ARMS = PAIRS[:3]
CHAIN = {"tasks": ("chain",), "lags": (1, 8)}


def no_gain(place):
    return 0.0


def engines(out, shift=0.0, verl_seeds=range(3), lost=(), **settings):
    """Two sweeps below ``out``; the real stack's scores are ``shift(place)`` higher."""
    move = shift if callable(shift) else lambda place: shift
    store(out / "lab", whole(no_gain, ARMS, seeds=range(8), **CHAIN))
    real = whole(move, ARMS, seeds=verl_seeds, **CHAIN)
    kept = [one.model_copy(update={"engine": "verl"}) for one in real if one.place not in lost]
    store(out / "verl", kept, lost, engine="verl", **settings)
    return studies.read([out])


def card(found):
    labs = [study for study in found if study.settings["engine"] == "lab"]
    (pair,) = pairs(found)
    return finding(pair, labs)


# --- the statistics ---------------------------------------------------------------------------------------------------


def test_welch_by_hand():
    got = estimates.welch([1.0, 2.0, 3.0], [2.0, 4.0, 6.0, 8.0])
    # Variances 1 and 20/3, so the squared standard error is 1/3 + 5/3 = 2; 4 / (1/18 + 25/27) = 4.075 degrees of
    # freedom, whose .975 quantile lies between t(4) = 2.776 and t(5) = 2.571.
    assert (got.n, got.mean) == ((3, 4), -3.0)
    half = got.high - got.mean
    assert got.mean - got.low == pytest.approx(half)
    assert 2.571 * 2**0.5 < half < 2.776 * 2**0.5
    assert half == pytest.approx(2.776 * 2**0.5, rel=0.01)
    assert 0.05 < got.p < 0.2
    back = estimates.welch([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0])
    assert (back.mean, back.p) == (3.0, pytest.approx(got.p))


def test_what_leaves_welch_no_interval():
    assert estimates.welch([], [1.0]) is None
    assert estimates.welch([1.0], [2.0, 3.0]) == estimates.Unpaired((1, 2), -1.5)
    assert estimates.welch([1.0, 1.0], [2.0, 2.0]) == estimates.Unpaired((2, 2), -1.0)


@pytest.mark.parametrize(
    ("lab", "verl", "whole_", "adjusted", "expected"),
    [
        ([0.70, 0.71, 0.72], [0.70, 0.71, 0.72], True, None, "agree"),
        ([0.70, 0.71, 0.72], [0.715, 0.72, 0.725], True, 0.001, "agree"),  # a difference, but within the margin
        ([0.70, 0.71, 0.72], [0.90, 0.91, 0.92], True, None, "differ"),
        ([0.70, 0.71, 0.72], [0.90, 0.91, 0.92], True, 0.06, "open"),  # corrected, it may be chance
        ([0.50, 0.70, 0.90], [0.60, 0.70, 0.80], True, None, "open"),
        ([0.70, 0.71, 0.72], [0.70, 0.71, 0.72], False, None, "interim"),
        ([0.70, 0.71, 0.72], [], True, None, "not run"),
        ([0.70, 0.71, 0.72], [0.71], True, None, "open"),
    ],
)
def test_the_rule(lab, verl, whole_, adjusted, expected):
    sides = (dict(enumerate(lab)), dict(enumerate(verl)))
    assert Comparison(("x",), *sides, whole=whole_, adjusted=adjusted).verdict == expected


# --- who is compared --------------------------------------------------------------------------------------------------


def test_engines_are_paired_by_their_settings(tmp_path):
    found = engines(tmp_path / "same", overrides=["backend=cuda"])  # the laboratory has no backend
    (pair,) = pairs(found)
    assert (pair.lab, pair.verl) == tuple(found)
    assert len(pair.shared) == len(ARMS) * 2
    found = engines(tmp_path / "other", steps=48)
    (pair,) = pairs(found)
    assert pair.lab is None
    assert card(found).sentences == ["Study 1 has steps 128 (real stack: 48)."]
    found = engines(tmp_path / "words", overrides=["actor_rollout_ref.actor.optim.lr_warmup_steps=0"])
    assert pairs(found)[0].lab is None


def test_arms_that_the_laboratory_cannot_run_do_not_keep_the_answer_open(tmp_path):
    store(tmp_path / "lab", whole(no_gain, ARMS, seeds=range(8), **CHAIN), model="tiny_moe")
    arms = (*ARMS, "grpo_r3", "sat_grpo_r3", "grpo_r3_matched")
    store(tmp_path / "verl", whole(no_gain, arms, seeds=range(3), **CHAIN), engine="verl", model="tiny_moe")
    found = studies.read([tmp_path])
    (pair,) = pairs(found)
    assert sorted({place.arm for place in pair.places}) == sorted(ARMS)
    assert "Not answered" not in card(found).headline
    assert card(found).sentences[-1].startswith("Of the real stack alone, the laboratory has no such arms: GRPO + R3")


def test_one_folder_or_two_give_the_same(tmp_path):
    one = engines(tmp_path)
    two = studies.read([tmp_path / "verl", tmp_path / "lab"])
    names = [[cell_.text for cell_ in row] for row in sections(one)[0].tables[0].rows]
    assert names == [[cell_.text for cell_ in row] for row in sections(two)[0].tables[0].rows]


def test_equal_engines_agree_on_average_and_a_gross_difference_is_named(tmp_path):
    same = card(engines(tmp_path / "same"))
    assert same.headline == "Yes, on average over the places, within ±0.05; no place differs"
    off = card(engines(tmp_path / "off", lambda place: -0.3 * (place.arm == "grpo")))
    assert off.headline.startswith("No: the engines differ in 2 places")
    assert any(text.startswith("Differs: GRPO, chain at lag 1: −0.") for text in off.sentences)
    assert off.tone == "no"


def test_a_seeds_mean_over_the_places_is_one_number(tmp_path):
    (pair,) = pairs(engines(tmp_path, 0.01))
    (mean,) = pair.together()
    by_hand = [
        np.mean([pair.verl.values(Block("chain", 1e-3), arm, lag, "auc")[seed] for arm in ARMS for lag in (1, 8)])
        for seed in range(3)
    ]
    assert list(mean.verl.values()) == pytest.approx(by_hand)
    assert len(mean.lab) == 8


def test_effects_are_paired_within_an_engine(tmp_path):
    (pair,) = pairs(engines(tmp_path, lambda place: 0.05 * place.arm.startswith("sat_")))
    effects = {one.name: (one, lab, verl) for one, lab, verl in pair.effects()}
    assert len(effects) == 2 * 2
    one, lab, verl = effects["sat_grpo", "grpo_matched", "chain", "8"]
    sat, control = (pair.verl.values(Block("chain", 1e-3), arm, 8, "auc") for arm in ("sat_grpo", "grpo_matched"))
    gaps = [sat[seed] - control[seed] for seed in range(3)]
    assert verl.mean == pytest.approx(np.mean(gaps))
    assert one.found.mean == pytest.approx(verl.mean - lab.mean)


def test_what_is_missing_is_said(tmp_path):
    lost = places(("grpo",), ("chain",), (1, 8), range(3))
    lost += places(("sat_grpo",), ("chain",), (8,), (2,))
    found = engines(tmp_path, lost=lost)
    (pair,) = pairs(found)
    verdicts = {one.name: one.verdict for one in pair.compared("auc")}
    assert [name for name, verdict in verdicts.items() if verdict == "not run"] == [
        ("grpo", "chain", "1"), ("grpo", "chain", "8"),
    ]  # fmt: skip
    assert [name for name, verdict in verdicts.items() if verdict == "interim"] == [("sat_grpo", "chain", "8")]
    assert card(found).headline == "Not answered: cells of one engine or of both are missing"
    rows = [[cell_.text for cell_ in row] for row in sections(found)[0].tables[0].rows]
    assert "not run" in next(row for row in rows if row[:3] == ["GRPO", "chain", "1"])


# --- the real stack's own comparisons ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "tested"), [(3, False), (5, True)])
def test_few_seeds_of_the_real_stack_are_described_not_tested(tmp_path, seeds, tested):
    found = engines(tmp_path, lambda place: 0.5 * place.arm.startswith("sat_"), verl_seeds=range(seeds))
    verl = next(study for study in found if study.settings["engine"] == "verl")
    h1 = families(verl)["H1"]
    assert h1.tested is tested
    assert claim(h1.of("grpo")) == ("one task" if tested else "described")
    assert all((test.adjusted is None) is not tested for test in h1.tests)
    part = next(part for part in page.parts(found) if part.study is verl)
    assert ("verdict" in part.test_tables[0].head) is tested
    assert part.findings[0].headline.startswith(
        "No claim from one task" if tested else "3 seeds, no claim: means from +0.5"
    )


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_both_engines(tmp_path):
    engines(tmp_path / "sweeps")
    out = tmp_path / "report.html"
    assert command_line.main([str(tmp_path / "sweeps"), f"out={out}"]) == 0
    html, text = out.read_text(), out.with_suffix(".md").read_text()
    for words in ("Does the laboratory predict the real stack?", "Scores of the two engines", "mean of 6 places",
                  "What SAT does in the two engines", "Matched radii of the two engines",
                  "a separate inference engine"):  # fmt: skip
        assert words in html
        assert words in text
    assert "Learning curves of the two engines" in html
    assert str(tmp_path) not in html.replace(f"python -m benchmarks.report {tmp_path}/sweeps out={out}", "")


def test_without_the_real_stack_the_page_says_so(tmp_path):
    store(tmp_path / "lab", [cell(place, 0.8) for place in places(("grpo",), ("chain",), (1,), range(2))])
    out = tmp_path / "report.html"
    assert command_line.main([str(tmp_path / "lab"), f"out={out}"]) == 0
    assert "Not run: no study of engine=verl is among the folders" in out.read_text()
