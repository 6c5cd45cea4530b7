"""The command line of the sweep, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from benchmarks import arguments
from benchmarks.arguments import once, or_null, seed_range, split_items
from benchmarks.arms import ARMS
from benchmarks.lag_sweep.matched import matched_to

LEARNING_RATES = {"chain": 1e-3, "sort": 1e-3}
"""By task, of the tiny models: the largest of three that costs ``grpo`` little without lag (PROTOCOL.md)."""

PAIRS = ("grpo", "sat_grpo", "grpo_matched", "gspo", "sat_gspo", "gspo_matched")


Names = Annotated[tuple[str, ...], BeforeValidator(split_items), Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AXES = ("task", "arms", "lr", "lags", "seeds")
"""Settings of which each value is a cell."""
HOW = ("workers", "retry", "submit", "slurm", "out", "cache")
"""Settings that no number depends on."""


class Settings(BaseModel):
    """One call of the sweep.

    Attributes:
        engine: ``lab``, one process and exact lag, tiny models; ``verl``, the real stack, one run folder a cell.
        task, arms, lags, seeds: the axes of the matrix. ``seeds=10`` is short for 0 to 9.
        lr: learning rates, one more axis; null: :data:`LEARNING_RATES` of the task.
        schedule: what a lag of n means, see :class:`sat_verl.lag.LagSchedule`.
        model: name of a model preset.
        steps, prompts_per_step, responses_per_prompt: optimizer steps, and the size of each.
        micro_batches: parts of a step that the loss is called on.
        eval_every: steps between two evaluations; there is one before the first step and one after the last.
        eval_problems: held-out problems, one sampled response each.
        noise: of the sampler's log-probs (lab alone).
        dual_clip: of all arms alike; null for none. An arm that sets its own keeps it.
        quantile_scope: of all SAT arms alike; null for what each says.
        overrides: further words of ``python -m recipes.train`` for every arm.
        out: folder of the results.
        cache: folder of tiny models and data.
        workers: lab processes, one thread each; 0 runs the cells in the calling process.
        retry: run failed cells again.
        submit: who starts the runs of ``engine=verl``: this process one after another, Ray jobs, or SLURM jobs.
        slurm: parameters of submitit's executor, ``[timeout_min=600,gpus_per_node=8]``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["lab", "verl"] = "lab"
    task: Names = ("chain", "sort")
    arms: Names = PAIRS
    lags: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(split_items), Field(min_length=1)] = (
        0, 1, 4, 8, 16, 32,
    )  # fmt: skip
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(seed_range), Field(min_length=1)] = (
        0, 1, 2,
    )  # fmt: skip
    lr: Annotated[tuple[Rate, ...] | None, BeforeValidator(lambda value: split_items(or_null(value)))] = None
    schedule: Literal["broadcast", "constant"] = "broadcast"
    model: str = "tiny"
    steps: Count = 128
    prompts_per_step: Count = 16
    responses_per_prompt: Count = 8
    micro_batches: Count = 1
    eval_every: Count = 8
    eval_problems: Count = 256
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    dual_clip: Annotated[Annotated[float, Field(gt=1)] | None, BeforeValidator(or_null)] = None
    quantile_scope: Annotated[Literal["batch", "microbatch"] | None, BeforeValidator(or_null)] = None
    overrides: Annotated[tuple[str, ...], BeforeValidator(split_items)] = ()
    out: Path
    cache: Path = Path(".cache")
    workers: Annotated[int, Field(ge=0)] = 1
    retry: bool = False
    submit: Literal["local", "ray", "slurm"] = "local"
    slurm: Annotated[tuple[str, ...], BeforeValidator(split_items)] = ()

    @field_validator("task", "arms", "lags", "seeds", "lr")
    @classmethod
    def _once(cls, values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return once(values)

    @field_validator("arms")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            source = matched_to(name)
            if source is None and name not in ARMS:
                close = difflib.get_close_matches(name, [*ARMS, *(f"{one}_matched" for one in ARMS)], n=2)
                raise ValueError(f"there is no arm {name}" + (f", did you mean {' or '.join(close)}" if close else ""))
            if source is not None and source not in names:
                raise ValueError(f"{name} has the radii that {source} had: add {source} (its done cells are kept)")
        return names

    @model_validator(mode="after")
    def _engine(self) -> Settings:
        responses = self.prompts_per_step * self.responses_per_prompt
        if responses % self.micro_batches:
            raise ValueError(f"micro_batches: it does not divide the {responses} responses of a step")
        if self.engine == "verl" and self.noise:
            raise ValueError("noise: the engines of engine=verl have their own; it is for engine=lab")
        if self.engine == "lab":
            if self.submit != "local":
                raise ValueError("submit: it is for engine=verl; a lab cell is a matter of seconds")
            for name in self.arms:
                reason = _not_in_the_lab(name)
                if reason:
                    raise ValueError(f"arms: {name} {reason}")
        return self

    def shared(self) -> dict[str, Any]:
        """What all cells of a folder have in common."""
        return self.model_dump(mode="json", exclude={*AXES, *HOW})


def _not_in_the_lab(name: str) -> str | None:
    arm = ARMS.get(name)
    needs = arm.needs if arm else ()
    if "experts" in needs:
        return (
            "replays routes, and the laboratory's sampler and trainer are one engine that never route apart: "
            "use engine=verl model=tiny_moe"
        )
    return "needs a critic, which the laboratory does not have: use engine=verl" if "critic" in needs else None


def parse(words: Sequence[str]) -> Settings:
    """Settings from ``name=value`` words.

    Raises:
        ConfigError: a word that is none, an unknown or repeated setting, a value that cannot work.
    """
    more = " (verl's own go into overrides=[...])"
    return arguments.parse(Settings, words, "python -m benchmarks.lag_sweep", more)
