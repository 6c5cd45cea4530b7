"""The command line of the simulator, and the scenario that it stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from benchmarks import arguments
from benchmarks.arguments import once, seed_range, split_items
from benchmarks.simulate.measures import warm_windows
from benchmarks.simulate.scenario import Engine, Lengths, Scenario, Training
from sat_verl.lag import LagSchedule

KINDS = ("broadcast", "constant", "bounded", "bounded_drop", "colocated")
"""Schedules by name: ``bounded`` waits. ``colocated``, for comparison, is no schedule of the recipes: synchronous, all
GPUs generate and then all train."""

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(split_items), Field(min_length=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(seed_range), Field(min_length=1)]
Lags = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(split_items), Field(min_length=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_items), Field(min_length=1)]


@dataclass(frozen=True)
class Cell:
    """One simulated run: the lag in optimizer steps, GPUs of both sides together."""

    schedule: str
    lag: int
    gpus: int
    seed: int

    @property
    def policy(self) -> tuple[LagSchedule, str | None]:
        """The schedule, and what ``lag.strategy`` would be."""
        if self.schedule == "colocated":
            return LagSchedule("broadcast", 0), None
        if self.schedule.startswith("bounded") and self.lag:
            return LagSchedule("bounded", self.lag), "drop" if self.schedule == "bounded_drop" else "wait"
        return LagSchedule(self.schedule.removesuffix("_drop"), self.lag), None

    @property
    def name(self) -> str:
        if self.schedule == "colocated":
            return "colocated"
        return "synchronous" if self.lag == 0 else f"{self.schedule} {self.lag}"


class Settings(BaseModel):
    """One call of the simulator; the defaults are a dense model of 8 B parameters on GPUs with 80 GB (SIMULATOR.md).

    Attributes:
        schedules, lags, gpus, seeds: the axes. Lag 0 is one cell for all schedules, and so is lag 1 of the exact ones.
        prompts_per_step, steps: one number, or one for each of ``gpus``.
        rollout_share: of the GPUs; the rest train.
        lengths, length_typical, length_shape, length_within: :class:`benchmarks.simulate.scenario.Lengths`.
        gpus_per_replica, slots: of a rollout replica.
        iteration_ms, per_sequence_us, per_context_ns, prefill_us, request_ms, store_ms: :class:`~.scenario.Engine`.
        train_us: microseconds of one GPU per token that is trained on; ``train_fixed_s`` comes to it per step.
        sync_s, other_s, poll_s: :class:`~.scenario.Scenario`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedules: Names = KINDS
    lags: Lags = (0, 1, 2, 4, 8)
    gpus: Counts = (8, 64, 512)
    seeds: Seeds = (0, 1)
    steps: Counts = (40,)
    prompts_per_step: Counts = (32, 128, 512)
    responses_per_prompt: Count = 16
    prompt_tokens: Count = 512
    response_limit: Count = 32768
    lengths: Literal["lognormal", "pareto", "fixed"] = "lognormal"
    length_typical: Positive = 6000.0
    length_shape: Positive = 0.9
    length_within: Annotated[float, Field(ge=0, le=1)] = 0.5
    rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.8125
    gpus_per_replica: Count = 2
    slots: Count = 64
    iteration_ms: Positive = 6.3
    per_sequence_us: Time = 20.0
    per_context_ns: Time = 30.0
    prefill_us: Time = 16.0
    request_ms: Time = 5.0
    store_ms: Time = 5.0
    train_us: Time = 142.0
    train_fixed_s: Time = 5.0
    train_noise: Time = 0.0
    sync_s: Time = 4.0
    other_s: Time = 2.0
    poll_s: Positive = 0.05
    out: Path

    @field_validator("schedules", "lags", "gpus", "seeds")
    @classmethod
    def _once(cls, values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return once(values)

    @field_validator("schedules")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in KINDS:
                raise ValueError(f"there is no schedule {name}, use {', '.join(KINDS)}")
        return names

    @model_validator(mode="after")
    def _fits(self) -> Settings:
        for name in ("prompts_per_step", "steps"):
            if len(getattr(self, name)) not in (1, len(self.gpus)):
                raise ValueError(f"{name}: give one number, or one for each of the {len(self.gpus)} gpus")
        for gpus in self.gpus:
            if not 1 <= self.replicas(gpus) * self.gpus_per_replica < gpus:
                raise ValueError(
                    f"gpus: of {gpus}, rollout_share={self.rollout_share} leaves none to one side, with "
                    f"gpus_per_replica={self.gpus_per_replica}"
                )
        for cell in self.cells():
            schedule, _ = cell.policy
            steps = self._at(cell.gpus, self.steps)
            if steps % schedule.sync_every:
                raise ValueError(f"steps: {cell.name} syncs every {schedule.sync_every} steps, and a run ends with one")
            if steps // schedule.sync_every < warm_windows(schedule) + 1:
                raise ValueError(f"steps: nothing of {cell.name} is left to measure without its start")
        return self

    def _at(self, gpus: int, values: tuple[int, ...]) -> int:
        return values[self.gpus.index(gpus)] if len(values) > 1 else values[0]

    def replicas(self, gpus: int) -> int:
        """Rollout replicas where the two sides have their own GPUs."""
        return round(gpus * self.rollout_share) // self.gpus_per_replica

    def cells(self) -> list[Cell]:
        """Every cell once, those of few GPUs first."""
        found: dict[tuple[Any, ...], Cell] = {}
        for gpus in self.gpus:
            for seed in self.seeds:
                for name in self.schedules:
                    for lag in (0,) if name == "colocated" else self.lags:
                        same = "exact" if lag == 1 and name in ("broadcast", "constant") else name
                        kind = "sync" if lag == 0 and name != "colocated" else same
                        found.setdefault((gpus, seed, kind, lag), Cell(name, lag, gpus, seed))
        return list(found.values())

    def key(self, cell: Cell) -> str:
        """Names a cell by all that its numbers depend on, but for the code."""
        content = json.dumps([asdict(cell), asdict(self.scenario(cell))], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def scenario(self, cell: Cell) -> Scenario:
        shared = cell.schedule == "colocated"
        rollout = self.replicas(cell.gpus)
        trainers = cell.gpus if shared else cell.gpus - rollout * self.gpus_per_replica
        engine = Engine(
            slots=self.slots,
            iteration_s=self.iteration_ms * 1e-3,
            per_sequence_s=self.per_sequence_us * 1e-6,
            per_context_s=self.per_context_ns * 1e-9,
            prefill_s=self.prefill_us * 1e-6,
            request_s=self.request_ms * 1e-3,
            store_s=self.store_ms * 1e-3,
        )
        return Scenario(
            replicas=cell.gpus // self.gpus_per_replica if shared else rollout,
            engine=engine,
            training=Training(self.train_fixed_s, self.train_us * 1e-6 / trainers, self.train_noise),
            lengths=Lengths(
                self.lengths, self.length_typical, self.length_shape, self.response_limit, self.length_within
            ),
            prompts=self._at(cell.gpus, self.prompts_per_step),
            responses=self.responses_per_prompt,
            prompt_tokens=self.prompt_tokens,
            steps=self._at(cell.gpus, self.steps),
            sync_s=self.sync_s,
            other_s=self.other_s,
            poll_s=self.poll_s,
        )


def parse(words: Sequence[str]) -> Settings:
    """Settings from ``name=value`` words.

    Raises:
        ConfigError: a word that is none, an unknown or repeated setting, a value that cannot work.
    """
    return arguments.parse(Settings, words, "python -m benchmarks.simulate")
