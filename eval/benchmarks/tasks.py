"""The recipes' tasks as benchmarks: the very test problems that a recipe with the same settings validates on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import recipes
from eval.schema import Problem
from recipes.errors import ConfigError
from recipes.tasks import TASKS, draw, get_task
from recipes.tasks.parquet import DATA_VERSION

NAMES = tuple(TASKS)
_PRESETS = Path(recipes.__file__).parent / "config" / "task"


def problems(
    name: str, size: int | None = None, seed: int | None = None, difficulty: Mapping[str, Any] | None = None
) -> tuple[list[Problem], str, int]:
    """The test problems of a task.

    Args:
        name: one of :data:`NAMES`.
        size: how many problems; what is not given is as in the recipe's preset, here and below.
        seed: chooses the problems.
        difficulty: settings of the task.

    Returns:
        The problems, with the task's own number for an id, where they are from, and the tokens that a recipe allows
        for a response.

    Raises:
        ConfigError: a difficulty that the task does not have, or a size that its test split does not have.
    """
    whole: Any = OmegaConf.to_container(OmegaConf.load(_PRESETS / f"{name}.yaml"))
    preset = whole["task"]
    size = preset["test_size"] if size is None else size
    seed = preset["seed"] if seed is None else seed
    try:
        task = get_task(name, {**preset["difficulty"], **(difficulty or {})})
        drawn = draw(task, "test", size, seed)
    except ConfigError as error:
        setting = error.setting.replace("task.test_size", "size").removeprefix("task.")
        raise ConfigError(setting, error.value, error.problem, error.fix) from None
    found = [
        Problem(id=str(one.number), statement=one.prompt, gold=one.ground_truth, data_source=task.data_source)
        for one in drawn
    ]
    settings = ", ".join(f"{key} {value}" for key, value in task.difficulty.items())
    lineage = f"recipes.tasks {name} ({settings}), test split, seed {seed}, version {DATA_VERSION}"
    return found, lineage, whole["data"]["max_response_length"]
