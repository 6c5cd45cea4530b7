"""One tail reference q for a whole optimizer step (``policy_loss.quantile_scope=batch``).

verl calls a policy loss once per micro-batch, with no argument for q. The step's q therefore stands in a context that
whoever runs the step opens around it, and from which the SAT losses read. Without one they raise
:class:`MissingBatchQuantileError`; they never fall back to the micro-batch.

verl's own training: :class:`sat_verl.worker.BatchQuantileWorker` does it. Any other loop, with gradient accumulation::

    with torch.no_grad():  # first pass: the weights of the step, and the very micro-batches of the second pass
        q = batch_tail_reference(
            ({"log_prob": model(b), "old_log_prob": b.old, "response_mask": b.mask} for b in micro_batches),
            loss_mode="sat_grpo", alpha=0.9,  # group=torch.distributed.group.WORLD if data-parallel
        )
    with batch_quantile(q):
        for b in micro_batches:
            loss, metrics = compute_policy_loss_sat_grpo(b.old, model(b), b.advantages, b.mask, config=config)
            loss.backward()

With one micro-batch per rank and step there is no first pass: ``with one_micro_batch(group): loss, ... ; backward()``.

The first pass costs one more forward of the batch (a third of the training step's arithmetic, without activation
memory) and keeps one score and one flag per token; the selection itself is one local sort and a few hundred counts. Its
micro-batches have to be those of the second pass: another split rounds differently, and then the tokens that stand
exactly at q (for SAT-GSPO: a whole response) can count as beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist

from sat_verl.trust_region import quantile_rank, sequence_mean, tail_reference, widen

__all__ = [
    "MissingBatchQuantileError",
    "StepReference",
    "batch_quantile",
    "batch_tail_reference",
    "distributed_tail_reference",
    "one_micro_batch",
]

SAT_MODES = ("sat_grpo", "sat_gspo")


class MissingBatchQuantileError(RuntimeError):
    """A loss with ``quantile_scope=batch`` was called where the q of the step is not to be had."""


class StepReference(NamedTuple):
    """What the SAT losses of one optimizer step measure staleness by; all of shape ``()``.

    Attributes:
        q: the tail reference, float.
        batch, fresh, age: with ``reference=fresh`` (:mod:`sat_verl.fresh`) the quantile of all tokens and of those of
            the least age, float, and that age, int64; else None.
    """

    q: torch.Tensor
    batch: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    age: torch.Tensor | None = None


Take = Callable[[torch.Tensor, torch.Tensor, float], StepReference]
"""From distances, active tokens and alpha, on all ranks at once."""


class _Step:
    """The reference of one optimizer step: given, or taken by the only call of the loss."""

    def __init__(self, reference: StepReference | None, take: Take | None = None) -> None:
        self.reference, self.take, self.called = reference, take, False

    def tail_reference(self, distance: torch.Tensor, active: torch.Tensor, alpha: float) -> StepReference:
        if self.reference is not None:
            return self.reference._replace(q=self.reference.q.to(distance))
        if self.called:
            raise MissingBatchQuantileError(
                "policy_loss.quantile_scope='batch': the loss was called twice in one one_micro_batch(), whose q is "
                "that of the first call alone: compute q with batch_tail_reference() first, and use batch_quantile(q)"
            )
        self.called = True
        assert self.take is not None
        return self.take(distance, active, alpha)


_current: ContextVar[_Step | None] = ContextVar("sat_verl_step", default=None)


@contextmanager
def _use(step: _Step) -> Iterator[None]:
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def batch_quantile(q: torch.Tensor | StepReference):
    """Context in which every call of a SAT loss with ``quantile_scope=batch`` uses this q, shape ``()``, float."""
    return _use(_Step(q if isinstance(q, StepReference) else StepReference(q.detach())))


def one_micro_batch(group: dist.ProcessGroup | None = None, take: Take | None = None):
    """Context for a step of one micro-batch per rank: the only call of the loss takes q over the ranks of ``group``.

    Every rank of the group has to call the loss; a second call raises :class:`MissingBatchQuantileError`.

    Args:
        group: data-parallel group; None: this process alone.
        take: by another rule than :func:`distributed_tail_reference`.
    """

    def quantile(distance: torch.Tensor, active: torch.Tensor, alpha: float) -> StepReference:
        return StepReference(distributed_tail_reference(distance, active, alpha, group))

    return _use(_Step(None, take or quantile))


def step_tail_reference(score: torch.Tensor, active: torch.Tensor, alpha: float, *, fresh: bool) -> StepReference:
    """The step's reference, for the losses: q of the widened scores' dtype.

    Args:
        score: what the loss gates by, shape ``(B, T)``, any float dtype.
        active: tokens that count, shape ``(B, T)``, bool.
        alpha: level in (0, 1].
        fresh: the rule that the loss is set to: ``reference=fresh``, or ``batch``.

    Raises:
        MissingBatchQuantileError: no context is open, or one of the other rule.
    """
    step = _current.get()
    if step is None:
        raise MissingBatchQuantileError(
            "policy_loss.quantile_scope='batch', but nobody computed the q of this optimizer step: train with "
            "sat_verl.worker.ObservedActorWorker (trainer.v1.trainer_mode=sat_async), or call the loss inside "
            "sat_verl.batch_quantile.batch_quantile(q), or use quantile_scope='microbatch'"
        )
    reference = step.tail_reference(widen(score).abs(), active, alpha)
    if fresh != (reference.age is not None):
        raise MissingBatchQuantileError(
            f"policy_loss.reference={('fresh' if fresh else 'batch')!r}, but the q of this optimizer step was taken by "
            "the other rule: compute it with sat_verl.fresh for 'fresh', with sat_verl.batch_quantile for 'batch'"
        )
    return reference


@torch.no_grad()
def active_distances(
    loss_mode: str, log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distances that a SAT loss gates by, and which tokens count, of one micro-batch: flat, bit for bit the loss's.

    ``|d|`` of the token (``sat_grpo``), or of its response's mean (``sat_gspo``).

    Args:
        loss_mode: ``sat_grpo`` or ``sat_gspo``.
        log_prob, old_log_prob: of the sampled tokens, shape ``(B, T)``, float; anything on masked tokens.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float.

    Returns:
        Shape ``(B * T,)``, float32 or float64; shape ``(B * T,)``, bool.

    Raises:
        ValueError: another loss mode.
    """
    if loss_mode not in SAT_MODES:
        raise ValueError(f"loss_mode must be one of {', '.join(SAT_MODES)}, got {loss_mode!r}: other losses have no q")
    active = response_mask.bool()
    score = torch.where(active, log_prob, 0.0) - torch.where(active, old_log_prob, 0.0)
    if loss_mode == "sat_gspo":
        score = sequence_mean(score, response_mask).expand_as(score)
    return widen(score).abs().flatten(), active.flatten()


