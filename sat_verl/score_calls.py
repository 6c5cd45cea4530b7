"""Fewer calls to the reward workers: responses that end at about the same time are scored by one call.

verl asks a reward worker for each response alone, and sends it as a saved tensor file. For a rule that takes less than
a millisecond, the call costs several times what it computes. Its workers take many at once, too, and score them side
by side; that is what is used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

PATIENCE_S = 0.005
"""How long a response waits for others, in seconds: nothing against a step, some steps of a small engine."""

Plain = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]


class Rows(Sequence):
    """Single responses, as verl's ``compute_score_batch`` reads them: ``rows[i : i + 1]`` is the i-th one's data.

    They are not padded to one batch: in that one, a reward manager would not find where a response ends. They travel
    as NumPy arrays.
    """

    def __init__(self, rows: Sequence[DataProto]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> DataProto:
        (row,) = self._rows[index] if isinstance(index, slice) else [self._rows[index]]
        return row

    def __reduce__(self) -> tuple[Callable, tuple[list[Plain]]]:
        return from_plain, ([_plain(row) for row in self._rows],)


def _plain(row: DataProto) -> Plain:
    return {name: column.numpy() for name, column in row.batch.items()}, row.non_tensor_batch, row.meta_info


def from_plain(rows: Sequence[Plain]) -> Rows:
    return Rows([_row(*row) for row in rows])


def _row(columns: dict[str, np.ndarray], non_tensor_batch: dict[str, np.ndarray], meta_info: dict) -> DataProto:
    batch = TensorDict({name: torch.tensor(column) for name, column in columns.items()}, batch_size=1)
    return DataProto(batch=batch, non_tensor_batch=non_tensor_batch, meta_info=meta_info)


class GatheredScores:
    """For a reward worker's handle: ``worker.compute_score.remote(data)`` waits for others to share the call with.

    The call is made when every response that is on its way waits for a score, or after :data:`PATIENCE_S`. If it
    fails, each response is scored alone: it has its own result, or its own error.

    Args:
        worker: the handle of verl's reward loop worker.
        running: how many responses are on their way.
    """

    def __init__(self, worker: Any, running: Callable[[], int]) -> None:
        self._worker = worker
        self._running = running
        self._waiting: list[tuple[DataProto, asyncio.Future]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task] = set()
        self.compute_score = self

    def remote(self, data: DataProto) -> asyncio.Future:
        """The future result, a dict with ``reward_score`` and ``reward_extra_info``, of one response."""
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._waiting.append((data, result))
        if len(self._waiting) >= self._running():
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(PATIENCE_S, self._send)
        return result

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = [one for one in self._waiting if not one[1].done()], []
        if waiting:
            call = asyncio.create_task(self._call(waiting))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: Sequence[tuple[DataProto, asyncio.Future]]) -> None:
        try:
            results = await self._worker.compute_score_batch.remote(Rows([data for data, _ in waiting]))
        except Exception:  # of any of them
            alone = [self._worker.compute_score.remote(data) for data, _ in waiting]
            results = await asyncio.gather(*alone, return_exceptions=True)
        for (_, future), result in zip(waiting, results, strict=True):
            if future.done():  # cancelled
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
