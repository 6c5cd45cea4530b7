"""Going on with an earlier run: its settings, its last whole checkpoint, and its records up to there."""

from __future__ import annotations

import json
import re
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
    "steps", "checkpoint", "resume", "dry_run", "validate_every", "overrides", "plan", "ray_kwargs",
    "sat_verl.keep_checkpoints", "sat_verl.wait_limit_s",
    "trainer.total_training_steps", "trainer.save_freq", "trainer.test_freq", "trainer.resume_mode",
    "trainer.resume_from_path", "trainer.val_before_train", "trainer.logger", "backend.cores",
    "trainer.v1.sampler.sampler_kwargs.stall_timeout_s", "trainer.experiment_name",
    "actor_rollout_ref.rollout.trace.experiment_name",
)  # fmt: skip
"""What a resumed run may have otherwise than before: nothing that the numbers depend on."""


_OURS = (
    "choices.",
    "seed",
    "lag.",
    "task.",
    "model.",
    "benchmark",
    "prompts_per_step",
    "responses_per_prompt",
    "clip_ratio",
    "dual_clip",
    "reference",
    "negative_cap",
    "routing_replay",
)
_PREPARED = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
"""Paths that are written into the config when data and model have been built; other settings repeat them."""


def value_of(arguments: Sequence[str]) -> str | None:
    """The folder that ``resume=`` names, if it does."""
    values = [value for key, value in map(_split, arguments) if key == "resume"]
    if not values or values[-1] == "null":
        return None
    if not values[-1]:
        raise ConfigError("resume", "", "it names no folder", "give the folder of an earlier run, or leave it out")
    return values[-1]


def given(cfg: DictConfig) -> dict[str, str]:
    """Names and values of the settings that the user gave on the command line of a composed config."""
    return dict(map(_split, map(str, cfg.get("overrides") or ())))


def _split(argument: str) -> tuple[str, str]:
    """Name and value of an override, without Hydra's prefixes and quotes."""
    key, _, value = argument.partition("=")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return key.lstrip("+"), value[1:-1] if quoted else value


def _override(key: str, path: object) -> str:
    """``key=path`` in Hydra's grammar, whatever the path holds."""
    text = str(path)
    if re.fullmatch(r"[\w./:~@%-]+", text):
        return f"{key}={text}"
    return f"{key}='" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def with_earlier(arguments: Sequence[str]) -> list[str]:
    """A command line with ``resume=RUN``, completed by the overrides that RUN was started with; others as they are.

    Raises:
        ConfigError: RUN holds no run, or another folder is named besides.
    """
    named = value_of(arguments)
    if named is None:
        return list(arguments)
    run_dir = Path(named).expanduser().resolve()
    if any(key == "run_dir" for key, _ in map(_split, arguments)):
        raise ConfigError("run_dir", "", "resume names the run's folder already", "leave run_dir out")
    earlier = _config_of(run_dir)
    new = [argument for argument in arguments if _split(argument)[0] != "resume"]
    folders = [_override("run_dir", run_dir), _override("resume", run_dir)]
    return [*earlier.overrides, _override("cache_dir", earlier.cache_dir), *new, *folders]


def begin_or_go_on(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Arguments of ``recipes.train`` for a folder: a run with these overrides, or the one that it holds, resumed."""
    begun = (run_dir / CONFIG_FILE).is_file()
    return [f"resume={run_dir}"] if begun else [*overrides, f"run_dir={run_dir}"]


def _config_of(run_dir: Path) -> DictConfig:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError("resume", run_dir, "there is no run in this folder", "give the folder of an earlier run")
    try:
        config = OmegaConf.load(path)
        assert isinstance(config, DictConfig)
        config.overrides, config.cache_dir, config.run_dir, config.steps  # noqa: B018
    except Exception as error:  # YAML's and OmegaConf's many kinds, and undecodable bytes
        problem = f"{CONFIG_FILE} is not that of a run of these recipes ({type(error).__name__})"
        raise ConfigError("resume", run_dir, problem, "give the folder of an earlier run") from None
    return config


def own_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides that make a run what it is, for a later ``resume``."""
    return [argument for argument in arguments if _split(argument)[0] not in ("resume", "run_dir", "cache_dir")]


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by their dotted names."""
    if not isinstance(node, dict) or not node:
        return {prefix.removesuffix("."): node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}{name}.").items()}


def check_same(cfg: DictConfig, *, prepared: bool = True) -> None:
    """Refuse to go on with other settings than the run had.

    Args:
        cfg: the derived config.
        prepared: whether it names the data and the model already, which are then compared as well.

    Raises:
        ConfigError: the first setting that differs, or steps that are done already.
    """
    run_dir = Path(cfg.run_dir)
    earlier = _config_of(run_dir)
    _check_steps(cfg, earlier)
    # A folder may have been moved.
    text = json.dumps(OmegaConf.to_container(earlier)).replace(str(earlier.run_dir), str(run_dir))
    before, now = _flat(json.loads(text)), _flat(OmegaConf.to_container(cfg, resolve=True))
    later = [] if prepared else [before[key] for key in _PREPARED]
    # What the user can have typed comes before what follows from it.
    # What comes with a benchmark means nothing without one (and earlier versions did not have it).
    unused = [] if cfg.get("benchmark") else [key for key in now if key.startswith("benchmark_")]
    for key in sorted(before.keys() | now.keys(), key=lambda key: (not key.startswith(_OURS), key.count("."), key)):
        if (
            key in unused
            or any(key == one or key.startswith(one + ".") for one in _MAY_CHANGE)
            or before.get(key) in later
        ):
            continue
        if before.get(key) != now.get(key):
            raise ConfigError(
                key, now.get(key), f"the run in {cfg.run_dir} has {before.get(key)}, and would not be one run any more",
                "leave it as it was, or start a new run",
            )  # fmt: skip


def steady(optim: DictConfig) -> bool:
    """Whether the learning rate, of verl's FSDP or Megatron optimizer, does not depend on the number of steps."""
    style = optim.get("lr_scheduler_type") or optim.get("lr_decay_style")
    return style == "constant" and (optim.lr_warmup_steps > 0 or not optim.lr_warmup_steps_ratio)


def _check_steps(cfg: DictConfig, earlier: DictConfig) -> None:
    """More steps are the same run only where the learning rate does not depend on their number."""
    before, optim, done = earlier.steps, cfg.actor_rollout_ref.actor.optim, last_step(Path(cfg.run_dir))
    if cfg.steps < before:
        raise ConfigError("steps", cfg.steps, f"the run has {before}", f"leave it out, or set more than {before}")
    if cfg.steps <= done:
        raise ConfigError("steps", cfg.steps, f"the run is finished, {done} steps are done", "set more, to go further")
    if cfg.steps != before and not steady(optim):
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
