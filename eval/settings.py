"""The command line of ``python -m eval``: composed, checked, and refused with a reason before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.compose import Source, compose_from
from recipes.errors import ConfigError

EVAL = Source("eval.config", "eval", ("engine",), Path(__file__).parent / "config")


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of a command line.

    Raises:
        ConfigError: an unknown setting or engine, a value of the wrong kind, or no model.
    """
    cfg, _ = compose_from(EVAL, overrides)
    try:
        if OmegaConf.is_missing(cfg, "model") or not cfg.model:
            raise ConfigError("model", "", "it is missing", "add model=PATH: a model, a run folder or a checkpoint")
        _check(cfg)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "command line"
        raise ConfigError(key, "", str(error).splitlines()[0].rstrip("."), "see eval/config/eval.yaml") from error
    return cfg


def _check(cfg: DictConfig) -> None:
    _whole(cfg, "n", 1)
    _whole(cfg, "seed", 0)
    if cfg.sampling.max_tokens is not None:
        _whole(cfg, "sampling.max_tokens", 1)
    _whole(cfg, "grading.threads", 1)
    _number(cfg, "sampling.temperature", 0.0, math.inf)
    _number(cfg, "sampling.top_p", 0.0, 1.0)
    if cfg.sampling.top_p == 0:
        raise ConfigError("sampling.top_p", 0, "no token is left", "write sampling.temperature=0 for greedy decoding")
    _number(cfg, "grading.deadline_s", 0.01, 3600.0)
    _number(cfg, "max_errors", 0.0, 1.0)
    top_k = cfg.sampling.top_k
    if not isinstance(top_k, int) or isinstance(top_k, bool) or (top_k < 1 and top_k != -1):
        raise ConfigError("sampling.top_k", top_k, "it is neither -1 nor a positive number", "write -1 for no limit")
    for key in ("concurrency", "batch_size"):
        if key in cfg.engine:
            _whole(cfg, f"engine.{key}", 1)
    if cfg.engine.name == "openai":
        _whole(cfg, "engine.retries", 0)
        _number(cfg, "engine.timeout_s", 0.1, math.inf)
        if cfg.engine.api not in ("chat", "completions"):
            raise ConfigError("engine.api", cfg.engine.api, "there is no such interface", "chat or completions")
        if not str(cfg.engine.base_url).startswith(("http://", "https://")):
            raise ConfigError(
                "engine.base_url", cfg.engine.base_url, "it is no web address", "e.g. http://127.0.0.1:8000/v1"
            )


def _whole(cfg: DictConfig, key: str, low: int) -> None:
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(key, value, f"it is not a whole number of at least {low}", "write such a number")


def _number(cfg: DictConfig, key: str, low: float, high: float) -> None:
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high or value != value:
        raise ConfigError(key, value, f"it is not a number from {low:g} to {high:g}", "write such a number")
