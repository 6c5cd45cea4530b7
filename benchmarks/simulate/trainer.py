"""The trainer of a simulated run: the order of events of verl's ``separate_async``, with the recipes' drain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from benchmarks.simulate.queue import VirtualReplayBuffer
from benchmarks.simulate.rollout import Pool, Response
from benchmarks.simulate.scenario import Scenario
from sat_verl.batch_record import TRAIN, prompt_of
from sat_verl.lag import LagSchedule, token_ages

_ROUNDING_S = 1e-9


class _Memory:
    """Bytes in the queue: now, most, and their integral over time since the last :meth:`take`."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._at = self._since = self._integral = 0.0

    def add(self, now: float, amount: int) -> None:
        self._integral += self.bytes * (now - self._at)
        self._at = now
        self.bytes += amount
        self.peak = max(self.peak, self.bytes)

    def take(self, now: float) -> dict[str, float]:
        self.add(now, 0)
        found = {"queue_peak_bytes": self.peak, "queue_byte_s": self._integral}
        self.peak, self._integral = self.bytes, 0.0
        return found


class SimulatedRun:
    """One run of a schedule.

    Args:
        scenario: machine and sizes.
        schedule, strategy: as in a run.
        seed: of the lengths, which depend on a prompt's number alone, and of the noise.
    """

    def __init__(self, scenario: Scenario, schedule: LagSchedule, strategy: str | None, seed: int) -> None:
        self.scenario, self.schedule = scenario, schedule
        lengths, noise = np.random.SeedSequence(seed).spawn(2)
        self._lengths, self._noise = np.random.default_rng(lengths), np.random.default_rng(noise)
        self.pool = Pool(scenario.engine, scenario.replicas, scenario.prompt_tokens, self._ended)
        self.buffer = VirtualReplayBuffer(
            self.pool, schedule, strategy, scenario.responses, scenario.poll_s, self._submit
        )
        self.memory = _Memory()
        self.global_step = 1
        self.prompts: dict[int, list[Response]] = {}
        self.trained: list[list[int]] = []
        self._next_prompt = 0
        self._left: dict[int, int] = {}
        self._dropped_tokens = 0

    # --- prompts and responses

    def _submit(self, count: int) -> int:
        """Ask the rollout for ``count`` new prompts (:meth:`PPOTrainer._add_prompts_to_generate`).

        It waits until the agent loop workers have taken them, whose event loops first do what is before it in their
        line.
        """
        self.pool.advance(self.pool.now + self.pool.host_line())
        scenario, first = self.scenario, self._next_prompt
        lengths = scenario.lengths.draw(self._lengths, count, scenario.responses)
        self._next_prompt += count
        pace = float(np.exp(scenario.engine.noise * self._noise.standard_normal())) if scenario.engine.noise else 1.0
        new = range(first, first + count)
        for prompt, row in zip(new, lengths.tolist(), strict=True):
            self.prompts[prompt] = [Response(prompt, length, pace=pace) for length in row]
            self._left[prompt] = scenario.responses
        self.buffer.submitted(new, self.global_step)
        self.pool.submit(response for prompt in new for response in self.prompts[prompt])
        return count

    def _ended(self, response: Response) -> None:
        self.memory.add(self.pool.now, self._bytes(response))
        self._left[response.prompt] -= 1
        if not self._left[response.prompt]:
            del self._left[response.prompt]
            self.buffer.finished(response.prompt)

    def _bytes(self, response: Response) -> int:
        queue = self.scenario.queue
        return queue.response_token * response.length + queue.prompt_token * self.scenario.prompt_tokens

    def _forget_dropped(self) -> int:
        """Free what the sampler dropped; returns the number of prompts."""
        dropped, self.buffer.dropped = self.buffer.dropped, []
        for prompt in dropped:
            responses = self.prompts.pop(prompt)
            self._dropped_tokens += sum(response.length for response in responses)
            self.memory.add(self.pool.now, -sum(map(self._bytes, responses)))
        return len(dropped)

    # --- the run

    def run(self) -> list[dict[str, Any]]:
        """All global steps; one row per optimizer step, with the keys of ``samples.jsonl`` and times in seconds.

        The last row of a global step also has the window's own times and the sums of the pool and the queue.
        """
        rows: list[dict[str, Any]] = []
        every = self.schedule.sync_every
        if self.schedule.batches_ahead:
            self._submit(self.schedule.batches_ahead * self.scenario.prompts)
        for global_step in range(1, self.scenario.steps // every + 1):
            self.global_step, begin = global_step, self.pool.now
            self._submit(every * self.scenario.prompts)
            submitted = self.pool.now
            steps = [(self.global_step - 1) * every + inner + 1 for inner in range(every)]
            window = [self._optimizer_step(step) for step in steps]
            window[-1] |= {"submit_s": submitted - begin}
            window[-1] |= self._end_of_window([row.pop("held") for row in window], begin)
            rows += window
        return rows

    def _optimizer_step(self, step: int) -> dict[str, Any]:
        begin = self.pool.now
        batch, _ = self.buffer.sample(self.global_step, TRAIN, self.scenario.prompts)
        prompts = sorted({int(prompt_of(key)) for key in batch.keys})
        responses = [response for prompt in prompts for response in self.prompts.pop(prompt)]
        self.trained.append(prompts)
        sampled = self.pool.now
        tokens = sum(response.length for response in responses)
        row = self._record(step, responses)
        trained = self.scenario.queue.trained_token * tokens
        self.memory.add(self.pool.now, trained)
        total = tokens + self.scenario.prompt_tokens * len(responses)
        self._train(self.scenario.training.seconds(total, self._noise))
        held = trained + sum(map(self._bytes, responses))
        return row | {"wait_s": sampled - begin, "train_s": self.pool.now - sampled, "tokens": tokens, "held": held}

    def _train(self, seconds: float) -> None:
        """Let ``seconds`` of the trainer's work pass, which take longer where the rollout is in its way."""
        scenario, pool = self.scenario, self.pool
        if scenario.trainer_slowed == scenario.rollout_slowed == 1.0:
            pool.advance(pool.now + seconds)
            return
        pool.set_slow(scenario.rollout_slowed)
        while seconds > _ROUNDING_S:
            factor, begin = scenario.trainer_slowed if pool.unstored else 1.0, pool.now
            pool.advance(min(begin + seconds * factor, pool.next_event()))
            seconds -= (pool.now - begin) / factor
        pool.set_slow(1.0)

    def _record(self, step: int, responses: list[Response]) -> dict[str, Any]:
        syncs: Counter[int] = Counter()
        for response in responses:
            for sync, tokens in response.segments:
                syncs[sync] += tokens
        ages = token_ages(step, self.schedule.sync_every, syncs.items())
        refilled, retried = self.buffer.take_counts()
        return {
            "step": step,
            "global_step": self.global_step,
            "tokens_by_age": {str(age): count for age, count in sorted(ages.items())},
            "responses": len(responses),
            "mixed_responses": sum(len({sync for sync, _ in one.segments}) > 1 for one in responses),
            "dropped_groups": self._forget_dropped(),
            "refilled_groups": refilled,
            "retried_groups": retried,
            "drain_seconds": 0.0,
            "in_flight_s": float(np.mean([one.ended - one.sent for one in responses])),
            "in_queue_s": float(np.mean([self.pool.now - one.ended for one in responses])),
            "generated_between": [min(one.sent for one in responses), max(one.ended for one in responses)],
        }

    def _end_of_window(self, held: list[int], begin: float) -> dict[str, Any]:
        scenario = self.scenario
        drain = self.buffer.drain() if self.schedule.exact else 0.0
        self.pool.sync_weights(scenario.sync_s)
        self.memory.add(self.pool.now, -sum(held))
        ready = self.buffer.outstanding_prompts()
        self.pool.advance(self.pool.now + scenario.other_s)
        totals = {f"pool_{name}": value for name, value in self.pool.totals().items()}
        return {
            "drain_seconds": drain,
            "sync_s": scenario.sync_s,
            "other_s": scenario.other_s,
            "begin": begin,
            "end": self.pool.now,
            "outstanding_prompts": ready,
            "dropped_tokens": self._dropped_tokens,
            **totals,
            **self.memory.take(self.pool.now),
        }
