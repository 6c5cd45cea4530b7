"""The replay buffer of the recipes: verl's asynchronous one, which does not wait for ever, and can keep a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from sat_verl.batch_record import TRAIN


class RolloutFailedError(RuntimeError):
    """The rollout fails again and again, or has stopped: the run cannot go on."""


class GuardedReplayBuffer(ReplayBufferAsync):
    """verl's :class:`ReplayBufferAsync` that ends a run whose rollout is broken, and polls as fast as a tiny step.

    Upstream replaces every failed prompt group by a new one, without an end: with a dead engine the run neither
    trains nor stops. Chosen by ``trainer.v1.sampler.custom_sampler``; options under ``sampler_kwargs``:

    - ``poll_interval_s`` (0.05): time between two looks at the queue, in seconds (upstream: 2).
    - ``failure_limit`` (16): groups that may fail without one success in between.
    - ``stall_timeout_s`` (1800): time without any finished group after which the run is given up, in seconds.
    - ``exact`` (False): train on the prompts in the order of their submission, and generate a failed group again
      instead of replacing it, so that nothing is skipped and every batch has the age that its submission gave it.

    The trainer sets ``resubmit`` (an exact buffer's way to generate groups again) and ``on_progress``.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        options = self.sampler_kwargs or {}
        self.poll_interval = float(options.get("poll_interval_s", 0.05))
        self.failure_limit = int(options.get("failure_limit", 16))
        self.stall_timeout_s = float(options.get("stall_timeout_s", 1800.0))
        self.exact = bool(options.get("exact", False))
        self.resubmit: Callable[[list[str]], None] | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self.retried_groups = 0
        self.refilled_groups = 0
        self._upstream_refill: Callable[[int], int] = kwargs["refill_fn"]
        self.refill_fn = self._refill
        self._failed_in_a_row = 0
        self._last_progress = self._now()
        self._last_terminal: set[str] = set()

    def _refill(self, count: int) -> int:
        self.refilled_groups += count
        return self._upstream_refill(count)

    def take_counts(self) -> tuple[int, int]:
        """Groups refilled and retried since the last call."""
        counts = self.refilled_groups, self.retried_groups
        self.refilled_groups = self.retried_groups = 0
        return counts

    # --- sampling

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        self._start_waiting()
        if not self.exact or partition_id != TRAIN:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            return self._in_order(batch), metrics
        self._wait_until(lambda: self._all_finished(self._next(batch_size)) and len(self._prompts()) >= batch_size)
        batch = self._materialize_batch(TRAIN, self._next(batch_size), dict(self.partitions[TRAIN]))
        return self._in_order(batch), {}

    @staticmethod
    def _in_order(batch: KVBatchMeta) -> KVBatchMeta:
        """Rows in the order of submission; upstream's is that of completion, which no seed can repeat."""

        def place(index: int) -> tuple[str, int, int]:
            uid, response, part = batch.keys[index].rsplit("_", 2)
            return uid, int(response), int(part)

        batch.reorder(sorted(range(len(batch.keys)), key=place))
        return batch

    def drain(self) -> float:
        """Wait until no training prompt is pending or running, and return the seconds it took (exact only)."""
        start = self._now()
        self._start_waiting()
        self._wait_until(lambda: self._all_finished(self._prompts()))
        return self._now() - start

    def outstanding(self) -> list[str]:
        """Training prompts that were submitted and not trained on yet, in the order of submission."""
        self._sync_metadata_from_transfer_queue()
        return self._prompts()

    def _prompts(self) -> list[str]:
        return sorted(self.prompt_global_steps[TRAIN])

    def _next(self, batch_size: int) -> list[str]:
        return self._prompts()[:batch_size]

    def _all_finished(self, uids: list[str]) -> bool:
        return self.finished_keys[TRAIN].issuperset(uids)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        last_debug_time = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            failed = sorted(self.failure_keys[TRAIN])
            if failed:
                assert self.resubmit is not None
                self.retried_groups += len(failed)
                self.resubmit(failed)
                self._last_terminal -= set(failed)  # one that fails again counts again
            elif ready():
                return
            last_debug_time = self._wait_for_next_poll(TRAIN, last_debug_time)

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        """Upstream's ``wait`` waits for prompts at the bound that are in flight, but lets others overtake them, after
        which more of them can be at the bound than one step takes. So what is left must be able to make it, too.
        """
        enough = super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys)
        if not enough or self.max_off_policy_threshold is None or self.max_off_policy_strategy != "wait":
            return enough
        submitted = self.prompt_global_steps[partition_id]
        taken = set(sorted(sampleable_keys, key=lambda uid: submitted[uid])[:batch_size])
        left = sorted(step for uid, step in submitted.items() if uid not in taken)
        # The i-th of those left is trained on at this step + 1 + i // batch_size at the earliest.
        last = self.max_off_policy_threshold - 1
        return all(step + last > global_steps + index // batch_size for index, step in enumerate(left))

    # --- guards

    def _now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def _start_waiting(self) -> None:
        self._last_progress = self._now()
        self._last_terminal = set()

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        finished = set().union(*self.finished_keys.values()) if self.finished_keys else set()
        failed = set().union(*self.failure_keys.values()) if self.failure_keys else set()
        if finished - self._last_terminal:  # in what order they ended since the last look, nobody knows
            self._failed_in_a_row = 0
        else:
            self._failed_in_a_row += len(failed - self._last_terminal)
        if (finished | failed) - self._last_terminal:
            self._last_progress = self._now()
            self.on_progress()
        self._last_terminal = finished | failed
        if self._failed_in_a_row >= self.failure_limit:
            raise RolloutFailedError(
                f"{self._failed_in_a_row} prompt groups failed in a row and none succeeded: the rollout is broken "
                "(the first 'Error in _run_prompt' in the log of the run is the cause)"
            )

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        waited = self._now() - self._last_progress
        if waited > self.stall_timeout_s:
            raise RolloutFailedError(
                f"no prompt group has finished for {waited:.0f} s ({len(self.pending_keys[partition_id])} pending, "
                f"{len(self.running_keys[partition_id])} running): the rollout has stopped. If a response may really "
                "take that long, raise trainer.v1.sampler.sampler_kwargs.stall_timeout_s"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)
