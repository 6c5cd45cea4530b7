"""Warm-started models on disk: built once, keyed by what they depend on, checked before reuse."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from recipes.models.architectures import ARCHITECTURES, MAX_POSITIONS, build_model, check_name
from recipes.models.tokenizer import build_tokenizer
from recipes.models.warm_start import Progress, WarmStart, default_warm_start, train
from recipes.tasks import TaskSpec, get_task
from recipes.tasks.artifacts import MANIFEST, check_replaceable, key_digest, publish, read_intact

# Part of the cache key: raise it when a change to the code changes the weights it builds.
MODEL_VERSION = 2


def _silent(_: Progress) -> None:
    return None


def ensure_model(
    name: str,
    task: str,
    difficulty: Mapping[str, Any] | None = None,
    seed: int = 0,
    cache_dir: str | Path = ".cache/models",
    settings: WarmStart | None = None,
    report: Callable[[Progress], None] = _silent,
) -> Path:
    """Return a warm-started model from the cache, building it if need be.

    Args:
        name: ``"tiny"`` or ``"tiny_moe"``.
        task: name of the task.
        difficulty: the task's settings that differ from its defaults.
        seed: fixes weights, problems, slips and samples.
        cache_dir: where models are kept, one folder per key.
        settings: of the warm start; the task's defaults if None.
        report: called at every evaluation of the warm start.

    Returns:
        A folder in Hugging Face format with a ``manifest.json``. A damaged one is built again.

    Raises:
        ConfigError: for an unknown model or task, or settings that cannot work.
    """
    spec = get_task(task, difficulty)
    settings = settings or default_warm_start(task)
    key = model_key(name, spec, seed, settings)
    folder = Path(cache_dir) / f"{name}-{task}-seed{seed}-{key_digest(key)}"
    _build(folder, key, spec, seed, settings, report, owned=True)
    return folder


def build_model_at(
    out: str | Path,
    name: str,
    task: str,
    difficulty: Mapping[str, Any] | None = None,
    seed: int = 0,
    settings: WarmStart | None = None,
    report: Callable[[Progress], None] = _silent,
) -> dict[str, Any]:
    """Put a warm-started model into a folder of the caller's choice, unless it is there already.

    Args:
        out: the folder; a model of other settings that was built here is replaced, anything else is left alone.
        name: as for :func:`ensure_model`, like the other arguments.
        task: name of the task.
        difficulty: the task's settings that differ from its defaults.
        seed: fixes weights, problems, slips and samples.
        settings: of the warm start; the task's defaults if None.
        report: called at every evaluation of the warm start.

    Returns:
        The manifest.

    Raises:
        ConfigError: as :func:`ensure_model`, and if ``out`` holds files that were not built here.
    """
    spec = get_task(task, difficulty)
    settings = settings or default_warm_start(task)
    return _build(Path(out), model_key(name, spec, seed, settings), spec, seed, settings, report, owned=False)


def model_key(name: str, task: TaskSpec, seed: int, settings: WarmStart) -> dict[str, Any]:
    """Return everything the weights depend on, apart from the machine and the library versions.

    Args:
        name: of the model.
        task: what it learns.
        seed: of the build.
        settings: of the warm start.

    Returns:
        The key.

    Raises:
        ConfigError: for an unknown name.
    """
    check_name(name)
    return {
        "name": name,
        "architecture": ARCHITECTURES[name],
        "task": task.name,
        "difficulty": task.difficulty,
        "seed": seed,
        "warm_start": asdict(settings),
        "version": MODEL_VERSION,
    }


def _build(
    folder: Path,
    key: dict[str, Any],
    task: TaskSpec,
    seed: int,
    settings: WarmStart,
    report: Callable[[Progress], None],
    owned: bool,
) -> dict[str, Any]:
    manifest = read_intact(folder, key)
    if manifest is not None:
        return manifest
    if not owned:
        check_replaceable(folder)  # before the training rather than after it
    tokenizer = build_tokenizer(MAX_POSITIONS)
    model = build_model(key["name"], tokenizer, seed)
    # Trained in memory: nothing is on disk until the model is complete.
    measured = train(model, tokenizer, task, settings, seed, report)

    def write(staged: Path) -> dict[str, Any]:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "measured": measured,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": numpy.__version__,
            },
        }

    return publish(folder, key, write, owned)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a model built here.

    Args:
        folder: the model's folder.

    Returns:
        The manifest: key, parameters, measured, versions, files.

    Raises:
        FileNotFoundError: if the folder has none.
    """
    manifest: dict[str, Any] = json.loads((Path(folder) / MANIFEST).read_text())
    return manifest
