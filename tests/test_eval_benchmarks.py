"""Benchmarks load the same problems from every source, and name what is wrong with a copy."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

import recipes
from eval.benchmarks import NAMES, contests, load, sources
from eval.benchmarks.fingerprint import fingerprint, hashes, likeness, without_figure
from eval.schema import Problem
from recipes.errors import ConfigError
from recipes.tasks import get_task, write_parquet
from sat_verl.grading import grade

ROOT = Path(recipes.__file__).parent.parent
AIME24_KEY = (
    "204 25 809 116 104 294 540 197 480 113 371 385 110 104 721 73 236 45 33 80 55 699 127 902 468 601 23 321 211 315"
)
AIME25_KEY = (
    "70 588 16 117 279 504 821 77 62 81 259 510 204 60 735 468 49 82 106 336 293 237 610 149 907 113 19 248 104 240"
)


@pytest.fixture(scope="module")
def aime24():
    """AIME 2024 in canonical order, as id, statement and answer."""
    return [{"id": p.id, "problem": p.statement, "answer": p.gold} for p in load("aime24").problems]


def store(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refusal(*args, **settings):
    with pytest.raises(ConfigError) as caught:
        load(*args, **settings)
    return caught.value


# --- the contests


@pytest.mark.parametrize(("name", "year", "key"), [("aime24", 2024, AIME24_KEY), ("aime25", 2025, AIME25_KEY)])
def test_a_contest_is_whole_and_in_order(name, year, key):
    found = load(name)
    assert [p.id for p in found.problems] == [f"{year}-{part}-{n}" for part in ("I", "II") for n in range(1, 16)]
    assert [p.gold for p in found.problems] == key.split()
    assert {p.data_source for p in found.problems} == {name}
    assert found.lineage.startswith("PyPI sgl-eval 0.1.3, ")
    assert not [line for line in found.warnings if line.startswith("fault")]


def test_the_digests_of_the_packaged_problems_stay():
    found = load("aime24")
    assert found.statements_sha256 == "09847aeddc0ed685041d6049eb6aed24dbb11d3c512f803caf51f11c243d760a"
    assert found.answers_sha256 == "4088ebfe864e008c3eac1ea1a5ad356c3f44e73b58a79914327f828e3105a0e8"


def test_nothing_of_the_package_is_imported():
    code = "import sys; from eval.benchmarks import load; load('aime24'); sys.exit('sgl_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_aime24_warns_of_contamination():
    assert any("MathArena" in line for line in load("aime24").warnings)
    assert not any("MathArena" in line for line in load("aime25").warnings)


def test_aime25s_last_problem_in_the_package_lacks_a_restriction():
    assert any(line.startswith("2025-II-15") for line in load("aime25").warnings)


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_the_stored_fingerprints_are_those_of_the_statements(name):
    for problem in load(name).problems:
        assert contests.KEYS[name][problem.id]["fingerprint"] == fingerprint(problem.statement)


def test_statements_of_two_problems_are_far_from_alike():
    both = [*load("aime24").problems, *load("aime25").problems]
    keys = contests.KEYS["aime24"] | contests.KEYS["aime25"]
    known = {p.id: hashes(p.statement) for p in both}
    worst = max(likeness(keys[a]["fingerprint"], known[b]) for a in known for b in known if a != b)
    assert worst <= contests.RECOGNISED / 2


SCHEMES = {
    "H4": lambda n, p, a: {"id": 60 + n, "problem": p, "solution": "Long.", "answer": a.zfill(3), "year": "2024"},
    "math-ai": lambda n, p, a: {"id": 60 + n, "problem": p, "solution": f"\\boxed{{{a}}}", "url": "x"},
    "Maxwell-Jia": lambda n, p, a: {"ID": f"p{n}", "Problem": p, "Solution": "Long.", "Answer": int(a)},
    "NeMo": lambda n, p, a: {"id": f"aime24-{n}", "problem": p, "expected_answer": a},
    "MathArena": lambda n, p, a: {"problem_idx": n, "problem": p, "answer": int(a)},
    "question": lambda n, p, a: {"question": p, "answer": f"So it is.\n#### {a}"},
    "verl": lambda n, p, a: {
        "data_source": "math",
        "prompt": [{"role": "user", "content": p}],
        "reward_model": {"ground_truth": a, "style": "rule"},
        "extra_info": {"index": n},
    },
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_of_columns_and_order_gives_the_same_benchmark(tmp_path, aime24, scheme, suffix):
    shuffled = random.Random(1).sample(aime24, len(aime24))
    rows = [SCHEMES[scheme](n, row["problem"], row["answer"]) for n, row in enumerate(shuffled)]
    path = store(tmp_path / f"copy{suffix}", rows)
    found, packaged = load("aime24", source=path), load("aime24")
    assert found.problems == packaged.problems
    assert (found.statements_sha256, found.answers_sha256) == (packaged.statements_sha256, packaged.answers_sha256)
    assert found.lineage == f"file copy{suffix}"


def test_spacing_and_figures_do_not_matter_to_recognition(tmp_path, aime24):
    rows = [row | {"problem": row["problem"].replace("$", " $ ") + " [asy] draw(204); [/asy]"} for row in aime24]
    found = load("aime24", source=store(tmp_path / "spaced.json", rows))
    assert [p.id for p in found.problems] == [row["id"] for row in aime24]
    assert found.statements_sha256 != load("aime24").statements_sha256


def test_other_years_are_left_out(tmp_path, aime24):
    rows = [row | {"Year": 2024} for row in aime24] + [{"id": "old", "problem": "Old?", "answer": "1", "Year": 1983}]
    assert len(load("aime24", source=store(tmp_path / "all.parquet", rows)).problems) == 30


def without(key):
    return lambda rows: [row for row in rows if row["id"] != key]


def changed(key, **how):
    return lambda rows: [row | {k: f(row[k]) for k, f in how.items()} if row["id"] == key else row for row in rows]


def answers(key, text):
    return changed(key, answer=lambda _: text)


def states(key, more):
    return changed(key, problem=lambda statement: statement + more)


STRANGER = {"id": "x", "problem": "What is 1+1?", "answer": "2"}
FAULTS = {
    "a known wrong label": (
        answers("2024-I-12", "384"),
        "2024-I-12: its answer is 384, correct is 385 (the known mislabelling",
    ),
    "a wrong label": (answers("2024-II-3", "46"), "2024-II-3: its answer is 46, correct is 45"),
    "swapped answers": (
        lambda rows: answers("2024-I-1", "25")(answers("2024-I-2", "204")(rows)),
        "2024-I-1: its answer is 25, correct is 204; 2024-I-2: its answer is 204, correct is 25",
    ),
    "no integer": (answers("2024-I-4", "m+n"), "2024-I-4: its answer 'm+n' is no integer"),
    "too large": (answers("2024-I-4", "1160"), "2024-I-4: its answer '1160' is no integer"),
    "answer in I-5": (
        states("2024-I-5", " We get $CE = 104$."),
        "2024-I-5: its statement gives the answer away (known of early public copies",
    ),
    "box in I-6": (states("2024-I-6", r" \boxed{294}"), "2024-I-6: its statement gives the answer away"),
    "padded answer": (states("2024-II-3", " 045"), "2024-II-3: its statement gives the answer away"),
    "solution in II-10": (
        states("2024-II-10", " By Euler's formula the distance is a root, so the triangles are"),
        "2024-II-10: its statement has 13 words too many (known of early public copies",
    ),
    "missing": (without("2024-II-15"), "2024-II-15: missing"),
    "twice": (lambda rows: [*rows, rows[3] | {"id": "other"}], "2024-I-4: there more than once"),
    "a stranger": (lambda rows: [*rows, STRANGER], "x: no problem of this contest"),
    "another statement": (changed("2024-I-9", problem=lambda s: "What is two plus two?"), "2024-I-9: its statement is"),
    "a changed number": (
        changed("2024-I-5", problem=lambda s: s.replace("107", "108")),
        "2024-I-5: its statement has other numbers than the contest's (108 for 107)",
    ),
    "swapped numbers": (
        changed("2024-I-5", problem=lambda s: s.replace("107", "x").replace("17", "107").replace("x", "17")),
        "2024-I-5: its statement has other numbers than the contest's (17 for 107, 107 for 17)",
    ),
    "a lost number": (
        changed("2024-I-3", problem=lambda s: s.replace("2024", "some")),
        "2024-I-3: its statement has other numbers than the contest's (nothing for 2024)",
    ),
    "a number spelt out": (
        changed("2024-I-6", problem=lambda s: s.replace("exactly four times", "exactly five times")),
        "2024-I-6: its statement has other numbers than the contest's (5 for 4)",
    ),
    "cut": (changed("2024-I-1", problem=lambda s: s[: len(s) * 2 // 3]), "2024-I-1: its statement is not the"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_that_names_it_or_a_warning_on_demand(tmp_path, aime24, fault):
    spoil, message = FAULTS[fault]
    path = store(tmp_path / "bad.jsonl", spoil(aime24))
    error = refusal("aime24", source=path)
    assert message in error.problem
    assert "bad.jsonl" in error.problem
    assert "allow_faults=true" in error.fix
    tolerant = load("aime24", source=path, allow_faults=True)
    assert any(message.split("; ")[0] in line for line in tolerant.warnings)
    assert len({p.id for p in tolerant.problems}) == len(tolerant.problems)


def test_a_clean_copy_has_no_fault(tmp_path, aime24):
    found = load("aime24", source=store(tmp_path / "good.jsonl", aime24))
    assert found.warnings == [contests.CONTAMINATED]


def test_aime25s_known_wrong_angle_is_named(tmp_path):
    rows = [{"id": p.id, "problem": p.statement, "answer": p.gold} for p in load("aime25").problems]
    rows = changed("2025-I-14", problem=lambda s: s.replace(r"\angle B=\angle E", r"\angle ZBA"))(rows)
    assert (
        "2025-I-14: its statement names an angle ZBA"
        in refusal("aime25", source=store(tmp_path / "a.jsonl", rows)).problem
    )


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_every_number_that_is_raised_by_one_is_named(name):
    for problem in load(name).problems:
        text = without_figure(problem.statement)
        for match in re.finditer(r"[0-9]+", text):
            other = f"{text[: match.start()]}{int(match[0]) + 1}{text[match.end() :]}"
            altered = problem.model_copy(update={"statement": other})
            faults = [fault for fault in contests.check(name, [altered]).faults if not fault.endswith("missing")]
            assert [fault.partition(":")[0] for fault in faults] == [problem.id], other


def test_how_a_number_is_set_does_not_matter(aime24):
    def check(row, change):
        problem = Problem(id=row["id"], statement=change(row["problem"]), gold=row["answer"])
        assert problem.statement != row["problem"]
        faults = contests.check("aime24", [problem]).faults
        assert not [fault for fault in faults if fault.startswith(row["id"])]

    rows = {row["id"]: row for row in aime24}
    check(rows["2024-II-7"], lambda s: s.replace("1000", "1{,}000"))
    check(rows["2024-I-6"], lambda s: s.replace("four times", "4 times"))
    check(rows["2024-I-1"], lambda s: s.replace(r"\frac{1}{2}", r"\frac12"))
    check(rows["2024-I-5"], lambda s: without_figure(s))
    for figure in ("![figure 3](https://example.org/17.png)", r"\begin{asy} draw(9); \end{asy}", '<img src="4.png">',
                   r"\includegraphics[width=4cm]{5.png}"):  # fmt: skip
        check(rows["2024-I-5"], lambda s, figure=figure: s + figure)


# --- the recipes' tasks


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chain", {}),
        ("sort", {}),
        ("arithmetic", {}),
        ("chain", {"size": 40, "seed": 3, "difficulty": {"digits": 4}}),
        ("arithmetic", {"difficulty": {"terms": 3}}),
    ],
)
def test_a_task_has_the_problems_that_its_recipe_validates_on(tmp_path, name, settings):
    preset = OmegaConf.load(ROOT / "recipes" / "config" / "task" / f"{name}.yaml").task
    task = get_task(name, {**preset.difficulty, **settings.get("difficulty", {})})
    size, seed = settings.get("size", preset.test_size), settings.get("seed", preset.seed)
    made = write_parquet(task, tmp_path, train_size=64, test_size=size, seed=seed)
    rows = pd.read_parquet(made.test).to_dict("records")
    found = load(name, **settings)
    assert found.prompt == "{statement}"
    assert [(p.statement, p.gold, p.data_source) for p in found.problems] == [
        (row["prompt"][0]["content"], row["reward_model"]["ground_truth"], row["data_source"]) for row in rows
    ]
    from_file = load(str(made.test))
    assert [(p.statement, p.gold) for p in from_file.problems] == [(p.statement, p.gold) for p in found.problems]
    assert from_file.prompt == "{statement}"


def test_a_tasks_settings_are_checked():
    assert refusal("chain", difficulty={"digit": 3}).setting == "difficulty.digit"
    assert refusal("chain", size=10**9).setting == "size"
    assert refusal("chain", source="x.jsonl").setting == "source"
    assert refusal("aime24", size=3).setting == "size"
    assert refusal("aime24", difficulty={"digits": 3}).setting == "difficulty"


# --- any file


def test_a_file_is_read_as_it_says(tmp_path):
    rows = [{"q": "One { brace?", "a": "1", "k": "first"}, {"q": "Two\u2028lines?", "a": r"\frac{1}{2}", "k": "second"}]
    path = store(tmp_path / "mine.txt", rows)
    found = load(path, problem_column="q", answer_column="a", id_column="k")
    assert found.name == "mine"
    assert [(p.id, p.statement, p.gold) for p in found.problems] == [
        ("first", "One { brace?", "1"),
        ("second", "Two\u2028lines?", r"\frac{1}{2}"),
    ]
    assert all(grade(rf"\boxed{{{p.gold}}}", p.gold).status == "correct" for p in found.problems)


@pytest.mark.parametrize(
    ("columns", "setting", "there"),
    [
        ({}, "problem_column", "q, a, k"),
        ({"problem_column": "q"}, "answer_column", "q, a, k"),
        ({"problem_column": "nope"}, "problem_column", "q, a, k"),
        ({"problem_column": "q", "answer_column": "a", "id_column": "i"}, "id_column", "q, a, k"),
        ({"problem_column": "q", "answer_column": "q"}, "answer_column", "the column of the answers"),
    ],
)
def test_a_missing_column_names_those_that_are_there(tmp_path, columns, setting, there):
    path = store(tmp_path / "mine.jsonl", [{"q": "One?", "a": "1", "k": "x"}])
    error = refusal(path, **columns)
    assert error.setting == setting
    assert there in error.fix


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"problem": "One?", "answer": ""}], "answer"),
        ([{"problem": "One?", "answer": "1"}, {"problem": "Two?", "answer": None}], "row 1"),
        ([{"problem": "One?", "answer": "1"}, {"problem": " ", "answer": "2"}], "no statement"),
        ([{"problem": "One?", "solution": "no box"}], "for an answer"),
        ([{"problem": "A", "answer": "1", "id": 1}, {"problem": "B", "answer": "2", "id": 1}], "have the id 1"),
        ([{"problem": "A  b", "answer": "1"}, {"problem": "A b", "answer": "1"}], "0, 1: the same statement"),
        ([{"problem": "A", "answer": "1"}, {"problem": "A", "answer": "2"}], 'with different answers: "1", "2"'),
        ([{"problem": "A", "answer": "1", "data_source": "sat_verl/nope"}], "unknown task"),
        ([{"problem": "A", "answer": "1", "data_source": 5}], "data_source=5"),
        ([{"problem": "A \ud800", "answer": "1"}], "half of a surrogate pair"),
        ([{"problem": "A", "answer": "1", "id": "\udfff"}], "half of a surrogate pair"),
        ([{"prompt": ["A"], "reward_model": {"ground_truth": "1"}}], "not a single user turn"),
        ([{"problem": "A", "answer": "", "solution": r"\boxed{2}"}, {"problem": "B", "answer": "6", "solution": "9"}],
         "row 0 of"),
        (["text"], "not a JSON object"),
        ([], "no rows"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path, rows, words):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # a surrogate stays the escape that it is in JSON
    assert words in str(refusal(str(path)))


def test_the_rows_decide_together_which_column_has_the_answers(tmp_path):
    rows = [{"problem": "A", "solution": r"\boxed{2}"}, {"problem": "B", "answer": "6", "solution": r"\boxed{9}"}]
    error = refusal(store(tmp_path / "mine.jsonl", rows))
    assert (error.setting, error.value) == ("answer_column", "answer")
    assert [p.gold for p in load(str(tmp_path / "mine.jsonl"), answer_column="solution").problems] == ["2", "9"]


def test_json_may_be_pretty_and_suffixes_in_capitals(tmp_path):
    rows = [{"problem": "One?", "answer": "1"}, {"problem": "Two?", "answer": "2"}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "capitals.JSONL").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "one.json").write_text(json.dumps(rows[0], indent=2))
    for name, expected in (("list.json", "12"), ("lines.json", "12"), ("capitals.JSONL", "12"), ("one.json", "1")):
        assert "".join(p.gold for p in load(str(tmp_path / name)).problems) == expected
    assert load(str(tmp_path / "capitals.JSONL")).name == "capitals"


def test_repeated_problems_count_once_if_the_user_goes_on(tmp_path):
    path = store(tmp_path / "mine.jsonl", [{"problem": "A", "answer": "1"}, {"problem": "A", "answer": "2"}])
    found = load(path, allow_faults=True)
    assert [p.gold for p in found.problems] == ["1"]
    assert "the same statement" in found.warnings[0]


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"problem": "A", "answer": 1}\n{"problem"\n')
    assert "line 2 is not JSON" in str(refusal(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.parquet").write_text("no")
    assert "not a parquet file" in str(refusal(str(tmp_path / "a.parquet")))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in str(refusal(str(tmp_path / "b.jsonl")))
    (tmp_path / "c.json").write_text('{\n  "problem": "A",\n  "answer" 1\n}')
    assert "line 3 is not JSON" in str(refusal(str(tmp_path / "c.json")))
    (tmp_path / "d.json").write_text("[" * 100_000)
    assert "line 1 is nested too deeply" in str(refusal(str(tmp_path / "d.json")))
    (tmp_path / "d.jsonl").write_text('{"problem": "A", "answer": ' + "[" * 100_000)
    assert "line 1 is nested too deeply" in str(refusal(str(tmp_path / "d.jsonl")))
    (tmp_path / "e.json").write_text("")
    assert "no rows" in str(refusal(str(tmp_path / "e.json")))
    assert "no such file" in str(refusal(str(tmp_path / "none.jsonl")))
    assert all(name in refusal("aime").fix for name in NAMES)


def test_a_list_of_answers_and_numbers_become_what_the_grader_takes(tmp_path):
    rows = [{"problem": "A", "answer": 27.0}, {"problem": "B", "answer": 5}, {"problem": "C", "answer": ["1", "2"]}]
    found = load(store(tmp_path / "mine.jsonl", rows))
    assert [p.gold for p in found.problems] == ["27", "5", ["1", "2"]]


def test_the_first_problems_alone_have_a_digest_of_their_own_and_a_warning():
    whole, part = load("aime24"), load("aime24", limit=3)
    assert part.problems == whole.problems[:3]
    assert part.statements_sha256 != whole.statements_sha256
    assert any("only the first 3 of 30" in line for line in part.warnings)
    assert refusal("aime24", limit=0).setting == "limit"


def test_a_named_set_of_another_size_is_refused(tmp_path):
    path = store(tmp_path / "amc.jsonl", [{"question": f"{n}?", "answer": str(n)} for n in range(39)])
    assert "39 problems, where it has 40" in refusal("amc23", source=path).problem


# --- where problems come from

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IN_ANOTHER_PROCESS = """
import json, sys
from eval.benchmarks import load
from recipes.errors import ConfigError
for arguments in json.loads(sys.argv[1]):
    try:
        found = load(arguments.pop("name"), **arguments)
        print(json.dumps([len(found.problems), found.lineage, found.warnings]))
    except ConfigError as error:
        print(json.dumps([0, error.problem, error.fix]))
