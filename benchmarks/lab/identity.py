"""What a run's numbers depend on, and the key under which they are kept."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from benchmarks.lab.config import LabConfig, recipe
from benchmarks.lab.engine import ENGINE_VERSION
from benchmarks.lab.rollout import base_model
from recipes.models import read_manifest

# Parts of the actor config that no single process reads.
_UNUSED = ("checkpoint", "engine", "fsdp_config", "profiler", "qat", "router_replay")


def identity(config: LabConfig) -> dict[str, Any]:
    """Everything that a run's numbers depend on, apart from library versions and the kind of processor.

    The recipe's settings are part of it as they resolve now: a changed default is another run, and a setting given in
    ``overrides`` that was the default anyway is the same run.
    """
    cfg = recipe(config)
    settings = asdict(config)
    for name in ("cache_dir", "overrides"):
        del settings[name]
    actor: Any = OmegaConf.to_container(cfg.actor_rollout_ref.actor, resolve=True)
    return {
        "engine": ENGINE_VERSION,
        "config": settings,
        "actor": {name: value for name, value in actor.items() if name not in _UNUSED},
        "correction": OmegaConf.to_container(cfg.algorithm.rollout_correction, resolve=True),
        "normalise_by_std": cfg.algorithm.norm_adv_by_std_in_grpo,
        "max_response_length": cfg.data.max_response_length,
        "task": OmegaConf.to_container(cfg.task, resolve=True),
        "base_weights": _base_weights(config.model, config.task, tuple(config.difficulty.items()), config.cache_dir),
    }


@functools.lru_cache(maxsize=64)
def _base_weights(model: str, task: str, difficulty: tuple[tuple[str, Any], ...], cache_dir: str) -> str:
    """Checksum of the start weights."""
    config = LabConfig(model=model, task=task, difficulty=dict(difficulty), cache_dir=cache_dir)
    return str(read_manifest(base_model(config))["files"]["model.safetensors"])


def cell_key(config: LabConfig) -> str:
    """A short digest of :func:`identity`."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
