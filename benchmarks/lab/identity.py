"""What a run's numbers depend on, and the key under which they are kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from benchmarks.lab.config import LabConfig, recipe
from benchmarks.lab.engine import ENGINE_VERSION
from benchmarks.lab.rollout import base_model
from recipes.models import read_manifest


def identity(config: LabConfig) -> dict[str, Any]:
    """Everything that a run's numbers depend on, apart from library versions and the kind of processor.

    The recipe's settings are part of it as they resolve now: a changed default is another run.
    """
    cfg = recipe(config)
    settings = asdict(config)
    del settings["cache_dir"]
    weights = read_manifest(base_model(config))["files"]["model.safetensors"]
    return {
        "engine": ENGINE_VERSION,
        "config": settings,
        "actor": OmegaConf.to_container(cfg.actor_rollout_ref.actor, resolve=True),
        "task": OmegaConf.to_container(cfg.task, resolve=True),
        "base_weights": weights,
    }


def cell_key(config: LabConfig) -> str:
    """A short digest of :func:`identity`."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
