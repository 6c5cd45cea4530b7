"""Settings of one laboratory run, and the recipe config that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig

from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError

SCHEDULES = ("broadcast", "constant")


@dataclass(frozen=True)
class LabConfig:
    """One run.

    Args:
        algorithm: a preset of ``recipes/config/algorithm``.
        overrides: further settings in the words of ``python -m recipes.train``, for instance
            ``("actor_rollout_ref.actor.optim.lr=1e-3", "dual_clip=3")``. Learning rate, warm-up, clip radii and all
            else that is not set here come from the recipe.
        task: name of a synthetic task.
        difficulty: the task's settings that differ from its defaults.
        model: name of a tiny model; its warm start (seed 0) is shared by all runs.
        schedule: how the sampler's weights lag, see :func:`batch_age`.
        lag: ``n`` of ``broadcast``, ``k`` of ``constant``.
        steps: optimizer steps.
        prompts_per_step: prompts of one step.
        responses_per_prompt: responses to each of them, the group of the GRPO advantage.
        micro_batches: equal parts, of whole prompt groups where that is possible, that the loss is called on.
        seed: order of the prompts and noise of the samples.
        eval_every: steps between evaluations; there is one before the first step and one after the last.
        eval_problems: held-out problems of an evaluation, one sampled response each.
        cache_dir: where tiny models are kept.

    Raises:
        ConfigError: a setting that cannot work.
    """

    algorithm: str = "sat_gspo"
    overrides: tuple[str, ...] = ()
    task: str = "chain"
    difficulty: Mapping[str, Any] = field(default_factory=dict)
    model: str = "tiny"
    schedule: Literal["broadcast", "constant"] = "broadcast"
    lag: int = 8
    steps: int = 100
    prompts_per_step: int = 16
    responses_per_prompt: int = 8
    micro_batches: int = 1
    seed: int = 0
    eval_every: int = 5
    eval_problems: int = 512
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError("schedule", self.schedule, "there is no such schedule", f"use {' or '.join(SCHEDULES)}")
        low = 1 if self.schedule == "broadcast" else 0
        if self.lag < low:
            raise ConfigError("lag", self.lag, f"the {self.schedule} schedule takes {low} or more", f"set lag={low}")
        for name in ("steps", "micro_batches", "eval_every", "eval_problems"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "it is below 1", f"set {name}=1 or more")
        if self.responses % self.micro_batches:
            problem = f"the {self.responses} responses of a step cannot be split evenly"
            raise ConfigError("micro_batches", self.micro_batches, problem, "choose a divisor")

    @property
    def responses(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.responses_per_prompt


def batch_age(schedule: str, lag: int, step: int) -> int:
    """How many optimizer steps older than the trained weights the weights are that sampled a batch.

    * ``broadcast``: weights go to the sampler every ``lag`` steps, and it works one batch ahead: the ages are a
      sawtooth 1 .. ``lag``, after a first batch of age 0.
    * ``constant``: every batch is exactly ``lag`` steps old, or as old as the run is; 0 is on-policy.

    Args:
        schedule: one of the two.
        lag: its parameter.
        step: number of the batch, from 1.
    """
    if schedule == "constant":
        return min(step - 1, lag)
    return 0 if step == 1 else (step - 2) % lag + 1


def recipe(config: LabConfig) -> DictConfig:
    """The recipe's config of a run: what ``python -m recipes.train`` would hand to verl. Do not modify it."""
    words = (
        f"algorithm={config.algorithm}",
        f"task={config.task}",
        f"model={config.model}",
        f"prompts_per_step={config.prompts_per_step}",
        f"responses_per_prompt={config.responses_per_prompt}",
        *(f"++task.difficulty.{name}={value}" for name, value in config.difficulty.items()),
        *config.overrides,
    )
    return _compose(words)


@functools.lru_cache(maxsize=64)  # most of a second each, and a sweep needs few different ones
def _compose(words: tuple[str, ...]) -> DictConfig:
    return derive(compose(words))
