"""Going on with an earlier run: its settings, its last whole checkpoint, and its records up to there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.errors import ConfigError
from sat_verl import checkpoints
from sat_verl.records import METRICS_FILE, SAMPLES_FILE, VALIDATION_FILE, WAIT_FILE, read_rows

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"

_MAY_CHANGE = (
    "steps", "checkpoint", "resume", "overrides", "ray_kwargs", "sat_verl.keep_checkpoints", "sat_verl.wait_limit_s",
    "trainer.total_training_steps", "trainer.save_freq", "trainer.test_freq", "trainer.resume_mode",
    "trainer.resume_from_path", "trainer.val_before_train", "trainer.logger", "backend.cores",
    "trainer.v1.sampler.sampler_kwargs.stall_timeout_s",
)  # fmt: skip
"""What a resumed run may have otherwise than before: nothing that the numbers depend on."""


def value_of(arguments: Sequence[str]) -> str | None:
    """The folder that ``resume=`` names, if it does."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith("resume=")]
    return values[-1] if values and values[-1] not in ("", "null") else None


def with_earlier(arguments: Sequence[str]) -> list[str]:
    """A command line with ``resume=RUN``, completed by the overrides that RUN was started with; others as they are.

    Raises:
        ConfigError: RUN holds no run, or another folder is named besides.
    """
    named = value_of(arguments)
    if named is None:
        return list(arguments)
    run_dir = Path(named).absolute()
    config = run_dir / CONFIG_FILE
    if not config.is_file():
        raise ConfigError("resume", named, f"there is no run in {run_dir}", "give the folder of an earlier run")
    if any(argument.startswith("run_dir=") for argument in arguments):
        raise ConfigError("run_dir", "", "resume names the run's folder already", "leave run_dir out")
    earlier = OmegaConf.load(config)
    new = [argument for argument in arguments if not argument.startswith("resume=")]
    return [*earlier.overrides, f"cache_dir={earlier.cache_dir}", *new, f"run_dir={run_dir}", f"resume={run_dir}"]


def own_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides that make a run what it is, for a later ``resume``."""
    return [argument for argument in arguments if not argument.startswith(("resume=", "run_dir=", "cache_dir="))]


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by their dotted names."""
    if not isinstance(node, dict) or not node:
        return {prefix.removesuffix("."): node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}{name}.").items()}


def check_same(cfg: DictConfig) -> None:
    """Refuse to go on with other settings than the run had.

    Raises:
        ConfigError: the first setting that differs.
    """
    _check_steps(cfg)
    before = _flat(OmegaConf.to_container(OmegaConf.load(Path(cfg.run_dir) / CONFIG_FILE)))
    now = _flat(OmegaConf.to_container(cfg, resolve=True))
    for key in sorted(before.keys() | now.keys()):
        if any(key == free or key.startswith(free + ".") for free in _MAY_CHANGE):
            continue
        if before.get(key) != now.get(key):
            raise ConfigError(
                key, now.get(key), f"the run in {cfg.run_dir} has {before.get(key)}, and would not be one run any more",
                "leave it as it was, or start a new run",
            )  # fmt: skip


def _check_steps(cfg: DictConfig) -> None:
    """More steps are the same run only where the learning rate does not depend on their number."""
    before, optim = OmegaConf.load(Path(cfg.run_dir) / CONFIG_FILE).steps, cfg.actor_rollout_ref.actor.optim
    steady = optim.lr_scheduler_type == "constant" and (optim.lr_warmup_steps > 0 or not optim.lr_warmup_steps_ratio)
    if cfg.steps != before and not steady:
        raise ConfigError(
            "steps", cfg.steps, f"the run has {before}, and its learning-rate schedule depends on their number",
            "leave it out, or start a new run",
        )  # fmt: skip


def last_step(run_dir: Path) -> int:
    """Optimizer step of a run's last whole checkpoint; 0 where there is none."""
    newest = checkpoints.newest(run_dir / CHECKPOINTS)
    return checkpoints.read_marker(newest)["optimizer_step"] if newest else 0


def go_back(cfg: DictConfig) -> None:
    """Point verl at the last whole checkpoint, and cut the records back to it: what came after will be done again."""
    run_dir = Path(cfg.run_dir)
    checkpoints.remove_broken(run_dir / CHECKPOINTS)
    newest = checkpoints.newest(run_dir / CHECKPOINTS)
    step = checkpoints.read_marker(newest)["global_step"] if newest else -1
    if newest:
        with open_dict(cfg):
            cfg.trainer.resume_mode = "resume_path"
            cfg.trainer.resume_from_path = str(newest)
            cfg.trainer.val_before_train = False
    for name in (METRICS_FILE, VALIDATION_FILE, SAMPLES_FILE):
        _keep(run_dir / name, step)
    (run_dir / WAIT_FILE).unlink(missing_ok=True)


def _keep(path: Path, global_step: int) -> None:
    partial = path.with_name(path.name + ".partial")
    kept = [row for row in read_rows(path) if row["global_step"] <= global_step]
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
    partial.replace(path)
