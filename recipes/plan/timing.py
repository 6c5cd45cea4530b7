"""Time and cost of a run on one GPU type, in ranges.

Training is arithmetic over a share of the peak. Generation is a roofline: a decoding step reads the weights that its
sequences meet and their keys and values once, or does their arithmetic, or takes its floor, whichever is longest; then
the longest responses of a window run on alone. None of it was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from recipes.plan.gpus import Gpu
from recipes.plan.layout import Trainer
from recipes.plan.model import Model
from recipes.plan.quantities import ZERO, Range
from recipes.plan.rollout_layout import Rollout
from recipes.plan.rollout_memory import RolloutMemory, weights
from recipes.plan.settings import Settings
from recipes.plan.trainer_memory import held, sharded
from recipes.plan.work import Case, Work

HOST_BANDWIDTH = Range(50e9, 200e9)
"""Bytes a second that an optimizer on the host moves, as if all ranks were on one node; not measured here."""


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step, and of the run.

    Attributes:
        train, generate: of the two sides, at the expected lengths.
        sync: of the weight sync, per optimizer step.
        step: of a whole step, at the expected lengths.
        step_any: at any length of the assumed range.
        step_limit: if every response ran into the limit.
        tokens_per_s: that all rollout GPUs sample together.
        running: sequences that a server runs at once.
        bottleneck: ``trainer``, ``rollout`` or ``either``.
        hidden: share of both sides' time that their overlap hides.
        validation: seconds of all validations together, None where their problems are not known.
        run: seconds of the run with its validations, at the expected lengths.
        gpu_hours, cost: of the run; cost in US dollars.
    """

    train: Range
    generate: Range
    sync: Range
    step: Range
    step_any: Range
    step_limit: Range
    tokens_per_s: Range
    running: Range
    bottleneck: str
    hidden: Range
    validation: Range | None
    run: Range
    gpu_hours: Range
    cost: Range | None


@dataclass(frozen=True)
class Machine:
    """What a run's time depends on beside its work."""

    model: Model
    trainer: Trainer
    rollout: Rollout
    memory: RolloutMemory
    gpu: Gpu
    settings: Settings


def training(machine: Machine, case: Case) -> Range:
    """Seconds of the trainer's passes of one step, and of an optimizer on the host."""
    peak = machine.trainer.ranks * machine.gpu.tflops * 1e12
    arithmetic = Range.exactly(case.flops).over(machine.settings.train_mfu * peak)
    trainer = machine.trainer
    # Master weights and moments are read and written, gradients read.
    each = 2 * (4 + trainer.optimizer.moments) + 4
    moved = sharded(trainer, held(machine.model, trainer), each) * trainer.ranks * (1 - trainer.optimizer.on_gpu)
    return arithmetic + (Range.exactly(moved).over(HOST_BANDWIDTH) if moved else ZERO)


def decoding_step(machine: Machine, sequences: float, context: float, efficiency: float, floor_ms: float) -> float:
    """Seconds of one decoding step of a server.

    Args:
        machine: see there.
        sequences: that it advances.
        context: tokens that each of them has.
        efficiency: share of peak bandwidth and arithmetic.
        floor_ms: least milliseconds.
    """
    model, rollout = machine.model, machine.rollout
    on_gpu = weights(model, rollout) - model.parameters.embedding / rollout.tensor * (not model.tied)
    if model.experts:
        experts = model.parameters.experts / (rollout.tensor * (rollout.data if rollout.expert > 1 else 1))
        on_gpu -= experts * (1 - model.top_k / model.experts) ** sequences  # experts that no sequence meets
    own = sequences / rollout.data
    read = on_gpu * rollout.weights + own * context * machine.memory.token
    flops = own * (2 * model.matmul + 4 * context * model.q * model.layers) / rollout.tensor
    bound = max(read / (machine.gpu.bandwidth * 1e9), flops / (machine.gpu.tflops * 1e12))
    return max(bound / efficiency, floor_ms / 1000)


