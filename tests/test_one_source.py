"""What a run would overwrite, contradict or never read is refused by its name, before anything starts."""

from io import StringIO

import pytest
from rich.console import Console

from recipes import guards, plan
from recipes.compose import compose
from recipes.derive import derive
from recipes.dry_run import run as dry_run
from recipes.errors import ConfigError

DENSE = "recipe=qwen2.5_1.5b_fsdp_vllm"
EXPERTS = "recipe=qwen3_30b_a3b_megatron_vllm"
ROLLOUT = "actor_rollout_ref.rollout."
TENSOR = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"
EXPERT = "actor_rollout_ref.ref.megatron.expert_model_parallel_size"


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        guards.check_config(derive(compose(list(words))))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("words", "setting", "fix"),
    [
        ([DENSE, "actor_rollout_ref.model.path=/other"], "actor_rollout_ref.model.path", "set model=/other"),
        (["actor_rollout_ref.model.path=/other"], "actor_rollout_ref.model.path", "set model=/other"),
        ([DENSE, "data.train_files=/mine.parquet"], "data.train_files", "set task=TRAIN.parquet"),
        (["data.val_files=/mine.parquet"], "data.val_files", "benchmark=NAME"),
        (["custom_reward_function.path=/mine.py"], "custom_reward_function.path", "reward.custom_reward_function.path"),
        ([DENSE, "reward_model.enable=true"], "reward_model.enable", "reward.reward_model.enable"),
        ([DENSE, "reward_model.rollout.name=vllm"], "reward_model.rollout.name", "reward.reward_model.rollout.name"),
        ([EXPERTS, f"{TENSOR}=2"], TENSOR, "leave it out"),
        ([EXPERTS, f"{EXPERT}=2"], EXPERT, "leave it out"),
        ([EXPERTS, "backend=cuda"], "backend", "choose another recipe"),
        (["recipe=qwen3_4b_fsdp_vllm", "backend=cuda_megatron"], "backend", "choose another recipe"),
        ([DENSE, "+trainer_rank=8"], "trainer_rank", "set trainer_ranks without +"),
        ([DENSE, "++foo.bar=1"], "foo.bar", "leave it out"),
        (["recipe="], "recipe", "qwen3_4b_fsdp_vllm"),
        ([DENSE, "data.truncation=foo"], "data.truncation", "error, left, right, middle"),
        ([DENSE, "actor_rollout_ref.actor.kl_loss_type=foo"], "actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
    ],
)  # fmt: skip
def test_refused(words, setting, fix):
    error = refused(*words)
    assert error.setting == setting
    assert fix in error.fix


@pytest.mark.parametrize(
    ("engine", "name", "ours"),
    [
        ("vllm", "gpu_memory_utilization=0.5", "gpu_memory_utilization"),
        ("vllm", "max_num_seqs=16", "max_num_seqs"),
        ("vllm", "tensor_parallel_size=2", "tensor_model_parallel_size"),
        ("sglang", "mem_fraction_static=0.5", "gpu_memory_utilization"),
        ("sglang", "tp_size=2", "tensor_model_parallel_size"),
    ],
)
def test_an_engines_own_argument_does_not_win_over_verls_setting(engine, name, ours):
    words = [f"recipe=qwen3_30b_a3b_megatron_{engine}", f"+{ROLLOUT}engine_kwargs.{engine}.{name}"]
    error = refused(*words)
    assert error.setting == f"{ROLLOUT}engine_kwargs.{engine}.{name.partition('=')[0]}"
    assert error.fix == f"set {ROLLOUT}{ours} instead"


def test_an_argument_of_the_other_engine_is_not_read():
    error = refused(EXPERTS, f"+{ROLLOUT}engine_kwargs.sglang.anything=1")
    assert "the rollout engine is vllm" in error.problem


def test_what_follows_or_is_nobody_elses_passes():
    for words in (
        [DENSE, "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct"],
        [EXPERTS, f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8"],
        [EXPERTS, f"{TENSOR}=4"],
        [DENSE, "+trainer.my_own=1"],
        [DENSE, "actor_rollout_ref.actor.kl_loss_type=k3+"],
    ):
        guards.check_config(derive(compose(words)))


@pytest.mark.parametrize("name", ["aime99", "missing.jsonl"])
def test_a_dry_run_knows_the_names_of_benchmarks(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        dry_run(derive(compose([DENSE, f"benchmark={name}", f"run_dir={tmp_path / 'run'}"])), Console(file=StringIO()))
    assert caught.value.setting == "benchmark"
    assert "aime24" in caught.value.fix


def test_megatron_takes_a_dense_model(tmp_path):
    """verl's token dispatcher is named for every model; Megatron refuses its own default with variable lengths."""
    pytest.importorskip("megatron.core")
    out = StringIO()
    words = ["backend=cpu_megatron", "model=tiny", f"run_dir={tmp_path / 'run'}"]
    dry_run(derive(compose(words)), Console(file=out, width=200))
    assert "TransformerConfig and OptimizerConfig made by megatron-core" in out.getvalue()


def test_a_run_folder_that_cannot_be_made_is_an_error_of_its_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run_dir="):
        plan.build(derive(compose([DENSE, f"run_dir={tmp_path / 'run'}"])), hub=False).write(tmp_path / "file" / "x")
