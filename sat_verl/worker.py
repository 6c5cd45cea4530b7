"""The actor worker of the recipes: verl's own, observed, and with the q of the whole optimizer step on request."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import BaseEngine, FSDPEngine
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from sat_verl.batch_quantile import (
    SAT_MODES,
    active_distances,
    batch_quantile,
    distributed_tail_reference,
    one_micro_batch,
)
from sat_verl.drift import ppo_loss_with_drift
from sat_verl.lag import LAG_SUMS


class BatchQuantileWorker(TrainingWorker):
    """verl's training worker, whose steps give the SAT losses one q where ``policy_loss.quantile_scope=batch``.

    With every other loss or scope it is verl's worker. See :func:`step_context` for what a step then costs.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        # verl calls nothing between entering the engine's train mode, which loads offloaded weights, and the first
        # micro-batch; so the engine's own step is wrapped.
        self._engine_step = self.engine.train_batch
        self.engine.train_batch = self._step

    def _step(self, data: TensorDict, loss_function: Any) -> Any:
        with step_context(self.engine, data, loss_function):
            return self._engine_step(data, loss_function)

    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """verl's, except that sums by version lag are summed over the mini-batches, not left to be averaged."""
        output = super().train_mini_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            sums = {name: [sum(metrics[name])] for name in metrics if name.startswith(LAG_SUMS)}
            tu.assign_non_tensor_data(output, "metrics", {**metrics, **sums})
        return output


class ObservedActorWorker(DetachActorWorker):
    """verl's actor worker whose every policy loss also reports ``actor/abs_log_ratio`` and sums by version lag."""

    actor_worker_cls = BatchQuantileWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        loss_fn = getattr(self, "loss_fn", None)
        # Only verl's plain PPO loss is observed; a distillation loss stays as it is.
        if isinstance(loss_fn, partial) and loss_fn.func is ppo_loss:
            self.actor.set_loss_fn(partial(ppo_loss_with_drift, **loss_fn.keywords))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_loss_in_use(self) -> dict[str, Any]:
        """What this process computes, read back from the objects that compute it (not from the driver's config)."""
        config = self.actor.loss_fn.keywords["config"]
        function = get_policy_loss_fn(config.policy_loss.loss_mode)
        names = ("alpha", "kernel_exponent", "quantile_scope")
        options = {name: getattr(config.policy_loss, name, None) for name in names}
        return {
            "loss_mode": config.policy_loss.loss_mode,
            "function": f"{function.__module__}.{function.__qualname__}",
            "loss_agg_mode": config.loss_agg_mode,
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "clip_ratio_c": config.clip_ratio_c,
            **{name: value for name, value in options.items() if value is not None},
        }


def step_context(engine: BaseEngine, data: TensorDict, loss_function: Any) -> AbstractContextManager[None]:
    """The context that the loss of one optimizer step needs; one that does nothing unless it takes q over the batch.

    Where every rank has one micro-batch, the loss itself takes q. Otherwise a forward-only pass over the micro-batches
    precedes the first backward: about a third of the step's time again, no activations, and one float and one flag per
    token kept.

    Args:
        engine: in train mode.
        data: this rank's share of the step, with the settings that verl's ``train_batch`` adds; not changed.
        loss_function: a partial whose keyword ``config`` is the actor config; any other takes no q.
    """
    policy_loss = getattr(getattr(loss_function, "keywords", {}).get("config"), "policy_loss", None)
    if policy_loss is None or policy_loss.loss_mode not in SAT_MODES:
        return nullcontext()
    if policy_loss.get("quantile_scope", "microbatch") != "batch":
        return nullcontext()
    # Other engines may split further (Megatron's pipeline).
    if isinstance(engine, FSDPEngine) and _is_one_micro_batch(engine, data):
        return one_micro_batch(engine.get_data_parallel_group())
    return batch_quantile(_step_quantile(engine, data, policy_loss.loss_mode, policy_loss.alpha))


def _is_one_micro_batch(engine: FSDPEngine, data: TensorDict) -> bool:
    """Whether verl's ``prepare_micro_batches`` makes one micro-batch of ``data`` on every rank."""
    if not tu.get(data, "use_dynamic_bsz", True):
        # verl gives every rank as many samples.
        return len(data) == data["micro_batch_size_per_gpu"] * tu.get(data, "force_group_size", 1)
    tokens = data["input_ids"].offsets()[-1].to(engine.device_mesh.device_type, copy=True)
    torch.distributed.all_reduce(tokens, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    return tokens.item() <= data["max_token_len_per_gpu"] * engine.ulysses_sequence_parallel_size


def _step_quantile(engine: BaseEngine, data: TensorDict, loss_mode: str, alpha: float) -> torch.Tensor:
    """The q of the step, shape ``()``, from a forward-only pass over its micro-batches."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def collect(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        padded = data.select("response_mask", "old_log_probs").to_padded_tensor()
        response_mask = padded["response_mask"].to(bool)  # as in ppo_loss
        parts.append(active_distances(loss_mode, log_prob, padded["old_log_probs"], response_mask))
        return log_prob.new_zeros(()), {}

    # A shallow copy: the pass leaves settings in it. Entropy has no part in q.
    data = data.copy()
    tu.assign_non_tensor(data, calculate_entropy=False)
    engine.infer_batch(data, collect)
    distances, actives = zip(*parts, strict=True)
    return distributed_tail_reference(torch.cat(distances), torch.cat(actives), alpha, engine.get_data_parallel_group())