def generation(machine: Machine, case: Case, sequences: int, *, drained: bool) -> tuple[Range, Range]:
    """Seconds in which the servers finish so many sequences, and how many a server runs at once.

    Args:
        machine: see there.
        case: how long the sequences are.
        sequences: on all servers together.
        drained: whether the end of the longest response is waited for.
    """
    settings, lengths = machine.settings, case.lengths
    each = -(-sequences // machine.rollout.replicas)
    places = machine.memory.tokens * (1 / lengths.whole)
    cap = min(each, machine.rollout.sequences * machine.rollout.data)
    running = Range(max(1.0, min(places.low, cap)), max(1.0, min(places.high, cap)))
    context = lengths.prompt + lengths.response / 2
    corners = ((running.high, settings.decode_efficiency.high, settings.step_floor_ms.low),
               (running.low, settings.decode_efficiency.low, settings.step_floor_ms.high))  # fmt: skip
    seconds = [
        each * lengths.response / places_ * decoding_step(machine, places_, context, efficiency, floor)
        for places_, efficiency, floor in corners
    ]
    gpus = machine.rollout.gpus / machine.rollout.replicas
    prefill = each * lengths.prompt * 2 * machine.model.matmul / (gpus * machine.gpu.tflops * 1e12)
    tail = 0.0
    if drained:
        longest = machine.rollout.length
        alone = decoding_step(machine, 1, longest, settings.decode_efficiency.low, settings.step_floor_ms.high)
        tail = max(0.0, longest - lengths.whole) * alone
    # At best the prompt's keys and values are shared by its responses, and all responses end together.
    return Range(seconds[0], seconds[1] + prefill / settings.decode_efficiency.low + tail), running


def _step(train: Range, generate: Range, sync: Range, *, overlapped: bool, shared: bool) -> Range:
    """Both at once, or one after the other; on one GPU at once, but not faster than the sum at worst."""
    both, most = train + generate, train.most(generate)
    if not overlapped:
        return both + sync
    return Range(most.low, both.high if shared else most.high) + sync


def _hidden(train: Range, generate: Range, *, overlapped: bool) -> Range:
    """Share of both sides' time that runs under the other's, over the corners of the ranges."""
    if not overlapped:
        return ZERO
    shares = [
        min(one, other) / (one + other)
        for one, other in product((train.low, train.high), (generate.low, generate.high))
    ]
    return Range(min(shares), max(shares))


def _any(ranges: Sequence[Range]) -> Range:
    """All of them together."""
    return Range(min(one.low for one in ranges), max(one.high for one in ranges))


def time_of(machine: Machine, work: Work, *, lag: int, bounded: bool) -> Time:
    """Time and cost of a run.

    Args:
        machine: see there.
        work: see there.
        lag: in optimizer steps; 0 is synchronous.
        bounded: whether responses may span weight syncs, so that none is waited for.
    """
    window, overlapped = work.window, lag > 0
    weights_bytes = machine.model.parameters.total * machine.rollout.weights
    sync = Range.exactly(weights_bytes / window).over(machine.settings.sync_gb_per_s * 1e9)

    def sides(name: str) -> tuple[Range, Range, Range]:
        case = work.cases[name]
        seconds, running = generation(machine, case, window * work.responses, drained=not bounded or not overlapped)
        return training(machine, case), seconds * (1 / window), running

    steps = {}
    for name in work.cases:
        train, generate, _ = sides(name)
        steps[name] = _step(train, generate, sync, overlapped=overlapped, shared=machine.rollout.shared)
    train, generate, running = sides("expected")
    bottleneck = "rollout" if generate.low > train.high else "trainer" if train.low > generate.high else "either"
    validation = None
    if work.problems is not None:
        once, _ = generation(machine, work.cases["expected"], work.problems * work.samples, drained=True)
        validation = once * work.validations
    run = steps["expected"] * work.steps + (validation or ZERO)
    gpus = machine.trainer.ranks + machine.rollout.gpus * (not machine.rollout.shared)
    gpu_hours = run * (gpus / 3600)
    price = machine.settings.price
    return Time(
        train=train, generate=generate, sync=sync, step=steps["expected"],
        step_any=_any([steps[name] for name in ("low", "expected", "high")]), step_limit=steps["limit"],
        tokens_per_s=Range.exactly(work.cases["expected"].generated).over(generate), running=running,
        bottleneck=bottleneck, hidden=_hidden(train, generate, overlapped=overlapped), validation=validation, run=run,
        gpu_hours=gpu_hours,
        cost=None if price is None else Range(gpu_hours.low * price.low, gpu_hours.high * price.high),
    )  # fmt: skip
