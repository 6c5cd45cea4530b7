"""Where a run's model is described: its folder, the hub's cache, or the descriptions that come with the recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.plan.model import Model, model_of

ARCHITECTURES = Path(__file__).parent / "architectures"


def find(cfg: DictConfig) -> Model:
    """The model of a composed and derived config.

    Raises:
        ConfigError: no description of it is here, or the hub is not reached.
    """
    name, described, source = _described(cfg)
    override = OmegaConf.select(cfg, "actor_rollout_ref.model.override_config") or {}
    kept = {key: value for key, value in dict(override).items() if key in described}
    try:
        return model_of({**described, **kept}, name, source)
    except KeyError as error:
        problem = f"its config.json has no {error.args[0]}"
        raise ConfigError("model", name, problem, "give a causal language model of Hugging Face's format") from error


def _described(cfg: DictConfig) -> tuple[str, Mapping[str, Any], str]:
    """Name, config and source of a run's model."""
    if cfg.model.name != "hf":
        return cfg.model.name, _tiny(cfg.model.name), "recipes/models/architectures.py"
    if OmegaConf.is_missing(cfg.model, "path"):
        raise ConfigError("model.path", "", "model=hf needs it", "write model=PATH_OR_HUB_ID")
    name = str(cfg.model.path)
    file = Path(name).expanduser() / "config.json"
    if file.is_file():
        return name, json.loads(file.read_text()), str(file)
    cached = _cached(name)
    if cached is not None:
        return name, json.loads(cached.read_text()), str(cached)
    known = shipped()
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if short in known:
        file, entry = known[short]
        return name, entry["config"], f"{file.name} of recipes/plan/architectures ({name} has no config.json here)"
    return name, _from_hub(name), "the hub"


def _tiny(name: str) -> Mapping[str, Any]:
    from recipes.models.architectures import ARCHITECTURES as TINY
    from recipes.models.tokenizer import CHARACTERS, SPECIAL

    family = "qwen3_moe" if "num_experts" in TINY[name] else "qwen3"
    return {"model_type": family, "vocab_size": len(SPECIAL + CHARACTERS), **TINY[name]}


def _cached(name: str) -> Path | None:
    """The config in the hub's local cache; no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _from_hub(name: str) -> Mapping[str, Any]:
    from transformers import PretrainedConfig

    try:
        described, _ = PretrainedConfig.get_config_dict(name)
    except Exception as error:  # of the network, of the hub, of the name: whichever, it is not here
        names = ", ".join(sorted(entry["names"][0] for _, entry in shipped().values()))
        fix = f"give a folder with its config.json, or one of {names}"
        raise ConfigError("model", name, "no config.json of it is here, and the hub was not reached", fix) from error
    return described


def shipped() -> dict[str, tuple[Path, dict[str, Any]]]:
    """The descriptions that come with the recipes, by the lower-case name of a model: file and content."""
    found = {}
    for file in sorted(ARCHITECTURES.glob("*.json")):
        entry = json.loads(file.read_text())
        for name in entry["names"]:
            found[name.lower()] = (file, entry)
    return found
