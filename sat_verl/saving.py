"""Checkpoints from which a lag schedule can go on, as a part of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from sat_verl import checkpoints
from sat_verl.batch_record import TRAIN, prompt_of
from sat_verl.fresh import KEPT, ReferenceMemory

if TYPE_CHECKING:
    from sat_verl.lag import LagSchedule
    from sat_verl.records import RunRecorder
    from sat_verl.sampler import GuardedReplayBuffer


class ResumeError(RuntimeError):
    """A checkpoint does not hold what the lag schedule needs to go on."""


class WholeCheckpoints(PPOTrainer):
    """verl's checkpoint, after a drain, with the place in the prompts; it counts once all of it is on disk.

    It holds what an exact schedule has in flight: nothing that is unfinished, and in the queue the samples that are
    still to be trained on, with their policy versions.
    """

    schedule: LagSchedule
    reference: ReferenceMemory | None
    recorder: RunRecorder
    replay_buffer: GuardedReplayBuffer
    _next_prompt: int
    _saved: dict[str, Any] | None = None  # facts of a checkpoint whose steps are not recorded yet

    def _drain(self) -> None:
        raise NotImplementedError

    def _save_checkpoint(self) -> None:
        root = Path(self.config.trainer.default_local_dir)
        root.mkdir(parents=True, exist_ok=True)
        checkpoints.check_space(root, Path(self.config.actor_rollout_ref.model.path))
        self._drain()
        with self.recorder.waiting("the checkpoint to be saved"):
            super()._save_checkpoint()
        self._saved = {
            "global_step": self.global_steps,
            "optimizer_step": self.global_steps * self.parameter_sync_step,
            "next_prompt": self._next_prompt,
            "outstanding_prompts": self.replay_buffer.outstanding(),
            "lag": {"schedule": self.schedule.kind, "steps": self.schedule.steps},
        }
        if self.reference:
            self._saved[KEPT] = self.reference.kept

    def _declare_checkpoint(self) -> None:
        """Call it when the records of the steps are on disk: verl saves first, validates, and reports last."""
        if self._saved is None:
            return
        root = Path(self.config.trainer.default_local_dir)
        with self.recorder.waiting("the checkpoint to be on disk"):
            checkpoints.mark(root / f"global_step_{self.global_steps}", self._saved)
            checkpoints.prune(root, self.config.sat_verl.keep_checkpoints)
        self._saved = None

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        facts = checkpoints.read_marker(folder)
        self._next_prompt = facts["next_prompt"]
        if self.reference:
            self.reference = ReferenceMemory(self.reference.steps, facts[KEPT])
        outstanding = self.replay_buffer.outstanding()
        self._forget_trained(set(outstanding))
        if outstanding != facts["outstanding_prompts"]:
            raise ResumeError(f"{folder} should hold the prompts {json.dumps(facts['outstanding_prompts'])} that were "
                              f"not trained on yet, and holds {json.dumps(outstanding)}")  # fmt: skip

    def _forget_trained(self, outstanding: set[str]) -> None:
        """The queue is saved before verl clears the step that was just trained; those samples are done with."""
        done = [key for key in self.replay_buffer.partitions[TRAIN] if prompt_of(key) not in outstanding]
        if done:
            tq.kv_clear(keys=done, partition_id=TRAIN)
