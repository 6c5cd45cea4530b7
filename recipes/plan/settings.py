"""What a plan assumes, from the config's ``plan`` section; every one may be set, and the section may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.plan.gpus import GPUS, Gpu
from recipes.plan.model import Model
from recipes.plan.quantities import Range

SECTION = "plan"
LEAST, MOST = 1e-6, 1e9
"""Of any number here; beyond, times overflow."""


@dataclass(frozen=True)
class Assumed:
    """A length that a run will show: from ``low`` over ``expected`` to ``high`` tokens."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Settings:
    """The assumptions of a plan.

    Attributes:
        gpu: its type; None for a CPU run that names none.
        baseline: preset of ``algorithm`` to compare with; None for the one that the preset builds on.
        prompt, response: mean tokens of a prompt and of a response.
        train_mfu: share of the peak arithmetic that training reaches.
        decode_efficiency: share of peak bandwidth and arithmetic that decoding reaches.
        step_floor_ms: least milliseconds of a decoding step, whatever the model.
        sync_gb_per_s: 1e9 bytes a second of the weight sync.
        price: US dollars per GPU and hour.
    """

    gpu: Gpu | None
    baseline: str | None
    prompt: Assumed
    response: Assumed
    train_mfu: Range
    decode_efficiency: Range
    step_floor_ms: Range
    sync_gb_per_s: Range
    price: Range | None


@dataclass(frozen=True)
class _Section:
    """Names of the settings, with what holds where they are not set (None: it depends on the run)."""

    gpu: str | None = None
    baseline: str | None = None
    mean_prompt_tokens: Any = None
    mean_response_tokens: Any = None
    train_mfu: Any = None
    decode_efficiency: Any = (0.3, 0.7)
    step_floor_ms: Any = (4.0, 15.0)
    sync_gb_per_s: Any = (5.0, 50.0)
    price_per_gpu_hour: Any = None


def _section(cfg: DictConfig) -> _Section:
    found = OmegaConf.select(cfg, SECTION)
    if found is not None and not isinstance(found, DictConfig):
        raise ConfigError(SECTION, found, "it is a group of settings", f"leave it, and set {SECTION}.NAME=VALUE")
    values = {} if found is None else dict(OmegaConf.to_container(found, resolve=True))  # type: ignore[arg-type]
    names = [one.name for one in fields(_Section)]
    for name in values:
        if name not in names:
            raise ConfigError(
                f"{SECTION}.{name}", values[name], "a plan has no such setting", f"it has {', '.join(names)}"
            )
    return _Section(**{name: value for name, value in values.items() if value is not None})


def _numbers(name: str, value: Any, sizes: Sequence[int], most: float = MOST) -> list[float]:
    """One number, or a list of one of these sizes, rising, above 0 and at most ``most``."""
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    good = all(isinstance(one, int | float) and not isinstance(one, bool) and LEAST <= one <= most for one in numbers)
    if not good or len(numbers) not in (1, *sizes) or numbers != sorted(numbers):
        forms = " or ".join(["a number", *(f"{size} rising numbers" for size in sizes)])
        raise ConfigError(
            f"{SECTION}.{name}", value, f"it must be {forms}, from {LEAST:g} to {most:g}", "write [LOW,HIGH], say"
        )
    return [float(one) for one in numbers]


def _range(name: str, value: Any, most: float = MOST) -> Range:
    numbers = _numbers(name, value, (2,), most)
    return Range(numbers[0], numbers[-1])


def _assumed(name: str, value: Any, limit: int, default: tuple[float, float, float]) -> Assumed:
    if value is None:
        return Assumed(*(max(1.0, share * limit) for share in default))
    numbers = _numbers(name, value, (3,))
    if numbers[-1] > limit:
        raise ConfigError(f"{SECTION}.{name}", value, f"the limit is {limit} tokens", f"keep it within {limit}")
    low, expected, high = numbers if len(numbers) == 3 else numbers * 3
    return Assumed(low, expected, high)


def settings_of(cfg: DictConfig, model: Model) -> Settings:
    """The assumptions for a run.

    Raises:
        ConfigError: an unknown GPU type or setting, or a value out of range.
    """
    section = _section(cfg)
    if section.gpu is not None and (not isinstance(section.gpu, str) or section.gpu not in GPUS):
        raise ConfigError(
            f"{SECTION}.gpu", section.gpu, "there is no such GPU type", f"choose one of {', '.join(GPUS)}"
        )
    on_cpu = cfg.backend.name == "cpu"
    gpu = GPUS[section.gpu] if section.gpu is not None else (None if on_cpu else GPUS["h100"])
    # Of a mixture of experts, small matrices and the exchange of tokens keep it lower.
    usual = (0.08, 0.30) if model.experts else (0.20, 0.45)
    mfu = usual if section.train_mfu is None else section.train_mfu
    price = section.price_per_gpu_hour
    return Settings(
        gpu=gpu,
        baseline=section.baseline,
        prompt=_assumed(
            "mean_prompt_tokens", section.mean_prompt_tokens, cfg.data.max_prompt_length, (0.05, 0.15, 0.5)
        ),
        response=_assumed(
            "mean_response_tokens", section.mean_response_tokens, cfg.data.max_response_length, (0.05, 0.2, 0.6)
        ),
        train_mfu=_range("train_mfu", mfu, most=1.0),
        decode_efficiency=_range("decode_efficiency", section.decode_efficiency, most=1.0),
        step_floor_ms=_range("step_floor_ms", section.step_floor_ms),
        sync_gb_per_s=_range("sync_gb_per_s", section.sync_gb_per_s),
        price=_range("price_per_gpu_hour", price) if price is not None else (gpu.price if gpu else None),
    )
