"""Training data: each problem once, none of a benchmark's, in verl's schema, nothing claimed that was not checked."""

import json
import random

import huggingface_hub.constants
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from eval import benchmarks
from eval.benchmarks import rows as files
from eval.benchmarks import sources
from eval.benchmarks.load import MATH_PROMPT
from eval.prompts import conversation
from recipes.errors import ConfigError
from recipes.prepare import build, decontaminate, distinct, prepare
from recipes.prepare.__main__ import main
from recipes.prepare.distinct import canonical, normalise
from recipes.prepare.out import alone
from recipes.prepare.sets import DAPO_WRAPPER, MIXTURES, SETS
from recipes.prepare.settings import parse
from sat_verl.reward import compute_score

WORDS = ("ring", "prime", "lattice", "chord", "angle", "digit", "coin", "urn", "tile", "path", "graph", "clock", "cube")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/nonexistent")


def statement(number):
    """A problem like no other: its words are drawn by its number."""
    words = " ".join(random.Random(number).choices(WORDS, k=24))
    return f"Let $n={number}$ and consider the {words}. Find $n^2$ modulo $1000$."


def dapo_row(text, answer, index):
    """With the hub's columns, and its instructions around the problem."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_WRAPPER.before}{text}{DAPO_WRAPPER.after}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"00000000-0000-4000-8000-{index:012d}"},
    }


def dapo_rows(copies=20):
    rows = [dapo_row(statement(n), n * n % 1000, n) for n in range(12)]
    rows.append(dapo_row(statement(3).replace(" and ", "  and "), 9, 100))  # another row, the same problem
    rows.append(dapo_row(statement(200), 1, 101))
    rows.append(dapo_row(statement(200).replace("$n=", "$n = "), 2, 102))  # the same problem with another answer
    rows.append(dapo_row("设 $x$ 为整数，求 $x^2=4$ 的正解。", 2, 103))
    return rows * copies


@pytest.fixture
def dapo(tmp_path):
    path = tmp_path / "dapo-math-17k.parquet"
    pd.DataFrame(dapo_rows()).to_parquet(path, index=False)
    return path


@pytest.fixture
def dolci(tmp_path):
    """As the datasets library saves it."""
    rows = [
        {"prompt": statement(n), "ground_truth": str(n * n % 1000), "dataset": "math", "original_dataset": "x"}
        for n in (*range(8, 12), *range(300, 306))
    ]
    path = tmp_path / "dolci"
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}).save_to_disk(path)
    return path


@pytest.fixture
def math500(tmp_path):
    rows = [{"problem": f"{statement(1000 + n)} ({n})", "answer": str(n), "unique_id": f"test/{n}"} for n in range(500)]
    path = tmp_path / "math500.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(words, lines=None):
    return prepare(parse([str(word) for word in words]), (lines if lines is not None else []).append)


def texts(made):
    return [row[0]["content"] for row in pd.read_parquet(made.folder / build.TRAIN)["prompt"]]


def refusal(words):
    with pytest.raises(ConfigError) as caught:
        run(words)
    return caught.value


# --- from rows to rows


def test_dapo_becomes_one_row_a_problem_with_the_prompt_of_the_evaluation(dapo, math500, tmp_path):
    out = tmp_path / "out"
    made = run(
        ["dapo_math_17k", f"out={out}", f"source={dapo}", f"benchmark_source.math500={math500}", "allow_faults=true"]
    )
    facts = made.manifest
    assert (facts["sets"][0]["rows"], facts["sets"][0]["different_texts"]) == (320, 16)
    assert (facts["rows"], facts["repeated"], len(facts["contradicted"])) == (13, 1, 2)
    rows = pd.read_parquet(out / build.TRAIN).to_dict("records")
    assert [row["prompt"][0]["content"] for row in rows[:12]] == [
        conversation(statement(n), MATH_PROMPT, None)[0]["content"] for n in range(12)
    ]
    first = rows[5]
    assert first["data_source"] == "dapo_math_17k"
    assert first["reward_model"] == {"style": "rule", "ground_truth": "25"}
    assert first["extra_info"] == {"split": "train", "index": 5, "problem": "00000000-0000-4000-8000-000000000005"}
    score = compute_score(first["data_source"], "So \\boxed{25}", first["reward_model"]["ground_truth"])
    assert score["score"] == 1.0
    assert facts["decontaminated_against"] == ["aime24", "aime25", "math500"]
    assert not any("Answer:" in text for text in texts(made))


@pytest.mark.slow
def test_verls_own_data_set_reads_the_file(dapo, tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from recipes.models.tokenizer import build_tokenizer

    made = run(["dapo_math_17k", f"out={tmp_path / 'o'}", f"source={dapo}", "skip=math500", "allow_faults=true"])
    config = OmegaConf.create({"max_prompt_length": 9999, "cache_dir": str(tmp_path / "cache")})
    data = RLHFDataset(str(made.folder / build.TRAIN), build_tokenizer(4096), config)
    assert len(data) == 13
    assert data[0]["reward_model"]["ground_truth"] == "0"
    assert data[0]["index"] == 0


def test_a_hub_style_folder_of_gsm8k_and_its_marked_answers(tmp_path):
    folder = tmp_path / "gsm8k/main"
    folder.mkdir(parents=True)
    rows = [{"question": statement(n), "answer": f"Multiply.\n#### 1,{n:03d}"} for n in range(5)]
    pd.DataFrame(rows).to_parquet(folder / "train-00000-of-00001.parquet")
    pd.DataFrame(rows[:1]).to_parquet(folder / "test-00000-of-00001.parquet")
    made = run(["gsm8k", f"out={tmp_path / 'o'}", f"source={folder}", "skip=math500", "allow_faults=true"])
    truths = [row["ground_truth"] for row in pd.read_parquet(made.folder / build.TRAIN)["reward_model"]]
    assert truths == [f"1,{n:03d}" for n in range(5)]
    assert compute_score("gsm8k", "\\boxed{1003}", truths[3])["score"] == 1.0


def test_a_mixture_keeps_a_shared_problem_once(dapo, dolci, tmp_path):
    words = ["dapo_math_17k+dolci_math", f"out={tmp_path / 'o'}", f"source.dapo_math_17k={dapo}"]
    made = run([*words, f"source.dolci_math={dolci}", "skip=math500", "allow_faults=true"])
    assert [one["kept"] for one in made.manifest["sets"]] == [13, 6]
    assert made.manifest["repeated"] == 1 + 4
    assert made.manifest["rows_as_published"] == 30_712 == MIXTURES["dapo_math_17k", "dolci_math"]
    assert len(set(texts(made))) == made.manifest["rows"] == 19


def test_any_file_of_problems_is_a_set(tmp_path):
    path = tmp_path / "my set.jsonl"
    path.write_text("".join(json.dumps({"q": statement(n), "a": n}) + "\n" for n in range(4)))
    words = [str(path), f"out={tmp_path / 'o'}", "skip=math500"]
    assert refusal(words).setting == "problem_column"
    made = run([*words, "problem_column=q", "answer_column=a"])
    assert made.manifest["rows"] == 4
    assert made.manifest["sets"][0]["name"] == "my_set"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Find  $x + 1$\n.", "find $x+1$.", True),
        ("café", "cafe\u0301", True),
        ("10² apples", "102 apples", False),
        ("x-1", "x1", False),
        ("3 4", "34", False),
        ("a b", "ab", False),
    ],
)
def test_what_counts_as_the_same_statement(one, other, same):
    assert (normalise(one) == normalise(other)) is same


def test_contradicted_problems_can_be_kept(dapo, tmp_path):
    words = ["dapo_math_17k", f"out={tmp_path / 'o'}", f"source={dapo}", "skip=math500", "allow_faults=true"]
    assert run([*words, "contradicted=keep"]).manifest["rows"] == 14


def test_rows_of_one_text_with_two_answers_are_contradicted(tmp_path):
    path = tmp_path / "set.jsonl"
    rows = [{"problem": statement(n), "answer": a} for n, a in ((1, "1"), (2, "4"), (1, "2"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run([path, f"out={tmp_path / 'o'}", "skip=math500"])
    assert made.manifest["rows"] == 1
    assert made.manifest["contradicted"] == ["set:0"]


def jsonl(path, *rows):
    """A file of (statement, answer) or (statement, answer, id)."""
    path.parent.mkdir(exist_ok=True)
    named = [dict(zip(("problem", "answer", "id"), row, strict=False)) for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in named))
    return path


def test_an_id_that_is_used_twice_drops_no_other_problem(tmp_path, aime):
    rows = [(statement(1), 1, "x"), (statement(1), 2, "x"), (statement(2), 3, "x"), (statement(3), 4, "x")]
    of24 = (aime["aime24"][0].statement, 204, "y")
    path = jsonl(tmp_path / "set.jsonl", *rows, (statement(4), 5, "y"), of24)
    made = run([path, f"out={tmp_path / 'o'}", "skip=math500"])
    assert [text.partition("$ and")[0][-3:] for text in texts(made)] == ["n=2", "n=3", "n=4"]
    assert made.manifest["sets"][0]["kept"] == made.manifest["rows"] == 3
    assert made.manifest["contradicted"] == ["set:x"]
    assert made.manifest["contaminated"]["problems"] == 1


def test_sets_that_cannot_be_told_apart_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "d1/cc.jsonl", (statement(1), 1))
    jsonl(tmp_path / "d2/cc.jsonl", (statement(2), 1))
    (tmp_path / "link.jsonl").symlink_to("d1/cc.jsonl")
    for words, problem in (
        ("d1/cc.jsonl+d2/cc.jsonl", "have this name both"),
        ("d1/cc.jsonl+./d1/cc.jsonl", "names a set twice"),
        ("d1/cc.jsonl+link.jsonl", "names a set twice"),
    ):
        error = refusal([words, "out=o", "skip=math500"])
        assert (error.setting, problem in error.problem) == ("set", True)


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [(1.0, 1, 1), ("1", 1, 1), ("0.5", "\\frac12", 1), (["1"], "1", 1), (["1", "2"], "1", 0), ("1", "1.5", 0)],
)
@pytest.mark.parametrize("copy", [statement(1), statement(1).replace(" ", "  ")])
def test_answers_contradict_each_other_if_the_grader_says_so(one, other, copy, rows, tmp_path):
    path = jsonl(tmp_path / "set.jsonl", (statement(1), one), (copy, other), (statement(2), 1))
    settings = parse([str(path), f"out={tmp_path / 'o'}"]).sets[0]
    got = distinct.collect(settings.known, [files.read(path)], settings.columns, lambda *_: None)
    assert len(distinct.merge([got], keep_contradicted=False).problems) == rows + 1


def test_a_set_of_contradictions_alone_is_refused_as_such(tmp_path):
    path = jsonl(tmp_path / "set.jsonl", (statement(1), 1), (statement(1), 2))
    error = refusal([path, f"out={tmp_path / 'o'}", "skip=math500"])
    assert error.setting == "contradicted"
    assert "set:0" in error.problem


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Let N=5 and n=7. Find N.", "Let N=5 and n=7. Find n.", False),
        ("List 1. 5", "List 1.5", False),
        ("List 1. (5)", "List 1.(5)", False),
        ("Find  $x + 1$\n. Then", "Find $x+1$. Then", True),
        ("Find 1 .5", "Find 1.5", False),
        ("caf\u00e9", "cafe\u0301", True),
    ],
)
def test_what_is_merged_as_one_problem(one, other, same):
    assert (canonical(one) == canonical(other)) is same


def test_another_saved_split_below_a_folder_of_the_splits_name(tmp_path):
    """Data of other splits do not count, new data do."""
    path = tmp_path / "train/ds"
    words = [path, f"out={tmp_path / 'o'}", "skip=math500"]
    for size in (1, 2):
        rows = {
            split: Dataset.from_list([{"problem": statement(n), "answer": 1} for n in range(count)])
            for split, count in (("train", size), ("validation", 3))
        }
        DatasetDict(rows).save_to_disk(path)
        made = run(words)
        assert not made.reused
        assert made.manifest["rows"] == size
        assert [name.split("/")[0] for name in made.manifest["sets"][0]["sha256"]] == ["train"]


# --- known counts and digests


def test_a_copy_with_other_counts_is_refused_with_the_numbers(dapo, tmp_path):
    error = refusal(["dapo_math_17k", f"out={tmp_path / 'o'}", f"source={dapo}", "skip=math500"])
    assert "rows 320, expected 1791700" in error.problem
    assert "different texts 16, expected 17398" in error.problem
    assert not (tmp_path / "o").exists()


def test_a_copy_without_repetitions_is_compared_by_its_texts_alone(tmp_path):
    path = tmp_path / "dedup.parquet"
    pd.DataFrame(dapo_rows(copies=1)).to_parquet(path)
    error = refusal(["dapo_math_17k", f"out={tmp_path / 'o'}", f"source={path}", "skip=math500"])
    assert "different texts 16, expected 17398" in error.problem
    assert "rows" not in error.problem


def test_a_file_of_the_pinned_commit_must_have_its_digest(tmp_path, monkeypatch):
    commit = SETS["dapo_math_17k"].revision
    hub_copy(tmp_path / "hub", "BytedTsinghua-SIA/DAPO-Math-17k", commit, "data/dapo-math-17k.parquet", dapo_rows(2))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    words = ["dapo_math_17k", f"out={tmp_path / 'o'}", "skip=math500"]
    assert "sha256 of dapo-math-17k.parquet" in refusal(words).problem
    made = run([*words, "allow_faults=true"])
    assert made.manifest["sets"][0]["commit"] == commit
    assert made.manifest["sets"][0]["pinned"] is True
    assert [check["ok"] for check in made.manifest["checks"]] == [False, False, False]


# --- the hub's cache, through the hub's client


def hub_copy(cache, name, commit, file, rows):
    folder = cache / f"datasets--{name.replace('/', '--')}"
    (folder / "snapshots" / commit / file).parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(folder / "snapshots" / commit / file, index=False)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(commit)


def test_an_unpinned_set_is_pinned_by_its_first_use(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commits = ["1" * 40, "2" * 40]
    words = ["dolci_math", f"out={tmp_path / 'o'}", "skip=math500", "allow_faults=true"]
    sizes = {}
    for size, commit in enumerate(commits, start=3):
        rows = [{"prompt": statement(n), "ground_truth": [str(n)], "dataset": "math"} for n in range(size)]
        hub_copy(tmp_path / "hub", SETS["dolci_math"].hub, commit, "data/train-00000-of-00001.parquet", rows)
        lines = []
        made = run(words, lines)
        sizes[commit] = made.manifest["rows"]
        warned = [line for line in lines if line.startswith("warning")]
        if commit == commits[0]:
            assert commits[0] in warned[0]
            assert made.manifest["sets"][0] | {"commit": commits[0], "pinned": False} == made.manifest["sets"][0]
        else:
            assert made.reused
            assert not warned
    assert sizes == dict.fromkeys(commits, 3)
    made = run([*words, f"revision={commits[1]}"])
    assert (made.manifest["rows"], made.manifest["sets"][0]["commit"]) == (4, commits[1])


def test_without_hub_and_copy_the_way_out_is_named(tmp_path):
    error = refusal(["dolci_math", f"out={tmp_path / 'o'}", "skip=math500"])
    assert error.value == "allenai/Dolci-RL-Zero-Math-7B"
    assert "source=PATH" in error.fix


# --- contamination


@pytest.fixture(scope="module")
def aime():
    return {name: benchmarks.load(name, allow_faults=True).problems for name in ("aime24", "aime25")}


def contaminated_set(tmp_path, aime, math500):
    """Seven problems, of which five are in a benchmark."""
    of24, of25 = aime["aime24"][3].statement, aime["aime25"][7].statement
    longer = "Solve this carefully. " + aime["aime24"][10].statement + " Explain every step."
    numbers = json.loads(math500.read_text().splitlines()[9])["problem"].replace("1009", "77").replace("(9)", "")
    text = json.loads(math500.read_text().splitlines()[4])["problem"].replace(" ", "  ").upper()
    rows = [statement(1), of24.replace(" ", "  "), of25, longer, numbers, text, statement(2)]
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": one, "answer": "1", "id": f"r{n}"}) + "\n" for n, one in enumerate(rows))
    )
    return path


def matches_of(made):
    lines = (made.folder / build.MATCHES).read_text().splitlines()
    return {one["problem"]: one for one in map(json.loads, lines)}


def test_problems_of_benchmarks_are_found_by_text_and_by_word_sequences(tmp_path, aime, math500):
    path = contaminated_set(tmp_path, aime, math500)
    words = [path, f"out={tmp_path / 'o'}", f"benchmark_source.math500={math500}"]
    made = run(words)
    found = matches_of(made)
    assert {name: (one["benchmark"], one["rule"]) for name, one in found.items()} == {
        "train:r1": ("aime24", "text"),
        "train:r2": ("aime25", "text"),
        "train:r3": ("aime24", "ngram"),
        "train:r4": ("math500", "ngram"),
        "train:r5": ("math500", "text"),
    }
    assert found["train:r1"]["matched"] == aime["aime24"][3].id
    assert "77 for 1009" in found["train:r4"]["numbers"]
    assert made.manifest["rows"] == 2
    assert made.manifest["benchmarks"]["math500"]["training_problems"] == 2
    report = (made.folder / build.REPORT).read_text()
    assert "Decontaminated against: aime24, aime25, math500." in report
    assert refusal([*words[:1], f"out={tmp_path / 'p'}", words[2], "contaminated=fail"]).value == "fail"
    kept = run([*words[:1], f"out={tmp_path / 'q'}", words[2], "contaminated=keep"])
    assert (kept.manifest["rows"], kept.manifest["decontaminated_against"]) == (7, [])
    assert "**5 contaminated problems were kept**" in (kept.folder / build.REPORT).read_text()


def test_aime_is_recognised_without_its_statements(tmp_path, aime, math500, monkeypatch):
    path = contaminated_set(tmp_path, aime, math500)
    monkeypatch.setattr(sources, "from_package", lambda name: None)
    made = run([path, f"out={tmp_path / 'o'}", "skip=math500"])
    found = matches_of(made)
    assert set(found) == {"train:r1", "train:r2", "train:r3"}
    assert {one["rule"] for one in found.values()} == {"fingerprint"}
    assert made.manifest["benchmarks"]["aime24"]["statements"] == 0
    assert made.manifest["decontaminated_against"] == ["aime24", "aime25"]


def test_every_aime_problem_is_found_by_its_fingerprint_and_none_in_another(aime):
    for name, problems in aime.items():
        (whole,) = decontaminate.references([name], {}, [])
        finder = decontaminate.Finder(decontaminate.Reference(name, "", {}, whole.fingerprints))
        assert [finder.find(problem).matched for problem in problems] == [problem.id for problem in problems]
        others = [problem for other, found in aime.items() if other != name for problem in found]
        assert not any(finder.find(problem) for problem in others)


def test_a_benchmark_that_is_not_at_hand_ends_it_unless_skipped(dapo, tmp_path):
    words = ["dapo_math_17k", f"out={tmp_path / 'o'}", f"source={dapo}", "allow_faults=true"]
    error = refusal(words)
    assert error.setting == "benchmark_source.math500"
    assert "skip=math500" in error.fix
    made = run([*words, "skip=math500"])
    assert made.manifest["decontaminated_against"] == ["aime24", "aime25"]
    assert made.manifest["not_checked_against"] == ["math500"]
    assert "**Not checked against math500**" in (made.folder / build.REPORT).read_text()
    assert refusal([*words, "skip=math5000"]).setting == "skip"


# --- interruption


def test_an_interrupted_command_goes_on_and_ends_as_an_undisturbed_one(dapo, dolci, tmp_path, monkeypatch):
    def words(out):
        return [
            "dapo_math_17k+dolci_math", f"out={tmp_path / out}", f"source.dapo_math_17k={dapo}",
            f"source.dolci_math={dolci}", "skip=math500", "allow_faults=true",
        ]  # fmt: skip

    def interrupt(*_):
        raise KeyboardInterrupt

    undisturbed = run(words("whole"))
    with monkeypatch.context() as patch:
        patch.setattr(decontaminate, "find", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(words("o"))
    assert not (tmp_path / "o").exists()
    lines = []
    made = run(words("o"), lines)
    assert sum("going on with" in line for line in lines) == 2
    assert made.manifest["rows_sha256"] == undisturbed.manifest["rows_sha256"]
    assert texts(made) == texts(undisturbed)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".o")] == []
    again = run(words("o"))
    assert again.reused
    # Another file in the source's place is read anew.
    pd.DataFrame(dapo_rows(copies=3)[:5]).to_parquet(dapo, index=False)
    assert run(words("o")).manifest["sets"][0]["rows"] == 5


def test_foreign_files_are_not_touched(dapo, tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    assert "thesis.tex" in refusal(["dapo_math_17k", f"out={out}", f"source={dapo}", "skip=math500"]).problem
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


# --- the folder that is written


def test_a_folder_is_written_by_one_command_at_a_time(tmp_path):
    words = [jsonl(tmp_path / "set.jsonl", (statement(1), 1)), f"out={tmp_path / 'o'}", "skip=math500"]
    with alone(tmp_path / "o"):
        error = refusal(words)
    assert (error.setting, str(error.value)) == ("out", str(tmp_path / "o"))
    assert "another run" in error.problem
    assert run(words).manifest["rows"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "set.jsonl"]


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("dangling", "is not there"),
        ("loop", "loop"),
        ("set.jsonl/o", "is a file"),
        ("a\0b", "null"),
        ("x" * 250, "bytes"),
        ("x" * 300, "too long"),
        (".", "in use"),
        ("locked/o", "cannot be written to"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(out, problem, tmp_path, monkeypatch):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    (inside / "dangling").symlink_to("nowhere")
    (inside / "loop").symlink_to("loop")
    (inside / "set.jsonl").write_text("this is not read")
    (inside / "locked").mkdir(mode=0o500)
    monkeypatch.setattr("os.access", lambda path, mode: path.stat().st_mode & 0o200)  # root may write anywhere
    before = sorted(inside.iterdir())
    error = refusal(["set.jsonl", f"out={out}", "skip=math500"])
    assert error.setting == "out"
    assert problem in error.problem.lower()
    assert sorted(inside.iterdir()) == before
    assert list(tmp_path.iterdir()) == [inside]


def test_a_link_to_an_empty_folder_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    run([jsonl(tmp_path / "set.jsonl", (statement(1), 1)), f"out={tmp_path / 'link'}", "skip=math500"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / build.TRAIN).is_file()


# --- the command line


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["dapo"], "set"),
        (["gsm8k+gsm8k"], "set"),
        (["gsm8k", "prompt=Solve"], "prompt.template"),
        (["gsm8k", "prompt=5"], "prompt.template"),
        (["gsm8k", "against=,"], "against"),
        ([""], "set"),
        (["gsm8k+"], "set"),
        (["gsm8k", "contaminated=maybe"], "contaminated"),
        (["gsm8k", "sourse=x"], "sourse"),
        (["gsm8k+dolci_math", "source=x"], "source"),
        (["gsm8k", "source=/nonexistent/a.parquet"], "source"),
        (["gsm8k", "against=aime23", "benchmark_source.math500=x"], "benchmark_source"),
    ],
)
def test_settings_that_cannot_work_are_named(words, setting, tmp_path):
    assert (
        refusal(
            [*words[:1], f"out={tmp_path / 'o'}", *words[1:], *(["skip=math500"] if len(words) < 3 else [])]
        ).setting
        == setting
    )


def test_the_command(dapo, tmp_path, capsys):
    out = tmp_path / "o"
    assert main(["dapo_math_17k", f"out={out}", f"source={dapo}", "skip=math500", "allow_faults=true"]) == 0
    written = capsys.readouterr()
    assert written.out.splitlines()[0] == str(out / build.TRAIN)
    assert "13 rows written" in written.err
    assert "NOT checked against math500" in written.err
    assert main(["dapo_math_17k", f"out={out}", "source=/nonexistent.parquet"]) == 2
    assert main([]) == 2
    assert parse(["gsm8k", "out=--5"]).out.name == "--5"
