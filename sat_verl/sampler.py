"""The replay buffer of the recipes: verl's asynchronous one, which does not wait for ever."""

from __future__ import annotations

import time

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync


class RolloutFailedError(RuntimeError):
    """The rollout fails again and again, or has stopped: the run cannot go on."""


class GuardedReplayBuffer(ReplayBufferAsync):
    """verl's :class:`ReplayBufferAsync` that ends a run whose rollout is broken, and polls as fast as a tiny step.

    Upstream replaces every failed prompt group by a new one, without an end: with a dead engine the run neither
    trains nor stops. Chosen by ``trainer.v1.sampler.custom_sampler``; options under ``sampler_kwargs``:

    - ``poll_interval_s`` (0.05): time between two looks at the queue, in seconds (upstream: 2).
    - ``failure_limit`` (16): groups that may fail without one success in between.
    - ``stall_timeout_s`` (1800): time without any finished group after which the run is given up, in seconds.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        options = self.sampler_kwargs or {}
        self.poll_interval = float(options.get("poll_interval_s", 0.05))
        self.failure_limit = int(options.get("failure_limit", 16))
        self.stall_timeout_s = float(options.get("stall_timeout_s", 1800.0))
        self._failed_in_a_row: set[str] = set()
        self._last_progress = time.monotonic()
        self._last_terminal: set[str] = set()

    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        self._last_progress = time.monotonic()
        self._last_terminal = set()
        return super().sample(global_steps, partition_id, batch_size)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        finished = set().union(*self.finished_keys.values()) if self.finished_keys else set()
        failed = set().union(*self.failure_keys.values()) if self.failure_keys else set()
        if finished - self._last_terminal:
            self._failed_in_a_row.clear()
        self._failed_in_a_row |= failed - self._last_terminal
        if (finished | failed) - self._last_terminal:
            self._last_progress = time.monotonic()
        self._last_terminal = finished | failed
        if len(self._failed_in_a_row) >= self.failure_limit:
            raise RolloutFailedError(
                f"{len(self._failed_in_a_row)} prompt groups failed in a row and none succeeded: the rollout is broken "
                "(the first 'Error in _run_prompt' in the log of the run is the cause)"
            )

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        waited = time.monotonic() - self._last_progress
        if waited > self.stall_timeout_s:
            raise RolloutFailedError(
                f"no prompt group has finished for {waited:.0f} s ({len(self.pending_keys[partition_id])} pending, "
                f"{len(self.running_keys[partition_id])} running): the rollout has stopped. If a response may really "
                "take that long, raise trainer.v1.sampler.sampler_kwargs.stall_timeout_s"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)
