"""Cheaper agent loops: what verl does for every response, done once for a prompt's responses or once for all.

Of the processor time that a short response costs in the agent loop worker, about half goes into putting it into
TransferQueue (four round trips each) and a quarter into building its agent loop through Hydra. Neither depends on the
response. What the queue, the sampler and the trainer see is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import hydra
import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict
from verl.experimental.agent_loop import agent_loop as upstream
from verl.utils.rollout_trace import rollout_trace_attr

Put = Callable[..., Awaitable[Any]]


class Waiting(NamedTuple):
    """Rows that wait for their group, and what tells that they are stored."""

    rows: dict[str, Any]
    done: asyncio.Future


class GroupedPuts:
    """The puts of one prompt's responses, sent as one when the last of them is there.

    verl counts a prompt as finished only when all its responses have settled, so nobody waits for a single one. Each
    put returns when the one that holds it has, and raises what that raises.

    Args:
        put: of all rows: ``put(keys=, partition_id=, fields=, tags=)``.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._running = 0
        self._waiting: list[Waiting] = []
        self._sending: set[asyncio.Task] = set()

    async def put(self, **rows: Any) -> None:
        """Put rows (as TransferQueue's ``async_kv_batch_put``) together with those of the group's other responses."""
        one = Waiting(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._send_if_complete()
        try:
            await one.done
        finally:
            if one in self._waiting:  # cancelled
                self._waiting.remove(one)

    def begin(self) -> None:
        """One more response is on its way."""
        self._running += 1

    def end(self) -> None:
        """A response has settled, with a put or without one."""
        self._running -= 1
        self._send_if_complete()

    def _send_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        waiting, self._waiting = self._waiting, []
        for part in alike(waiting):
            # A task of its own: a response that is cancelled takes no other's put along.
            task = asyncio.create_task(self._send(part))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, part: Sequence[Waiting]) -> None:
        try:
            await self._put(**as_one([one.rows for one in part]))
        except Exception as error:
            for one in part:
                if not one.done.done():
                    one.done.set_exception(error)
        else:
            for one in part:
                if not one.done.done():
                    one.done.set_result(None)


def concatenated(batches: Sequence[TensorDict]) -> TensorDict:
    """Batches with the same columns as one: what verl's ``list_of_dict_to_tensordict`` makes of all their rows.

    verl's own ``concat_tensordict`` joins ragged columns only if they are ragged in every batch, and those of one row
    are not.
    """
    columns = {key: [batch.get(key) for batch in batches] for key in batches[0].keys()}  # noqa: SIM118 (rows)
    size = sum(batch.batch_size[0] for batch in batches)
    return TensorDict({key: _column(parts) for key, parts in columns.items()}, batch_size=[size])


def _column(parts: Sequence[torch.Tensor | NonTensorStack]) -> torch.Tensor | NonTensorStack:
    stacks = [part for part in parts if isinstance(part, NonTensorStack)]
    if len(stacks) == len(parts):
        return NonTensorStack(*[row for stack in stacks for row in stack.tensordicts])
    rows = [row for part in parts for row in part.unbind()]
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def alike(waiting: Sequence[Waiting]) -> list[list[Waiting]]:
    """Those that may be put as one: to the same partition, with columns of the same names and kinds."""
    parts: dict[tuple, list[Waiting]] = {}
    for one in waiting:
        kinds = sorted((name, *_kind(column)) for name, column in one.rows["fields"].items())
        parts.setdefault((one.rows["partition_id"], *kinds), []).append(one)
    return list(parts.values())


def _kind(column: Any) -> tuple[str, ...]:
    if not isinstance(column, torch.Tensor):
        return (type(column).__name__,)
    return ("tensor", str(column.dtype), str(column.dim()), str(tuple(column.shape[2:])))


def as_one(puts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Puts that are alike, as one."""
    if len(puts) == 1:
        return puts[0]
    return {
        "keys": [key for one in puts for key in one["keys"]],
        "tags": [tag for one in puts for tag in one["tags"]],
        "partition_id": puts[0]["partition_id"],
        "fields": concatenated([one["fields"] for one in puts]),
    }


_group: ContextVar[GroupedPuts | None] = ContextVar("prompt_group", default=None)
_storing: ContextVar[bool] = ContextVar("storing_a_response", default=False)


def group_puts() -> None:
    """Let this process' puts of responses wait for their group: verl calls TransferQueue's function by its name.

    The only way in: the call stands in the middle of ``AgentLoopWorkerTQ._agent_loop_postprocess``. Every other call
    goes through as it is.
    """
    put = transfer_queue.async_kv_batch_put
    if hasattr(put, "__wrapped__"):
        return

    @wraps(put)
    async def grouped(*args: Any, **rows: Any) -> Any:
        group = _group.get()
        if group is None or args or not _storing.get() or set(rows) != {"keys", "partition_id", "fields", "tags"}:
            return await put(*args, **rows)
        return await group.put(**rows)

    transfer_queue.async_kv_batch_put = grouped


class Frugal:
    """For verl's agent loop worker: one put for a prompt's responses, agent loops without Hydra."""

    config: Any
    llm_client: Any
    tokenizer: Any
    processor: Any
    hf_model_type: Any
    dataset_cls: Any
    tools: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        group_puts()
        self._put = transfer_queue.async_kv_batch_put.__wrapped__
        self._loops: dict[str, type] = {}

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        token = _group.set(GroupedPuts(self._put))
        try:
            await super()._run_prompt(*args, **kwargs)  # type: ignore[misc]
        finally:
            _group.reset(token)

    async def _agent_loop_postprocess(self, *args: Any, **kwargs: Any) -> None:
        token = _storing.set(True)
        try:
            await super()._agent_loop_postprocess(*args, **kwargs)  # type: ignore[misc]
        finally:
            _storing.reset(token)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        group = _group.get()
        if group is None:
            return await self._run_loop(sampling_params, trajectory, **kwargs)
        group.begin()
        try:
            return await self._run_loop(sampling_params, trajectory, **kwargs)
        finally:
            group.end()

    async def _run_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        loop = self._loop(agent_name)
        if loop is None:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)  # type: ignore[misc]
        place = {name: trajectory[name] for name in ("sample_index", "rollout_n", "validate")}
        with rollout_trace_attr(step=trajectory["step"], name="agent_loop", trace=kwargs.pop("trace", True), **place):
            output = await loop.run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _loop(self, agent_name: str) -> Any:
        """A new agent loop; None where its entry in the registry holds more than a class, which is Hydra's to read."""
        entry = upstream._agent_loop_registry.get(agent_name)
        if entry is None or set(entry) != {"_target_"}:
            return None
        if agent_name not in self._loops:
            self._loops[agent_name] = hydra.utils.get_class(entry["_target_"])
        return self._loops[agent_name](
            trainer_config=upstream.DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=upstream.DictConfigWrap(self.config.data),
            tools=upstream.ToolListWrap(self.tools),
        )
