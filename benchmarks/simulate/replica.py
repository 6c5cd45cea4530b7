"""A replica of a simulated rollout: continuous batching in closed form, and its host."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from benchmarks.simulate.scenario import Engine

_TOLERANCE = 1e-6
"""Tokens: what is missing by less was lost to rounding."""


@dataclass(slots=True, eq=False)
class Response:
    """One response; times in seconds, lengths in tokens.

    Attributes:
        prompt: number of its prompt.
        length: tokens that it will have; ``done``: tokens of the requests before the current one.
        segments: (weight sync, tokens) of each request.
        sent, ended: when its first request reached the replica, and when the host took up what came of it; -1 before.
        rounds: times that the host has worked on storing it.
        pace: factor on the host's work for it.
    """

    prompt: int
    length: int
    done: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)
    sent: float = -1.0
    ended: float = -1.0
    rounds: int = 0
    pace: float = 1.0
    began: float = 0.0
    """Iterations of its replica when the current request began to decode."""


@dataclass(slots=True)
class Progress:
    """What a replica did: requests that reached it, responses that it ended, those of them that the host has taken up,
    those that the queue has now."""

    sent: int = 0
    ended: int = 0
    taken_up: int = 0
    stored: list[Response] = field(default_factory=list)


class Replica:
    """One engine: all its sequences advance alike, so that only the next end has to be known.

    ``done`` iterations of the decoder are the replica's own time: a request that began at iteration b with r tokens to
    go ends at b + r. Between two events the number of sequences stays, their contexts grow by one token per iteration,
    and an iteration takes longer by ``per_context_s`` times their number, so that x iterations take
    ``first * x + growth * x**2 / 2`` seconds.
    """

    def __init__(self, engine: Engine, prompt_tokens: int) -> None:
        self.engine, self.prompt_tokens = engine, prompt_tokens
        self.slow = 1.0
        self.outside: deque[Response] = deque()
        self.host: deque[Response] = deque()
        self.waiting: deque[Response] = deque()
        self.running: list[tuple[float, int, Response]] = []
        self.done = 0.0
        self.context = 0.0
        self.at = self.decodes_from = 0.0
        self.host_ready = math.inf
        self.load = self.in_work = 0
        self.idle_s = self.slot_s = self.tokens = 0.0
        self._order = 0

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next iteration, and by how much each one is longer than the one before."""
        count = len(self.running)
        engine = self.engine
        first = engine.iteration_s + engine.per_sequence_s * count + engine.per_context_s * self.context
        return first * self.slow, engine.per_context_s * count * self.slow

    def _host_seconds(self, response: Response) -> float:
        """Of the host's next piece of work on a response."""
        engine = self.engine
        seconds = engine.store_s / engine.store_rounds if response.done == response.length else engine.request_s
        return seconds * response.pace * self.slow

    def host_line(self, now: float) -> float:
        """Seconds until the host has done the next piece of everything that waits for it at ``now``."""
        if not self.host:
            return 0.0
        others = sum(self._host_seconds(response) for response in itertools.islice(self.host, 1, None))
        return max(0.0, self.host_ready - now) + others

    def _take_up(self, now: float) -> int:
        """The host begins with the next piece of its work; 1 if that is a response that has just ended, else 0."""
        if not self.host:
            self.host_ready = math.inf
            return 0
        response = self.host[0]
        self.host_ready = now + self._host_seconds(response)
        if response.done < response.length or response.ended >= 0:
            return 0
        response.ended = now
        return 1

    def next_event(self) -> float:
        """When a response ends or the host is done with one next; infinity if there is none."""
        found = self.host_ready
        if self.running:
            first, growth = self._pace()
            left = self.running[0][0] - self.done
            found = min(found, max(self.at, self.decodes_from) + left * (first + growth * left / 2))
        return found

    def set_slow(self, factor: float) -> None:
        """Everything takes ``factor`` times as long from now on."""
        if self.host:
            self.host_ready = self.at + (self.host_ready - self.at) * factor / self.slow
        self.slow = factor

    def advance(self, now: float) -> None:
        """Decode until ``now``, before which nothing ends or arrives."""
        count = len(self.running)
        if count:
            span = now - max(self.at, self.decodes_from)
            if span > 0:
                first, growth = self._pace()
                iterations = 2 * span / (first + math.sqrt(first * first + 2 * growth * span))
                self.done += iterations
                self.context += count * iterations
                self.tokens += count * iterations
            self.slot_s += count * (now - self.at)
        else:
            self.idle_s += now - self.at
        self.at = now

    def work(self, now: float, version: int) -> Progress:
        """Handle what is due at ``now``; the last tokens of what ends have ``version``."""
        self.advance(now)
        found = Progress()
        while self.running and self.running[0][0] <= self.done + _TOLERANCE:
            _, _, response = heapq.heappop(self.running)
            self.context -= self.prompt_tokens + response.length
            response.segments.append((version, response.length - response.done))
            response.done = response.length
            found.ended += 1
            found.taken_up += self._give_host(response)
        if not self.running:
            self.context = 0.0
        while self.host and self.host_ready <= now:
            response = self.host.popleft()
            if response.done < response.length:
                response.sent = now
                found.sent += 1
                self.waiting.append(response)
            else:
                response.rounds += 1
                if response.rounds < self.engine.store_rounds:
                    self.host.append(response)
                else:
                    found.stored.append(response)
            found.taken_up += self._take_up(now)
        self.in_work -= len(found.stored)
        found.taken_up += self._begin()
        self._admit()
        self.load -= found.ended
        return found

    def _begin(self) -> int:
        """Let the host begin with the oldest requests while it has fewer responses in work than there are slots.

        See :mod:`sat_verl.admission`, which counts whole prompts. Returns how many ended responses the host takes up.
        """
        taken_up = 0
        while self.outside and self.in_work < self.engine.slots:
            self.in_work += 1
            taken_up += self._give_host(self.outside.popleft())
        return taken_up

    def _give_host(self, response: Response) -> int:
        self.host.append(response)
        return self._take_up(self.at) if len(self.host) == 1 else 0

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.engine.slots:
            response = self.waiting.popleft()
            context = self.prompt_tokens + response.done
            self.context += context
            response.began = self.done
            self._order += 1
            heapq.heappush(self.running, (self.done + response.length - response.done, self._order, response))
            if self.engine.prefill_s:
                self.decodes_from = max(self.at, self.decodes_from) + self.engine.prefill_s * context

    def take(self, response: Response) -> None:
        """A new request."""
        self.load += 1
        self.outside.append(response)
        self._begin()

    def abort(self, version: int) -> None:
        """End all running requests; they wait, in their order, to be resumed with what they have."""
        for _, _, response in sorted(self.running, key=lambda entry: entry[1], reverse=True):
            tokens = min(int(self.done - response.began + _TOLERANCE), response.length - response.done - 1)
            if tokens > 0:
                response.segments.append((version, tokens))
                response.done += tokens
            self.waiting.appendleft(response)
        self.running.clear()
        self.context = 0.0

    def resume(self, now: float) -> None:
        """Take up all requests again under new weights, at ``now``."""
        self.idle_s += now - self.at
        self.host_ready = max(self.host_ready, now)
        self.at = self.decodes_from = now
        self._admit()
