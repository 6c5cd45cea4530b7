"""Guard rails about files and folders: data, model, run folder, cache (see :mod:`recipes.guards`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pyarrow import ArrowInvalid, parquet

from recipes.errors import ConfigError

PLAN_FILE = "plan.json"
"""Of a dry run, in the folder of the run that it plans."""

PARQUET_COLUMNS = ("data_source", "reward_model")
"""Columns that verl's reward loop reads, beside the prompt's."""


def data_files(cfg: DictConfig) -> dict[str, Path]:
    """The files of a parquet task by their settings; none of another task.

    Raises:
        ConfigError: a setting that names none.
    """
    found: dict[str, Path] = {}
    for key in ("train_file", "test_file") if cfg.task.name == "parquet" else ():
        if key == "test_file" and cfg.task.get(key, "") is None and cfg.benchmark is not None:
            continue
        setting, fix = f"task.{key}", f"add task.{key}=FILE.parquet"
        if OmegaConf.is_missing(cfg.task, key):
            raise ConfigError(setting, "", "a parquet task needs it", fix)
        name = cfg.task[key]
        if not isinstance(name, str):
            raise ConfigError(setting, "null" if name is None else name, "it must be the path of a parquet file", fix)
        found[setting] = Path(name)
    return found


def files(cfg: DictConfig) -> None:
    """Data and reward files are there and of the right form."""
    if cfg.task.name == "parquet":
        for key, path in data_files(cfg).items():
            _parquet(key, path, (cfg.data.prompt_key, *PARQUET_COLUMNS))
        train_file = Path(cfg.task.train_file)
        enough("task.train_file", train_file, parquet.read_metadata(train_file).num_rows, cfg)
        if cfg.model.name != "hf":
            raise ConfigError("model", cfg.model.name, "it is built for a task of ours", "give model=PATH_OR_HUB_ID")
    reward = cfg.reward.custom_reward_function.path
    if reward and not reward.startswith("pkg://") and not Path(reward).expanduser().is_file():
        key = "reward.custom_reward_function.path"
        raise ConfigError(key, reward, "there is no such file", "give a Python file, or pkg://MODULE")


def enough(key: str, value: object, prompts: int, cfg: DictConfig) -> None:
    """There are prompts for one weight-sync window; ``key`` and ``value`` are the setting that says how many."""
    needed = cfg.data.train_batch_size
    if prompts < needed:
        problem = f"one weight-sync window takes {needed} prompts, and there are {prompts}"
        raise ConfigError(key, value, problem, f"give {needed} or more, or lower prompts_per_step or lag.steps")


def _parquet(key: str, path: Path, columns: Sequence[str]) -> None:
    if not path.is_file():
        raise ConfigError(key, path, "there is no such file", "give the path of a parquet file")
    try:
        schema = parquet.read_schema(path)
    except (OSError, ArrowInvalid):
        raise ConfigError(key, path, "it is not a parquet file", "give a parquet file in verl's schema") from None
    missing = [name for name in columns if name not in schema.names]
    if missing:
        has = f"it has no column {', '.join(missing)} (it has {', '.join(schema.names)})"
        raise ConfigError(key, path, has, f"write verl's schema: {', '.join(columns)}")
    extra = schema.field("extra_info").type if "extra_info" in schema.names else None
    if extra is None or not any(extra.field(number).name == "index" for number in range(extra.num_fields)):
        has = "it has no extra_info.index, the number of the row, by which samples are seeded and recorded"
        raise ConfigError(key, path, has, "add it, as verl's own data scripts do")


def model_folder(cfg: DictConfig) -> None:
    """A model that is a folder is there, and has a config; so is a tokenizer of its own."""
    if cfg.model.name == "hf":
        if OmegaConf.is_missing(cfg.model, "path"):
            raise ConfigError("model.path", "", "model=hf needs it", "write model=PATH_OR_HUB_ID")
        path = Path(str(cfg.model.path)).expanduser()
        looks_local = str(cfg.model.path).startswith(("/", ".", "~")) or path.exists()
        if looks_local and not path.is_dir():
            raise ConfigError("model", path, "there is no such folder", "give a Hugging Face model folder or hub id")
        if looks_local and not (path / "config.json").is_file():
            raise ConfigError(
                "model", path, "the folder holds no config.json", "give a Hugging Face model folder or hub id"
            )
    for key in ("actor_rollout_ref.model.tokenizer_path", "data.tokenizer"):
        value = OmegaConf.select(cfg, key, throw_on_missing=False)
        if isinstance(value, str) and value.startswith(("/", ".", "~")) and not Path(value).expanduser().exists():
            raise ConfigError(key, value, "there is no such folder", "leave it out: it is the model's")


def folders(cfg: DictConfig) -> None:
    """Run folder and cache can be written; the run folder is new, or that of a run to resume."""
    run_dir = Path(cfg.run_dir)
    for key in ("run_dir", "cache_dir"):
        path = Path(cfg[key])
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if not nearest.is_dir():
            raise ConfigError(key, path, f"{nearest} is not a folder", "name a folder")
        if not os.access(nearest, os.W_OK):
            raise ConfigError(key, path, f"{nearest} cannot be written", "name a folder that you may write")
    # A dry run leaves its plan.
    used = run_dir.is_dir() and any(entry.name != PLAN_FILE for entry in run_dir.iterdir())
    if used and not cfg.resume:
        raise ConfigError(
            "run_dir", run_dir, "the folder is not empty", f"name a new one, or continue it with resume={run_dir}"
        )
    if cfg.resume and not used:
        raise ConfigError("resume", True, f"there is no run in {run_dir}", "give the run_dir of an earlier run")


def missing_files(cfg: DictConfig) -> list[str]:
    """The settings that name data, and the files that are not there."""
    return [f"{key}={path}" for key, path in data_files(cfg).items() if not path.exists()]
