"""Settings of one laboratory run, and the recipe config that they stand for."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig

from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from sat_verl.lag import LagSchedule

EXACT = ("broadcast", "constant")


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
        schedule: how the sampler's weights lag, see :class:`sat_verl.lag.LagSchedule`.
        lag: its ``steps``.
        steps: optimizer steps.
        prompts_per_step: prompts of one step.
        responses_per_prompt: responses to each of them, the group of the GRPO advantage.
        micro_batches: equal parts, of whole prompt groups where that is possible, that the loss is called on.
        noise: standard deviation of the noise on the log-probs that the sampler records, for an engine that does not
            agree with the trainer's; 0 for none.
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
    noise: float = 0.0
    seed: int = 0
    eval_every: int = 5
    eval_problems: int = 512
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        if self.schedule not in EXACT:
            raise ConfigError("schedule", self.schedule, "it is not an exact schedule", f"use {' or '.join(EXACT)}")
        if self.lag < 0:
            raise ConfigError("lag", self.lag, "it is below 0", "set lag=0 or more")
        if not 0 <= self.noise < math.inf:
            raise ConfigError("noise", self.noise, "it is no standard deviation", "set noise=0 or more, 0.03 say")
        for name in ("steps", "micro_batches", "eval_every", "eval_problems"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "it is below 1", f"set {name}=1 or more")
        if self.responses % self.micro_batches:
            problem = f"the {self.responses} responses of a step cannot be split evenly"
            raise ConfigError("micro_batches", self.micro_batches, problem, "choose a divisor")

    @property
    def lag_schedule(self) -> LagSchedule:
        return LagSchedule(self.schedule, self.lag)

    @property
    def responses(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.responses_per_prompt


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


@functools.lru_cache(maxsize=512)  # most of a second each, and a sweep needs few different ones
def _compose(words: tuple[str, ...]) -> DictConfig:
    cfg = derive(compose(words))
    if cfg.algorithm.adv_estimator != "grpo":
        problem = "the laboratory has no critic"
        raise ConfigError("algorithm.adv_estimator", cfg.algorithm.adv_estimator, problem, "use engine=verl")
    if not cfg.algorithm.rollout_correction.bypass_mode and cfg.sat_verl.recompute != "step":
        problem = "the laboratory recomputes with the weights of the step at hand alone"
        raise ConfigError("sat_verl.recompute", cfg.sat_verl.recompute, problem, "set sat_verl.recompute=step")
    if cfg.routing_replay.mode != "none":
        problem = "the laboratory's sampler and trainer are one engine: they never route apart at the same weights"
        raise ConfigError("routing_replay", cfg.routing_replay.mode, problem, "use engine=verl")
    return cfg
