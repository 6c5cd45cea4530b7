"""Synthetic tasks with a verifiable answer and a settable difficulty."""

from recipes.tasks.base import Problem, TaskSpec
from recipes.tasks.parquet import ParquetSet, write_parquet
from recipes.tasks.registry import TASKS, get_task
from recipes.tasks.splits import capacity, draw

__all__ = [
    "TASKS",
    "ParquetSet",
    "Problem",
    "TaskSpec",
    "capacity",
    "draw",
    "get_task",
    "write_parquet",
]
