"""``dry_run=true``: everything about a run that can be checked without starting, downloading or building anything."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from recipes import guards, megatron, routing, upstream
from recipes.engines import NotInstalledError, sglang, vllm
from recipes.models.published import Described, describe
from sat_verl.routes import router_of

ENGINES: dict[str, Callable[[DictConfig, Any], Any]] = {"vllm": vllm.arguments, "sglang": sglang.arguments}
"""By ``rollout.name``, what makes and parses the arguments of an engine."""

PLAN = "recipes.plan"


@dataclass(frozen=True)
class Finding:
    """One line of a dry run.

    Attributes:
        name: of what was looked at.
        state: ``ok``; ``note``, which the run may yet trip over; or ``not checked``, with the reason.
        text: the details.
    """

    name: str
    state: str
    text: str


def findings(cfg: DictConfig) -> Iterator[Finding]:
    """Check a derived config, one finding at a time.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    guards.check_config(cfg)
    yield Finding("config", "ok", "composed, and within the recipes' guard rails")
    described = describe(cfg)
    yield from _model(cfg, described)
    yield from _data(cfg)
    guards.folders(cfg)
    upstream.upstream(cfg)
    made = upstream.dataclasses_of(cfg)
    yield Finding("verl", "ok", f"validate_config, and the dataclasses of {', '.join(made)}")
    if described is None:
        return
    yield from _trainer(cfg, described)
    yield engine_arguments(cfg, described)
    router = router_of(described.numbers)
    if cfg.routing_replay.mode != "none" and router is not None:
        tokens = cfg.data.max_prompt_length + cfg.data.max_response_length
        responses = cfg.prompts_per_step * cfg.responses_per_prompt
        yield Finding("routing replay", "ok", routing.payload(router, tokens, responses))


def _model(cfg: DictConfig, described: Described | None) -> Iterator[Finding]:
    name = cfg.model.path if cfg.model.name == "hf" else cfg.model.name
    if described is None:
        text = f"{name} is not here, and nothing is known of it: neither its splits nor the engines were checked"
        yield Finding("model", "not checked", text)
        return
    yield Finding("model", "ok", f"{name}: its sizes and the splits fit, by {described.source}")
    if described.differing:
        text = f"{described.source} differs from the published numbers: {'; '.join(described.differing)}"
        yield Finding("model", "note", text)


def _data(cfg: DictConfig) -> Iterator[Finding]:
    if missing := guards.missing_files(cfg):
        yield Finding("data", "note", f"not there yet: {', '.join(missing)}")
    else:
        guards.files(cfg)
        yield Finding("data", "ok", "there, in verl's schema" if cfg.task.name == "parquet" else "made by the run")
    if cfg.benchmark is not None:
        yield Finding("benchmark", "not checked", f"{cfg.benchmark} is loaded when the run starts")


def _trainer(cfg: DictConfig, described: Described) -> Iterator[Finding]:
    if not megatron.chosen(cfg):
        return
    if upstream.megatron_here():
        upstream.megatron_arguments(cfg, described.numbers)
        yield Finding("Megatron", "ok", "TransformerConfig and OptimizerConfig made by megatron-core")
    if missing := megatron.missing_packages(cfg):
        yield Finding("Megatron", "note", f"not installed here: {', '.join(missing)}")


def engine_arguments(cfg: DictConfig, described: Described) -> Finding:
    """The rollout engine's arguments, made by verl and read by the engine's parser.

    Raises:
        ConfigError: what verl or the engine says of them.
    """
    engine = cfg.actor_rollout_ref.rollout.name
    name = f"{engine} arguments"
    try:
        ENGINES[engine](cfg, described.numbers)
    except NotInstalledError as error:
        return Finding(name, "not checked", str(error))
    return Finding(name, "ok", "made by verl, read by the engine's own parser")


def run(cfg: DictConfig, console: Console) -> None:
    """Check a derived config and print what was found; the plan of the run follows.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of optional packages, when vLLM is imported
    colours = {"ok": "green", "note": "yellow", "not checked": "yellow"}
    for one in findings(cfg):
        line = Text.assemble((f"{one.state:<12}", colours[one.state]), f"{one.name}: {one.text}")
        console.print(line, soft_wrap=True)
    if importlib.util.find_spec(PLAN) is not None:
        importlib.import_module(PLAN).report(cfg, console, cfg.run_dir)
