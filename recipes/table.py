"""``python -m recipes.table``: what is checked of every recipe and every row of the SAT paper's table, as Markdown."""

from __future__ import annotations

import functools
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from benchmarks.arms import ARMS, Arm
from recipes import dry_run, guards, megatron, upstream
from recipes.compose import choices, compose
from recipes.derive import derive
from recipes.models.published import Described, describe
from sat_verl.routes import router_of

LAGS = (1, 8)
PAPER_ARMS = tuple(arm for arm in ARMS.values() if arm.paper)
DENSE = "dense model"
_COLUMNS = ("recipe", "arms", "lag", "composes", "validates", "Megatron arguments", "engine arguments")


@dataclass(frozen=True)
class Row:
    """What was found of one arm of a recipe; a cell that is not ``yes`` says why.

    Attributes:
        recipe, arms: their names.
        lags: at which the cells are the same.
        composes: the config composes, derives and is within the guard rails.
        validates: verl's ``validate_config`` and dataclasses take it.
        trainer: Megatron's own configs take it.
        engine: the rollout engine's parser takes the arguments that verl makes.
    """

    recipe: str
    arms: tuple[str, ...]
    lags: tuple[int, ...]
    composes: str
    validates: str = "-"
    trainer: str = "-"
    engine: str = "-"

    def cells(self) -> tuple[str, ...]:
        lags = ", ".join(map(str, self.lags))
        return (
            f"`{self.recipe}`",
            ", ".join(self.arms),
            lags,
            self.composes,
            self.validates,
            self.trainer,
            self.engine,
        )


@functools.cache
def _composed(recipe: str, words: tuple[str, ...]) -> bytes:
    return pickle.dumps(compose([f"recipe={recipe}", *words]))  # ten times faster to copy than by deepcopy


def config_of(recipe: str, arm: Arm, lag: int, run_dir: Path = Path("/tmp/not-made")) -> DictConfig:
    """The composed config of an arm of a recipe, before it is derived.

    The lag is a value of one group, which is set on a copy: composing takes most of the time.
    """
    cfg = pickle.loads(_composed(recipe, arm.words))
    cfg.lag.steps, cfg.run_dir = lag, str(run_dir)
    return cfg


def has_experts(recipe: str) -> bool:
    """Whether the model of a recipe is a mixture of experts."""
    described = describe(pickle.loads(_composed(recipe, PAPER_ARMS[0].words)))
    return described is not None and router_of(described.numbers) is not None


def check(recipe: str, arm: Arm, lag: int) -> Row:
    """Check one arm of a recipe at one lag.

    Raises:
        ConfigError: it cannot work.
    """
    if "experts" in arm.needs and not has_experts(recipe):
        return Row(recipe, (arm.label,), (lag,), DENSE)
    cfg = derive(config_of(recipe, arm, lag))
    guards.check_config(cfg)
    upstream.upstream(cfg)
    upstream.dataclasses_of(cfg)
    described = describe(cfg)
    assert described is not None, f"nothing is known of the model of {recipe}"
    return Row(recipe, (arm.label,), (lag,), "yes", "yes", _trainer(cfg, described), _engine(cfg, described))


_PARSED: dict[str, str] = {}
"""Cells by the settings that they depend on: most arms differ in the loss alone."""


def _once(name: str, settings: DictConfig, described: Described, make: Callable[[], str]) -> str:
    key = json.dumps([name, OmegaConf.to_container(settings, resolve=True), dict(described.numbers)], default=str)
    if key not in _PARSED:
        _PARSED[key] = make()
    return _PARSED[key]


def _trainer(cfg: DictConfig, described: Described) -> str:
    if not megatron.chosen(cfg):
        return "FSDP2"
    if not upstream.megatron_here():
        return "not here"

    def make() -> str:
        upstream.megatron_arguments(cfg, described.numbers)
        return "yes"

    return _once("trainer", cfg.actor_rollout_ref.actor, described, make)


def _engine(cfg: DictConfig, described: Described) -> str:
    def make() -> str:
        finding = dry_run.engine_arguments(cfg, described)
        return "yes" if finding.state == "ok" else f"not here ({finding.text})"

    # Of the names that differ from run to run, none is an argument.
    rollout = cfg.actor_rollout_ref.rollout.copy()
    rollout._set_parent(cfg.actor_rollout_ref)
    rollout.trace = None
    return _once("engine", rollout, described, make)


def rows() -> Iterator[Row]:
    """Every recipe with every row of the paper's table, one at each lag."""
    for recipe in choices("recipe"):
        for arm in PAPER_ARMS:
            for lag in LAGS:
                yield check(recipe, arm, lag)


def together(found: Iterable[Row]) -> list[Row]:
    """Rows of a recipe that say the same as one row, its arms and lags those of all of them."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        groups.setdefault((row.recipe, *row.cells()[3:]), []).append(row)
    merged = []
    for (recipe, *cells), group in groups.items():
        arms = tuple(dict.fromkeys(arm for row in group for arm in row.arms))
        lags = tuple(sorted({lag for row in group for lag in row.lags}))
        if len(group) == len(arms) * len(lags):
            merged.append(Row(recipe, arms, lags, *cells))
        else:
            merged += group
    return merged


def markdown(found: Iterable[Row]) -> str:
    """The table of these rows."""
    lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(row.cells() for row in together(found))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown(rows()) + "\n")
