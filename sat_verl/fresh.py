"""A tail reference that does not grow stale with the batch (``policy_loss.reference=fresh``); not in the SAT paper.

The paper takes q over the very batch whose staleness it bounds, so q, and with it the effective radius, grows with the
lag, and contraction ends where it is needed. Here q is that of the freshest tokens. With A_t the least age among the
active tokens of optimizer step t, f_t their alpha-quantile of ``|d|``, b_t that of all active tokens, and K = (A, q, s)
the reference kept of a recent step s::

    g_t = q of K  if there is a K with A < A_t and t - s <= n,  else f_t
    q_t = min(g_t, b_t)  if g_t >= ROUNDING,  else b_t
    K   = (A_t, f_t, t)  after step t, if f_t >= ROUNDING and there is no K with A < A_t and t + 1 - s <= n

so K is forgotten after n optimizer steps (``reference_steps``, the lag by default: under a broadcast schedule that is
just until the next freshest step). q_t is never above b_t, so the interval lies within the paper's.

The first steps: nothing is kept, and q_t is f_t, or b_t where nothing has moved yet (ROUNDING). With weights that have
not moved and engines that agree, f_t is the rounding of two forward passes: no yardstick, and not kept. With engines
that do not agree it is their noise, and is. K is part of a checkpoint of :class:`sat_verl.trainer.SATAsyncTrainer`, so
a resumed run goes on as if it had not stopped; in a loop that does not keep it, a resumed run begins anew.

The age of a sample is that of the oldest weights that generated it, in optimizer steps. :class:`ReferenceMemory` has
K, on whatever drives the steps; the steps compute on the device, over all micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sat_verl.batch_quantile import StepReference, active_distances, distributed_tail_reference, one_micro_batch

__all__ = [
    "KEPT",
    "KeptReference",
    "MissingAgesError",
    "ReferenceMemory",
    "batch_fresh_reference",
    "fresh_reference",
    "one_fresh_micro_batch",
    "sample_ages",
]

ROUNDING = 1e-5
"""A quantile of ``|d|`` below this is the rounding of float32 log-probs (about 1e-6), not a distance of policies."""

KEPT = "kept_reference"
"""Name of the non-tensor field, ``[age, q, step]``, with which a batch carries the kept reference to the workers."""

AGE_METRIC, Q_METRIC = "actor/sat/fresh_age", "actor/sat/q_fresh"
"""What the losses report for :meth:`ReferenceMemory.after`."""

NO_AGE = torch.iinfo(torch.int64).max


class MissingAgesError(RuntimeError):
    """A loss with ``reference=fresh`` was called on samples whose ages are not to be had."""


class KeptReference(NamedTuple):
    """The q of the freshest recent step: its least age in optimizer steps, its q, and its number."""

    age: int
    q: float
    step: int


class ReferenceMemory:
    """What is remembered from step to step; one for a run, beside whatever numbers the optimizer steps.

    Args:
        steps: optimizer steps after its own in which a reference is used; at least 1.
        kept: of an earlier part of the run.
    """

    def __init__(self, steps: int, kept: Sequence[float] | None = None) -> None:
        self.steps = steps
        self.kept = KeptReference(int(kept[0]), float(kept[1]), int(kept[2])) if kept else None

    @classmethod
    def of(cls, policy_loss: Any, lag: int) -> ReferenceMemory | None:
        """The memory that a policy-loss config asks for; None unless its ``reference`` is ``fresh``.

        Args:
            policy_loss: a :class:`sat_verl.config.SATPolicyLossConfig`, or a mapping of its names.
            lag: largest age in optimizer steps that the schedule promises, which ``reference_steps=None`` stands for.
        """
        if policy_loss.get("reference", "batch") != "fresh":
            return None
        return cls(policy_loss.get("reference_steps", None) or max(lag, 1))

    def before(self, step: int) -> KeptReference | None:
        """What optimizer step ``step`` may use; None if nothing was kept, or too long ago."""
        return self.kept if self.kept and 0 < step - self.kept.step <= self.steps else None

    def after(self, step: int, age: float, q: float) -> None:
        """Take note of the least age of step ``step`` and the q of its freshest tokens; NaN is no q."""
        if not (ROUNDING <= q < math.inf):
            return
        last = self.before(step + 1)
        if last is None or age <= last.age:
            self.kept = KeptReference(round(age), float(q), step)


_ages: ContextVar[torch.Tensor | None] = ContextVar("sat_verl_ages", default=None)


@contextmanager
def sample_ages(ages: torch.Tensor | None) -> Iterator[None]:
    """Inside the block the losses' samples have these ages, shape ``(B,)``, int; None: unknown."""
    token = _ages.set(ages)
    try:
        yield
    finally:
        _ages.reset(token)


