"""The report of the lag sweep: statistics, the protocol's verdicts, incomplete sweeps, and the page."""

import re
import shlex
from html.parser import HTMLParser

import pandas as pd
import pytest
from sweep_cells import PAIRS, cell, places, store, study_of, whole

from benchmarks.lag_sweep.store import Place
from benchmarks.report import __main__ as command_line
from benchmarks.report import estimates, page, studies
from benchmarks.report.answer import p_text, signed
from benchmarks.report.protocol import Block, claim, families
from benchmarks.report.tables import scores, with_spread
from recipes.errors import ConfigError


class Reader(HTMLParser):
    """Tags, attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_a_mean_its_interval_and_the_interquartile_mean_by_hand():
    got = estimates.estimate([0.0, 1.0, 2.0, 9.0])
    assert (got.n, got.mean, got.iqm) == (4, 3.0, 1.5)  # the middle two
    # sd = sqrt((9 + 4 + 1 + 36) / 3), t(3) = 3.18245
    assert got.half_width == pytest.approx(3.18245 * (50 / 3) ** 0.5 / 2, rel=1e-5)
    assert estimates.estimate([0.5]) == estimates.Estimate(1, 0.5, 0.5)
    assert estimates.estimate([]) is None


def test_a_paired_difference_by_hand():
    got = estimates.difference({0: 3.0, 1: 5.0, 2: 7.0, 9: 100.0}, {0: 2.0, 1: 3.0, 2: 7.5, 7: -100.0})
    # Differences 1, 2, -.5: mean .8333, sd 1.2583, t(2) = 4.30265, standard error .72648.
    assert (got.n, got.wins, got.losses) == (3, 2, 1)
    assert got.mean == pytest.approx(2.5 / 3)
    assert got.high - got.mean == pytest.approx(4.30265 * 0.726483, rel=1e-4)
    # t = 1.14708 with 2 degrees of freedom, whose p is 1 - t / sqrt(t^2 + 2).
    assert got.p == pytest.approx(1 - 1.14708 / (1.14708**2 + 2) ** 0.5, rel=1e-4)
    # Ranks 1 (of -.5), 2, 3: of the 8 signs, 2 have a negative sum of at most 1, and as many a positive one.
    assert got.wilcoxon == pytest.approx(4 / 8)
    # 3 > 2; 5 > 2, 3; 7 > 2, 3 of nine pairs (3 and 3 are equal).
    assert got.improvement == pytest.approx((5 + 0.5) / 9)


def test_differences_that_leave_a_test_nothing():
    none = estimates.difference({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6})
    assert (none.mean, none.p, none.wilcoxon, none.improvement) == (0, 1, 1, 0.5)
    equal = estimates.difference({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert equal.mean == 1
    assert equal.p is None
    one = estimates.difference({0: 1.0}, {0: 0.0})
    assert (one.n, one.low, one.p) == (1, None, None)
    assert estimates.difference({0: 1.0}, {1: 0.0}) is None


def test_holm_by_hand():
    # Sorted .01, .02, .03, .04 times 4, 3, 2, 1 = .04, .06, .06, .04; never below the one before.
    assert estimates.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert estimates.holm([0.6, 0.9]) == [1.0, 1.0]
    # The one that is missing counts: three tests.
    assert estimates.holm([None, 0.02, 0.01]) == [None, pytest.approx(0.04), pytest.approx(0.03)]


# --- the protocol -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wins(tmp_path_factory):
    """The protocol's parts 1 and 2; SAT-GRPO beats its control at lag 8, SAT-GSPO is its control."""

    def gain(place):
        return 0.08 * (place.arm == "sat_grpo" and place.lag == 8)

    cells = [*whole(gain), *whole(gain, ("grpo", "sat_grpo", "gspo", "sat_gspo"), lags=(0, 4, 16))]
    return store(tmp_path_factory.mktemp("wins"), cells)


