"""The grader as a function and as a command: exactly one verdict for each response, whatever it is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import eval
from eval import grade
from eval.grading import grade_response, grader_identity, verdicts
from eval.schema import STATUSES
from sat_verl.grading import verify
from sat_verl.reward import compute_score

HANGING = r"\boxed{\binom{100000000}{50000000}}"
ROOT = Path(__file__).resolve().parent.parent


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *cases: object) -> Path:
    path.write_text("".join((case if isinstance(case, str) else json.dumps(case)) + "\n" for case in cases))
    return path


def case(response, gold="204", name="a", **more):
    return {"id": name, "response": response, "gold": gold} | more


@pytest.mark.parametrize(
    ("response", "gold", "options", "status"),
    [
        (r"\boxed{204}", "204", {}, "correct"),
        (r"\boxed{204}", 204, {}, "correct"),
        (r"\boxed{203}", "204", {}, "wrong"),
        ("no idea", "204", {}, "no_answer"),
        ("It is 20", "204", {"finish_reason": "length"}, "truncated"),
        (r"\boxed{204} and so on", "204", {"finish_reason": "length"}, "correct"),
        (None, "204", {}, "request_error"),
        (r"\boxed{204}", None, {}, "grader_error"),
        ("134", "134", {"data_source": "sat_verl/sort"}, "correct"),
        ("134", "134", {"data_source": "sat_verl/sort", "finish_reason": "length"}, "truncated"),
        (None, "134", {"data_source": "sat_verl/sort"}, "request_error"),
    ],
)
def test_each_status(response, gold, options, status):
    for policy in ("strict", "lenient"):
        found = eval.grade_response(response, gold, policy=policy, **options)
        assert found.status == status in STATUSES
        assert found.seconds >= 0


def test_policies_differ_where_the_rules_say_so():
    found = verdicts("The answer is 42 because of symmetry.", "42")
    assert (found["strict"].status, found["lenient"].status) == ("no_answer", "correct")


def test_reward_and_evaluation_agree():
    calls = [
        ("sat_verl/chain", "1350274", "4", "stop"), ("sat_verl/chain", "1350274", "4", "length"),
        ("sat_verl/sort", "134", "134", "length"), ("sat_verl/arithmetic", "12 \\boxed{7}", "7", "stop"),
        ("math", "Answer: 7", "7", "stop"), ("math", "Answer: 7", "7", "length"), ("aime", "\\boxed{7}", "nan", "stop"),
    ]  # fmt: skip
    for source, response, gold, reason in calls:
        for policy in ("strict", "lenient"):
            score = compute_score(source, response, gold, {"finish_reason": reason}, policy=policy)
            found = grade_response(response, gold, data_source=source, finish_reason=reason, policy=policy)
            assert score["verdict"].split()[0] == found.status
            assert score["acc"] == (found.status == "correct")


def test_half_a_surrogate_pair_in_an_answer_is_no_obstacle():
    found = grade_response("\\boxed{x\ud83d}", "204")
    assert found.status == "wrong"
    assert json.dumps(found.model_dump(), ensure_ascii=False).encode()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="domain"):
        grade_response("1", "1", domain="algebra")
    with pytest.raises(ValueError, match="policy"):
        grade_response("1", "1", policy="loose")
    with pytest.raises(ValueError, match="policy"):
        grade_response("1", "1", policy="loose", data_source="sat_verl/chain")


def test_the_identity_names_sources_and_libraries():
    found = grader_identity()
    assert found == grader_identity()
    assert len(found["sources_sha256"]) == 64
    assert all(version[0].isdigit() for version in found["libraries"].values())


def test_import_is_cheap():
    code = "import sys, eval; assert not {'pydantic', 'torch', 'sympy'} & {*sys.modules}; eval.grade_response"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- limits by the clock


def test_no_limit_is_exceeded_in_threads_while_the_worker_starts_and_dies(verifier):
    limits = [1.0, 2.0, 3.0] * 2

    def timed(limit_s):
        started = time.monotonic()
        found = grade_response(HANGING, r"\frac12", limit_s=limit_s)
        return found.status, time.monotonic() - started

    with ThreadPoolExecutor(len(limits)) as pool:
        for limit_s, (status, seconds) in zip(limits, pool.map(timed, limits), strict=True):
            assert status == "grader_error"
            assert seconds < limit_s + 1  # a busy machine may take its time to tell


# --- the command


def run(tmp_path, *words, out="out.jsonl"):
    code = grade.main([f"cases={tmp_path / 'in.jsonl'}", f"out={tmp_path / out}", *words])
    path = tmp_path / out
    return code, rows(path) if path.is_file() else None


def test_order_ids_and_fields_are_kept(tmp_path, capsys):
    write(
        tmp_path / "in.jsonl",
        case(r"\boxed{0.5}", r"\frac{1}{2}", 7, kind="ignored"),
        "",
        case(None, name="b"),
        case("It is 20", name=["c", 1], finish_reason="length"),
        case(HANGING, name=None, domain="aime", limit_s=10),
        case(r"\boxed{204}", 204, "b"),
        case(r"\boxed{x", "x", "d\ud83d"),
        case(r"\boxed{204}", {"a": 1}, "e"),
    )
    for workers in (1, 2):
        code, found = run(tmp_path, f"workers={workers}")
        assert code == 0
        assert [row["id"] for row in found] == [7, "b", ["c", 1], None, "b", "d\ud83d", "e"]
        statuses = ["correct", "request_error", "truncated", "wrong", "correct", "no_answer", "grader_error"]
        assert [row["status"] for row in found] == statuses
        assert [row["answer"] for row in found][:3] == ["0.5", None, None]
        assert all(0 <= row["seconds"] < 10 for row in found)
    told = capsys.readouterr()
    assert "grader_error 1" in told.out
    assert "more than one line" in told.err


def test_policy_and_limit_of_grader_errors(tmp_path, capsys):
    write(tmp_path / "in.jsonl", case("The answer is 204 since it must.", name=1), case(r"\boxed{2}", "nan", 2))
    assert [row["status"] for row in run(tmp_path)[1]] == ["no_answer", "grader_error"]
    assert [row["status"] for row in run(tmp_path, "policy=lenient")[1]] == ["correct", "grader_error"]
    assert run(tmp_path, "max_grader_errors=1")[0] == 0
    assert run(tmp_path, "max_grader_errors=0")[0] == 1
    assert "1 cases could not be graded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: no JSON object"),
        ({"id": 1, "response": "x"}, "line 2: no field gold"),
        ({"response": "x", "gold": "1"}, "line 2: no field id"),
        (case(204), "line 2: response is neither text nor null"),
        (case("x", domain="algebra"), "line 2: there is no domain 'algebra'"),
        (case("x", limit_s=0), "line 2: limit_s is no positive number"),
        (case("x", limit_s=True), "line 2: limit_s"),
        (case("x", finish_reason=1), "line 2: finish_reason"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_graded(tmp_path, capsys, bad, told):
    write(tmp_path / "in.jsonl", case(r"\boxed{204}"), bad)
    assert run(tmp_path) == (2, None)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["policy=loose"], "policy=loose"),
        (["polcy=strict"], "polcy=strict: there is no such setting"),
        (["limit_s=soon"], "limit_s=soon"),
        (["limit_s=-1"], "limit_s=-1"),
        (["workers=0"], "workers=0"),
        (["max_grader_errors=-1"], "max_grader_errors=-1"),
    ],
)
def test_bad_settings_are_named(tmp_path, capsys, words, told):
    write(tmp_path / "in.jsonl", case(r"\boxed{204}"))
    assert run(tmp_path, *words) == (2, None)
    assert told in capsys.readouterr().err


def test_input_that_cannot_be_read_is_named(tmp_path, capsys):
    assert run(tmp_path)[0] == 2
    (tmp_path / "in.jsonl").write_bytes(b"\n\n")
    assert run(tmp_path)[0] == 2
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe")
    assert run(tmp_path)[0] == 2
    write(tmp_path / "in.jsonl", case("x"))
    assert run(tmp_path, out="in.jsonl")[0] == 2
    told = capsys.readouterr().err
    for reason in ("No such file", "it has no cases", "not UTF-8", "it is the input"):
        assert reason in told
    assert rows(tmp_path / "in.jsonl") == [case("x")]


def test_a_limit_with_decimals_and_the_command_line_itself(tmp_path):
    cases = write(tmp_path / "in.jsonl", case(r"\boxed{204}"))
    command = [sys.executable, "-m", "eval.grade", f"cases={cases}", f"out={tmp_path / 'new' / 'out.jsonl'}"]
    done = subprocess.run([*command, "limit_s=2.5"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "correct 1\n"
    assert rows(tmp_path / "new" / "out.jsonl")[0]["status"] == "correct"


def test_integers_need_no_math_verify(tmp_path, monkeypatch, verifier):
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    write(tmp_path / "in.jsonl", case(r"\boxed{204}"))
    assert run(tmp_path)[1][0]["status"] == "correct"
    write(tmp_path / "in.jsonl", case(r"\boxed{0.5}", r"\frac12"))
    assert run(tmp_path)[0] == 2
