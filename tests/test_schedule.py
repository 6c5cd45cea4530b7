"""`lag` on the command line, what follows from it, and what cannot be."""

import pytest
from omegaconf import OmegaConf

from recipes.compose import compose, expand_short_forms
from recipes.derive import derive
from recipes.errors import ConfigError

ASYNC = "trainer.v1.separate_async."
SAMPLER = "trainer.v1.sampler."


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("lag=8", ["lag=broadcast", "lag.steps=8"]),
        ("lag=0", ["lag=broadcast", "lag.steps=0"]),
        ("lag=constant8", ["lag=constant", "lag.steps=8"]),
        ("lag=bounded12", ["lag=bounded", "lag.steps=12"]),
        ("lag=constant", ["lag=constant"]),
        ("lag.steps=8", ["lag.steps=8"]),
    ],
)
def test_short_forms(short, long):
    assert expand_short_forms([short]) == long


@pytest.mark.parametrize("text", ["lag=eight", "lag=-1", "lag=1.5", "lag=sometimes8", "lag=1,8"])
def test_a_lag_that_is_none(text):
    with pytest.raises(ConfigError, match=r"write lag=8, lag=constant8 or lag=bounded8"):
        expand_short_forms([text])


def derived(*overrides):
    return derive(compose(["run_dir=/tmp/x", *overrides]))


def settings(cfg):
    names = (ASYNC + "parameter_sync_step", ASYNC + "num_warmup_batches", SAMPLER + "max_off_policy_threshold")
    more = (SAMPLER + "max_off_policy_strategy", SAMPLER + "sampler_kwargs.exact", "data.train_batch_size")
    return [OmegaConf.select(cfg, name) for name in names + more]


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        ("lag=8", [8, 1 / 8, None, "wait", True, 128]),
        ("lag=1", [1, 1, None, "wait", True, 16]),
        ("lag=0", [1, 0, None, "wait", True, 16]),
        ("lag=constant8", [1, 8, None, "wait", True, 16]),
        ("lag=constant0", [1, 0, None, "wait", True, 16]),
        ("lag=bounded8", [1, 8, 9, "wait", False, 16]),
        ("lag=bounded0", [1, 0, None, "wait", True, 16]),
    ],
)
def test_verls_settings_follow(lag, expected):
    cfg = derived(lag)
    assert settings(cfg) == expected
    assert cfg.trainer.v1.sat_async.parameter_sync_step == expected[0]


def test_dropping_instead_of_waiting():
    assert settings(derived("lag=bounded4", "lag.strategy=drop"))[2:4] == [5, "drop"]


def test_steps_and_checkpoints_count_optimizer_steps():
    cfg = derived("lag=8", "steps=40")
    assert cfg.trainer.total_training_steps == 5
    assert cfg.trainer.save_freq == 1
    assert derived("lag=8", "steps=40", "checkpoint.every=24").trainer.save_freq == 3
    assert derived("lag=constant8", "checkpoint.every=24").trainer.save_freq == 24


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        derived(*overrides)
    return caught.value


def test_a_run_ends_with_a_sync():
    error = refused("lag=8", "steps=42")
    assert error.setting == "steps"
    assert "steps=40 or steps=48" in error.fix
    assert refused("lag=8", "steps=5").fix == "set steps=16 or more"


@pytest.mark.parametrize("lag", ["lag=8", "lag=constant8", "lag=bounded8"])
def test_a_run_must_outlast_its_lag(lag):
    error = refused(lag, "steps=8")
    assert error.setting == "steps"
    assert "before anything is lag.steps=8 old" in error.problem


def test_an_exact_schedule_has_no_strategy():
    assert refused("lag=8", "+lag.strategy=drop").setting == "lag.strategy"


def test_verl_reads_the_options_under_the_trainers_name():
    assert refused("lag=8", "++trainer.v1.sat_async.parameter_sync_step=4").setting == "trainer.v1.sat_async"


def test_checkpoints_hold_what_a_resume_needs():
    assert "optimizer" in refused("actor_rollout_ref.actor.checkpoint.save_contents=[model]").problem


@pytest.mark.parametrize(
    ("key", "value", "source"),
    [
        (ASYNC + "parameter_sync_step", 2, "lag.steps"),
        (ASYNC + "num_warmup_batches", 3, "lag.steps"),
        (SAMPLER + "max_off_policy_threshold", 3, "lag.steps"),
        (SAMPLER + "max_off_policy_strategy", "drop", "lag.strategy"),
        (SAMPLER + "sampler_kwargs.exact", "false", "lag.schedule"),
        ("trainer.total_training_steps", 7, "steps"),
        ("trainer.save_freq", 7, "checkpoint.every"),
        ("sat_verl.lag.steps", 4, "lag.steps"),
        ("sat_verl.keep_checkpoints", -1, "checkpoint.keep"),
        ("sat_verl.seed", 5, "seed"),
        ("actor_rollout_ref.actor.clip_ratio_c", 3, "dual_clip"),
        ("trainer.default_local_dir", "/tmp/elsewhere", "run_dir"),
    ],
)
def test_what_follows_from_the_lag_is_not_the_users_to_set(key, value, source):
    error = refused("lag=1", f"{key}={value}")
    assert error.setting == key
    assert source in error.problem + error.fix


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.critic_warmup=3",
        "algorithm.filter_groups.enable=true",
        "trainer.v1.sampler.custom_sampler.name=Other",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        "trainer.del_local_ckpt_after_load=true",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.total_epochs=1",
        "trainer.resume_mode=auto",
        "trainer.val_only=true",
        "actor_rollout_ref.hybrid_engine=true",
    ],
)
def test_what_a_schedule_cannot_be_kept_with(override):
    assert refused(f"++{override}").setting == override.partition("=")[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sat_verl.on_nonfinite", "maybe"),
        ("sat_verl.wait_limit_s", 0),
        ("sat_verl.wait_limit_s", "long"),
        ("trainer.v1.sampler.sampler_kwargs.failure_limit", 0),
        ("actor_rollout_ref.actor.grad_clip", 0),
        ("checkpoint", 5),
        ("checkpoint.every", 0),
        ("sat_verl", "null"),
        ("run_dir", 5),
        ("actor_rollout_ref.actor.clip_ratio", 0.3),
    ],
)
def test_values_out_of_range_name_their_setting(key, value):
    assert refused(f"{key}={value}").setting == key


@pytest.mark.parametrize(("key", "value"), [("lag.schedule", "weekly"), ("lag.strategy", "hope"), ("lag.steps", "1.5")])
def test_values_of_the_group(key, value):
    error = refused(f"++{key}={value}")
    assert error.setting == key
