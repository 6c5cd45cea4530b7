"""``benchmark=`` in a recipe: what a run validates on is what ``python -m eval`` scores."""

import functools
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from eval import grading, statistics
from eval.benchmarks import load
from eval.prompts import Renderer, conversation, requests
from recipes import benchmark, file_guards, guards, launch, plots, report, resume
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from recipes.models.tokenizer import build_tokenizer
from recipes.schedule import AFTER_TRAINING
from sat_verl.records import RunRecorder, read_rows
from sat_verl.reward import compute_score
from sat_verl.validation import tally

ROOT = Path(__file__).resolve().parent.parent
VAL = "actor_rollout_ref.rollout.val_kwargs"


@functools.cache
def composed(*groups):
    return compose(groups)


def config(tmp_path, *overrides, groups=()):
    folders = [f"run_dir={tmp_path / 'run'}", f"cache_dir={tmp_path / 'cache'}"]
    return derive(OmegaConf.merge(composed(*groups), OmegaConf.from_dotlist([*folders, *overrides])))


# --- settings


def test_a_benchmark_is_sampled_as_the_evaluation_samples(tmp_path):
    cfg = config(tmp_path, "benchmark=aime24")
    evaluation = OmegaConf.load(ROOT / "eval" / "config" / "eval.yaml")
    values = OmegaConf.select(cfg, VAL)
    assert values.n == evaluation.n == 8
    for name in ("temperature", "top_p", "top_k"):
        assert values[name] == evaluation.sampling[name]
    assert values.do_sample
    assert set(cfg.benchmark_data) == set(evaluation.data)


def test_without_one_a_run_validates_as_before(tmp_path):
    cfg = config(tmp_path)
    assert cfg.benchmark is None
    assert OmegaConf.select(cfg, VAL).n == 1
    assert cfg.trainer.test_freq == AFTER_TRAINING


def test_the_number_of_samples_has_one_source(tmp_path):
    assert OmegaConf.select(config(tmp_path, "benchmark=aime24", "benchmark_samples=3"), VAL).n == 3
    with pytest.raises(ConfigError, match="benchmark_samples"):
        config(tmp_path, "benchmark=aime24", f"{VAL}.n=3")


@pytest.mark.parametrize(("every", "lag", "freq"), [(10, 1, 10), (10, 4, 2), (1, 8, 1)])
def test_validations_fall_on_weight_syncs(tmp_path, every, lag, freq):
    cfg = config(tmp_path, f"validate_every={every}", f"lag.steps={lag}")
    assert cfg.trainer.test_freq == freq


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["benchmark=aime42"], "benchmark"),
        (["benchmark=3"], "benchmark"),
        (["benchmark=aime24", "benchmark_samples=0"], "benchmark_samples"),
        (["benchmark=aime24", "benchmark_data.size=3"], "benchmark_data.size"),
        (["benchmark=chain", "benchmark_data.source=x.jsonl"], "benchmark_data.source"),
        (["benchmark=none.jsonl"], "benchmark"),
        (["validate_every=0"], "validate_every"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, overrides, setting):
    with pytest.raises(ConfigError) as caught:
        guards.check(config(tmp_path, *overrides))
    assert caught.value.setting == setting


def test_ones_own_data_need_no_test_file_beside_a_benchmark(tmp_path):
    row = {"prompt": [{"role": "user", "content": "1"}], "data_source": "math", "reward_model": {"ground_truth": "1"}}
    train = tmp_path / "train.parquet"
    pd.DataFrame([row | {"extra_info": {"index": index}} for index in range(16)]).to_parquet(train)
    groups = (f"task={train}", "model=some/model")
    cfg = config(tmp_path, "benchmark=aime24", groups=groups)
    file_guards.files(cfg)
    guards.validation(cfg)
    with pytest.raises(ConfigError) as caught:
        file_guards.files(config(tmp_path, groups=groups))
    assert caught.value.setting == "task.test_file"
    with pytest.raises(ConfigError, match=r"validates on benchmark=aime24"):
        guards.validation(config(tmp_path, f"task.test_file={train}", "benchmark=aime24", groups=groups))


def test_a_run_of_before_there_were_benchmarks_can_be_resumed(tmp_path):
    cfg = config(tmp_path)
    earlier = OmegaConf.to_container(cfg, resolve=True)
    for name in ("benchmark", "benchmark_samples", "benchmark_data", "validate_every"):
        earlier.pop(name)
    Path(cfg.run_dir).mkdir()
    OmegaConf.save(OmegaConf.create(earlier), Path(cfg.run_dir) / "config.yaml")
    resume.check_same(cfg, prepared=False)
    with pytest.raises(ConfigError, match=r"^benchmark=aime24"):
        resume.check_same(config(tmp_path, "benchmark=aime24"), prepared=False)


