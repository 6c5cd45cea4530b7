"""The drift diagnostic ``actor/abs_log_ratio`` for every policy loss, so that verl's own arms log it too."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

__all__ = ["ppo_loss_with_drift"]

DRIFT = "actor/abs_log_ratio"


def ppo_loss_with_drift(
    config: ActorConfig, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss``, and mean ``|log_prob - old_log_prob|`` over the active tokens where the loss reports none.

    The paper's d-bar (arXiv 2607.18722, Table 1). The loss is the tensor that ``ppo_loss`` returns. Set it in the
    worker with ``set_loss_fn(functools.partial(ppo_loss_with_drift, config=actor_config))``.

    The value is the mean over one micro-batch; verl aggregates it, like its other policy-loss metrics, by the plain
    mean over micro-batches and ranks, whatever their numbers of tokens.

    Args:
        config: actor config; its ``policy_loss.loss_mode`` names the loss.
        model_output: the engine's output; ``log_probs`` nested, one row of ``prompt + response`` tokens a sample.
        data: micro-batch with ``prompts``, ``responses``, ``response_mask``, ``old_log_probs`` and what else
            ``ppo_loss`` reads; not changed.
        dp_group: passed on.

    Returns:
        The loss, shape ``()``, and the metrics, of type :class:`verl.utils.metric.Metric`.
    """
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if DRIFT not in metrics:
        metrics[DRIFT] = Metric(value=_abs_log_ratio(model_output["log_probs"], data), aggregation=AggregationType.MEAN)
    return loss, metrics


@torch.no_grad()
def _abs_log_ratio(log_probs: torch.Tensor, data: TensorDict) -> float:
    """Mean ``|log_prob - old_log_prob|`` over the active tokens; 0 if there are none."""
    log_prob = no_padding_2_padding(log_probs, data)
    padded = data.select("response_mask", "old_log_probs").to_padded_tensor()
    active = padded["response_mask"].bool()
    distance = torch.where(active, log_prob - padded["old_log_probs"], 0.0).abs()
    drift = distance.sum(dtype=torch.promote_types(distance.dtype, torch.float32))
    return (drift.double() / active.sum().clamp(min=1)).item()
