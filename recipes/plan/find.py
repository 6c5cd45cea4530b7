"""Where a run's model is described: its folder, the hub's cache, the numbers that come with the recipes, the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.models.published import PUBLISHED, UnknownModelError, describe
from recipes.plan.model import MissingSizeError, Model, model_of

ARCHITECTURES = Path(__file__).parent / "architectures"


def find(cfg: DictConfig, *, hub: bool = True) -> Model:
    """The model of a composed and derived config.

    Args:
        cfg: composed and derived.
        hub: whether the hub is asked for a model that is not here.

    Raises:
        UnknownModelError: no description of it is here, or none that it can be counted by.
        ConfigError: its description cannot be read.
    """
    name, described, source = _described(cfg, hub=hub)
    override = OmegaConf.select(cfg, "actor_rollout_ref.model.override_config") or {}
    kept = {key: value for key, value in dict(override).items() if key in described}
    try:
        return model_of({**described, **kept}, name, source)
    except MissingSizeError as error:
        problem = f"its config.json has no {error}"
    except Exception as error:  # transformers raises many kinds for what it does not know or cannot build
        lines = str(error).strip().splitlines() or [""]
        problem = f"transformers cannot build it from its config.json ({type(error).__name__}: {lines[0].rstrip('.')})"
    raise UnknownModelError("model", name, problem, "give a causal language model of Hugging Face's format")


def _described(cfg: DictConfig, *, hub: bool) -> tuple[str, Mapping[str, Any], str]:
    """Name, config and source of a run's model."""
    if cfg.model.name != "hf":
        return cfg.model.name, _tiny(cfg.model.name), "recipes/models/architectures.py"
    if OmegaConf.is_missing(cfg.model, "path"):
        raise ConfigError("model.path", "", "model=hf needs it", "write model=PATH_OR_HUB_ID")
    name = str(cfg.model.path)
    here = describe(cfg)
    if here is not None:
        return name, here.numbers, here.source
    known = shipped()
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if short in known:
        file, entry = known[short]
        return name, entry["config"], f"recipes/plan/architectures/{file.name} ({name} has no config.json here)"
    if not hub:
        problem = "no config.json of it is here, and the hub is not asked"
        raise UnknownModelError("model", name, problem, "load the model, or give a folder with its config.json")
    return name, _from_hub(name), "the hub"


def _tiny(name: str) -> Mapping[str, Any]:
    from recipes.models.architectures import ARCHITECTURES as TINY
    from recipes.models.tokenizer import CHARACTERS, SPECIAL

    family = "qwen3_moe" if "num_experts" in TINY[name] else "qwen3"
    return {"model_type": family, "vocab_size": len(SPECIAL + CHARACTERS), **TINY[name]}


def _from_hub(name: str) -> Mapping[str, Any]:
    from transformers import PretrainedConfig

    try:
        described, _ = PretrainedConfig.get_config_dict(name)
    except Exception as error:  # of the network, of the hub, of the name: whichever, it is not here
        names = ", ".join([*PUBLISHED, *(entry["names"][0] for _, entry in shipped().values())])
        fix = f"give a folder with its config.json, or one of {names}"
        problem = "no config.json of it is here, and the hub was not reached"
        raise UnknownModelError("model", name, problem, fix) from error
    return described


def shipped() -> dict[str, tuple[Path, dict[str, Any]]]:
    """The descriptions that come with the recipes, by the lower-case name of a model: file and content."""
    found = {}
    for file in sorted(ARCHITECTURES.glob("*.json")):
        entry = json.loads(file.read_text())
        for name in entry["names"]:
            found[name.lower()] = (file, entry)
    return found
