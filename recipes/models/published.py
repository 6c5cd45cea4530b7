"""What a model's own config says, also of a model that is not on this machine yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from sat_verl.routes import EXPERTS, PER_TOKEN

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_EXPERTS = (*EXPERTS, *PER_TOKEN, "decoder_sparse_step")
"""0 in configs of dense models."""
_FIX = "give a causal language model of Hugging Face's format"

_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
_QWEN3 = _QWEN | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
_QWEN25 = _QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}

PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen3-30B-A3B-Base": _QWEN3 | {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False,
            "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": True, "mlp_only_layers": [],
        },
        "Qwen/Qwen3-4B-Base": _QWEN3 | {
            "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25 | {
            "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
        },
        "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25 | {
            "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        },
    }
)  # fmt: skip
"""Numbers of the recipes' models as their authors published them, written down by hand: used until the model's own
``config.json`` is here, which then wins, and is compared with this."""


class UnknownModelError(ConfigError):
    """A model that a run may be able to load, and of which too little is known here to plan it."""


@dataclass(frozen=True)
class Described:
    """A model's config.

    Attributes:
        numbers: as in its ``config.json``; of a multi-modal model, with those of its text part on top.
        source: that file, or in words where the numbers are from.
        differing: names of the numbers in :data:`PUBLISHED` that the file has otherwise, with both values.
    """

    numbers: Mapping[str, Any]
    source: str
    differing: tuple[str, ...] = ()


def describe(cfg: DictConfig) -> Described | None:
    """The config of a run's model; None of one that is neither on this machine nor in :data:`PUBLISHED`.

    Nothing is downloaded: a model from the hub is looked for in the hub's local cache.

    Raises:
        ConfigError: its ``config.json`` cannot be read, or has sizes that are none.
    """
    if cfg.model.name != "hf":
        from recipes.models.architectures import ARCHITECTURES

        found = ARCHITECTURES.get(cfg.model.name)
        return None if found is None else Described(found, "recipes/models")
    if OmegaConf.is_missing(cfg.model, "path"):
        return None
    name = str(cfg.model.path)
    published, file = PUBLISHED.get(name), _config_file(name)
    if file is not None:
        numbers = read(file)
        return Described(numbers, str(file), _differing(published or {}, numbers))
    return None if published is None else Described(published, "the published numbers (recipes/models/published.py)")


def read(file: Path) -> dict[str, Any]:
    """The numbers of a ``config.json``; the text part of a multi-modal one lies on top of the rest.

    Sizes that differ from layer to layer (lists) are left out: nothing here computes with them.

    Raises:
        ConfigError: not a JSON object in UTF-8, or a size that is no whole number of at least 1.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))  # as transformers, which takes no byte-order mark
    except (OSError, ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        reason = str(error).splitlines()[0]
        raise ConfigError("model", file, f"it cannot be read as JSON in UTF-8 ({reason})", _FIX) from error
    text = found.get("text_config") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(text, dict | None):
        what = "it" if not isinstance(found, dict) else "its text_config"
        raise ConfigError("model", file, f"{what} must be an object of JSON", _FIX)
    numbers = {key: value for key, value in {**found, **(text or {})}.items() if key != "text_config"}
    for names, least in ((_SIZES, 1), (_EXPERTS, 0)):
        for name in names:
            value = numbers.get(name)
            if isinstance(value, list):
                del numbers[name]
            elif value is not None and (type(value) is not int or value < least):
                problem = f"its {name} is {json.dumps(value)}, and must be a whole number of at least {least}"
                raise ConfigError("model", file, problem, _FIX)
    dense = numbers.get("mlp_only_layers")
    if not isinstance(dense, list | None) or not all(type(layer) is int for layer in dense or ()):
        raise ConfigError("model", file, "its mlp_only_layers must be a list of layers", _FIX)
    if any(numbers.get(name) for name in EXPERTS) and numbers.get("num_hidden_layers") is None:
        raise ConfigError("model", file, "it has experts, and no num_hidden_layers", _FIX)
    return numbers


def _config_file(name: str) -> Path | None:
    local = Path(name).expanduser() / "config.json"
    if local.is_file():
        return local
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None


def _differing(published: Mapping[str, Any], numbers: Mapping[str, Any]) -> tuple[str, ...]:
    missing = object()
    # A number that is not in the file has transformers' default, which is not known here.
    found = {key: numbers.get(key, missing) for key in published}
    return tuple(
        f"{key} {found[key]} (published: {value})"
        for key, value in published.items()
        if found[key] is not missing and found[key] != value
    )
