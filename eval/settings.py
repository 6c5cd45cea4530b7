"""The command line of ``python -m eval``: composed, checked, and refused with a reason before anything is loaded.

One strict model per section of ``eval/config/eval.yaml``: ``no`` is no boolean here, ``true`` no number, and a key that
no model has is refused even with ``+``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from recipes.compose import Source, compose_from
from recipes.errors import ConfigError

EVAL = Source(
    "eval.config", "eval", ("engine",), Path(__file__).parent / "config", open_sections=("engine.options.",)
)  # fmt: skip
_EMPTY = ("engine.extra_body", "prompt.chat_template_options", "data.difficulty")
"""Sections that take any key and have none by default, so that nothing can be misspelt."""


def _refused(problem: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "fix": fix})


def _greedy_or_warm(value: float) -> float:
    if 0 < value < 0.01:
        raise _refused("vLLM would draw at 0.01 instead", "write 0 for greedy decoding, or 0.01 or more")
    return value


def _top_k(value: int) -> int:
    if value < 1 and value != -1:
        raise _refused("it is neither -1 nor a positive number", "write -1 for no limit")
    return value


def _filled(value: str) -> str:
    if not value.strip():
        raise _refused("it is empty", "name something, or leave the setting out")
    return value


def _web_address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise _refused("it is no web address", "e.g. http://127.0.0.1:8000/v1")
    return value


def _folder(value: str) -> str:
    """A folder, or a path where one can be made."""
    nearest = next((path for path in (Path(value), *Path(value).absolute().parents) if os.path.lexists(path)), Path())
    if not nearest.is_dir():
        raise _refused(f"{nearest} is no folder", "name a folder, or a path where one can be made")
    if not os.access(nearest, os.W_OK):
        raise _refused(f"{nearest} cannot be written to", "name another folder")
    return value


def _without(*names: str) -> AfterValidator:
    """Options without those that the harness itself passes on."""

    def check(options: dict[str, Any]) -> dict[str, Any]:
        taken = [name for name in names if name in options]
        if taken:
            raise _refused(f"{taken[0]} is not an option", "it follows from dtype, model, trust_remote_code, sampling")
        return options

    return AfterValidator(check)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Text = Annotated[str, AfterValidator(_filled)]
Folder = Annotated[str, AfterValidator(_filled), AfterValidator(_folder)]


class SamplingSettings(_Section):
    """How samples are drawn, on every engine: nothing that the model's folder says adds to it."""

    temperature: Annotated[float, Field(ge=0), AfterValidator(_greedy_or_warm)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, AfterValidator(_top_k)]
    max_tokens: Count | None


class PromptSettings(_Section):
    """How a problem becomes a prompt."""

    template: Text | None
    system: str | None
    chat: bool | None
    chat_template_options: dict[str, Any]
    think_open: bool | None


class DataSettings(_Section):
    """Where the problems come from: the arguments of :func:`eval.benchmarks.load`."""

    source: Text | None
    revision: Text | None
    split: Text | None
    limit: Count | None
    problem_column: Text | None
    answer_column: Text | None
    id_column: Text | None
    allow_faults: bool
    size: Count | None
    seed: Seed | None
    difficulty: dict[str, Any] | None


class GradingSettings(_Section):
    """How responses are graded."""

    deadline_s: Annotated[float, Field(ge=0.01, le=3600)]
    threads: Count


class VLLMSettings(_Section):
    """vLLM in this process."""

    name: Literal["vllm"]
    options: Annotated[dict[str, Any], _without("model", "dtype", "max_model_len", "trust_remote_code")]


class SGLangSettings(_Section):
    """SGLang in this process."""

    name: Literal["sglang"]
    concurrency: Count
    options: Annotated[dict[str, Any], _without("model_path", "dtype", "context_length", "trust_remote_code")]


class HFSettings(_Section):
    """transformers in this process."""

    name: Literal["hf"]
    batch_size: Count
    device: Text | None


class OpenAISettings(_Section):
    """A server."""

    name: Literal["openai"]
    base_url: Annotated[str, AfterValidator(_web_address)]
    api: Literal["chat", "completions"]
    served_model: Text | None
    context: Count | None
    concurrency: Count
    timeout_s: Annotated[float, Field(ge=0.1)]
    retries: Annotated[int, Field(ge=0)]
    api_key_env: Text
    extra_body: dict[str, Any]


class Settings(_Section):
    """Everything that ``python -m eval`` can be told."""

    model: Text
    revision: Text | None
    benchmark: Text
    n: Count
    seed: Seed
    out: Folder | None
    sampling: SamplingSettings
    prompt: PromptSettings
    data: DataSettings
    grading: GradingSettings
    max_errors: Annotated[float, Field(ge=0, le=1)]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    trust_remote_code: bool
    cache_dir: Folder
    engine: Annotated[VLLMSettings | SGLangSettings | HFSettings | OpenAISettings, Field(discriminator="name")]


_QUOTES = "write text; what looks like a number, true or null needs quotes of its own: KEY='\"5\"'"
_REASONS = {
    "bool_type": ("it is neither true nor false", "write true or false"),
    "dict_type": ("it is no set of names and values", "write '{name: value}'"),
    "extra_forbidden": ("there is no such setting", "leave it out"),
    "float_type": ("it is not a number", "write a number"),
    "int_type": ("it is not a whole number", "write a whole number"),
    "literal_error": ("", "choose one of these"),
    "model_type": ("it is a section, not a value", "set what is in it: SECTION.KEY=VALUE"),
    "string_type": ("it is not text", _QUOTES),
    "union_tag_invalid": ("there is no such engine", "leave it out, and choose the engine by engine=NAME"),
}
"""By pydantic's kind of error: what to say in place of its words (empty: its words do), and how to mend it."""


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of a command line, every value of the kind that :class:`Settings` says.

    Raises:
        ConfigError: an unknown setting or engine, a value of the wrong kind or out of range, or no model.
    """
    cfg, _ = compose_from(EVAL, [_addable(word) for word in overrides])
    try:
        given = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "command line"
        raise ConfigError(key, "", str(error).splitlines()[0].rstrip("."), "see eval/config/eval.yaml") from error
    assert isinstance(given, dict)
    if given.get("model") in ("???", None, ""):
        raise ConfigError("model", "", "it is missing", "add model=PATH: a model, a run folder or a checkpoint")
    try:
        return OmegaConf.create(Settings.model_validate(given).model_dump())
    except ValidationError as error:
        raise _explained(error) from None


def _addable(word: str) -> str:
    """Keys of the sections that take any are added; Hydra asks for ``+`` otherwise, and refuses ``{a: 1}``."""
    key = word.partition("=")[0]
    free = key == "engine.options" or any(f"{key}.".startswith(f"{section}.") for section in _EMPTY)
    return f"++{word}" if free and "=" in word else word


def _explained(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    kind, place = first["type"], [str(part) for part in first["loc"] if part != "[key]"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        place = ["engine", "name"]
    elif place[0] == "engine" and len(place) > 1:
        del place[1]  # the name of the engine, by which pydantic tells them apart
    if kind == "missing":
        return ConfigError(".".join(place), "", "it is missing", f"write {'.'.join(place)}=VALUE")
    value = first["input"]
    if isinstance(value, dict) and kind != "extra_forbidden":
        value = value.get("name", "") if kind == "union_tag_invalid" else ""
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    problem, fix = _REASONS.get(kind, ("", "write such a value"))
    said = first["msg"].replace("Input should be", "it should be", 1)
    return ConfigError(".".join(place), value, problem or said, first.get("ctx", {}).get("fix") or fix)
