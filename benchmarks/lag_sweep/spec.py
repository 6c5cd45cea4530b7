"""From a place in the matrix to what runs there, and to the key under which its record is kept."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from benchmarks.arms import Arm
from benchmarks.lab import LabConfig, identity
from benchmarks.lab.engine import ENGINE_VERSION
from benchmarks.lag_sweep.matched import Radii, arm_of, matched_to
from benchmarks.lag_sweep.settings import LEARNING_RATES, Settings
from benchmarks.lag_sweep.store import Place
from recipes import variants
from recipes.clip import DUAL_CLIP_LOSSES
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError

VERL_CODE_VERSION = 1
"""Part of the key of cells of the real stack: raise it when a change to the code changes the numbers."""

_LR = "actor_rollout_ref.actor.optim.lr"
_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss."


class Identity(NamedTuple):
    """What a cell's record is kept under; see :class:`benchmarks.lag_sweep.store.Cell`."""

    key: str
    config_hash: str
    code_version: int


@dataclass(frozen=True)
class Spec:
    """One cell to run; ``radii`` are the measured ones of a matched arm."""

    place: Place
    settings: Settings
    radii: Radii | None = None

    @property
    def arm(self) -> Arm:
        return arm_of(self.place.arm, self.radii)

    @property
    def _own_words(self) -> tuple[str, ...]:
        """The arm, after what all arms share: what an arm sets itself wins."""
        settings, arm = self.settings, self.arm
        shared = [f"{_LR}={self.place.lr!r}", *settings.overrides]
        if settings.dual_clip is not None and _loss_mode(arm.words) in DUAL_CLIP_LOSSES:
            shared.append(f"dual_clip={settings.dual_clip!r}")
        if settings.quantile_scope is not None and _loss_mode(arm.words).startswith("sat_"):
            shared.append(f"{_POLICY_LOSS}quantile_scope={settings.quantile_scope}")
        return (*shared, *arm.words)

    @property
    def words(self) -> list[str]:
        """For ``python -m recipes.train``, without the folder of the run."""
        return [*self._words_but_seed, f"seed={self.place.seed}"]

    @property
    def _words_but_seed(self) -> tuple[str, ...]:
        s, place = self.settings, self.place
        share = s.prompts_per_step * s.responses_per_prompt // s.micro_batches
        return (
            *self._own_words,
            f"task={place.task}",
            f"model={s.model}",
            f"lag={place.lag if s.schedule == 'broadcast' else f'{s.schedule}{place.lag}'}",
            f"steps={s.steps}",
            f"prompts_per_step={s.prompts_per_step}",
            f"responses_per_prompt={s.responses_per_prompt}",
            f"validate_every={s.eval_every}",
            f"++task.test_size={s.eval_problems}",
            f"checkpoint.every={max(s.steps // 4, 1)}",
            *([] if s.micro_batches == 1 else [f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={share}"]),
        )

    @property
    def lab_config(self) -> LabConfig:
        settings, place = self.settings, self.place
        words = self._own_words
        algorithm = [word.partition("=")[2] for word in words if word.startswith("algorithm=")][-1]
        return LabConfig(
            algorithm=algorithm,
            overrides=tuple(word for word in words if not word.startswith("algorithm=")),
            task=place.task,
            model=settings.model,
            schedule=settings.schedule,
            lag=place.lag,
            steps=settings.steps,
            prompts_per_step=settings.prompts_per_step,
            responses_per_prompt=settings.responses_per_prompt,
            micro_batches=settings.micro_batches,
            noise=settings.noise,
            seed=place.seed,
            eval_every=settings.eval_every,
            eval_problems=settings.eval_problems,
            cache_dir=str(settings.cache),
        )

    def identity(self) -> Identity:
        """The key of the cell's record.

        Raises:
            ConfigError: a setting that cannot work, for instance a step count that the lag does not divide.
        """
        return _identity(self)


@functools.cache
def _identity(spec: Spec) -> Identity:
    if spec.settings.engine == "lab":
        whole = identity(spec.lab_config)
        version = ENGINE_VERSION
        config = {name: value for name, value in whole.items() if name != "engine"}
    else:
        version = VERL_CODE_VERSION
        config = {"config": _composed(spec._words_but_seed), "seed": spec.place.seed}
    code = {"engine": spec.settings.engine, "version": version, "verl": metadata.version("verl")}
    return Identity(_digest({"config": config, "code": code}), _digest(config), version)


def _digest(content: Any) -> str:
    text = json.dumps(_plain(content), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(content: Any) -> Any:
    """Whole numbers as such: 3 and 3.0 are one setting."""
    if isinstance(content, Mapping):
        return {name: _plain(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return int(content) if isinstance(content, float) and content.is_integer() else content


def _loss_mode(words: Iterable[str]) -> str:
    """The loss of an arm: that of its preset."""
    return _loss_of_preset(tuple(word for word in words if word.startswith("algorithm=")))


@functools.lru_cache(maxsize=64)  # most of a second each
def _loss_of_preset(words: tuple[str, ...]) -> str:
    return str(compose(words).actor_rollout_ref.actor.policy_loss.loss_mode)


@functools.lru_cache(maxsize=512)
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    """The derived config of a run, at a fixed place, without what only says how it was asked for."""
    cfg = derive(compose([*words, "run_dir=/run", "cache_dir=/cache"]))
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    # The last two stand in the policy loss, if they are given.
    for name in ("overrides", "choices", "checkpoint", *variants.WORDS):
        content.pop(name, None)
    return content


def places(settings: Settings) -> Iterator[Place]:
    """The matrix, seed by seed, so that one that is cut short has every arm; matched arms last within a seed.

    Raises:
        ConfigError: a task without a default learning rate, and no ``lr``.
    """
    for seed in settings.seeds:
        for task in settings.task:
            if settings.lr is None and task not in LEARNING_RATES:
                having = ", ".join(LEARNING_RATES)
                raise ConfigError("lr", "", f"{task} has no default learning rate (only {having} have)", "give lr=...")
            for lr in settings.lr or (LEARNING_RATES[task],):
                for lag in settings.lags:
                    for arm in sorted(settings.arms, key=lambda name: matched_to(name) is not None):
                        yield Place(task, arm, lr, lag, seed)


def sources(place: Place, settings: Settings) -> list[Place]:
    """The cells whose mean radii a matched arm has: those of its SAT arm at the same place, all seeds."""
    arm = matched_to(place.arm)
    return [place._replace(arm=arm, seed=seed) for seed in settings.seeds] if arm else []


def group_by_key(specs: Iterable[Spec]) -> Mapping[str, list[Spec]]:
    """Specs by key: arms that are the same run share one."""
    found: dict[str, list[Spec]] = {}
    for spec in specs:
        found.setdefault(spec.identity().key, []).append(spec)
    return found
