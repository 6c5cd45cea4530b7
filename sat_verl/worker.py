"""The actor worker of the recipes: verl's own, observed, and with the q of the whole optimizer step on request."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import BaseEngine, FSDPEngine
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from sat_verl.batch_quantile import (
    SAT_MODES,
    batch_quantile,
    distributed_tail_reference,
    one_micro_batch,
)
from sat_verl.config import SAT_OPTIONS
from sat_verl.drift import ppo_loss_with_drift
from sat_verl.fresh import KEPT, KeptReference, fresh_reference, one_fresh_micro_batch
from sat_verl.lag import LAG_SUMS
from sat_verl.routing.engine import FLAG, METRICS, FSDPRoutingReplay, replay_mode
from sat_verl.routing.megatron import MegatronRoutingReplay
from sat_verl.tail import LogRatioTail, forward_distances

TAIL, TAIL_NATIVE = "actor/log_ratio_tail/", "actor/log_ratio_tail_native/"
COMPARE_SECONDS = METRICS + "compare_seconds"


class BatchQuantileWorker(TrainingWorker):
    """verl's training worker, whose steps give the SAT losses one q where ``policy_loss.quantile_scope=batch``.

    See :func:`step_context` for what a step then costs. With ``router_replay.mode=R3`` its FSDP2 engine replays routes
    (:mod:`sat_verl.routing`). Steps of verl's PPO loss also report the tail of the log-ratio.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)
        # verl calls nothing between entering the engine's train mode, which loads offloaded weights, and the first
        # micro-batch; so the engine's own step is wrapped.
        self._engine_step = self.engine.train_batch
        self.engine.train_batch = self._step
        self._replay = _replay(self.engine)

    def _step(self, data: TensorDict, loss_function: Any) -> Any:
        metrics: dict[str, float] = {}
        if _is_ppo(loss_function):
            tail, metrics = LogRatioTail(), self._native_tail(data)
            with step_context(self.engine, data, loss_function):
                output = self._engine_step(data, tail.observed(loss_function))
            metrics |= tail.metrics(TAIL, self.engine, get_device_id())
        else:
            output = self._engine_step(data, loss_function)
        metrics |= self._replay.take_metrics() if self._replay else {}
        if self.engine.is_mp_src_rank_with_outputs():
            output["metrics"].update({name: [value] for name, value in metrics.items()})
        return output

    def _native_tail(self, data: TensorDict) -> dict[str, float]:
        """On request, the tail that the same step would have without replay, from a forward-only pass, and its time."""
        compare = getattr(self.engine_config.router_replay, "compare", False)
        if not compare or not tu.get_non_tensor_data(data=data, key=FLAG, default=False):
            return {}
        start = time.perf_counter()
        native = LogRatioTail(forward_distances(self.engine, data, "sat_grpo", **{FLAG: False}))
        metrics = native.metrics(TAIL_NATIVE, self.engine, get_device_id())
        return metrics | {COMPARE_SECONDS: time.perf_counter() - start}

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
        # verl sets it, which makes it flag the batches to replay, for Megatron and VeOmni alone.
        if "actor" in self.role and isinstance(self.actor.engine, FSDPEngine):
            self.enable_routing_replay = replay_mode(self.actor.engine_config) != "disabled"
        loss_fn = getattr(self, "loss_fn", None)
        # Only verl's plain PPO loss is observed; a distillation loss stays as it is.
        if isinstance(loss_fn, partial) and loss_fn.func is ppo_loss:
            self.actor.set_loss_fn(partial(ppo_loss_with_drift, **loss_fn.keywords))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_loss_in_use(self) -> dict[str, Any]:
        """What this process computes, read back from the objects that compute it (not from the driver's config)."""
        config = self.actor.loss_fn.keywords["config"]
        function = get_policy_loss_fn(config.policy_loss.loss_mode)
        options = {name: getattr(config.policy_loss, name, None) for name in SAT_OPTIONS}
        return {
            "loss_mode": config.policy_loss.loss_mode,
            "function": f"{function.__module__}.{function.__qualname__}",
            "loss_agg_mode": config.loss_agg_mode,
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "clip_ratio_c": config.clip_ratio_c,
            **{name: value for name, value in options.items() if value is not None},
        }


def _replay(engine: BaseEngine) -> FSDPRoutingReplay | MegatronRoutingReplay | None:
    """What replays the engine's routes, or watches that it does; None for engines that replay by themselves."""
    mode, strategy = replay_mode(engine.engine_config), engine.engine_config.strategy
    if strategy in ("fsdp", "fsdp2") and mode != "disabled":
        return FSDPRoutingReplay(engine)
    if strategy == "megatron" and mode == "R3":
        return MegatronRoutingReplay(engine)
    return None


def _is_ppo(loss_function: Any) -> bool:
    return isinstance(loss_function, partial) and loss_function.func in (ppo_loss, ppo_loss_with_drift)


def step_context(engine: BaseEngine, data: TensorDict, loss_function: Any) -> AbstractContextManager[None]:
    """The context that the loss of one optimizer step needs; one that does nothing unless it takes q over the batch.

    Where every rank has one micro-batch, the loss itself takes q. Otherwise a forward-only pass over the micro-batches
    precedes the first backward: about a third of the step's time again, no activations, and one float and one flag per
    token kept.

    Args:
        engine: in train mode.
        data: this rank's share of the step, with the settings that verl's ``train_batch`` adds; not changed. For
            ``reference=fresh`` with the ages of its samples, and where one is kept the reference, under
            :data:`sat_verl.fresh.KEPT`.
        loss_function: a partial whose keyword ``config`` is the actor config; any other takes no q.
    """
    policy_loss = getattr(getattr(loss_function, "keywords", {}).get("config"), "policy_loss", None)
    if policy_loss is None or policy_loss.loss_mode not in SAT_MODES:
        return nullcontext()
    reference = policy_loss.get("reference", "batch")
    if policy_loss.get("quantile_scope", "microbatch") != "batch" or not isinstance(reference, str):
        return nullcontext()
    fresh, group = reference == "fresh", engine.get_data_parallel_group()
    kept = KeptReference(*numbers) if fresh and (numbers := tu.get(data, KEPT)) else None
    if engine.engine_config.strategy in ("fsdp", "fsdp2", "megatron") and _is_one_micro_batch(engine, data):
        return one_fresh_micro_batch(kept, group) if fresh else one_micro_batch(group)
    distances = forward_distances(engine, data, policy_loss.loss_mode, with_ages=fresh)
    values, actives = distances.all(get_device_id())
    if not fresh:
        return batch_quantile(distributed_tail_reference(values, actives, policy_loss.alpha, group))
    ages = distances.all_ages(get_device_id())
    return batch_quantile(fresh_reference(values, ages, actives, policy_loss.alpha, kept, group))


def _is_one_micro_batch(engine: BaseEngine, data: TensorDict) -> bool:
    """Whether verl's ``prepare_micro_batches`` makes one micro-batch of ``data`` on every rank."""
    config = engine.engine_config
    if config.get("virtual_pipeline_model_parallel_size") or config.get("dynamic_context_parallel"):
        return False  # these split further
    if not tu.get(data, "use_dynamic_bsz", True):
        # verl gives every rank as many samples.
        return len(data) == data["micro_batch_size_per_gpu"] * tu.get(data, "force_group_size", 1)
    tokens = data["input_ids"].offsets()[-1].to(get_device_id(), copy=True)
    torch.distributed.all_reduce(tokens, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    split = config.context_parallel_size if config.strategy == "megatron" else engine.ulysses_sequence_parallel_size
    return tokens.item() <= data["max_token_len_per_gpu"] * split
