"""The asynchronous trainer of the recipes: verl's ``separate_async``, which records what it does.

Registered as ``sat_async`` (``trainer.v1.trainer_mode=sat_async``). It changes nothing in how verl trains; it writes
one line of metrics per optimizer step, and reads back from the workers which loss they compute.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_separate_async as upstream
from verl.trainer.ppo.v1.trainer_base import register_trainer

from sat_verl.records import RunRecorder
from sat_verl.worker import ObservedActorWorker

# Upstream passes print's `flush=True` to logger.info, which raises a TypeError when INFO is shown.
upstream.logger.setLevel(max(upstream.logger.level, logging.WARNING))

TRAINER_MODE = "sat_async"


class PolicyLossMismatchError(RuntimeError):
    """The workers compute another loss than the config names."""


@register_trainer(TRAINER_MODE)
class SATAsyncTrainer(upstream.PPOTrainerSeparateAsync):
    """verl's separate asynchronous PPO trainer with a record of every optimizer step.

    Config (beside verl's own): ``sat_verl.run_dir``, the folder that receives ``metrics.jsonl`` and ``worker.json``.
    """

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.recorder = RunRecorder(Path(config.sat_verl.run_dir))
        self._last_step_end: float | None = None

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(ObservedActorWorker)

    def init(self) -> None:
        self.recorder.phase("start engines")
        super().init()
        self.recorder.phase("engines ready")
        self._check_policy_loss()

    def _check_policy_loss(self) -> None:
        """Read the loss back from every worker.

        Raises:
            PolicyLossMismatchError: a worker computes another loss than ``policy_loss.loss_mode``.
        """
        reports = self.actor_rollout_wg.policy_loss_in_use()
        named = self.config.actor_rollout_ref.actor.policy_loss.loss_mode
        wrong = [report for report in reports if report["loss_mode"] != named]
        if wrong:
            raise PolicyLossMismatchError(f"policy_loss.loss_mode={named}, but a worker computes {wrong[0]}")
        self.recorder.worker(reports)

    def fit(self, agent_loop_manager) -> None:
        super().fit(agent_loop_manager)
        self.recorder.phase("done")

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        start = time.perf_counter()
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        row = dict(metrics)
        row.update(self._batch_metrics(batch))
        end = time.perf_counter()
        row["timing_s/optimizer_step"] = end - start
        # From the end of the last step: waiting, weight sync and validation count.
        row["perf/response_tokens_per_s"] = row["response_length/tokens"] / (end - (self._last_step_end or start))
        self._last_step_end = end
        self.recorder.add(row)
        return batch

    def _batch_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        """Reward and length (tokens) of this optimizer step's own samples (verl's are over the whole sync window)."""
        rows = [index for index, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        keys = [batch.keys[index] for index in rows]
        scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
        rewards = np.array([float(score.sum()) for score in scores.unbind()])
        lengths = np.array([batch.tags[index]["response_len"] for index in rows])
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "response_length/tokens": float(lengths.sum()),
            "response_length/average": float(lengths.mean()),
        }

    def _validate(self) -> dict[str, float]:
        start = time.perf_counter()
        self.recorder.phase("validate")
        metrics = super()._validate()
        self.recorder.phase("train")
        self.recorder.validation(self.global_steps, metrics, time.perf_counter() - start)
        return metrics

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self.recorder.flush(global_steps, self.parameter_sync_step, metrics)
