"""What one optimizer step trains on, read once from the queue: rewards, lengths, ages, times."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from sat_verl import lag
from sat_verl.lag import LAG_SUMS
from sat_verl.routes import ROUTES_BYTES

TRAIN = "train"
"""The queue's partition of the training samples."""

SEGMENTS = "policy_segments"
"""Key in ``extra_fields``: ``[[weight sync, tokens], ...]`` in the order of generation, one entry per request."""

STARTED, FINISHED = "generation_started", "generation_finished"
"""Keys in ``extra_fields``: Unix time, in seconds, of the first request's start and the last one's end."""

FINISH_REASON = "finish_reason"
"""Key in ``extra_fields``, and in the ``extra_info`` of the reward function: "length" or "stop"."""

VALUES = ["rm_scores", "response_mask", "rollout_log_probs"]
"""What a step computes with, per token."""

PER_ROW = ("rewards", "tokens", "ages", "in_flight", "in_queue", "started")
"""Arrays of a :class:`BatchRecord` with one entry per response."""


class UnknownPolicyVersionError(RuntimeError):
    """A response came without the record of its generation."""


@dataclass
class BatchRecord:
    """One entry per response, without the rows that verl pads a batch with.

    Attributes:
        keys: keys of the queue, ``{prompt}_{response}_{part}``.
        data_rows: rows of the data set, one per prompt in the order of submission.
        data: ``rm_scores``, ``response_mask`` and ``rollout_log_probs``, nested, float or int.
        rewards: shape ``(rows,)``.
        tokens: tokens that count, shape ``(rows,)``.
        ages: age in optimizer steps of the oldest and the newest weights, shape ``(rows, 2)``.
        row_ages: tokens of each response by age.
        in_flight: seconds from request to response, shape ``(rows,)``.
        in_queue: seconds from the response to now, shape ``(rows,)``.
        started: Unix time of each request, shape ``(rows,)``.
        skipped: prompts whose responses were left out, in the order of submission.
        routes_bytes: size of the routes of all responses that came; 0 without routing replay.
    """

    keys: list[str]
    data_rows: list[int]
    data: TensorDict
    rewards: np.ndarray
    tokens: np.ndarray
    ages: np.ndarray
    row_ages: list[Counter[int]]
    in_flight: np.ndarray
    in_queue: np.ndarray
    started: np.ndarray
    skipped: list[str] = field(default_factory=list)
    routes_bytes: int = 0

    @property
    def prompts(self) -> list[str]:
        """The prompts that the step consumes, each once, in the order of submission."""
        return sorted({prompt_of(key) for key in self.keys} | set(self.skipped))

    @property
    def tokens_by_age(self) -> Counter[int]:
        return sum(self.row_ages, Counter())

    def without(self, rows: np.ndarray) -> BatchRecord:
        """The record of the rows that are not marked, shape ``(rows,)``, bool; ``data`` stays whole."""
        kept, gone = np.flatnonzero(~rows), np.flatnonzero(rows)
        return replace(
            self,
            keys=[self.keys[row] for row in kept],
            row_ages=[self.row_ages[row] for row in kept],
            skipped=sorted({prompt_of(self.keys[row]) for row in gone}),
            **{name: getattr(self, name)[kept] for name in PER_ROW},
        )

    @property
    def mixed(self) -> int:
        """Responses that more than one policy version generated."""
        return int((self.ages[:, 0] != self.ages[:, 1]).sum())

    def sample_row(self, dropped: int, refilled: int, retried: int) -> dict[str, Any]:
        """The step's line in ``samples.jsonl``; the arguments are numbers of prompt groups since the step before."""
        return {
            "prompts": self.prompts,
            "data_rows": self.data_rows,
            "skipped_prompts": self.skipped,
            "tokens_by_age": {str(age): count for age, count in sorted(self.tokens_by_age.items())},
            "responses": len(self.keys),
            "mixed_responses": self.mixed,
            "dropped_groups": dropped,
            "refilled_groups": refilled,
            "retried_groups": retried,
            "drain_seconds": 0.0,
            "in_flight_s": float(self.in_flight.mean()),
            "in_queue_s": float(self.in_queue.mean()),
            "generated_between": [float(self.started.min()), float((self.started + self.in_flight).max())],
        }

    def metrics(self, longest: int) -> dict[str, float]:
        """Of this step's own samples (verl's are over the whole sync window); lengths in tokens, times in seconds."""
        groups = defaultdict(list)
        for key, reward in zip(self.keys, self.rewards, strict=True):
            groups[prompt_of(key)].append(reward)
        by_age = self.tokens_by_age
        payload = {"routing/payload_bytes": float(self.routes_bytes)} if self.routes_bytes else {}
        return payload | {
            "reward/mean": float(self.rewards.mean()),
            "reward/std": float(self.rewards.std()),
            "reward/groups_with_signal": sum(len(set(group)) > 1 for group in groups.values()) / len(groups),
            "response_length/tokens": float(self.tokens.sum()),
            "response_length/average": float(self.tokens.mean()),
            "response_length/truncated": float((self.tokens >= longest).mean()),
            "lag/age": sum(age * count for age, count in by_age.items()) / max(by_age.total(), 1),
            "lag/oldest": float(self.ages[:, 0].max()),
            "lag/newest": float(self.ages[:, 1].min()),
            "lag/mixed_responses": self.mixed / len(self.keys),
            "lag/in_flight_s": float(self.in_flight.mean()),
            "lag/in_queue_s": float(self.in_queue.mean()),
        }


