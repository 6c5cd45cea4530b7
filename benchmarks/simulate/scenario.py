"""What a simulated run consists of: lengths of responses, speed of rollout and trainer, sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm


@dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths, in tokens.

    Args:
        kind: ``lognormal``: ``typical`` is the median, ``shape`` the standard deviation of the logarithm. ``pareto``:
            ``typical`` is the smallest length, ``shape`` the tail index. ``fixed``: all are ``typical`` long.
        typical, shape: see ``kind``.
        limit: longest response; what would be longer ends there.
        within: correlation of the (normal scores of the) lengths of two responses to one prompt, 0 to 1.
    """

    kind: str
    typical: float
    shape: float
    limit: int
    within: float = 0.0

    def draw(self, chance: np.random.Generator, prompts: int, responses: int) -> np.ndarray:
        """Lengths of shape ``(prompts, responses)``, int64, from 1 to ``limit``."""
        own = chance.standard_normal((prompts, responses))
        common = chance.standard_normal((prompts, 1))
        score = math.sqrt(self.within) * common + math.sqrt(1 - self.within) * own
        if self.kind == "lognormal":
            lengths = self.typical * np.exp(self.shape * score)
        elif self.kind == "pareto":
            lengths = self.typical * norm.sf(score) ** (-1 / self.shape)
        else:
            lengths = np.full(score.shape, self.typical)
        return np.clip(np.rint(lengths), 1, self.limit).astype(np.int64)


@dataclass(frozen=True)
class Engine:
    """Speed of one rollout replica.

    One iteration of the decoder gives every running sequence a token and takes ``iteration_s + per_sequence_s *
    sequences + per_context_s * tokens in the KV cache``: reading the weights, computing, and reading the cache. So
    tokens per second grow with the batch and saturate.

    Args:
        slots: sequences that run at once, and responses that the host has in work; further requests wait, first come,
            first served.
        iteration_s, per_sequence_s, per_context_s: seconds, as above.
        prefill_s: seconds per token of a prompt, or of a response that is resumed; nothing is decoded meanwhile.
        request_s: work of the host until a request reaches the replica, in seconds.
        store_s: work of the host from the end of a response until the queue has it (reward, storing), in seconds. The
            host of a replica does one thing at a time, in the order in which it comes up: what is to be stored waits
            behind the requests that were made before, as in the event loop of an agent loop worker.
        store_rounds: pieces of equal size that this work comes in. After each, the response waits behind all other
            work that came up meanwhile, as a coroutine does behind the others at each ``await``: of responses that end
            together none is stored much earlier than the last.
        noise: standard deviation of the logarithm of a factor on the host's work, drawn once per submission.
    """

    slots: int
    iteration_s: float
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0
    prefill_s: float = 0.0
    request_s: float = 0.0
    store_s: float = 0.0
    store_rounds: int = 1
    noise: float = 0.0


@dataclass(frozen=True)
class Training:
    """Seconds of an optimizer step: ``(fixed_s + per_token_s * tokens)`` times a factor whose logarithm has the
    standard deviation ``noise`` and mean 0; tokens of prompts and responses."""

    fixed_s: float
    per_token_s: float = 0.0
    noise: float = 0.0

    def seconds(self, tokens: int, chance: np.random.Generator) -> float:
        factor = math.exp(self.noise * chance.standard_normal()) if self.noise else 1.0
        return (self.fixed_s + self.per_token_s * tokens) * factor


@dataclass(frozen=True)
class QueueBytes:
    """Memory of a finished response until its global step ends, in bytes.

    verl's fields per response token: ``responses``, ``response_mask``, ``loss_mask``, ``input_ids``, ``position_ids``
    (int64), ``rollout_log_probs``, ``rm_scores`` (float32); per prompt token ``prompts``, ``input_ids``,
    ``position_ids``. Once it is trained on, ``old_log_probs``, ``advantages`` and ``returns`` (float32) come to them.
    """

    response_token: int = 5 * 8 + 2 * 4
    prompt_token: int = 3 * 8
    trained_token: int = 3 * 4


@dataclass(frozen=True)
class Scenario:
    """One simulated machine and run.

    Args:
        replicas: rollout replicas of the speed ``engine``.
        training: the trainer as a whole.
        lengths: of the responses.
        prompts, responses: of one optimizer step, and per prompt.
        prompt_tokens: tokens of a prompt.
        steps: optimizer steps.
        sync_s: seconds of a weight sync, in which neither side works.
        other_s: seconds between a weight sync and the next global step (metrics, logging).
        poll_s: seconds between two looks of the sampler at the queue.
        queue: memory of a response.
        trainer_slowed, rollout_slowed: by what factor a side is slower while both work; 1 unless they share a machine.
    """

    replicas: int
    engine: Engine
    training: Training
    lengths: Lengths
    prompts: int
    responses: int
    prompt_tokens: int
    steps: int
    sync_s: float
    other_s: float = 0.0
    poll_s: float = 0.05
    queue: QueueBytes = QueueBytes()
    trainer_slowed: float = 1.0
    rollout_slowed: float = 1.0
