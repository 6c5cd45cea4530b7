"""The recipes' own replay buffer on the clock of a simulated run, over a queue that is two sets."""

from __future__ import annotations

import logging
import math
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as upstream

from benchmarks.simulate.rollout import Pool
from recipes.schedule import sampler_settings
from sat_verl.batch_record import TRAIN
from sat_verl.lag import LagSchedule
from sat_verl.sampler import GuardedReplayBuffer

# One line per buffer, of which a matrix builds many.
upstream.logger.setLevel(max(upstream.logger.level, logging.WARNING))


class VirtualReplayBuffer(GuardedReplayBuffer):
    """:class:`~sat_verl.sampler.GuardedReplayBuffer` with another clock and store; every decision is its own.

    What is decided from (the prompts that are running and finished, and the global step that each was submitted in) is
    kept up to date here instead of being read from TransferQueue at every look; looks that could see nothing new
    are skipped. Prompts are numbers, in the order of their submission.

    Args:
        pool: the rollout, which holds the clock.
        schedule, strategy: as in a run.
        responses: per prompt.
        poll_s: seconds between two looks.
        refill: submits that many prompts in place of those that were dropped.
    """

    def __init__(
        self, pool: Pool, schedule: LagSchedule, strategy: str | None, responses: int, poll_s: float, refill: Any
    ) -> None:
        self.pool, self.responses = pool, responses
        self.changed = False
        self.dropped: list[int] = []
        settings = sampler_settings(schedule, strategy)
        settings["sampler_kwargs"] |= {"poll_interval_s": poll_s}
        super().__init__(trainer_mode="sat_async", trainer_config={}, refill_fn=refill, **settings)

    def submitted(self, prompts: range, global_step: int) -> None:
        self.prompt_global_steps[TRAIN].update(dict.fromkeys(prompts, global_step))
        self.running_keys[TRAIN].update(prompts)

    def finished(self, prompt: int) -> None:
        self.running_keys[TRAIN].remove(prompt)
        self.finished_keys[TRAIN].add(prompt)
        self.changed = True

    def outstanding_prompts(self) -> int:
        return len(self.prompt_global_steps[TRAIN])

    # --- clock and store

    def _now(self) -> float:
        return self.pool.now

    def _sync_metadata_from_transfer_queue(self) -> None:
        self.changed = False

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        begin = self.pool.now
        while not self.changed:
            when = self.pool.next_event()
            if when == math.inf:
                raise RuntimeError(f"the sampler waits for ever: {sorted(self.running_keys[TRAIN])[:8]} never end")
            self.pool.advance(when)
        looks = max(1, math.ceil((self.pool.now - begin) / self.poll_interval - 1e-9))
        self.pool.advance(max(self.pool.now, begin + looks * self.poll_interval))
        return last_debug_time

    def _prompts(self) -> Any:
        return list(self.prompt_global_steps[TRAIN])  # submitted, and so kept, in their order

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> Any:
        # A run takes those of one global step in the order of a set of strings, which no seed repeats.
        return super()._select_prompt_uids(partition_id, sorted(sampleable_keys), batch_size)

    def _forget(self, prompts: Any) -> None:
        for prompt in prompts:
            del self.prompt_global_steps[TRAIN][prompt]
            self.finished_keys[TRAIN].discard(prompt)

    def _clear_groups(self, partition_id: str, uids: Any) -> None:
        self.dropped.extend(sorted(uids))
        self._forget(uids)

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: Any, partition_snapshot: Any) -> KVBatchMeta:
        self._forget(selected_prompt_uids)
        keys = [f"{prompt:010d}_{place}_0" for prompt in selected_prompt_uids for place in range(self.responses)]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys])
