"""The arguments that the rollout engines would be started with, made by verl and read by the engines' own parsers."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError

FIRST_REPLICA = {"replica_rank": 0, "node_rank": 0}


class NotInstalledError(Exception):
    """The engine is not installed here, or does not import; the message says which and why."""


def model_of(cfg: DictConfig, numbers: Mapping[str, Any]) -> SimpleNamespace:
    """What verl's servers read of the model's config, without the model's files.

    Args:
        cfg: the derived config.
        numbers: the model's own config.
    """
    settings = OmegaConf.to_container(cfg.actor_rollout_ref.model, resolve=True, throw_on_missing=False)
    assert isinstance(settings, dict)
    path = str(cfg.model.path) if cfg.model.name == "hf" else cfg.model.name
    return SimpleNamespace(**{**settings, "local_path": path, "hf_config": SimpleNamespace(**numbers)})


def nodes_of(cfg: DictConfig) -> int:
    """Nodes that one engine lies on."""
    from recipes.divisibility import engine_size

    return max(1, engine_size(cfg) // cfg.actor_rollout_ref.rollout.n_gpus_per_node)


@contextlib.contextmanager
def refusals(engine: str) -> Iterator[None]:
    """What verl or the engine's parser says, as one line of a :class:`~recipes.errors.ConfigError`."""
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    except (NotInstalledError, ConfigError):
        raise
    except (Exception, SystemExit) as error:  # argparse exits
        lines = (said.getvalue() if isinstance(error, SystemExit) else str(error)).strip().splitlines()
        problem = (lines[-1] if lines else type(error).__name__).rstrip(".")
        fix = "change the setting that the message names"
        raise ConfigError(f"{engine} refuses its arguments", "", problem, fix) from error