def by_lag(sums: dict[str, float]) -> dict[str, float]:
    """``lag/<age>/...``, tokens, mean |d| and intercepted share, of the workers' sums over the tokens of one age."""
    found = {}
    for key, value in sums.items():
        age, _, quantity = key.removeprefix(LAG_SUMS).partition("/")
        tokens = max(sums[f"{LAG_SUMS}{age}/tokens"], 1)
        found[f"lag/{age}/{quantity}"] = value if quantity == "tokens" else value / tokens
    return found


def prompt_of(key: str) -> str:
    """The prompt that a key of the queue, ``{prompt}_{response}_{part}``, belongs to."""
    return key.split("_", 1)[0]


def read(batch: KVBatchMeta, step: int, sync_every: int) -> BatchRecord:
    """Fetch the record of a batch.

    Args:
        batch: what the sampler returned; its tags hold the weight syncs (0: the initial weights) that a trajectory
            began and ended with.
        step: the optimizer step that trains on it, from 1.
        sync_every: optimizer steps per weight sync.

    Raises:
        UnknownPolicyVersionError: an agent loop drops what the client says of a response.
    """
    rows = [index for index, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    keys, tags = [batch.keys[index] for index in rows], [batch.tags[index] for index in rows]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[*VALUES, "extra_fields", "index"])
    extra, rows_of_data = data.pop("extra_fields").tolist(), data.pop("index").tolist()
    if not all(SEGMENTS in fields for fields in extra):
        raise UnknownPolicyVersionError(
            "a response does not say which policy version generated it: its agent loop has to return "
            "extra_fields=output.extra_fields, as verl's own agent loops do"
        )
    tokens = np.array([int(mask.sum()) for mask in data["response_mask"].unbind()])
    syncs = np.array([[tag["min_global_steps"], tag["max_global_steps"]] for tag in tags])
    row_ages = [
        lag.token_ages(step, sync_every, _segments(fields, count, oldest))
        for count, oldest, fields in zip(tokens.tolist(), syncs[:, 0].tolist(), extra, strict=True)
    ]
    now = time.time()
    return BatchRecord(
        keys=keys,
        data_rows=[
            int(row)
            for _, row in sorted({prompt_of(key): row for key, row in zip(keys, rows_of_data, strict=True)}.items())
        ],
        data=data,
        rewards=np.array([float(score.sum()) for score in data["rm_scores"].unbind()]),
        tokens=tokens,
        ages=step - 1 - syncs * sync_every,
        row_ages=row_ages,
        in_flight=np.array([fields[FINISHED] - fields[STARTED] for fields in extra]),
        in_queue=np.array([now - fields[FINISHED] for fields in extra]),
        started=np.array([fields[STARTED] for fields in extra]),
        routes_bytes=sum(fields.get(ROUTES_BYTES, 0) for fields in extra),
    )


def _segments(fields: dict[str, Any], tokens: int, oldest: int) -> list[tuple[int, int]]:
    """Tokens by weight sync; those that no request accounts for (an agent's earlier turns) count as the oldest."""
    segments = [(sync, count) for sync, count in fields[SEGMENTS]]
    missing = tokens - sum(count for _, count in segments)
    if missing < 0:  # cut to the longest response allowed: the last tokens go first
        segments = _cut(segments, tokens)
    return [*segments, (oldest, missing)] if missing > 0 else segments


def _cut(segments: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    kept = []
    for sync, count in segments:
        kept.append((sync, min(count, tokens)))
        tokens -= kept[-1][1]
    return kept
