"""The plan of a run: memory, samples, arithmetic, time and cost with their formulas, and the diff to its baseline.

:func:`build` makes it from a composed and derived config, :func:`report` prints it as well; neither starts anything.
``recipes/plan/README.md`` says what is assumed, and how far it was checked.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from recipes.plan.build import PLAN_FILE, Plan, build
from recipes.plan.render import show

__all__ = ["PLAN_FILE", "Plan", "build", "report"]


def report(
    cfg: DictConfig, console: Console | None = None, run_dir: Path | str | None = None, *, hub: bool = True
) -> Plan:
    """Plan a run, print the plan, and write it as ``plan.json`` if a run folder is given.

    Args:
        cfg: composed and derived, of any backend.
        console: where it is printed; by default, standard output.
        run_dir: folder for ``plan.json``, made if it is not there.
        hub: whether the hub is asked for a model that is not here.

    Raises:
        ConfigError: see :func:`build`.
    """
    plan = build(cfg, hub=hub)
    show(plan, console or Console())
    if run_dir is not None:
        plan.write(Path(run_dir))
    return plan
