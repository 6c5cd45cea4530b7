"""Train and test sets as parquet files with verl's columns."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.tasks.artifacts import key_digest, publish, read_intact
from recipes.tasks.base import Problem, TaskSpec
from recipes.tasks.splits import Split, check_size, draw

# Part of the cache key: raise it when a change here or in the tasks changes the rows.
DATA_VERSION = 1


@dataclass(frozen=True)
class ParquetSet:
    """Where a task's files are, and the manifest written beside them."""

    train: Path
    test: Path
    manifest: dict[str, Any]


def make_row(task: TaskSpec, problem: Problem, split: Split, index: int) -> dict[str, Any]:
    """Return one row in verl's schema.

    Args:
        task: the task.
        problem: one of its problems.
        split: ``"train"`` or ``"test"``.
        index: position within the file.

    Returns:
        The row.
    """
    return {
        "data_source": task.data_source,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": task.ability,
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index, "problem": problem.number},
    }


def write_parquet(task: TaskSpec, out_dir: str | Path, train_size: int, test_size: int, seed: int = 0) -> ParquetSet:
    """Write ``train.parquet``, ``test.parquet`` and ``manifest.json``, unless they are there already.

    Args:
        task: the task at its difficulty.
        out_dir: where data sets are kept, each in a folder of its own, named by everything it depends on.
        train_size: rows of the train set.
        test_size: rows of the test set.
        seed: chooses the sample.

    Returns:
        The paths and the manifest; its ``rows_sha256`` identifies the problems whatever wrote the parquet bytes.

    Raises:
        ConfigError: if there are too few distinct problems.
    """
    sizes: dict[Split, int] = {"train": train_size, "test": test_size}
    for split, size in sizes.items():
        check_size(task, split, size)
    key = {
        "task": task.name,
        "difficulty": task.difficulty,
        "seed": seed,
        "train_size": train_size,
        "test_size": test_size,
        "version": DATA_VERSION,
    }

    folder = Path(out_dir) / f"{task.name}-seed{seed}-{key_digest(key)}"

    def write(staged: Path) -> dict[str, Any]:
        rows = {
            split: [
                make_row(task, problem, split, index) for index, problem in enumerate(draw(task, split, size, seed))
            ]
            for split, size in sizes.items()
        }
        for split in sizes:
            _write_rows(rows[split], staged / f"{split}.parquet")
        text = json.dumps(rows, sort_keys=True)
        return {"rows_sha256": hashlib.sha256(text.encode()).hexdigest()}

    manifest = read_intact(folder, key) or publish(folder, key, write, owned=True)
    return ParquetSet(folder / "train.parquet", folder / "test.parquet", manifest)


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    # Imported here: the warm start uses the tasks without any of pandas' start-up time.
    import pandas as pd

    pd.DataFrame(rows).to_parquet(path, index=False)
