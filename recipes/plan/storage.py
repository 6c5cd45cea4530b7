"""Bytes beside the GPUs: samples that wait in TransferQueue, and a checkpoint on disk."""

from __future__ import annotations

from recipes.plan.layout import Trainer
from recipes.plan.model import Model
from recipes.plan.quantities import Range, Row, count
from recipes.plan.work import Work
from sat_verl.lag import LagSchedule

SAMPLE = Range(24, 64)
"""Bytes of a token in TransferQueue without its route: ids, masks, positions, log-probs, advantages; not measured."""


def queued(model: Model, work: Work, schedule: LagSchedule, *, replay: bool) -> Row:
    """Samples of a whole window and of the batches worked ahead, from expected lengths to the limit.

    Args:
        model: whose routes they have.
        work: tokens of a step.
        schedule: when the rollout gets new weights, and how far it is ahead.
        replay: whether every token brings its route.
    """
    batches = schedule.sync_every + schedule.batches_ahead
    route = model.router.nbytes(1) if replay and model.router is not None else 0
    expected, limit = (work.cases[name].trained for name in ("expected", "limit"))
    nbytes = Range(batches * expected * (SAMPLE.low + route), batches * limit * (SAMPLE.high + route))
    routes = f" + {route} B of routes" if route else ""
    words = (
        f"{batches} batches ({schedule.sync_every} of a window, {schedule.batches_ahead} ahead) x {count(expected)} "
        f"(expected) to {count(limit)} (limit) tokens x {SAMPLE.low} to {SAMPLE.high} B{routes}"
    )
    return Row("samples in TransferQueue", nbytes, words, "sat_verl.lag; as if one node held all of it")


def checkpoint(model: Model, trainer: Trainer) -> Row:
    """A checkpoint of the policy on disk: weights, optimizer, and a copy that transformers can load."""
    optimizer, number = trainer.optimizer, model.parameters.total
    state = optimizer.master + optimizer.moments
    if trainer.engine == "megatron":
        each = Range.exactly(trainer.weights + state)
        words = f"{trainer.weights} B, which transformers can load, + {state} B master and moments"
    else:
        each = Range(trainer.weights + state + 2, trainer.weights + state + 4)
        words = f"{trainer.weights} B + {state} B moments + 2 to 4 B for transformers"
    return Row("checkpoint", each * number, f"{count(number)} parameters x ({words})", "verl's checkpoint managers")