def test_the_families_are_the_protocols(wins):
    study = studies.read([wins])[0]
    found = families(study)
    assert {name: len(family.tests) for name, family in found.items()} == {"H1": 12, "H2": 20, "H3": 4}
    assert all(family.answered == len(family.tests) for family in found.values())
    h1 = found["H1"]
    better = [(test.first, test.block.task) for test in h1.of("grpo") if test.verdict == "better"]
    assert better == [(("sat_grpo", 8), "chain"), (("sat_grpo", 8), "sort")]
    assert {test.verdict for test in h1.of("gspo")} <= {"undecided", "no difference that matters"}
    assert (claim(h1.of("grpo")), claim(h1.of("gspo"))) == ("beats", "no advantage")
    for test in h1.tests:
        assert test.adjusted >= test.found.p
    headlines = [finding.headline for finding in page.parts([study])[0].findings]
    assert headlines[0].startswith("Yes: SAT-GRPO beats GRPO at the same mean radius")
    assert headlines[1].startswith("No advantage of SAT-GSPO")
    assert "Radius up and interceptions down, lag by lag, in 4 of 4 cases" in headlines


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"chain": 0.1, "sort": -0.1}, "depends"),
        ({"chain": -0.1, "sort": -0.1}, "is beaten"),
        ({"chain": 0.1, "sort": 0.0}, "not on every task"),
    ],
)
def test_what_the_verdicts_say_together(tmp_path, gains, expected):
    study = study_of(tmp_path, whole(lambda p: gains[p.task] * (p.arm == "sat_grpo"), PAIRS[:3]))
    assert claim(families(study)["H1"].of("grpo")) == expected
    assert claim(families(study)["H1"].of("gspo")) == "not answered"  # never asked for


@pytest.mark.parametrize(("gain", "expected"), [(0.1, "one task"), (-0.1, "one task"), (0.0, "no advantage")])
def test_one_task_is_no_claim(tmp_path, gain, expected):
    """Both tasks are the protocol's rule, which holds in any other setting, too."""
    cells = whole(lambda p: gain * (p.arm == "sat_grpo"), PAIRS[:3], tasks=("chain",))
    study = study_of(tmp_path, cells, steps=48)
    assert claim(families(study)["H1"].of("grpo")) == expected
    headline = page.parts([study])[0].findings[0].headline
    assert headline.startswith("No claim from one task" if gain else "No advantage")


def test_numbers_near_a_limit_say_on_which_side_they_are():
    assert [p_text(p) for p in (None, 0.0002, 0.0123, 0.0498, 0.04996, 0.05, 0.0502, 0.3)] == [
        "–", "<0.001", "0.012", "0.0498", "0.04996", "0.05", "0.05", "0.3",
    ]  # fmt: skip
    assert [signed(value) for value in (-0.00005, 0.0, -0.0, 0.00005, -0.0315)] == [
        "−0.000", "+0.000", "+0.000", "+0.000", "−0.032",
    ]  # fmt: skip


def test_an_interval_within_the_zone_is_no_difference_that_matters(tmp_path):
    arms = ("sat_grpo", "grpo_matched")
    cells = [cell(p, 0.8 + 0.002 * ((p.seed + (p.arm == "sat_grpo")) % 2)) for p in places(arms, lags=(1,))]
    first = families(study_of(tmp_path, cells))["H1"].of("grpo")[0]
    assert -0.02 < first.found.low < 0 < first.found.high < 0.02
    assert first.verdict == "no difference that matters"


def test_what_is_incomplete_is_not_answered(tmp_path):
    cells = whole(lambda p: 0.2 * p.arm.startswith("sat_"))
    waiting = [one.place for one in cells if one.place == Place("sort", "grpo_matched", 1e-3, 32, 9)]
    rest = [one for one in cells if one.place not in waiting]
    study = study_of(tmp_path, rest, waiting)
    h1 = families(study)["H1"]
    (open_,) = [test for test in h1.tests if not test.answered]
    assert (open_.missing, open_.found.n, open_.verdict, open_.adjusted) == (1, 9, "not answered", None)
    (part,) = page.parts([study])
    assert part.progress == "359 of 360 cells done, 1 pending"
    assert part.findings[0].headline == "Not answered: 1 of 6 comparisons incomplete, 119 of 120 cells done"
    assert any("So far, uncorrected and no verdict: sort at lag 32" in text for text in part.findings[0].sentences)
    assert part.findings[1].headline.startswith("Yes: SAT-GSPO")
    # A sweep that goes no further is judged by what it has.
    assert families(study, closed=True)["H1"].answered == 12


