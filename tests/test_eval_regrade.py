"""Stored samples graded again: what changes, what is written, and what a second grader thinks."""

from __future__ import annotations

import json

import pytest

from eval import regrade
from eval.grading import verdicts
from eval.prompts import sample_seed
from eval.run import conclude
from eval.schema import POLICIES, Benchmark, Problem, Sample, Verdict
from eval.second_opinion import math_verify_verdict
from eval.storage import Plan, SampleWriter, read_results, read_samples, write_plan

WITHDRAWN = r"\boxed{2}. Hold on, it should be \boxed{3}"
TASKS = [
    ("half", r"\frac{1}{2}", "math", r"so \boxed{0.5}", "stop"),
    ("three", "3", "math", WITHDRAWN, "stop"),
    ("chain", "4", "sat_verl/chain", "1234", "length"),
    ("lost", "1", "math", None, "error"),
]


@pytest.fixture
def folder(tmp_path):
    """A finished run; its grader called every response wrong."""
    problems = [Problem(id=name, statement=name, gold=gold, data_source=source) for name, gold, source, *_ in TASKS]
    benchmark = Benchmark(
        name="four", problems=problems, lineage="the tests", statements_sha256="0", answers_sha256="0"
    )
    plan = Plan(model="m", benchmark=benchmark, n=1, key={"sampling": {"temperature": 1.0}, "seed": 0})
    write_plan(tmp_path, plan)
    with SampleWriter(tmp_path) as writer:
        for name, gold, _, response, reason in TASKS:
            old = Verdict(status="wrong", answer="5") if response else Verdict(status="request_error")
            writer.write(
                Sample(
                    problem=name, sample=0, seed=sample_seed(0, name, 0), gold=gold, response=response,
                    finish_reason=reason, grader="an old one",
                    verdicts=dict.fromkeys(POLICIES, old),
                )
            )  # fmt: skip
    conclude(tmp_path, plan, {"generate": 1.0}, ["said while sampling"], ["test"])
    return tmp_path


def statuses(samples, policy="strict"):
    return {sample.problem: sample.verdicts[policy].status for sample in samples.values()}


RIGHT = {"half": "correct", "three": "correct", "chain": "truncated", "lost": "request_error"}


def test_it_shows_what_changes_and_leaves_the_run_alone(folder, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert regrade.main([f"run={folder}", "policy=strict"]) == 0
    told = capsys.readouterr().out
    assert "4 samples: 3 statuses change, and 0 answers without them" in told
    assert "half" in told
    assert "lost" not in told
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before} == before
    (folder / "samples.jsonl").write_bytes((folder / "regraded.jsonl").read_bytes())
    assert statuses(read_samples(folder)) == statuses(read_samples(folder), "lenient") == RIGHT


def test_write_replaces_verdicts_results_and_report(folder, capsys):
    report = (folder / "report.html").read_bytes()
    assert read_results(folder).scores["strict"].average == 0
    assert regrade.main([f"run={folder}", "write=true"]) == 0
    assert statuses(read_samples(folder)) == RIGHT
    results = read_results(folder)
    assert results.scores["strict"].average == pytest.approx(2 / 3)
    assert results.timing == {"generate": 1.0}
    assert "said while sampling" in results.warnings
    assert results.grader["sources_sha256"]
    assert (folder / "report.html").read_bytes() != report
    capsys.readouterr()
    assert regrade.main([f"run={folder}"]) == 0
    assert "0 statuses change, and 0 answers" in capsys.readouterr().out


def test_math_verify_by_itself_is_another_opinion_and_never_replaces(folder, capsys):
    assert regrade.main([f"run={folder}", "write=true"]) == 0
    capsys.readouterr()
    out = folder / "other" / "second.jsonl"
    assert regrade.main([f"run={folder}", "grader=math_verify", f"out={out}", "policy=strict"]) == 0
    told = capsys.readouterr().out
    assert "three" in told, "it reads the box and the withdrawn one as a set"
    assert statuses(read_samples(folder)) == RIGHT
    assert regrade.main([f"run={folder}", "grader=math_verify", "write=true"]) == 2
    assert "write=true" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["samples.jsonl", "plan.json", "results.json", "report.html", "."])
def test_a_file_of_the_run_is_no_place_for_new_verdicts(folder, name, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert regrade.main([f"run={folder}", f"out={folder / name}", "grader=math_verify"]) == 2
    assert "out=" in capsys.readouterr().err
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_edited_golds_are_refused(folder, capsys):
    text = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(text.replace('"gold": "3"', '"gold": "2"'))
    assert regrade.main([f"run={folder}"]) == 2
    assert "its answer is '3'" in capsys.readouterr().err


def test_a_run_that_is_going_on_is_left_alone(folder, capsys):
    from rich.console import Console

    from recipes.lock import locked

    with locked(folder, Console(), 0.0):
        assert regrade.main([f"run={folder}", "write=true"]) == 2
    assert "another run is going on" in capsys.readouterr().err


def test_an_answer_cannot_steer_the_terminal(folder, capsys):
    text = (folder / "samples.jsonl").read_text()
    assert WITHDRAWN in json.loads(text.splitlines()[1])["response"]
    row = json.loads(text.splitlines()[1])
    row["response"] = "\\boxed{\x1b]0;owned\x07\u202e5}"
    (folder / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert regrade.main([f"run={folder}"]) == 0
    told = capsys.readouterr().out
    assert "owned" in told
    assert not {"\x1b", "\x07", "\u202e"} & {*told}


def test_second_opinion_statuses():
    assert math_verify_verdict(r"\boxed{204}", "204", False, 5).status == "correct"
    assert math_verify_verdict(r"\boxed{204}", ["7", "204"], False, 5).status == "correct"
    assert math_verify_verdict(WITHDRAWN, "3", False, 5).status == "wrong"
    assert verdicts(WITHDRAWN, "3")["strict"].status == "correct"
    assert math_verify_verdict("no idea", "204", False, 5).status == "no_answer"
    assert math_verify_verdict("no idea", "204", True, 5).status == "truncated"
    assert math_verify_verdict(None, "204", False, 5).status == "request_error"
    assert math_verify_verdict(r"\boxed{\binom{100000000}{50000000}}", "204", False, 0.5).status == "grader_error"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run=/nowhere"], "plan.json"),
        (["grader=ours"], "run: it is missing"),
        (["run=/nowhere", "grader=mine"], "grader=mine"),
        (["run=/nowhere", "write=perhaps"], "write=perhaps"),
        (["run=/nowhere", "polcy=strict"], "polcy=strict"),
    ],
)
def test_bad_settings_are_named(words, told, capsys):
    assert regrade.main(words) == 2
    assert told in capsys.readouterr().err
