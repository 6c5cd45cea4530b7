"""The plan of a run, from its composed and derived config; nothing is started, and no GPU is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.errors import ConfigError
from recipes.file_guards import PLAN_FILE
from recipes.plan import rollout_memory, storage, timing, trainer_memory
from recipes.plan.baseline import Comparison, compare
from recipes.plan.find import find
from recipes.plan.gpus import GPUS, Gpu
from recipes.plan.layout import Trainer, trainer_of
from recipes.plan.model import Model
from recipes.plan.quantities import ZERO, Memory, Range, Row, total
from recipes.plan.remedies import Remedy, remedies
from recipes.plan.rollout_layout import Rollout, rollout_of, sync_of
from recipes.plan.rollout_memory import RolloutMemory
from recipes.plan.settings import Settings, settings_of
from recipes.plan.timing import Machine, Time
from recipes.plan.work import Work, work_of
from recipes.schedule import schedule_of


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits GPUs of one type: ``fits``, ``tight`` or ``does not fit``, for both sides."""

    gpu: str
    trainer: str
    rollout: str


@dataclass(frozen=True)
class Plan:
    """What a run would take.

    Attributes:
        run: its choices and sizes, in words and numbers.
        model, trainer, rollout: as read from the config.
        settings: what is assumed.
        gpu: the type that the rows of memory and time are for (of a CPU run without ``plan.gpu``: h100, for its memory
            alone).
        trainer_memory, rollout_memory, host: memory of a GPU of each side, and of the host of a trainer's node that
            holds TransferQueue as well.
        checkpoint: bytes of one on disk.
        verdicts: for every known GPU type.
        remedies: changes that would make the trainer fit, if it does not surely.
        work: samples, tokens and arithmetic.
        time: None for a CPU run that names no GPU.
        routes: bytes of the routes of one response and of one optimizer step, without replay None.
        comparison: with the baseline arm; None for a base.
        notes: what a user should know before starting.
    """

    run: dict[str, Any]
    model: Model
    trainer: Trainer
    rollout: Rollout
    settings: Settings
    gpu: Gpu
    trainer_memory: Memory
    rollout_memory: RolloutMemory
    host: tuple[Row, ...]
    checkpoint: Row
    verdicts: tuple[Verdict, ...]
    remedies: tuple[Remedy, ...]
    work: Work
    time: Time | None
    routes: tuple[int, int] | None
    comparison: Comparison | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, as ``plan.json`` has it; sizes in bytes, times in seconds."""
        out = asdict(self)
        out["trainer_memory"]["peak"] = asdict(self.trainer_memory.peak)
        out["host_total"] = asdict(total(self.host))
        out["model"]["parameters"]["total"] = self.model.parameters.total
        out["model"] |= {"active": self.model.active, "matmul": self.model.matmul}
        out["note"] = "Estimates from formulas; no GPU run stands behind them (recipes/plan/README.md)."
        return _plain(out)

    def write(self, run_dir: Path) -> Path:
        """Write ``plan.json`` into a run's folder, whole or not at all; returns its path.

        Raises:
            ConfigError: the folder cannot be made.
        """
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder cannot be made ({error.strerror})"
            raise ConfigError("run_dir", run_dir, problem, "name a folder that you may write") from error
        target, partial = run_dir / PLAN_FILE, run_dir / (PLAN_FILE + ".partial")
        partial.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")
        partial.replace(target)
        return target


def _plain(value: Any) -> Any:
    """JSON's types only: numbers that are none become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | type(None)) else str(value)


def verdict(peak: Range, memory: float) -> str:
    """``fits``: even the high end is within the memory; ``tight``: the low end is; else ``does not fit``."""
    if peak.low > memory:
        return "does not fit"
    return "fits" if peak.high <= memory else "tight"


def room(rollout: Rollout, gpu: Gpu) -> float:
    """Bytes of a GPU that the trainer may take: all, or what the rollout leaves it on a shared one."""
    return gpu.memory * (1 - rollout.utilization if rollout.shared else 1)


def _expected(settings: Settings) -> Range:
    """Tokens of a whole sequence: from short to long, as they are assumed."""
    low, high = settings.prompt.low + settings.response.low, settings.prompt.high + settings.response.high
    return Range(low, high)


def _verdicts(rollout: Rollout, peak: Range, generating_on: Callable[[Gpu], RolloutMemory]) -> tuple[Verdict, ...]:
    found = []
    for name, gpu in GPUS.items():
        generating = generating_on(gpu)
        side = rollout_memory.fits(generating, gpu.memory, rollout.utilization)
        found.append(Verdict(name, verdict(peak, room(rollout, gpu)), side))
    return tuple(found)