def test_a_failed_cell_is_left_out_and_named(tmp_path):
    cells = whole(lambda p: 0.0, PAIRS[1:3], tasks=("chain",), lags=(8,))
    lost = Place("chain", "sat_grpo", 1e-3, 8, 3)
    error = "Traceback\nValueError: <b>bad</b> | value"
    cells = [one.model_copy(update={"status": "failed", "metrics": {}, "error": error, "evaluations": {}})
             if one.place == lost else one for one in cells]  # fmt: skip
    study = study_of(tmp_path, cells)
    test = next(test for test in families(study)["H1"].of("grpo") if test.first == ("sat_grpo", 8))
    assert (test.failed, test.missing, test.found.n, test.answered) == (1, 0, 9, True)
    content = page.context([study], ["redraw"])
    html, text = page.render(content, "sweep.html.j2"), page.render(content, "sweep.md.j2")
    assert "<b>bad" not in html
    assert "failed: ValueError: &lt;b&gt;bad&lt;/b&gt; | value" in html
    assert r"failed: ValueError: \<b\>bad\</b\> \| value" in text


def test_other_settings_have_the_comparisons_that_were_asked_for(tmp_path):
    cells = whole(lambda p: 0.0, ("sat_grpo", "grpo_matched", "grpo"), lags=(0, 2), seeds=range(3))
    found = families(study_of(tmp_path, cells, steps=16))
    assert [(test.first, test.block.task) for test in found["H1"].tests] == [
        (("sat_grpo", 2), "chain"), (("sat_grpo", 2), "sort"),
    ]  # fmt: skip
    assert [test.second for test in found["H3"].tests] == [("grpo", 0)] * 2
    assert all(test.answered and test.found.n == 3 for test in found["H1"].tests)


