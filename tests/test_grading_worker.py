"""The process that runs math-verify: hangs, deaths, threads, children, orphans and missing packages."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sat_verl.grading import MathVerifyMissingError, _worker, grade, verify

# Keeps math-verify busy inside one C call for far longer than any deadline here.
HANGING = r"\binom{100000000}{50000000}"
EQUAL, UNEQUAL = (r"\frac{1}{2}", r"\boxed{\frac{3}{6}}"), (r"\frac{1}{2}", r"\boxed{\frac{3}{5}}")


def gone(pid: int, limit_s: float) -> bool:
    """Whether the process ends (or is only a zombie) within the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_hanging_answer_is_an_error_in_time_and_the_next_call_works(verifier, capfd):
    grade(*reversed(EQUAL))
    started = time.monotonic()
    result = grade(f"\\boxed{{{HANGING}}}", "204", deadline_s=1)
    assert result.status == "grader_error"
    assert result.detail in ("deadline", "clock"), "on a busy machine the clock may come first"
    assert time.monotonic() - started < 1 * verify.WALL_CLOCK_FACTOR + verify.GRACE_S + 1
    assert grade(EQUAL[1], EQUAL[0]).status == "correct"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("tower", ["9^{9^{9^{9^9}}}", "10^{10^{10}}", "100000000!", "((10^6)!)"])
def test_giant_numbers_are_decided_without_computing_them(tower):
    assert grade(f"\\boxed{{{tower}}}", "204", deadline_s=5).status == "wrong"
    assert grade("\\boxed{204}", tower, deadline_s=5).detail == "too_large"
    assert grade(f"\\boxed{{\\frac{{{tower}}}{{{tower}}}}}", "1", deadline_s=5).status == "grader_error"


def test_sixteen_threads_share_one_worker_and_waiting_costs_no_deadline(verifier):
    tasks = [("204", f"\\boxed{{{HANGING}}}", None)] + [(*EQUAL, "correct"), (*UNEQUAL, "wrong")] * 15
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda t: grade(t[1], t[0], deadline_s=1.5).status, tasks))
    assert results == ["grader_error"] + [t[2] for t in tasks[1:]]


def test_deadline_counts_computing_and_not_the_clock(verifier):
    verifier.compare("1", "2")
    # Stopped for 1.5 s in the middle of its work, as a machine with too many processes would do.
    threading.Timer(0.3, os.kill, (verifier.pid, signal.SIGSTOP)).start()
    threading.Timer(1.8, os.kill, (verifier.pid, signal.SIGCONT)).start()
    started = time.monotonic()
    assert verifier.compare("204", HANGING, deadline_s=1).kind == "error"
    assert time.monotonic() - started > 2.1


def test_stuck_worker_is_given_up(verifier):
    verifier.compare("1", "2")
    os.kill(verifier.pid, signal.SIGSTOP)
    assert verifier.compare("0.5", r"\frac12", deadline_s=0.3) == verify.Verdict("error", "clock")
    assert verifier.compare("0.5", r"\frac12").kind == "equal"


def test_worker_death_is_survived_idle_and_in_a_call(verifier):
    assert verifier.compare("0.5", r"\frac12").kind == "equal"
    first = verifier.pid
    os.kill(first, signal.SIGKILL)
    assert verifier.compare("0.5", r"\frac12").kind == "equal"
    second = verifier.pid
    os.kill(second, signal.SIGSTOP)  # holds the next call until the kill
    threading.Timer(0.5, os.kill, (second, signal.SIGKILL)).start()
    assert verifier.compare("0.5", r"\frac12").kind == "equal"
    assert len({first, second, verifier.pid}) == 3


def test_deadly_question_is_an_error_not_a_loop(verifier, monkeypatch):
    starts = []
    monkeypatch.setattr(verifier, "_start", lambda: starts.append(1) or (_ for _ in ()).throw(verify._WorkerDiedError))
    assert verifier.compare("1", "2") == verify.Verdict("error", "worker_died")
    assert len(starts) == 2


def test_answer_to_another_question_is_not_used(verifier):
    verifier.compare("0.5", r"\frac12")
    pid, verifier._pending = verifier.pid, b'{"id": 0, "verdict": "equal", "detail": ""}\n'
    assert verifier.compare("0.5", "0.6").kind == "different"
    assert verifier.pid != pid


def _grade_into(queue):
    queue.put((grade(EQUAL[1], EQUAL[0]).status, grade(UNEQUAL[1], UNEQUAL[0]).status, verify._shared.pid))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_daemonic_child_has_a_worker_of_its_own(method):
    assert grade(EQUAL[1], EQUAL[0]).status == "correct"
    mine = verify._shared.pid
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_grade_into, args=(queue,), daemon=True)
    child.start()
    equal, unequal, worker = queue.get(timeout=120)
    child.join(60)
    assert (equal, unequal) == ("correct", "wrong")
    assert worker not in (None, mine)
    assert gone(worker, 15)
    assert grade(UNEQUAL[1], UNEQUAL[0]).status == "wrong"
    assert verify._shared.pid == mine