def _routes(cfg: DictConfig, model: Model, responses: int) -> tuple[int, int] | None:
    """Bytes of the routes of a response and of an optimizer step, with replay.

    Raises:
        ConfigError: a dense model.
    """
    if cfg.routing_replay.mode == "none":
        return None
    if model.router is None:
        problem = "routing replay needs a mixture-of-experts model, and this one is dense"
        raise ConfigError("model", model.name, problem, "set routing_replay=none")
    response = model.router.nbytes(cfg.data.max_prompt_length + cfg.data.max_response_length)
    return response, response * responses


def build(cfg: DictConfig, *, baseline: bool = True, hub: bool = True) -> Plan:
    """Plan a run.

    Args:
        cfg: composed and derived (:func:`recipes.compose.compose`, :func:`recipes.derive.derive`), of any backend.
        baseline: whether the run's baseline is composed and compared as well.
        hub: whether the hub is asked for a model that is not here.

    Raises:
        ConfigError: a model that is not described anywhere, ranks that cannot be split, bad settings of ``plan``.
    """
    model = find(cfg, hub=hub)
    settings = settings_of(cfg, model)
    trainer, rollout = trainer_of(cfg), rollout_of(cfg)
    gpu = settings.gpu or GPUS["h100"]
    work = work_of(cfg, model, trainer, settings)
    window = work.window * work.responses
    routes = _routes(cfg, model, work.responses)
    sync = sync_of(cfg)
    bucket = sync.bucket if sync.nccl else 0

    def generate(card: Gpu) -> RolloutMemory:
        return rollout_memory.plan(model, rollout, card.memory, _expected(settings), window, sync)

    generating = generate(gpu)
    # The buffers of a weight sync need not stand while the trainer is at its peak.
    beside = Range(rollout_memory.WORKER_CONTEXT.low, generating.outside.high) if rollout.shared else ZERO

    def train(layout: Trainer) -> Memory:
        return trainer_memory.plan(model, layout, bucket, replay=routes is not None, beside=beside)

    training = train(trainer)
    host = trainer_memory.host_rows(model, trainer, cfg.trainer.n_gpus_per_node)
    time = None
    if settings.gpu is not None:
        machine = Machine(model, trainer, rollout, generating, gpu, settings)
        time = timing.time_of(machine, work, lag=cfg.lag.steps, bounded=cfg.lag.schedule == "bounded")
    return Plan(
        run=_run(cfg), model=model, trainer=trainer, rollout=rollout, settings=settings, gpu=gpu,
        trainer_memory=training, rollout_memory=generating,
        host=(*host, storage.queued(model, work, schedule_of(cfg), replay=routes is not None)),
        checkpoint=storage.checkpoint(model, trainer), verdicts=_verdicts(rollout, training.peak, generate),
        remedies=remedies(trainer, room(rollout, gpu), lambda layout: train(layout).peak),
        work=work, time=time, routes=routes, comparison=compare(cfg, settings.baseline) if baseline else None,
        notes=tuple(_notes(cfg, model, rollout, training, generating)),
    )  # fmt: skip


def _run(cfg: DictConfig) -> dict[str, Any]:
    return {
        **{name: cfg.choices[name] for name in sorted(cfg.choices) if cfg.choices[name] is not None},
        "lag": f"{cfg.lag.schedule} {cfg.lag.steps}",
        "routing_replay": cfg.routing_replay.mode,
        "steps": cfg.steps,
        "prompts_per_step": cfg.prompts_per_step,
        "responses_per_prompt": cfg.responses_per_prompt,
        "max_prompt_length": cfg.data.max_prompt_length,
        "max_response_length": cfg.data.max_response_length,
    }


def _notes(cfg: DictConfig, model: Model, rollout: Rollout, training: Memory, generating: RolloutMemory) -> list[str]:
    notes = [*training.notes, *generating.notes]
    if model.positions is not None and rollout.length > model.positions:
        notes.append(
            f"prompt and response may take {rollout.length} tokens, the model has {model.positions} positions: the "
            "rollout engine refuses that; lower a limit, or raise max_position_embeddings (and its rotary scaling) on "
            "purpose"
        )
    if not model.exact:
        notes.append(f"{model.family} is counted in transformers' modules; activations are those of a Llama-like layer")
    if rollout.shared and cfg.lag.steps:
        notes.append("trainer and rollout share one GPU: a step takes between the longer of the two and both together")
    if cfg.backend.name == "cpu":
        notes.append("the run is on CPUs; the rows say what it would take on GPUs of that type with the same settings")
    return notes
