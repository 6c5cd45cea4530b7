"""The rollout of a simulated run: replicas as events on a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from benchmarks.simulate.replica import Replica, Response
from benchmarks.simulate.scenario import Engine


class Pool:
    """All replicas, and the clock of the run, which only :meth:`advance` and its callers move.

    Args:
        engine, replicas: what it consists of.
        prompt_tokens: tokens of a prompt.
        on_end: called with each response when it reaches the queue.
    """

    def __init__(
        self, engine: Engine, replicas: int, prompt_tokens: int, on_end: Callable[[Response], None] = lambda _: None
    ) -> None:
        self.replicas = [Replica(engine, prompt_tokens) for _ in range(replicas)]
        self.now = 0.0
        self.version = 0
        self.busy_s = 0.0
        self.in_flight = self.unstored = 0
        self.on_end = on_end
        self._events: list[tuple[float, int, int]] = []  # time, replica, its stamp then
        self._stamps = [0] * replicas
        self._loads = [(0, index) for index in range(replicas)]

    def submit(self, responses: Iterable[Response]) -> None:
        """Ask for responses, each of the replica with the fewest requests."""
        touched = set()
        for response in responses:
            index = self._least_loaded()
            replica = self.replicas[index]
            if index not in touched:
                replica.advance(self.now)
                touched.add(index)
            replica.take(response)
            heapq.heappush(self._loads, (replica.load, index))
            self.unstored += 1
        for index in sorted(touched):
            self._schedule(index)

    def host_line(self) -> float:
        """Seconds until every host would take up what it was asked for now."""
        return max(replica.host_line(self.now) for replica in self.replicas)

    def _least_loaded(self) -> int:
        while True:
            load, index = heapq.heappop(self._loads)
            if load == self.replicas[index].load:
                return index

    def _schedule(self, index: int) -> None:
        self._stamps[index] += 1
        when = self.replicas[index].next_event()
        if when < math.inf:
            heapq.heappush(self._events, (when, index, self._stamps[index]))

    def next_event(self) -> float:
        """When the rollout's state changes next; infinity if it does not."""
        while self._events and self._events[0][2] != self._stamps[self._events[0][1]]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def advance(self, until: float) -> None:
        """Let the rollout work until ``until``."""
        while (when := self.next_event()) <= until:
            _, index, _ = heapq.heappop(self._events)
            self._tick(when)
            replica = self.replicas[index]
            found = replica.work(when, self.version)
            self._schedule(index)
            self.in_flight += found.sent - found.taken_up
            if found.ended:
                heapq.heappush(self._loads, (replica.load, index))
            self.unstored -= len(found.stored)
            for response in found.stored:
                self.on_end(response)
        self._tick(until)

    def set_slow(self, factor: float) -> None:
        """Everything takes ``factor`` times as long from now on."""
        for index, replica in enumerate(self.replicas):
            replica.advance(self.now)
            replica.set_slow(factor)
            self._schedule(index)

    def _tick(self, now: float) -> None:
        self.busy_s += (now - self.now) if self.in_flight else 0.0
        self.now = now

    def sync_weights(self, seconds: float) -> None:
        """New weights: what runs is aborted, nothing works for ``seconds``, and what was aborted goes on."""
        for replica in self.replicas:
            replica.advance(self.now)
            replica.abort(self.version)
        self._tick(self.now + seconds)
        self.version += 1
        for index, replica in enumerate(self.replicas):
            replica.resume(self.now)
            self._schedule(index)

    def totals(self) -> dict[str, float]:
        """Sums since the start, over the replicas: seconds without a running sequence, seconds times running
        sequences, tokens; and seconds in which any request was in flight."""
        for index, replica in enumerate(self.replicas):
            replica.advance(self.now)
            self._schedule(index)
        found = {name: sum(getattr(one, name) for one in self.replicas) for name in ("idle_s", "slot_s", "tokens")}
        return found | {"busy_s": self.busy_s}