def test_another_rate_is_beside_the_claim(tmp_path):
    def gain(place):
        return 0.1 * (place.arm == "sat_grpo" and place.lr == 1e-3)

    low = whole(gain, PAIRS[:3], lags=(8, 32), seeds=range(5), lr=5e-4)
    study = study_of(tmp_path, [*whole(gain, PAIRS[:3]), *low])
    (part,) = page.parts([study])
    assert part.findings[0].headline.startswith("Yes")
    assert part.findings[0].sentences[-1].endswith("the claim does not hold there.")
    rest = [test for test in part.rest if test.second[0] == "grpo_matched"]
    assert {test.block.lr for test in rest} == {5e-4}  # the family's own are not repeated
    assert {(test.found.n, test.missing) for test in rest} == {(5, 0)}


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_of_one_setting_are_one_study(tmp_path):
    one = [cell(p, 0.7) for p in places(("grpo",), seeds=(0, 1))]
    two = [cell(p, 0.8) for p in places(("grpo",), seeds=(1, 2))]
    two[0] = two[0].model_copy(update={"key": "other"})
    store(tmp_path / "a", one)
    store(tmp_path / "b", two)
    store(tmp_path / "c", one, steps=64)
    found = studies.read([tmp_path / name for name in "aba"] + [tmp_path / "c"])
    assert [len(study.done) for study in found] == [18, 12]
    assert found[0].values(Block("chain", 1e-3), "grpo", 1) == {0: 0.7, 1: 0.7, 2: 0.8}
    assert [note for note in found[0].notes if "chain grpo lag 1 seed 1" in note]
    with pytest.raises(ConfigError, match="there is no sweep"):
        studies.read([tmp_path / "nothing"])


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small sweep with a mark of each kind, through the command line."""
    folder, out = tmp_path_factory.mktemp("sweep"), tmp_path_factory.mktemp("out") / "report.html"
    cells = whole(lambda p: 0.0, ("grpo", "sat_grpo", "grpo_matched", "<i>odd</i>"), tasks=("chain",), lags=(1, 8),
                  seeds=range(3))  # fmt: skip
    cells[0] = cells[0].model_copy(update={"metrics": cells[0].metrics | {"collapse_step": 8.0}})
    cells[1] = cells[1].model_copy(update={"no_signal": ["SAT intercepted 1e-05 of the tokens: it was its base loss"]})
    cells[0], cells[1] = (one.model_copy(update={"digest": "d"}) for one in cells[:2])
    waiting = places(("sat_grpo",), ("chain",), (1,), (3,))
    store(folder, cells, waiting, steps=16)
    assert command_line.main([str(folder), f"out={out}"]) == 0
    return folder, out


def test_the_page_is_whole_and_holds_no_script(written):
    html = written[1].read_text()
    page_ = Reader(html)
    assert not {"script", "iframe", "object", "embed", "form", "i"} & set(page_.tags)
    assert "default-src 'none'" in html
    assert not [name for name, _ in page_.attributes if name.startswith("on")]
    links = [value for name, value in page_.attributes if name in ("href", "src", "xlink:href")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)", html)
    ids = [value for name, value in page_.attributes if name == "id"]
    targets = re.findall(r'(?:href="|url\()#([^")]+)', html)
    assert set(targets) <= set(ids)
    assert "&lt;i&gt;odd&lt;/i&gt;" in html
    assert page_.tags.count("svg") > 8


def test_the_page_shows_the_numbers_of_the_table(written):
    folder, out = written
    frame = pd.read_parquet(out.with_name("cells.parquet"))
    assert len(frame) == 24
    html, text = out.read_text(), out.with_suffix(".md").read_text()
    for (_, _), group in frame[frame.status == "done"].groupby(["arm", "lag"]):
        shown = with_spread(estimates.estimate(group.final.tolist()))
        assert group.final.mean() == pytest.approx(float(shown.split()[0]), abs=5e-4)
        assert f">{shown}<small>" in html
        assert f"| {shown} (" in text
    table = scores(studies.read([folder])[0], Block("chain", 1e-3))
    marks = {row[0].small: row[1].small for row in table.rows}
    assert "n 3/3 · 1 collapsed" in marks["grpo"]
    assert "n 3/4 · 1 no signal · 1 pending" in marks["sat_grpo"]
    assert "identical to sat_grpo" in html


def test_the_page_names_commands_and_what_was_not_run(written):
    folder, out = written
    html = out.read_text()
    redraw = shlex.join(["python", "-m", "benchmarks.report", str(folder), f"out={out}"])
    plates = html.count("<figcaption")
    assert plates >= 4
    assert html.count(f"<pre>{redraw}</pre>") > plates
    assert html.count(f"python -m benchmarks.lag_sweep out={folder.name} arms=x") > plates
    assert "GPU cells: not run." in html
    assert "Qwen3-30B-A3B-Base" in html
    assert "34.79" in html
    assert "var(--s0)" in html  # lines follow the page's colours


def test_a_run_on_gpus_has_columns_instead_of_not_run(tmp_path):
    cells = whole(lambda p: 0.0, ("grpo",), tasks=("chain",), lags=(1, 8), seeds=range(2))
    cells = [one.model_copy(update={"metrics": one.metrics | {"samples_per_s": 7.0}}) for one in cells]
    study = study_of(tmp_path, cells, engine="verl", overrides=["backend=cuda"])
    content = page.context([study], ["redraw"])
    assert content["gpu"] == "GPU cells: 4 of 4 done, 0 not run."
    assert not any("on GPUs" in name for table in content["paper_tables"] for name in table.head)
    titles = [plates.title for plates in content["parts"][0].plates()]
    assert "Throughput against score" in titles


def test_nothing_yet_is_a_page_too(tmp_path):
    store(tmp_path / "empty", [], places(PAIRS, seeds=(0,)))
    assert command_line.main([str(tmp_path / "empty"), f"out={tmp_path / 'r.html'}"]) == 0
    assert "Not answered: 6 of 6 comparisons incomplete, 0 of 120 cells done" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["out=a.html"], "no folder is named"),
        (["DIR"], "out: it is missing"),
        (["DIR", "out=a.pdf"], "it is no page"),
        (["DIR", "out=a.html", "closed=yes"], "neither true nor false"),
        (["DIR", "out=a.html", "theme=dark"], "there is no such setting"),
        (["DIR", "out=a.html", "out=b.html"], "given twice"),
        (["nowhere", "out=a.html"], "there is no sweep"),
    ],
)
def test_bad_input_ends_with_status_2(words, text, capsys):
    assert command_line.main(words) == 2
    assert text in capsys.readouterr().err
