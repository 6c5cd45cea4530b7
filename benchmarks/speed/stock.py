"""verl's own trainers on a recipe's config, to measure the project's against.

``python -m benchmarks.speed.stock TRAINER RUN_DIR RUNTIME_DIR``, started as :mod:`recipes.driver` is. Where the
environment is a processor without a GPU, all of them run through the project's CPU backend: verl has none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import driver

SYNC, ASYNC, ASYNC_OUR_LOOPS = "verl_sync", "verl_async", "verl_async_our_loops"
TRAINERS = {
    SYNC: "verl's synchronous trainer: engine and trainer take turns on the same devices",
    ASYNC: "verl's separate_async",
    ASYNC_OUR_LOOPS: "verl's separate_async with the project's agent loops",
}
SAMPLERS = {True: "Sync", False: "Async"}


def as_verls(config: DictConfig, trainer: str) -> DictConfig:
    """A recipe's config for one of :data:`TRAINERS`, with verl's sampler at the recipe's staleness bound."""
    mode, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    with open_dict(config):
        mode.trainer_mode = "sync" if trainer == SYNC else "separate_async"
        mode.sampler.custom_sampler = {"path": "pkg://benchmarks.speed.samplers", "name": SAMPLERS[trainer == SYNC]}
        mode.sampler.sampler_kwargs = {"poll_interval_s": mode.sampler.sampler_kwargs.poll_interval_s}
        config.trainer.resume_mode = "disable"
        if trainer != ASYNC_OUR_LOOPS:
            rollout.agent.agent_loop_manager_class = None
        if trainer == SYNC:
            config.actor_rollout_ref.hybrid_engine = True
            rollout.nnodes = 0
            rollout.checkpoint_engine.backend = "naive"
    return config


def main(trainer: str, run_dir: Path, runtime_dir: Path) -> None:
    config: Any = as_verls(driver.load(run_dir, runtime_dir), trainer)
    OmegaConf.save(config, run_dir / f"{trainer}.yaml")
    driver.run(config)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
