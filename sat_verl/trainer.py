"""The asynchronous trainer of the recipes: verl's ``separate_async`` with a lag that is set, kept and proven.

Registered as ``sat_async`` (``trainer.v1.trainer_mode=sat_async``). The computation of a step is verl's. What is ours:
when the rollout may get new weights, which prompts a step trains on, what is checked and recorded of each step, and
that a checkpoint holds everything that the schedule needs to go on.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_separate_async as upstream
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient

from sat_verl import batch_record
from sat_verl.batch_record import TRAIN, BatchRecord, prompt_of
from sat_verl.fresh import AGE_METRIC, KEPT, Q_METRIC, ReferenceMemory
from sat_verl.lag import LAG_SUMS, LagSchedule, LagViolationError
from sat_verl.records import RunRecorder
from sat_verl.saving import WholeCheckpoints
from sat_verl.step_guard import StepGuard
from sat_verl.validation import tally
from sat_verl.worker import ObservedActorWorker

# Upstream passes print's `flush=True` to logger.info, which raises a TypeError when INFO is shown.
upstream.logger.setLevel(max(upstream.logger.level, logging.WARNING))

TRAINER_MODE = "sat_async"
DROPPED = "training/off_policy/evicted_samples"


class PolicyLossMismatchError(RuntimeError):
    """The workers compute another loss than the config names."""


class NumberedPrompts(PPOTrainer):
    """A prompt's name is its place in the run: order, seeds and the record of what was consumed rest on it."""

    _next_prompt = 0

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        names = [f"{self._next_prompt + offset:010d}" for offset in range(len(batch))]
        self._next_prompt += len(batch)
        tu.assign_non_tensor_stack(batch, "uid", names)
        return batch


