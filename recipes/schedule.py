"""verl's settings that follow from the lag schedule; a user sets ``lag``, never these."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from sat_verl.lag import SCHEDULES, LagSchedule

_ASYNC = "trainer.v1.separate_async."
_SAMPLER = "trainer.v1.sampler."
STRATEGIES = ("wait", "drop")
AFTER_TRAINING = 1_000_000_000
"""A validation interval beyond any run: verl validates at the last step all the same."""


def schedule_of(cfg: DictConfig) -> LagSchedule:
    """The lag schedule of a config.

    Raises:
        ConfigError: an unknown schedule, or a lag that is not a whole number of at least 0.
    """
    if cfg.lag.schedule not in SCHEDULES:
        raise ConfigError(
            "lag.schedule", cfg.lag.schedule, "there is no such schedule", f"choose one of {', '.join(SCHEDULES)}"
        )
    steps = cfg.lag.steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise ConfigError("lag.steps", steps, "it must be a whole number of at least 0", "set lag=8, say")
    strategy = cfg.lag.get("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise ConfigError("lag.strategy", strategy, "there is no such strategy", f"choose {' or '.join(STRATEGIES)}")
    if strategy is not None and cfg.lag.schedule != "bounded":
        raise ConfigError("lag.strategy", strategy, "an exact schedule neither waits nor drops", "set lag=bounded8")
    return LagSchedule(cfg.lag.schedule, steps)


def sampler_settings(schedule: LagSchedule, strategy: str | None = None) -> dict[str, Any]:
    """What the sampler is told of a schedule: verl's names under ``trainer.v1.sampler``."""
    return {
        "max_off_policy_threshold": None if schedule.exact else schedule.steps + 1,
        "max_off_policy_strategy": strategy or "wait",
        "sampler_kwargs": {"exact": schedule.exact},
    }


def follow(cfg: DictConfig, key: str, value: Any, source: str) -> None:
    """Set ``key``, which the recipe leaves null, and refuse what the user set it to instead."""
    found = OmegaConf.select(cfg, key)
    if found is not None and found != value:
        raise ConfigError(
            key, found, f"it follows from {source}, which makes it {value}", f"leave it out, set {source}"
        )
    OmegaConf.update(cfg, key, value, force_add=True)


def derive(cfg: DictConfig) -> None:
    """Write what follows from ``lag`` and ``steps`` into the config.

    Raises:
        ConfigError: a setting that contradicts the schedule, or that the schedule cannot be kept with.
    """
    schedule = schedule_of(cfg)
    every = schedule.sync_every
    if schedule.steps and cfg.steps <= schedule.steps:
        raise ConfigError(
            "steps", cfg.steps, f"the run would end before anything is lag.steps={schedule.steps} old",
            f"set steps={2 * schedule.steps} or more",
        )  # fmt: skip
    if cfg.steps % every:
        below = cfg.steps // every * every
        around = f"steps={below} or steps={below + every}"
        raise ConfigError(
            "steps", cfg.steps, f"lag={cfg.lag.steps} syncs the weights every {every} steps, and a run ends with one",
            f"set {around}",
        )  # fmt: skip
    follow(cfg, _ASYNC + "parameter_sync_step", every, "lag.steps")
    follow(cfg, _ASYNC + "num_warmup_batches", schedule.batches_ahead / every, "lag.steps")
    sampler = sampler_settings(schedule, cfg.lag.get("strategy"))
    follow(cfg, _SAMPLER + "max_off_policy_threshold", sampler["max_off_policy_threshold"], "lag.steps")
    follow(cfg, _SAMPLER + "max_off_policy_strategy", sampler["max_off_policy_strategy"], "lag.strategy")
    follow(cfg, _SAMPLER + "sampler_kwargs.exact", sampler["sampler_kwargs"]["exact"], "lag.schedule")
    follow(cfg, "trainer.total_training_steps", cfg.steps // every, "steps")
    follow(cfg, "trainer.save_freq", max(1, round(cfg.checkpoint.every / every)), "checkpoint.every")
    if cfg.validate_every is not None:
        follow(cfg, "trainer.test_freq", max(1, round(cfg.validate_every / every)), "validate_every")
    elif cfg.trainer.test_freq is None:
        cfg.trainer.test_freq = AFTER_TRAINING
    _check(cfg)


_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.actor.ppo_epochs": (
        (1,),
        "an age is counted in optimizer steps, of which a batch must have one",
    ),
    "trainer.critic_warmup": ((0,), "an age is counted in optimizer steps of the policy, and it delays them"),
    "algorithm.filter_groups.enable": ((False, None), "the groups that replace filtered ones would be younger"),
    "trainer.v1.sampler.custom_sampler.name": (("GuardedReplayBuffer",), "another sampler does not keep the schedule"),
    "actor_rollout_ref.actor.checkpoint.async_save": ((False, None), "a checkpoint must be whole when it is counted"),
    "trainer.del_local_ckpt_after_load": ((False, None), "a run could not be resumed a second time"),
    "trainer.total_epochs": ((1_000_000,), "the number of steps ends a run"),
    "trainer.resume_mode": (("disable", "resume_path"), "the launcher finds the last whole checkpoint: use resume=RUN"),
    "actor_rollout_ref.hybrid_engine": ((False,), "rollout on the trainer's devices stops while it trains"),
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": ((False,), "it lends the rollout the trainer's devices"),
    "trainer.val_only": ((False, None), "a run without an optimizer step has no lag"),
    "trainer.max_actor_ckpt_to_keep": ((None,), "verl deletes the old checkpoint before the new one is whole"),
    "trainer.max_critic_ckpt_to_keep": ((None,), "verl deletes the old checkpoint before the new one is whole"),
}


def _check(cfg: DictConfig) -> None:
    for key, (allowed, why) in _ONLY.items():
        value = OmegaConf.select(cfg, key)
        if value not in allowed:
            raise ConfigError(key, value, why, f"leave it at {allowed[0]}")
    if cfg.trainer.v1.sat_async != cfg.trainer.v1.separate_async:
        raise ConfigError(
            "trainer.v1.sat_async", "", "it must be what trainer.v1.separate_async is", "set the latter's options"
        )
    contents = cfg.actor_rollout_ref.actor.checkpoint
    for key in ("save_contents", "load_contents"):
        missing = {"model", "optimizer", "extra"} - set(contents[key])
        if missing:
            raise ConfigError(
                f"actor_rollout_ref.actor.checkpoint.{key}", list(contents[key]), "a resumed run would not be the same "
                f"without {', '.join(sorted(missing))}", "leave it out",
            )  # fmt: skip