def batch_tail_reference(
    micro_batches: Iterable[Mapping[str, torch.Tensor]],
    loss_mode: str,
    alpha: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The q of an optimizer step from the log-probs of all its micro-batches.

    Args:
        micro_batches: at least one; each with ``log_prob``, ``old_log_prob`` and ``response_mask`` as the loss gets
            them, shape ``(B, T)``, which may differ from one to the next.
        loss_mode: ``sat_grpo`` or ``sat_gspo``.
        alpha: level in (0, 1].
        group: data-parallel group, all of whose ranks call this; None: this process alone.

    Returns:
        q, shape ``()``, float32 or float64, the same on every rank; 0 if no token is active.

    Raises:
        ValueError: another loss mode, or no micro-batch.
    """
    names = ("log_prob", "old_log_prob", "response_mask")
    parts = [active_distances(loss_mode, *(batch[name] for name in names)) for batch in micro_batches]
    if not parts:
        raise ValueError("batch_tail_reference() needs at least one micro-batch, got none: pass one with an empty mask")
    distances, actives = zip(*parts, strict=True)
    return distributed_tail_reference(torch.cat(distances), torch.cat(actives), alpha, group)


def distributed_tail_reference(
    distance: torch.Tensor, active: torch.Tensor, alpha: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """:func:`~sat_verl.trust_region.tail_reference` of the values of all ranks, bit for bit, without gathering them.

    The bit pattern of a non-negative float rises with its value, so q is found byte by byte: 256 counts (2 KiB) are
    summed over the ranks for each of the 4 (float64: 8) bytes. Nothing waits for the device, and no sum of floats is
    taken: the result depends on neither the order of the values nor their distribution over the ranks.

    Args:
        distance: ``|d|`` of this rank's tokens, any shape, float32 or float64 (alike on all ranks); where active, at
            least 0 and not NaN.
        active: tokens that count, same shape, bool. A rank may have none.
        alpha: level in (0, 1].
        group: data-parallel group, all of whose ranks call this; None: this process alone.

    Returns:
        q, shape ``()``, dtype of ``distance``; 0 if no token of any rank is active.
    """

    if group is None:
        return tail_reference(distance, active, alpha) if distance.numel() else distance.new_zeros(())

    def total(count: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(count, op=dist.ReduceOp.SUM, group=group)
        return count

    # Patterns of their own width, as torch sorts int32 much faster than int64.
    pattern = {torch.float32: torch.int32, torch.float64: torch.int64}[distance.dtype]
    bits = distance.detach().view(pattern)
    ascending = torch.where(active, bits, torch.iinfo(pattern).max).flatten().sort().values
    count = total(torch.count_nonzero(active))
    rank = quantile_rank(count, alpha)
    prefix = torch.zeros((), dtype=pattern, device=distance.device)
    top = 8 * distance.element_size() - 8
    for shift in range(top, -1, -8):
        # The top byte ends at 127: the sign bit is 0, and the next one would overflow.
        byte = torch.arange(128 if shift == top else 256, dtype=pattern, device=distance.device)
        candidates = prefix + (byte << shift)
        below = total(torch.searchsorted(ascending, candidates))
        # `below` rises with the candidate; the last one with fewer than `rank` values below it is the byte.
        prefix = candidates.index_select(0, torch.count_nonzero(below < rank).reshape(1) - 1).squeeze(0)
    return torch.where(count > 0, prefix.view(distance.dtype), 0.0)