PARENT = """
import sys, time
from sat_verl.grading import grade, verify
grade(r"\\boxed{0.5}", r"\\frac12")
print(verify._shared.pid, flush=True)
if sys.argv[1] == "busy":
    grade(sys.argv[2], "204", deadline_s=2)
if sys.argv[1] != "exit":
    time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "exit"])
def test_no_worker_outlives_its_parent(state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state, f"\\boxed{{{HANGING}}}"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    if state == "busy":
        time.sleep(0.5)
    if state != "exit":
        assert not gone(worker, 0.1)
        parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(worker, 15)


def test_worker_ends_with_its_parent_even_if_the_pipe_stays_open():
    reader, writer = os.pipe()
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', {_worker.__name__!r}], stdin={reader}, \
stdout=subprocess.PIPE, pass_fds=[{reader}]); p.stdout.readline(); print(p.pid, flush=True); import os; os._exit(0)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[reader], stdout=subprocess.PIPE, text=True, check=True
    )
    os.close(reader)
    assert gone(int(parent.stdout), 15)
    os.close(writer)


def test_unreadable_gold_is_an_error_and_an_unreadable_answer_is_wrong():
    assert grade("\\boxed{x+1}", "\\frac{1}{2").detail == "gold_unparsed"
    unread = grade("\\boxed{\\frac{1}{}{+}}", "\\frac{1}{2}")
    assert (unread.status, unread.detail) == ("wrong", "answer_unparsed")


def test_missing_math_verify_is_named_only_when_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "_shared", verify.Verifier())
    find_spec = verify.importlib.util.find_spec
    monkeypatch.setattr(
        verify.importlib.util, "find_spec", lambda name: None if name == "math_verify" else find_spec(name)
    )
    assert grade("\\boxed{204}", "204").status == "correct"
    with pytest.raises(MathVerifyMissingError, match="pip install math-verify"):
        grade(EQUAL[1], EQUAL[0])


def test_broken_math_verify_is_named_too(monkeypatch, tmp_path, verifier):
    (tmp_path / "math_verify.py").write_text("print('{}')\nraise ImportError('half installed')")
    monkeypatch.setattr(verify.sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(verify, "Path", lambda _: tmp_path / "a" / "b" / "c")
    with pytest.raises(MathVerifyMissingError, match=r"half installed.*pip install math-verify"):
        verifier.compare("1", "2")


def test_answer_text_is_never_run(tmp_path):
    target = tmp_path / "pwned"
    payload = f"__import__('os').system('touch {target}')"
    for text in (
        f"\\boxed{{{payload}}}",
        f"\\boxed{{[{payload}, 2]}}",
        f"Answer: {payload}",
        f"\\boxed{{1+{payload}}}",
    ):
        for gold in ("204", r"\frac12", r"\begin{pmatrix}1&2\end{pmatrix}"):
            assert grade(text, gold, policy="lenient").status != "correct"
    assert not target.exists()


# --- limits by the clock -------------------------------------------------------------------------------------------


def test_a_limit_by_the_clock_covers_the_start_of_the_worker_which_goes_on(verifier):
    started = time.monotonic()
    result = grade(EQUAL[1], EQUAL[0], limit_s=0.2)
    assert (result.status, result.detail) == ("grader_error", "clock")
    assert time.monotonic() - started < 1
    starting = verifier.pid
    assert starting is not None
    assert grade(EQUAL[1], EQUAL[0]).status == "correct"
    assert verifier.pid == starting


def test_a_limit_by_the_clock_covers_waiting_for_a_turn_and_a_stopped_worker(verifier):
    verifier.start()
    os.kill(verifier.pid, signal.SIGSTOP)
    limits = [0.5, 0.5, 1.0]
    with ThreadPoolExecutor(3) as pool:
        started = time.monotonic()
        results = list(pool.map(lambda limit: grade(EQUAL[1], EQUAL[0], limit_s=limit), limits))
        assert time.monotonic() - started < max(limits) + 0.5
    assert {(result.status, result.detail) for result in results} == {("grader_error", "clock")}


def test_aime_answers_that_cannot_be_settled_are_wrong_and_a_broken_worker_is_still_an_error(verifier, monkeypatch):
    verifier.start()
    assert grade(f"\\boxed{{{HANGING}}}", "204", domain="math", deadline_s=1).status == "grader_error"
    monkeypatch.setattr(verifier, "_request", lambda *args: {"verdict": "error", "detail": "deadline"})
    assert grade(f"\\boxed{{{HANGING}}}", "204", domain="aime").status == "wrong"
    for broken in ("clock", "worker_died"):
        monkeypatch.setattr(verifier, "_request", lambda *args, why=broken: {"verdict": "error", "detail": why})
        assert grade(f"\\boxed{{{HANGING}}}", "204", domain="aime").status == "grader_error"


def test_math_verify_by_itself_is_a_second_opinion_with_its_own_faults(verifier):
    assert verifier.whole("$204$", "so \\boxed{204}")["verdict"] == "equal"
    assert verifier.whole("$204$", "so \\boxed{205}")["verdict"] == "different"
    assert verifier.whole("$204$", "no idea at all")["verdict"] == "answer_unparsed"
    assert verifier.whole("$204$", f"\\boxed{{{HANGING}}}", deadline_s=0.5)["verdict"] == "error"
    assert verifier.whole("$0.5$", "\\boxed{\\frac12}")["verdict"] == "equal"