def require_ages(ages: torch.Tensor | None) -> torch.Tensor:
    """The ages.

    Raises:
        MissingAgesError: there are none.
    """
    if ages is None:
        raise MissingAgesError(
            "policy_loss.reference='fresh', but the batch does not say how old its samples are (version_lag): train "
            "with trainer.v1.trainer_mode=sat_async, or use sat_verl.fresh in a loop of your own, or reference='batch'"
        )
    return ages


def fresh_reference(
    distance: torch.Tensor,
    ages: torch.Tensor,
    active: torch.Tensor,
    alpha: float,
    kept: KeptReference | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepReference:
    """The q of an optimizer step by the rule above; nothing waits for the device.

    Args:
        distance: ``|d|`` of this rank's tokens, any shape, float32 or float64 (alike on all ranks).
        ages: of each token, same shape, int.
        active: tokens that count, same shape, bool. A rank may have none.
        alpha: level in (0, 1].
        kept: :meth:`ReferenceMemory.before` of this step, the same on all ranks.
        group: data-parallel group, all of whose ranks call this; None: this process alone.

    Returns:
        The same on every rank; ``age`` is :data:`NO_AGE` if no token is active.
    """
    youngest = torch.where(active, ages.long(), NO_AGE).flatten()
    age = torch.cat([youngest, youngest.new_full((1,), NO_AGE)]).amin()
    if group is not None:
        dist.all_reduce(age, op=dist.ReduceOp.MIN, group=group)
    batch = distributed_tail_reference(distance, active, alpha, group)
    fresh = distributed_tail_reference(distance, active & (ages == age), alpha, group)
    candidate = fresh if kept is None else torch.where(age > kept.age, kept.q, fresh)
    q = torch.where(candidate >= ROUNDING, torch.minimum(candidate, batch), batch)
    return StepReference(q, batch, fresh, age)


def batch_fresh_reference(
    micro_batches: Iterable[Mapping[str, torch.Tensor]],
    loss_mode: str,
    alpha: float,
    kept: KeptReference | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepReference:
    """:func:`fresh_reference` of all micro-batches of a step, for ``batch_quantile(reference)`` in a loop of one's own.

    ``memory.after(step, int(reference.age), float(reference.fresh))`` then ends the step.

    Args:
        micro_batches: as of :func:`~sat_verl.batch_quantile.batch_tail_reference`, each with ``ages`` as well, shape
            ``(B,)``, int.
        loss_mode, alpha, kept, group: as above.

    Raises:
        ValueError: another loss mode, or no micro-batch.
    """
    names = ("log_prob", "old_log_prob", "response_mask")
    parts = [
        (*active_distances(loss_mode, *(one[name] for name in names)), of_tokens(one["ages"], one["response_mask"]))
        for one in micro_batches
    ]
    if not parts:
        raise ValueError("batch_fresh_reference() needs at least one micro-batch, got none")
    distance, active, ages = (torch.cat(column) for column in zip(*parts, strict=True))
    return fresh_reference(distance, ages, active, alpha, kept, group)


def of_tokens(ages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Ages of samples, shape ``(B,)``, int, as those of their tokens, shape ``(B * T,)``, int64."""
    return ages.to(response_mask.device).long().unsqueeze(-1).expand(response_mask.shape).flatten()


def one_fresh_micro_batch(
    kept: KeptReference | None = None, group: dist.ProcessGroup | None = None
) -> AbstractContextManager[None]:
    """:func:`~sat_verl.batch_quantile.one_micro_batch` by the rule above, inside :func:`sample_ages`."""

    def take(distance: torch.Tensor, active: torch.Tensor, alpha: float) -> StepReference:
        ages = of_tokens(require_ages(_ages.get()), active).view(active.shape)
        return fresh_reference(distance, ages, active, alpha, kept, group)

    return one_micro_batch(group, take)
