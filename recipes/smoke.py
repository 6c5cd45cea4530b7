"""``smoke=true``: any recipe's code path, start to end, in two optimizer steps of a few short responses."""

from __future__ import annotations

import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipes import megatron, schedule, values
from recipes.errors import ConfigError

STEPS = 2
RESPONSE_LENGTH = 64
PROBLEMS = 4
"""Held-out problems of a validation."""
_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
)


def apply(cfg: DictConfig) -> None:
    """Shrink a config, before anything is derived from it; without ``smoke=true`` nothing changes.

    Two optimizer steps at a lag of at most 1, on 2 responses to 2 prompts per data-parallel rank, of at most
    :data:`RESPONSE_LENGTH` tokens, with a validation on :data:`PROBLEMS` problems and a checkpoint. Model, engines,
    parallelism, loss, correction, replay and the schedule's kind stay what they are, and prompts keep their length.
    These settings win over those of the command line.

    Raises:
        ConfigError: ``smoke`` is no truth value, goes with ``resume``, or ``lag`` or the ranks cannot work.
    """
    if not values.switch(cfg, "smoke"):
        return
    if cfg.resume:
        raise ConfigError("smoke", True, "it would go on with another run than that of resume", "leave one of them out")
    parts = megatron.data_parallel(cfg)
    lag = min(schedule.schedule_of(cfg).steps, 1)
    smaller = {
        "steps": STEPS,
        "lag.steps": lag,
        "prompts_per_step": 2 * parts,
        "responses_per_prompt": 2,
        "data.max_response_length": min(cfg.data.max_response_length, RESPONSE_LENGTH),
        "checkpoint.every": STEPS,
        "validate_every": None,
        "benchmark_samples": 1,
    }
    if cfg.benchmark is not None:
        smaller["benchmark_data.limit"] = min(cfg.benchmark_data.limit or PROBLEMS, PROBLEMS)
    elif cfg.task.name == "parquet":
        smaller["data.val_max_samples"] = PROBLEMS
    else:
        smaller["task.test_size"] = min(cfg.task.test_size, PROBLEMS)
    for key, value in smaller.items():
        OmegaConf.update(cfg, key, value)
    # What follows from these is derived anew; a rank has 4 responses, and takes two at a time.
    for key in ("data.train_batch_size", "actor_rollout_ref.rollout.max_model_len"):
        OmegaConf.update(cfg, key, None)
    for key in _MICRO_BATCHES:
        size = OmegaConf.select(cfg, key)
        if isinstance(size, int):
            OmegaConf.update(cfg, key, min(size, 2))
    if cfg.run_dir is None:
        cfg.run_dir = str(Path("runs") / f"smoke-{cfg.choices.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}")
