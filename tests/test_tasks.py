"""The synthetic tasks: exact answers, disjoint splits, reproducible files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.errors import ConfigError
from recipes.tasks import TASKS, capacity, draw, get_task, write_parquet
from recipes.tasks.__main__ import main
from recipes.tasks.artifacts import MANIFEST, publish, read_intact
from recipes.tasks.splits import permute
from sat_verl.reward import compute_score

HARDEST = [("chain", {"digits": 18}), ("sort", {"digits": 18}), ("arithmetic", {"digits": 2, "terms": 9})]
EASIEST = [("chain", {"digits": 1}), ("sort", {"digits": 2}), ("arithmetic", {"digits": 1, "terms": 2})]
ALL = [*((name, {}) for name in TASKS), *EASIEST, *HARDEST]

# The problems behind a seed. They change only together with DATA_VERSION: otherwise a cache would keep the old ones.
ROWS_SHA256 = {
    "chain": "671bbbdde41de20703fcafeafcc5d6f07c45933d9e54153e086df01ec7167c7a",
    "sort": "6bd11d51182785b63c808965cec3e0bd438c24dbcac0fee07138b482e490a5e5",
    "arithmetic": "510daec20791a5e9992ae949231b318e566762c67b401138b2027148de48c0e8",
}


# Problems and answers


@pytest.mark.parametrize(("name", "difficulty"), ALL)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_worked_response_without_slips_is_right(name, difficulty, data):
    task = get_task(name, difficulty)
    problem = task.problem(data.draw(st.integers(0, task.num_problems - 1)))
    response = task.worked_response(problem, random.Random(0), slip_rate=0.0)
    assert task.is_correct(response, problem.ground_truth)
    assert len(response) <= task.max_response_chars


@pytest.mark.parametrize(
    ("name", "number", "prompt", "answer", "worked"),
    [
        ("chain", 123459, "123459", "4", "136054"),
        ("chain", 7, "000007", "7", "000007"),
        ("sort", 40213975, "40213975", "01234579", "01234579"),
        # 47 plus 85: 7 + 5 = 12, then 4 + 8 + 1 = 13.
        (
            "arithmetic",
            37 + 90 * 75,
            "What is 47 plus 85? Put the final answer in \\boxed{}.",
            "132",
            "12 13 \\boxed{132}",
        ),
        ("arithmetic", 0, "What is 10 plus 10? Put the final answer in \\boxed{}.", "20", "00 02 \\boxed{20}"),
    ],
)
def test_problems_and_worked_responses_by_hand(name, number, prompt, answer, worked):
    task = get_task(name)
    problem = task.problem(number)
    assert (problem.prompt, problem.ground_truth) == (prompt, answer)
    assert task.worked_response(problem, random.Random(0), 0.0) == worked


@pytest.mark.parametrize("name", TASKS)
def test_a_number_is_one_problem(name):
    task = get_task(name, {"digits": 2})
    assert len({task.problem(number).prompt for number in range(task.num_problems)}) == task.num_problems


@pytest.mark.parametrize(
    ("name", "response", "answer", "right"),
    [
        ("chain", "136054", "4", True),
        ("chain", "the sum is 4 ", "4", True),
        ("chain", "the sum is 4.", "4", False),
        ("chain", "136045", "4", False),
        ("chain", "", "4", False),
        ("chain", "no digit", "4", False),
        ("sort", " 0123\n", "0123", True),
        ("sort", "01234", "0123", False),
        ("sort", "1230", "0123", False),
        ("arithmetic", "\\boxed{7} no, \\boxed{132}", "132", True),
        ("arithmetic", "\\boxed{132} no, \\boxed{7}", "132", False),
        ("arithmetic", "132", "132", False),
        ("arithmetic", "\\boxed{1320}", "132", False),
        ("arithmetic", "\\boxed{132", "132", False),
    ],
)
def test_is_correct(name, response, answer, right):
    task = get_task(name)
    assert task.is_correct(response, answer) is right
    # The reward of the RL run and the warm start's check are written apart; they must not drift apart.
    assert compute_score(task.data_source, response, answer)["score"] == float(right)


@pytest.mark.parametrize(("name", "difficulty"), [*((name, {}) for name in TASKS), *HARDEST])
def test_slips_leave_the_chosen_share_right(name, difficulty):
    task, rng = get_task(name, difficulty), random.Random(1)
    problems = draw(task, "train", 1000, seed=0)
    rate = task.slip_rate_for(0.42)
    responses = [task.worked_response(problem, rng, rate) for problem in problems]
    share = sum(map(task.is_correct, responses, [problem.ground_truth for problem in problems])) / len(problems)
    assert max(map(len, responses)) <= task.max_response_chars
    # Up to 0.06 more by slips that cancel (chain), and four standard errors of 0.016.
    assert 0.42 - 0.065 < share < 0.48 + 0.065


def test_a_slip_carries_on_from_the_wrong_value():
    task = get_task("chain", {"digits": 18})
    problem, rng = task.problem(0), random.Random(0)  # eighteen zeros: every change is a slip
    runs = [len(set(task.worked_response(problem, rng, 0.05))) for _ in range(200)]
    written = [task.worked_response(problem, rng, 0.05) for _ in range(200)]
    changes = [sum(a != b for a, b in zip("0" + text, text, strict=False)) for text in written]
    # If a slip did not last, each one would change the digit twice.
    assert 0.05 * 18 * 0.7 < sum(changes) / len(changes) < 0.05 * 18 * 1.3
    assert max(runs) > 1


# Difficulty


@pytest.mark.parametrize(
    ("name", "difficulty", "words"),
    [
        ("chain", {"digits": 0}, ["digits", "0", "1 to 18"]),
        ("chain", {"digits": 19}, ["digits", "19", "1 to 18"]),
        ("chain", {"digits": "6"}, ["digits", "'6'", "integer"]),
        ("chain", {"digits": True}, ["digits", "True", "integer"]),
        ("chain", {"terms": 2}, ["terms", "no such setting", "digits"]),
        ("sort", {"digits": 1}, ["digits", "1", "2 to 18"]),
        ("arithmetic", {"terms": 1}, ["terms", "1", "2 to 9"]),
        ("arithmetic", {"digits": 7, "terms": 7}, ["digits", "terms", "at most 18"]),
        ("chian", {}, ["chian", "chain"]),
    ],
)
def test_a_wrong_difficulty_is_refused_with_the_fix(name, difficulty, words):
    with pytest.raises(ConfigError) as error:
        get_task(name, difficulty)
    for word in words:
        assert word in str(error.value)


def test_more_problems_than_there_are_is_refused(tmp_path):
    task = get_task("chain", {"digits": 2})
    with pytest.raises(ConfigError, match=r"train_size=89.*88 distinct train problems"):
        write_parquet(task, tmp_path, train_size=89, test_size=12)
    with pytest.raises(ConfigError, match=r"test_size=13.*12 distinct test problems"):
        write_parquet(task, tmp_path, train_size=88, test_size=13)
    with pytest.raises(ConfigError, match="test_size=0"):
        write_parquet(task, tmp_path, train_size=88, test_size=0)
    assert not list(tmp_path.iterdir())
    write_parquet(task, tmp_path, train_size=88, test_size=12)


# Splits


@pytest.mark.parametrize("size", [1, 2, 3, 10, 88, 257, 1000])
def test_permute_is_a_permutation_that_the_key_chooses(size):
    everything = np.arange(size, dtype=np.uint64)
    images = permute(everything, size, "a")
    assert sorted(images.tolist()) == list(range(size))
    if size >= 10:
        assert images.tolist() != everything.tolist()
        assert images.tolist() != permute(everything, size, "b").tolist()


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_problem_whatever_the_seeds(name):
    task = get_task(name)
    test = {problem.prompt for seed in range(4) for problem in draw(task, "test", 500, seed)}
    train = {problem.prompt for seed in range(4) for problem in draw(task, "train", 2000, seed)}
    assert len(test) > 500
    assert len(train) > 2000
    assert not test & train


@pytest.mark.parametrize(("name", "difficulty"), [*EASIEST, ("chain", {"digits": 3}), ("arithmetic", {"digits": 1})])
def test_both_splits_together_are_all_problems(name, difficulty):
    task = get_task(name, difficulty)
    numbers = [
        problem.number for split in ("train", "test") for problem in draw(task, split, capacity(task, split), seed=5)
    ]
    assert sorted(numbers) == list(range(task.num_problems))


def test_a_larger_draw_continues_a_smaller_one():
    task = get_task("sort")
    assert draw(task, "train", 100, seed=3)[:60] == draw(task, "train", 60, seed=3)
    assert draw(task, "train", 40, seed=3, start=60) == draw(task, "train", 100, seed=3)[60:]
    assert draw(task, "train", 60, seed=4) != draw(task, "train", 60, seed=3)


def test_the_test_split_looks_like_the_train_split():
    # The answer of a chain problem must not tell its split: each of ten answers about a tenth of either.
    task = get_task("chain")
    for split in ("train", "test"):
        answers = [int(problem.ground_truth) for problem in draw(task, split, 5000, seed=0)]
        assert np.bincount(answers, minlength=10).min() > 500 - 4 * 21
        assert np.bincount(answers, minlength=10).max() < 500 + 4 * 21


# Files


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_rows_are_the_same_in_every_process(tmp_path, hash_seed):
    code = (
        "import sys; from recipes.tasks import TASKS, get_task, write_parquet\n"
        "for name in TASKS: print(write_parquet(get_task(name), sys.argv[1], 300, 50, 7).manifest['rows_sha256'])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == list(ROWS_SHA256.values())


def test_verl_reads_the_rows(tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from recipes.models.tokenizer import build_tokenizer

    made = write_parquet(get_task("chain"), tmp_path / "data", 20, 10, seed=0)
    options = {
        "cache_dir": str(tmp_path / "verl"),
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": 1,
    }

    def read(path, longest):
        config = OmegaConf.create({**options, "max_prompt_length": longest})
        return RLHFDataset(str(path), build_tokenizer(64), config)

    problems = draw(get_task("chain"), "train", 20, seed=0)
    rows = read(made.train, longest=9)  # a token for the turn, six digits, the end of the turn, the answer's turn
    assert len(rows) == 20
    for index, problem in enumerate(problems):
        row = rows[index]
        assert row["raw_prompt"] == [{"role": "user", "content": problem.prompt}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": problem.ground_truth}
        assert row["data_source"] == "sat_verl/chain"
        assert row["index"] == index
        assert row["extra_info"]["split"] == "train"
    assert len(read(made.test, longest=9)) == 10
    assert len(read(made.test, longest=8)) == 0


def test_files_are_reused_until_a_setting_changes(tmp_path):
    task = get_task("chain")
    first = write_parquet(task, tmp_path, 50, 10, seed=0)
    stamp = first.train.stat().st_mtime_ns
    again = write_parquet(task, tmp_path, 50, 10, seed=0)
    assert again.train.stat().st_mtime_ns == stamp
    assert again.manifest == first.manifest
    others = [
        write_parquet(task, tmp_path, 50, 10, seed=1),
        write_parquet(task, tmp_path, 51, 10, seed=0),
        write_parquet(task, tmp_path, 50, 11, seed=0),
        write_parquet(get_task("chain", {"digits": 5}), tmp_path, 50, 10, seed=0),
        write_parquet(get_task("sort"), tmp_path, 50, 10, seed=0),
    ]
    assert len({made.train for made in [first, *others]}) == 6
    assert len({made.manifest["rows_sha256"] for made in [first, *others]}) == 6


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest"])
def test_damaged_files_are_written_again(tmp_path, damage):
    task = get_task("chain")
    made = write_parquet(task, tmp_path, 50, 10, seed=0)
    whole = made.test.read_bytes()
    if damage == "cut":
        made.test.write_bytes(whole[:-1])
    elif damage == "missing":
        made.test.unlink()
    else:
        (made.test.parent / MANIFEST).write_text("{")
    assert write_parquet(task, tmp_path, 50, 10, seed=0).manifest == made.manifest
    assert made.test.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [made.test.parent.name]


# Publishing a folder


def test_a_failed_build_leaves_the_old_folder(tmp_path):
    def fails(staged):
        (staged / "file").write_text("half")
        raise RuntimeError("disk full")

    folder = tmp_path / "out"
    publish(folder, {"v": 1}, lambda staged: (staged / "file").write_text("whole") and {})
    with pytest.raises(RuntimeError, match="disk full"):
        publish(folder, {"v": 2}, fails)
    assert (folder / "file").read_text() == "whole"
    assert read_intact(folder, {"v": 1}) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_build_leaves_no_folder_and_its_rest_is_removed_later(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from recipes.tasks.artifacts import publish\n"
        "def write(staged):\n"
        "    (staged / 'file').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
        "publish(Path(sys.argv[1]) / 'out', {}, write)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (rest,) = tmp_path.iterdir()

    def write(staged):
        (staged / "file").write_text("whole")
        return {}

    publish(tmp_path / "out", {}, write)
    assert rest.exists()  # as fresh as one that another process is still writing
    os.utime(rest, (time.time() - 7200, time.time() - 7200))
    publish(tmp_path / "out", {"v": 2}, write)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_of_others_are_not_replaced(tmp_path):
    def write(staged):
        (staged / "file").write_text("new")
        return {}

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        publish(tmp_path, {}, write)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="it is a file"):
        publish(tmp_path / "notes.txt", {}, write)
    publish(tmp_path / "out", {"v": 1}, write)
    publish(tmp_path / "out", {"v": 2}, write)
    (tmp_path / "out" / "checkpoint").write_text("mine")
    with pytest.raises(ConfigError, match="checkpoint"):
        publish(tmp_path / "out", {"v": 3}, write)


# Command line


def test_command_line(tmp_path, capsys):
    assert main(["write", "task=chain", f"out={tmp_path}", "train_size=30", "test_size=5", "digits=3"]) == 0
    train, test, digest = capsys.readouterr().out.splitlines()
    assert train.endswith("train.parquet")
    assert test.endswith("test.parquet")
    assert digest.startswith("rows sha256 ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["write", "task=chain"], "out: it is missing"),
        (["write", "task=chain", "out=x", "seed=x"], "seed=x: it is not a whole number"),
        (["write", "task=chain", "out=x", "seed=--5"], "seed=--5: it is not a whole number"),
        (["write", "task=chain", "out=x", "out=y"], "given twice"),
        (["write", "task=chain", "out"], "not of the form name=value"),
        (["write", "task=chain", "out=x", "digts=3"], "task.difficulty.digts=3"),
        (["make"], "usage"),
    ],
)
def test_command_line_refuses_what_it_does_not_know(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