# --- the same prompts and golds


def read(path):
    return pd.read_parquet(path).to_dict("records")


def test_a_run_validates_on_the_evaluations_prompts_and_golds(tmp_path):
    found = load("aime24")
    rows = read(benchmark.write(found, tmp_path))
    asked = requests(
        found, template=found.prompt, system=None, n=1, seed=0, max_tokens=8, context=None, renderer=None
    )  # fmt: skip
    assert [list(row["prompt"]) for row in rows] == [list(request.messages) for request in asked]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [problem.gold for problem in found.problems]
    assert [row["extra_info"]["problem"] for row in rows] == [problem.id for problem in found.problems]
    assert [row["extra_info"]["index"] for row in rows] == list(range(30))
    assert {row["data_source"] for row in rows} == {"aime24"}


@pytest.mark.parametrize("task", ["chain", "sort", "arithmetic"])
def test_the_tasks_own_test_set_is_the_benchmark_of_its_name(tmp_path, task):
    preset = OmegaConf.load(ROOT / "recipes" / "config" / "task" / f"{task}.yaml").task
    preset.test_size, preset.train_size = 32, 64
    own = read(launch.build_data(OmegaConf.create({"task": preset, "cache_dir": str(tmp_path)}))[1])
    as_benchmark = read(benchmark.write(load(task, size=32), tmp_path))
    for mine, theirs in zip(own, as_benchmark, strict=True):
        assert list(mine["prompt"]) == list(theirs["prompt"])
        for name in ("data_source", "reward_model"):
            assert mine[name] == theirs[name]
        assert mine["extra_info"]["index"] == theirs["extra_info"]["index"]  # which seeds its samples


def test_the_written_rows_are_found_again_and_say_where_they_are_from(tmp_path):
    found = load("aime24")
    path = benchmark.write(found, tmp_path)
    stamp = path.stat().st_mtime_ns
    assert benchmark.write(found, tmp_path) == path
    assert path.stat().st_mtime_ns == stamp
    assert benchmark.write(load("aime24", limit=3), tmp_path) != path
    origin = benchmark.origin(path)
    assert origin["lineage"] == found.lineage
    assert origin["warnings"] == found.warnings
    assert origin["statements_sha256"] == found.statements_sha256


