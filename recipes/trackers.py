"""Where a run's metrics go beside its own records: verl's ``Tracking``, chosen by ``trainer.logger``.

Checked before anything starts: verl itself would find a name that it does not know, or a package that is missing, in a
Ray worker after the engines are up.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from recipes.errors import ConfigError

KEY = "trainer.logger"


@dataclass(frozen=True)
class Tracker:
    """One of verl's trackers.

    Attributes:
        modules: what it imports; all are needed.
        install: how to get them.
        needs: environment variables without which it fails.
        places: environment variables by which it writes into the run folder, with the place there.
    """

    modules: tuple[str, ...] = ()
    install: str = ""
    needs: tuple[str, ...] = ()
    places: Mapping[str, str] | None = None


TRACKERS = {
    "console": Tracker(),
    "file": Tracker(places={"VERL_FILE_LOGGER_PATH": "verl_metrics.jsonl"}),
    "wandb": Tracker(("wandb",), "wandb", places={"WANDB_DIR": ""}),
    "tensorboard": Tracker(("tensorboard",), "tensorboard", places={"TENSORBOARD_DIR": "tensorboard"}),
    "mlflow": Tracker(("mlflow",), "mlflow"),
    "swanlab": Tracker(("swanlab",), "swanlab", places={"SWANLAB_LOG_DIR": "swanlog"}),
    "trackio": Tracker(("trackio",), "trackio"),
    "clearml": Tracker(("clearml",), "clearml"),
    "vemlp_wandb": Tracker(
        ("volcengine_ml_platform",),
        "volcengine-ml-platform",
        ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION"),
    ),
    "rl_insight": Tracker(("rl_insight",), "rl-insight"),
}
"""By the name that verl knows it by."""


def chosen(cfg: DictConfig) -> list[str]:
    """Names of the trackers of a config.

    Raises:
        ConfigError: neither a name nor a list of names, none at all, or one twice.
    """
    value = cfg.trainer.logger
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, ListConfig) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(KEY, value, "it must be a list of trackers", f"set {KEY}=[console,file]")
    if len(set(names)) < len(names):
        raise ConfigError(KEY, value, "it names a tracker twice", "name each once")
    return names


def known(cfg: DictConfig) -> list[str]:
    """Names of the trackers of a config, which verl has.

    Raises:
        ConfigError: see :func:`chosen`, and an unknown tracker.
    """
    names = chosen(cfg)
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(KEY, name, "verl has no such tracker", f"choose among {', '.join(TRACKERS)}")
    return names


def check(cfg: DictConfig) -> None:
    """Refuse trackers that would fail.

    Raises:
        ConfigError: an unknown tracker, one whose package is not installed, or one without its credentials.
    """
    for name in known(cfg):
        tracker = TRACKERS[name]
        missing = [module for module in tracker.modules if importlib.util.find_spec(module) is None]
        if missing:
            raise ConfigError(
                KEY,
                name,
                f"its package {missing[0]} is not installed",
                f"pip install {tracker.install}, or leave it out",
            )
        unset = [variable for variable in tracker.needs if not os.environ.get(variable)]
        if unset:
            raise ConfigError(
                KEY, name, f"it reads {', '.join(unset)}, which are not set", "export them, or leave it out"
            )


def environment(cfg: DictConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that make the trackers write into the run folder, unless the user has set them.

    verl's file tracker begins its file anew: a resumed run gets another one.

    Args:
        cfg: the derived config.
        given: the environment that is there.
    """
    run_dir, found = Path(cfg.run_dir), {}
    for name in chosen(cfg):
        for variable, place in (TRACKERS[name].places or {}).items():
            if variable not in given:
                found[variable] = str(_unused(run_dir / place) if name == "file" else run_dir / place)
    return found


def _unused(path: Path) -> Path:
    """The path, or with a number the first that is not there."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate
