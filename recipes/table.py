"""``python -m recipes.table``: what is checked of every recipe and every row of the SAT paper's table, as Markdown."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from benchmarks.arms import ARMS, Arm
from recipes import dry_run, guards, megatron, upstream
from recipes.compose import choices, compose
from recipes.derive import derive
from recipes.models.published import describe
from sat_verl.routes import router_of

LAGS = (1, 8)
PAPER_ARMS = tuple(arm for arm in ARMS.values() if arm.paper)
DENSE = "dense model"
_COLUMNS = ("recipe", "arm", "lag", "composes", "validates", "Megatron arguments", "engine arguments")


@dataclass(frozen=True)
class Row:
    """What was found of one arm of a recipe; a cell that is not ``yes`` says why.

    Attributes:
        recipe, arm: their names.
        lags: at which the cells are the same.
        composes: the config composes, derives and is within the guard rails.
        validates: verl's ``validate_config`` and dataclasses take it.
        trainer: Megatron's own configs take it.
        engine: the rollout engine's parser takes the arguments that verl makes.
    """

    recipe: str
    arm: str
    lags: tuple[int, ...]
    composes: str
    validates: str = "-"
    trainer: str = "-"
    engine: str = "-"

    def cells(self) -> tuple[str, ...]:
        lags = ", ".join(map(str, self.lags))
        return (self.recipe, self.arm, lags, self.composes, self.validates, self.trainer, self.engine)


@functools.cache
def _composed(recipe: str, words: tuple[str, ...]) -> DictConfig:
    return compose([f"recipe={recipe}", *words])


def config_of(recipe: str, arm: Arm, lag: int, run_dir: Path = Path("/tmp/not-made")) -> DictConfig:
    """The composed config of an arm of a recipe, before it is derived.

    The lag is a value of one group, which is set on a copy: composing takes most of the time.
    """
    cfg = copy.deepcopy(_composed(recipe, arm.words))
    cfg.lag.steps, cfg.run_dir = lag, str(run_dir)
    return cfg


def has_experts(recipe: str) -> bool:
    """Whether the model of a recipe is a mixture of experts."""
    described = describe(_composed(recipe, ()))
    return described is not None and router_of(described.numbers) is not None


def check(recipe: str, arm: Arm, lag: int) -> Row:
    """Check one arm of a recipe at one lag.

    Raises:
        ConfigError: it cannot work.
    """
    if "experts" in arm.needs and not has_experts(recipe):
        return Row(recipe, arm.label, (lag,), DENSE)
    cfg = derive(config_of(recipe, arm, lag))
    guards.check_config(cfg)
    upstream.upstream(cfg)
    upstream.dataclasses_of(cfg)
    described, trainer = describe(cfg), "FSDP2"
    assert described is not None, f"nothing is known of the model of {recipe}"
    if megatron.chosen(cfg):
        trainer = "not installed"
        if upstream.megatron_here():
            upstream.megatron_arguments(cfg, described.numbers)
            trainer = "yes"
    finding = dry_run.engine_arguments(cfg, described)
    engine = "yes" if finding.state == "ok" else f"not here ({finding.text})"
    return Row(recipe, arm.label, (lag,), "yes", "yes", trainer, engine)


def rows() -> Iterator[Row]:
    """Every recipe with every row of the paper's table, lags that differ in nothing together."""
    for recipe in choices("recipe"):
        for arm in PAPER_ARMS:
            found = [check(recipe, arm, lag) for lag in LAGS]
            if len({one.cells()[3:] for one in found}) == 1:
                yield Row(recipe, arm.label, LAGS, *found[0].cells()[3:])
            else:
                yield from found


def markdown() -> str:
    """The table."""
    lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(row.cells() for row in rows())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
