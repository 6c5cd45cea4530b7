"""What would fail late, or be silently wrong, is refused before anything starts."""

import json

import pandas as pd
import pytest

from recipes import guards
from recipes.compose import choices, compose
from recipes.derive import derive
from recipes.errors import ConfigError


def check(tmp_path, *overrides):
    run_dir = [] if any(item.startswith("run_dir=") for item in overrides) else [f"run_dir={tmp_path / 'run'}"]
    cfg = derive(compose([*run_dir, *overrides]))
    guards.check(cfg)
    return cfg


def test_the_defaults_pass(tmp_path):
    check(tmp_path)


@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_every_preset_passes(tmp_path, algorithm):
    guards.upstream(check(tmp_path, f"algorithm={algorithm}"))


@pytest.mark.parametrize(
    "override", ["algorithm.rollout_correction.bypass_mode=false", "actor_rollout_ref.rollout.top_p=0.9"]
)
def test_the_ratios_guard_rails_are_among_them(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, override)
    assert caught.value.setting == override.split("=")[0]


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("steps=0", "steps"),
        ("steps=1.5", "steps"),
        ("steps=abc", "steps"),
        ("seed=-1", "seed"),
        ("prompts_per_step=0", "prompts_per_step"),
        ("responses_per_prompt=1", "responses_per_prompt"),
        ("trainer_ranks=3", "trainer_ranks"),
        ("rollout_replicas=0", "rollout_replicas"),
        ("dual_clip=1", "dual_clip"),
        ("task.train_size=8", "task.train_size"),
        ("data.train_batch_size=17", "data.train_batch_size"),
        ("data.max_response_length=0", "data.max_response_length"),
        ("actor_rollout_ref.actor.clip_ratio_low=1.2", "actor_rollout_ref.actor.clip_ratio_low"),
        ("actor_rollout_ref.actor.clip_ratio_high=-0.1", "actor_rollout_ref.actor.clip_ratio_high"),
        ("actor_rollout_ref.actor.optim.lr=0", "actor_rollout_ref.actor.optim.lr"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        ("backend.cores=100000", "backend.cores"),
        ("model=/no/such/folder", "model"),
        ("model=hf", "model.path"),
        ("trainer_ranks=0", "trainer_ranks"),
        ("prompts_per_step=abc", "prompts_per_step"),
        ("backend.cores=1.5", "backend.cores"),
        ("task.train_size=abc", "task.train_size"),
        ("task.seed=abc", "task.seed"),
        ("actor_rollout_ref.actor.optim.lr=abc", "actor_rollout_ref.actor.optim.lr"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        ("algorithm.rollout_correction.bypass_mode=abc", "algorithm.rollout_correction.bypass_mode"),
        ("trainer.v1.separate_async.num_warmup_batches=-1", "trainer.v1.separate_async.num_warmup_batches"),
        ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("trainer.total_training_steps=5", "trainer.total_training_steps"),
        ("trainer.nnodes=2", "trainer.nnodes"),
        ("run_dir=/dev/null/x", "run_dir"),
        ("cache_dir=/dev/null/x", "cache_dir"),
        ("resume=true", "resume"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, override, setting):
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, override)
    assert caught.value.setting == setting
    assert "Fix: " in str(caught.value)


def test_bad_data_is_refused(tmp_path):
    names = ("good", "short", "bare", "other", "junk")
    good, short, bare, other, junk = (tmp_path / f"{name}.parquet" for name in names)
    row = {"prompt": [{"role": "user", "content": "1"}], "data_source": "x", "reward_model": {"ground_truth": "1"}}
    pd.DataFrame([row | {"extra_info": {"index": index}} for index in range(16)]).to_parquet(good)
    pd.DataFrame([row | {"extra_info": {"index": 0}}]).to_parquet(short)
    pd.DataFrame([row]).to_parquet(bare)
    pd.DataFrame([{"x": 1}]).to_parquet(other)
    junk.write_text("hello")
    hub = "model=Qwen/Qwen3-0.6B"
    check(tmp_path, f"task={good}", f"task.test_file={good}", hub)
    for train, test, match in (
        (tmp_path / "absent.parquet", good, r"task\.train_file=.*no such file"),
        (good, junk, r"task\.test_file=.*not a parquet file"),
        (other, good, r"task\.train_file=.*no column prompt, data_source, reward_model"),
        (bare, good, r"task\.train_file=.*no extra_info\.index"),
        (short, good, r"task\.train_file=.*takes 16 prompts, and there are 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            check(tmp_path, f"task={train}", f"task.test_file={test}", hub)
    with pytest.raises(ConfigError, match=r"task\.test_file: a parquet task needs it"):
        check(tmp_path, f"task={good}", hub)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"head_dim": 16}, "head_dim 16"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "head_dim 16"),
        ({"head_dim": 32, "max_position_embeddings": 40}, "40 positions"),
    ],
)
def test_a_model_that_cannot_work_is_refused(tmp_path, config, part):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [f"model={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=part):
        check(tmp_path, *arguments)
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 32, "max_position_embeddings": 64}))
    check(tmp_path, *arguments)


def test_a_tiny_model_has_a_length_limit(tmp_path):
    with pytest.raises(ConfigError, match="4096 positions"):
        check(tmp_path, "data.max_response_length=5000")


def test_a_used_run_folder_is_refused_unless_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        check(tmp_path, f"run_dir={tmp_path}")
    check(tmp_path, f"run_dir={tmp_path}", "resume=true")


def test_cuda_without_a_device_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="set backend=cpu"):
        check(tmp_path, "backend=cuda")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "loss_agg_mode"),
        ("actor_rollout_ref.actor.policy_loss.alpha=1.5", "alpha"),
        ("actor_rollout_ref.actor.policy_loss.quantile_scope=foo", "quantile_scope"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=foo", "sat_gspo"),
        ("algorithm.adv_estimator=foo", "adv_estimator=foo"),
    ],
)
def test_what_verls_dataclasses_refuse_is_said_in_one_line(tmp_path, override, part):
    cfg = check(tmp_path, override)
    with pytest.raises(ConfigError) as caught:
        guards.upstream(cfg)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
