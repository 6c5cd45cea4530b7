"""Diagnostics of every policy loss, verl's own arms included: ``actor/abs_log_ratio``, and sums by version lag."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from sat_verl.fresh import sample_ages
from sat_verl.lag import LAG_SUMS
from sat_verl.policy_loss import record_intercepted
from sat_verl.tail import response_log_probs, sampling_log_probs

__all__ = ["ppo_loss_with_drift"]

DRIFT = "actor/abs_log_ratio"


def ppo_loss_with_drift(
    config: ActorConfig, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss``, and mean ``|log pi - log mu|`` over the active tokens where the loss reports none.

    The paper's d-bar (arXiv 2607.18722, Table 1). log mu are the batch's ``rollout_log_probs``, or if it has none, its
    ``old_log_probs``; the two are the same unless old log-probs are recomputed. The loss is the tensor that
    ``ppo_loss`` returns. Set it in the worker with
    ``set_loss_fn(functools.partial(ppo_loss_with_drift, config=actor_config))``. The loss also gets the ages, which
    ``policy_loss.reference=fresh`` needs.

    The value is the mean over one micro-batch; verl aggregates it, like its other policy-loss metrics, by the plain
    mean over micro-batches and ranks, whatever their numbers of tokens.

    If the batch has the ages of its samples, also sums over the active tokens of each age, ``actor/lag_sums/<age>/``:
    ``tokens``, their number; ``abs_log_ratio``, of ``|log pi - log mu|``; and with a SAT loss ``intercepted``,
    the number of those whose gradient SAT removes and the base loss keeps. What arrives on the driver (``update_actor``
    of :class:`sat_verl.worker.ObservedActorWorker`, then verl's ``reduce_metrics``) are floats, the sums over all
    micro-batches, ranks and mini-batches of the call, each epoch counted. With verl's plain training worker they would
    be the sums of one mini-batch, averaged over the mini-batches.

    Args:
        config: actor config; its ``policy_loss.loss_mode`` names the loss.
        model_output: the engine's output; ``log_probs`` nested, one row of ``prompt + response`` tokens a sample.
        data: micro-batch with ``prompts``, ``responses``, ``response_mask``, ``old_log_probs`` and what else
            ``ppo_loss`` reads, and ``rollout_log_probs`` if it has them; not changed. Optional, and only together:
            ``version_lag``, the age of each sample in optimizer steps, shape ``(B,)``, int; and the non-tensor
            ``version_lags``, the list of all ages in the whole batch, so that every micro-batch and rank reports the
            same names. A sample of another age is not counted.
        dp_group: passed on.

    Returns:
        The loss, shape ``()``, and the metrics, of type :class:`verl.utils.metric.Metric`.

    Raises:
        ValueError: only one of ``version_lag`` and ``version_lags``.
    """
    lags = _lags(data)
    with record_intercepted() as intercepted, sample_ages(lags and lags.of_sample):
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if lags is None and DRIFT in metrics:
        return loss, metrics
    drift, sums = _measure(model_output["log_probs"], data, lags, intercepted)
    metrics.setdefault(DRIFT, Metric(value=drift, aggregation=AggregationType.MEAN))
    # verl adds SUM metrics over micro-batches, but averages them over the ranks.
    metrics.update(Metric.from_dict({k: v * data["dp_size"] for k, v in sums.items()}, AggregationType.SUM))
    return loss, metrics


class _Lags(NamedTuple):
    of_sample: torch.Tensor
    ages: list[int]


def _lags(data: TensorDict) -> _Lags | None:
    """The age of each sample, shape ``(B,)``, int, and all ages of the whole batch; None if the batch has none."""
    of_sample, ages = tu.get(data, "version_lag"), tu.get(data, "version_lags")
    if of_sample is None and ages is None:
        return None
    if of_sample is None or ages is None:
        missing = "version_lag" if of_sample is None else "version_lags"
        raise ValueError(
            f"metrics by version lag need both fields of the batch, version_lag (one age per sample) and version_lags "
            f"(all ages): {missing} is missing; give both, or neither"
        )
    return _Lags(of_sample, [int(age) for age in ages])


@torch.no_grad()
def _measure(
    log_probs: torch.Tensor, data: TensorDict, lags: _Lags | None, intercepted: list[torch.Tensor]
) -> tuple[float, dict[str, float]]:
    """Mean ``|log pi - log mu|`` over the active tokens, 0 if there are none; and the sums by age.

    Args:
        log_probs: the engine's, nested.
        data: micro-batch.
        lags: None: no sums.
        intercepted: of a SAT loss, the mask of its one call, shape ``(B, T)``, bool; else empty.
    """
    sampled = sampling_log_probs(data)
    padded = data.select("response_mask", sampled).to_padded_tensor()
    active = padded["response_mask"].bool()
    log_prob = response_log_probs(log_probs, data, active.shape[1])
    distance = torch.where(active, log_prob - padded[sampled], 0.0).abs()
    distance = distance.to(torch.promote_types(distance.dtype, torch.float32))
    on_device = [distance.sum(), torch.count_nonzero(active)]
    names = []
    if lags is not None:
        summands = {"tokens": active, "abs_log_ratio": distance}
        if intercepted:
            summands["intercepted"] = intercepted[0]
        for age in lags.ages:
            of_age = (lags.of_sample == age).unsqueeze(-1)
            for name, value in summands.items():
                names.append(f"{LAG_SUMS}{age}/{name}")
                on_device.append(torch.where(of_age, value, 0).sum(dtype=torch.float64))
    # One transfer for all.
    total, count, *sums = torch.stack([value.double() for value in on_device]).tolist()
    return total / max(count, 1.0), dict(zip(names, sums, strict=True))
