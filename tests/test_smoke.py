"""``smoke=true`` shrinks any recipe and changes nothing of what it does."""

import pytest
from omegaconf import OmegaConf

from recipes import guards, smoke
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError

SIZES = {
    "smoke", "overrides", "steps", "lag.steps", "prompts_per_step", "responses_per_prompt", "run_dir",
    "checkpoint.every", "validate_every", "benchmark_samples", "task.test_size", "benchmark_data.limit",
    "data.max_response_length", "data.train_batch_size", "data.val_max_samples", "sat_verl.lag.steps",
    "sat_verl.run_dir",
    "actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.rollout_n", "actor_rollout_ref.ref.rollout_n",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size", "critic.rollout_n", "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu", "reward.custom_reward_function", "trainer.total_training_steps",
    "trainer.save_freq", "trainer.default_local_dir", "trainer.experiment_name",
    "trainer.v1.separate_async.parameter_sync_step", "trainer.v1.separate_async.num_warmup_batches",
    "trainer.v1.sat_async.parameter_sync_step", "trainer.v1.sat_async.num_warmup_batches",
    "trainer.v1.sampler.max_off_policy_threshold",
}  # fmt: skip
"""All that may differ between a recipe and its smoke run."""


def flat(config, prefix=""):
    found = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def derived(*overrides):
    return derive(compose(overrides))


@pytest.mark.parametrize(
    "recipe",
    [
        ["algorithm=ppo", "lag=bounded8", "backend=cuda", "prompts_per_step=256", "responses_per_prompt=16"],
        ["backend=cuda", "model=/nonexistent/model", "task=/nonexistent/a.parquet", "benchmark=aime24", "lag=8",
         "trainer_ranks=4", "rollout_replicas=4", "steps=544", "data.max_response_length=32768",
         "actor_rollout_ref.rollout.max_model_len=33792"],
        ["backend=cpu_megatron", "model=tiny_moe", "trainer_ranks=2", "lag=0", "routing_replay=r3",
         "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"],
    ],
    ids=["critic", "benchmark", "megatron"],
)  # fmt: skip
def test_a_recipe_keeps_everything_but_its_sizes(recipe):
    whole, small = derived(*recipe), derived(*recipe, "smoke=true")
    left, right = (flat(OmegaConf.to_container(cfg, resolve=False)) for cfg in (whole, small))
    changed = {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}
    assert changed <= SIZES
    assert small.steps == 2
    assert small.lag.steps == min(whole.lag.steps, 1)
    assert small.data.max_response_length <= smoke.RESPONSE_LENGTH
    assert small.data.max_prompt_length == whole.data.max_prompt_length
    assert (
        small.actor_rollout_ref.rollout.max_model_len == small.data.max_prompt_length + small.data.max_response_length
    )
    assert small.trainer.total_training_steps == 2
    assert "smoke" in small.run_dir
    if whole.benchmark is not None:
        assert (small.benchmark_data.limit, small.actor_rollout_ref.rollout.val_kwargs.n) == (smoke.PROBLEMS, 1)
    else:
        assert small.task.test_size == smoke.PROBLEMS
    guards.sizes(small)


@pytest.fixture(scope="module")
def composed():
    return compose(["task=/nonexistent/a.parquet", "task.test_file=/nonexistent/b.parquet"])


def test_without_it_nothing_changes(composed):
    before = OmegaConf.to_container(composed, resolve=False)
    smoke.apply(composed)
    assert OmegaConf.to_container(composed, resolve=False) == before


def test_validation_on_a_file_is_small(composed):
    cfg = OmegaConf.merge(composed, {"smoke": True})
    smoke.apply(cfg)
    assert cfg.data.val_max_samples == smoke.PROBLEMS


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"smoke": 2}, "smoke"),
        ({"smoke": True, "resume": "runs/x"}, "smoke"),
        ({"smoke": True, "lag": {"steps": "x"}}, "lag.steps"),
    ],
)
def test_what_cannot_work_is_named(settings, setting, composed):
    with pytest.raises(ConfigError) as caught:
        smoke.apply(OmegaConf.merge(composed, settings))
    assert caught.value.setting == setting


@pytest.mark.slow
def test_a_smoke_run_trains_two_steps(tmp_path):
    """The whole stack on the CPU, from a long recipe."""
    import json
    import subprocess
    import sys

    words = ["smoke=true", "lag=8", "steps=512", "prompts_per_step=64", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-m", "recipes.train", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run/checkpoints/global_step_2/actor/huggingface/config.json").is_file()