def test_several_right_answers_survive_the_file(tmp_path):
    data = tmp_path / "mine.jsonl"
    rows = [{"problem": "A {x}?", "answer": ["7", r"\frac{1}{2}"]}, {"problem": "B?", "answer": "3"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = read(benchmark.write(load(str(data)), tmp_path))
    assert "A {x}?" in written[0]["prompt"][0]["content"]
    for response, acc in ((r"\boxed{7}", 1), (r"\boxed{\frac{1}{2}}", 1), (r"\boxed{3}", 0)):
        gold = written[0]["reward_model"]["ground_truth"]
        assert compute_score(written[0]["data_source"], response, gold)["acc"] == acc


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(4096).save_pretrained(folder)
    return folder


def test_verl_would_cut_long_prompts_so_they_are_refused(tmp_path, tokenizer_folder):
    found = load("aime24")
    cfg = config(tmp_path, "benchmark=aime24", "data.max_prompt_length=1000")
    cfg.actor_rollout_ref.model.path = str(tokenizer_folder)
    with pytest.raises(ConfigError) as caught:
        benchmark.check_lengths(found, cfg)
    assert caught.value.setting == "data.max_prompt_length"
    longest = int(caught.value.fix.split()[3])
    cfg.data.max_prompt_length = longest
    benchmark.check_lengths(found, cfg)
    loop = SimpleNamespace(rollout_config=SimpleNamespace(prompt_length=longest - 1))
    assert AgentLoopBase._cap_text_prompt_length(loop, list(range(longest))) == list(range(1, longest))


def test_verl_renders_the_evaluations_tokens(tmp_path, tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    renderer, builder = Renderer(tokenizer, None, {}), ContinuousTokenBuilder(tokenizer)
    found = load("aime24", limit=3)
    for row, problem in zip(read(benchmark.write(found, tmp_path)), found.problems, strict=True):
        ours = renderer.token_ids(renderer.text(conversation(problem.statement, found.prompt, None)))
        assert ours == builder.build_initial_tokens(list(row["prompt"]))


# --- the same grades

RESPONSES = [
    "", "7", "14", r"\boxed{204}", r"so \boxed{25} or \boxed{0204}", r"</think> The answer is 204.", r"\boxed{2{04}",
    "Answer: 204", r"\boxed{\frac{408}{2}}", "01244778", "3\n",
]  # fmt: skip


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize(("name", "gold"), [("aime24", "204"), ("chain", "4"), ("sort", "01244778")])
def test_the_reward_and_the_evaluation_grade_alike(name, gold, finish_reason):
    source = load(name, limit=1).problems[0].data_source
    right = 0
    for response in RESPONSES:
        scored = compute_score(source, response, gold, {"finish_reason": finish_reason})
        graded = grading.verdicts(response, gold, data_source=source, finish_reason=finish_reason)["strict"]
        assert scored["acc"] == float(graded.status == "correct")
        assert scored["verdict"].split()[0] == graded.status
        right += int(scored["acc"])
    assert right or finish_reason == "length"


# --- the same number


def test_verdicts_are_counted_by_problem_in_the_order_of_the_rows():
    counted = tally(
        ["a", "b", "c"],
        ["b", "a", "b", "a", "b"],
        ["wrong integer", "correct integer", "grader_error unusable_gold", "truncated cut", None],
    )
    assert counted == {"correct": [1, 0, 0], "counting": [2, 1, 0], "excluded": [0, 2, 0]}
    assert tally([], [], []) == {"correct": [], "counting": [], "excluded": []}


def test_verls_trainer_hands_over_what_is_counted(tmp_path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from sat_verl.trainer import SATAsyncTrainer

    names = list(inspect.signature(PPOTrainer._val_metrics_update).parameters)
    assert names == list(inspect.signature(SATAsyncTrainer._val_metrics_update).parameters)
    trainer = object.__new__(SATAsyncTrainer)
    graded = [compute_score("aime24", text, "7") for text in (r"\boxed{7}", r"\boxed{8}", r"\boxed{7}", "none")]
    infos = {name: [row[name] for row in graded] for name in graded[0]}
    expected = {("aime24", "first"): 2, ("aime24", "second"): 2}
    metrics = trainer._val_metrics_update(
        ["aime24"] * 4, ["second", "second", "first", "second"], infos, [1] * 4, expected_acc_counts=expected
    )
    assert trainer._by_problem == {"correct": [1, 1], "counting": [1, 3], "excluded": [0, 0]}
    assert any(key.startswith("val-core/aime24/acc/mean@") for key in metrics)
    trainer._val_metrics_update(["x"], ["p"], {"reward": [1.0]}, [1])
    assert trainer._by_problem is None
    recorder = RunRecorder(tmp_path)
    recorder.validation(3, {"x": 1.0}, 0.5, {"correct": [1], "counting": [2], "excluded": [0]})
    recorder.validation(4, {"x": 1.0}, 0.5)
    rows = read_rows(tmp_path / "validation.jsonl")
    assert rows[0]["problems"] == {"correct": [1], "counting": [2], "excluded": [0]}
    assert "problems" not in rows[1]


def test_the_score_of_a_validation_is_the_evaluations():
    correct, counting = [8, 4, 0, 1], [8, 8, 8, 7]
    found = benchmark.score({"problems": {"correct": correct, "counting": counting, "excluded": [0, 0, 0, 1]}}, 8)
    interval = statistics.population_interval(correct, counting)
    assert found["rate"] == statistics.average(correct, counting) == pytest.approx((1 + 0.5 + 0 + 1 / 7) / 4)
    assert (found["low"], found["high"]) == (interval.low, interval.high)
    assert (found["problems"], found["samples"], found["not_counted"]) == (4, 8, 1)
    assert benchmark.score({"val-core/x/acc/mean@8": 0.5}, 8) is None
    assert benchmark.score({"problems": {"correct": [0], "counting": [0], "excluded": [8]}}, 8) is None


def test_the_report_shows_score_and_interval(tmp_path):
    before = benchmark.score({"problems": {"correct": [0, 1, 4], "counting": [8, 8, 8], "excluded": [0] * 3}}, 8)
    after = benchmark.score({"problems": {"correct": [8, 2, 4], "counting": [8, 8, 7], "excluded": [0] * 3}}, 8)
    summary = {
        "algorithm": "grpo", "task": "chain", "model": "tiny", "loss_in_worker": {"function": "f"}, "steps": 1,
        "benchmark": {"benchmark": "aime24"}, "success_before": before, "success_after": after,
        "lag": {"schedule": "sync", "steps": 0, "ok": True, "broken_steps": [], "realised": {"0": 1.0}},
        "last_step": {}, "wall_seconds": {"total": 3.0}, "hf_checkpoint": None,
    }  # fmt: skip
    console = Console(record=True, width=140)
    console.print(report.table(summary, tmp_path))
    text = console.export_text()
    assert "aime24 avg@8" in text
    assert f"{after['rate']:.1%} [{after['low']:.1%}, {after['high']:.1%}]" in text
    assert "1: never drawn" in text
    path = plots.draw_curve([{"step": 0, **before}, {"step": 4, **after}], tmp_path, "aime24 avg@8", "title")
    assert path.stat().st_size > 5000
