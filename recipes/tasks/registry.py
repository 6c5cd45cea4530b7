"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from recipes.errors import ConfigError
from recipes.tasks.arithmetic import ArithmeticTask
from recipes.tasks.base import TaskSpec
from recipes.tasks.digits import ChainTask, SortTask

TASKS: dict[str, type[TaskSpec]] = {task.name: task for task in (ChainTask, SortTask, ArithmeticTask)}


def get_task(name: str, difficulty: Mapping[str, Any] | None = None) -> TaskSpec:
    """Return a task at a difficulty.

    Args:
        name: one of :data:`TASKS`.
        difficulty: settings that differ from the task's defaults, e.g. ``{"digits": 4}``.

    Returns:
        The task.

    Raises:
        ConfigError: for an unknown task, an unknown setting or a value out of range.
    """
    if name not in TASKS:
        raise ConfigError("task", name, "there is no such task", f"choose one of {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    for setting, value in (difficulty or {}).items():
        if setting not in known:
            raise ConfigError(
                f"task.difficulty.{setting}",
                value,
                f"the {name} task has no such setting",
                f"leave it out; it has {', '.join(known)}",
            )
    return TASKS[name](**(difficulty or {}))
