"""``dry_run=true``: everything about a run that can be checked without starting, downloading or building anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from recipes import benchmark, file_guards, guards, megatron, resume, routing, trackers, upstream
from recipes.engines import NotInstalledError, sglang, vllm
from recipes.errors import ConfigError
from recipes.models.published import Described, UnknownModelError, describe
from sat_verl.routes import router_of

ENGINES: dict[str, Callable[[DictConfig, Any], Any]] = {"vllm": vllm.arguments, "sglang": sglang.arguments}
"""By ``rollout.name``, what makes and parses the arguments of an engine."""


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
    yield from _trackers(cfg)
    file_guards.folders(cfg)
    if cfg.resume:
        resume.check_same(cfg, prepared=False)
        yield Finding("resume", "ok", f"goes on after step {resume.last_step(Path(cfg.run_dir))}")
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
    file_guards.model_folder(cfg)
    if missing := file_guards.missing_files(cfg):
        yield Finding("data", "note", f"not there yet: {', '.join(missing)}")
    else:
        file_guards.files(cfg)
        yield Finding("data", "ok", "there, in verl's schema" if cfg.task.name == "parquet" else "made by the run")
    if cfg.benchmark is not None:
        benchmark.known(cfg)
        yield Finding("benchmark", "not checked", f"{cfg.benchmark} is loaded when the run starts")


def _trackers(cfg: DictConfig) -> Iterator[Finding]:
    names = trackers.known(cfg)
    try:
        trackers.check(cfg)
    except ConfigError as error:  # of this machine, which need not be the one that the run is for
        yield Finding("trackers", "note", f"{error.value}: {error.problem}")
    else:
        yield Finding("trackers", "ok", ", ".join(names))


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


def run(cfg: DictConfig, console: Console, run_dir: str | None = None) -> None:
    """Check a derived config and print what was found; the plan of the run follows.

    Args:
        cfg: the derived config.
        console: where it is printed.
        run_dir: the folder that the user named for the run, which the plan is written into (but not beside the records
            of a run that is resumed).

    Raises:
        ConfigError: the first thing that cannot work.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of optional packages, when vLLM is imported
    for one in findings(cfg):
        _show(one, console)
    from recipes import plan  # here: every run imports this module

    try:
        plan.report(cfg, console, None if cfg.resume else run_dir, hub=False)
    except UnknownModelError as error:
        _show(Finding("plan", "not checked", f"not made: {error.value}: {error.problem}"), console)


def _show(one: Finding, console: Console) -> None:
    colours = {"ok": "green", "note": "yellow", "not checked": "yellow"}
    line = Text.assemble((f"{one.state:<12}", colours[one.state]), f"{one.name}: {one.text}")
    console.print(line, soft_wrap=True)