"""


def test_the_hubs_cache_serves_offline_runs_and_the_commit_is_recorded(tmp_path, aime24):
    cache = tmp_path / "hub" / "datasets--math-ai--aime24"
    data = cache / "snapshots" / COMMIT / "data"
    data.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    store(data / "test-00000-of-00002.parquet", aime24[:15])
    store(data / "test-00001-of-00002.parquet", aime24[15:])
    store(data / "train-00000-of-00001.parquet", aime24[:1])
    asked = [
        {"name": "aime24", "source": "math-ai/aime24"},
        {"name": "aime24", "revision": COMMIT},
        {"name": "aime24", "revision": "0" * 40},
        {"name": "math500"},
        {"name": "aime24", "source": "math-ai/aime24:data/test-00000-of-00002.parquet", "allow_faults": True},
        {"name": "math-ai/aime24", "split": "train"},
    ]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(asked)],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    unpinned, pinned, unknown, absent, one_file, generic = map(json.loads, done.stdout.splitlines())
    assert unpinned[0] == pinned[0] == 30
    assert f"hub math-ai/aime24 at {COMMIT}" in pinned[1]
    assert any(f"revision={COMMIT}" in line for line in unpinned[2])
    assert not any("pin it" in line for line in pinned[2])
    assert unknown[0] == absent[0] == 0
    assert "HuggingFaceH4/MATH-500" in absent[2]
    assert one_file[0] == 15
    assert generic[0] == 1


def test_without_any_source_the_error_names_all_three(monkeypatch):
    monkeypatch.setattr(sources, "PACKAGE", "sgl-eval-that-is-not-installed")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/nonexistent")
    error = refusal("aime24")
    for way in ("pip install", "source=FILE", "math-ai/aime24"):
        assert way in error.fix