@register_trainer(TRAINER_MODE)
class SATAsyncTrainer(WholeCheckpoints, NumberedPrompts, upstream.PPOTrainerSeparateAsync):
    """verl's separate asynchronous PPO trainer on a lag schedule, with a record of every optimizer step.

    Config (beside verl's own), under ``sat_verl``: ``run_dir``, the folder that receives the records; ``lag`` with
    ``schedule`` and ``steps`` (:class:`~sat_verl.lag.LagSchedule`); ``keep_checkpoints``; ``on_nonfinite``;
    ``recompute``, whose weights recompute old log-probs where the config wants that: ``step`` or ``window``.

    Raises:
        NonFiniteError: a reward, log-prob, loss or gradient is not finite.
        LagViolationError: a batch is not as old as the schedule promises; nothing is trained on it.
        RolloutFailedError: the rollout is broken, or has stopped.
        ResumeError: a checkpoint from which the schedule cannot go on.
    """

    def __init__(self, config: DictConfig) -> None:
        own = config.sat_verl
        self.schedule = LagSchedule(own.lag.schedule, own.lag.steps)
        super().__init__(config)
        self.reference = ReferenceMemory.of(config.actor_rollout_ref.actor.policy_loss, self.schedule.steps)
        self.recorder = RunRecorder(Path(own.run_dir))
        self.guard = StepGuard(Path(own.run_dir), own.on_nonfinite)
        self.replay_buffer.resubmit = self._resubmit
        self.replay_buffer.on_progress = self.recorder.touch
        self._last_step_end: float | None = None
        self._record: BatchRecord | None = None
        self._by_problem: dict[str, list[int]] | None = None

    @property
    def optimizer_step(self) -> int:
        """The optimizer step that is being made, from 1."""
        return (self.global_steps - 1) * self.parameter_sync_step + self.local_trigger_step + 1

    # --- start

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(ObservedActorWorker)

    def init(self) -> None:
        self.recorder.phase("start engines")
        with self.recorder.waiting("the engines to start"):
            super().init()
            self._check_policy_loss()
        self.recorder.phase("engines ready")

    def get_llm_client(self) -> LLMServerClient:
        # Not above: this module is imported as soon as verl's V1 trainers are, which that one imports itself.
        from sat_verl.rollout import RecordingClient

        servers = self.standalone_server_manager
        pairs = list(zip(servers.server_addresses, servers.server_handles, strict=True))
        # A router that is configured may count or choose as it likes; engines beside the trainer come and go.
        fixed = not self.config.actor_rollout_ref.hybrid_engine and not getattr(
            servers.rollout_config, "router_config_path", None
        )
        only = pairs[0] if fixed and len(pairs) == 1 else None
        return servers.get_client(client_cls=RecordingClient, only_server=only)

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

    def on_train_begin(self) -> None:
        self.recorder.phase("train")
        ahead = self.schedule.batches_ahead * self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        missing = ahead - self._restored_tq_prompt_count
        if missing > 0:
            self._add_prompts_to_generate(missing)

    def fit(self, agent_loop_manager) -> None:
        super().fit(agent_loop_manager)
        self.recorder.finish_lag(self.schedule)
        self.recorder.phase("done")

    # --- prompts

    def _resubmit(self, uids: list[str]) -> None:
        """Generate failed prompt groups again, under the weights that the rollout still has."""
        batch = tq.kv_batch_get(keys=uids, partition_id=TRAIN)
        stale = [key for key in self.replay_buffer.partitions[TRAIN] if prompt_of(key) in set(uids)]
        if stale:
            tq.kv_clear(keys=stale, partition_id=TRAIN)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=TRAIN, tags=tags)
        self.agent_loop_manager.generate_sequences(batch)

    # --- one optimizer step

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        start = time.perf_counter()
        with self.recorder.waiting(f"the samples of step {self.optimizer_step}"):
            batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        assert self._record is not None
        # Taken out of verl's metrics, which are averaged over the steps of a window.
        sums = {key: metrics.pop(key) for key in list(metrics) if key.startswith(LAG_SUMS)}
        row = metrics | batch_record.by_lag(sums) | self._record.metrics(self.config.data.max_response_length)
        end = time.perf_counter()
        row["timing_s/optimizer_step"] = end - start
        # From the end of the last step: waiting, weight sync and validation count.
        row["perf/response_tokens_per_s"] = row["response_length/tokens"] / (end - (self._last_step_end or start))
        self._last_step_end = end
        self.recorder.add(row, self._record.sample_row(int(metrics.get(DROPPED, 0)), *self.replay_buffer.take_counts()))
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """The first use of a batch: it is read and checked before anything is computed from it."""
        self.recorder.touch(f"optimizer step {self.optimizer_step}")
        self._check_size(batch)
        self._record = batch_record.read(batch, self.optimizer_step, self.parameter_sync_step)
        self._check_lag(self._record)
        self._record = self.guard.batch(self._record, self.optimizer_step, batch.partition_id)
        return self._old_log_prob(batch, metrics)

    def _old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's; with ``recompute=step`` that of its base trainer, which recomputes with the weights that it has.

        ``separate_async`` goes back to those of the last weight sync. In bypass mode both copy the rollout's log-probs.
        """
        if self.config.sat_verl.get("recompute") == "step":
            return PPOTrainer._compute_old_log_prob(self, batch, metrics)
        return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Every sample carries its age to the loss, whose metrics are then by age, and q from the freshest if asked."""
        assert self._record is not None
        ages = dict(zip(self._record.keys, self._record.ages[:, 0].tolist(), strict=True))
        lags = torch.tensor([ages.get(key, 0) for key in batch.keys])
        fields = TensorDict({"version_lag": lags}, batch_size=len(batch))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        batch.extra_info["version_lags"] = sorted(set(ages.values()))
        if self.reference and (kept := self.reference.before(self.optimizer_step)):
            batch.extra_info[KEPT] = list(kept)
        batch = super()._update_actor(batch, metrics)
        if self.reference:
            self.reference.after(self.optimizer_step, metrics[AGE_METRIC], metrics[Q_METRIC])
        self.guard.metrics(metrics, self.optimizer_step)
        return batch

    def _check_size(self, batch: KVBatchMeta) -> None:
        """verl pads a larger batch to whole mini-batches, and makes an optimizer step of each: ages would be wrong."""
        expected = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        if len(batch) != expected:
            raise LagViolationError(
                f"optimizer step {self.optimizer_step} got {len(batch)} rows for {expected} responses, so verl would "
                "make several steps of it, which no lag schedule counts: use an agent loop that returns one output"
            )

    def _check_lag(self, record: BatchRecord) -> None:
        step = self.optimizer_step
        # The tokens' own ages, and those of the oldest and newest weights of a trajectory: no request describes an
        # agent's later turns.
        if self.schedule.keeps(step, {*record.tokens_by_age, *record.ages.flatten().tolist()}):
            return
        self.recorder.broken_step(step, self.global_steps, record.sample_row(0, *self.replay_buffer.take_counts()))
        self.recorder.finish_lag(self.schedule)
        bound = "" if self.schedule.exact else "at most "
        raise LagViolationError(
            f"lag.schedule={self.schedule.kind} lag.steps={self.schedule.steps} promises age {bound}"
            f"{self.schedule.age(step)} for optimizer step {step}, but its tokens by age are "
            f"{dict(sorted(record.tokens_by_age.items()))} (oldest weights {record.ages.max()}, newest "
            f"{record.ages.min()}): the run is stopped, nothing was trained on them"
        )

    # --- between the steps: drain, save, sync, validate

    def _drain(self) -> None:
        """An exact schedule gives the rollout new weights only when nothing that it was asked for is unfinished.

        So no response mixes versions, and none is generated by newer weights than it should.
        """
        if self.schedule.exact:
            with self.recorder.waiting("the rollout to finish what it was asked for"):
                self.recorder.add_drain(self.replay_buffer.drain())

    def on_step_end(self) -> None:
        self._drain()
        with self.recorder.waiting("the weight sync"):
            super().on_step_end()

    def _validate(self) -> dict[str, float]:
        start = time.perf_counter()
        self.recorder.phase("validate")
        with self.recorder.waiting("the validation"):
            metrics = super()._validate()
        self.recorder.phase("train")
        self.recorder.validation(self.global_steps, metrics, time.perf_counter() - start, self._by_problem)
        return metrics

    def _val_metrics_update(
        self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=None
    ) -> dict[str, float]:
        verdicts = reward_extra_infos_dict.get("verdict")  # another reward function than ours has none
        problems = [uid for _, uid in expected_acc_counts or ()]  # in the order of the rows
        self._by_problem = tally(problems, sample_uids, verdicts) if verdicts is not None else None
        return super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=expected_acc_counts
        )

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self.recorder.flush(global_steps, self.parameter_sync_step, metrics)
        self._declare_checkpoint()  # only now: a resumed run needs the records of its steps, too
