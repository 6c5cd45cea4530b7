"""The rollout side of the proof: every response says which policy versions generated it, and when; and has its seed.

Used through verl's own seams: the trainer hands :class:`RecordingClient` to the agent loops, and
``rollout.agent.agent_loop_manager_class`` names :class:`SeededAgentLoopManager`.
"""

from __future__ import annotations

import hashlib
import time
from contextvars import ContextVar
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sat_verl.batch_record import FINISHED, SEGMENTS, STARTED

_segments: ContextVar[list[list[int]] | None] = ContextVar("policy_segments", default=None)


def request_seed(*identity: object) -> int:
    """A seed of 62 bits that depends on all of ``identity`` and on nothing else."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class _SegmentClient(LLMServerClient):
    """One request to the engine, which a response may need several of: verl aborts and resumes it at a weight sync."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any):
        if sampling_params.get("seed") is not None:
            # A resumed request must not draw the first tokens' noise again, nor a later turn that of an earlier one.
            seed = request_seed(sampling_params["seed"], len(prompt_ids))
            sampling_params = sampling_params | {"seed": seed}
        output = await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        segments = _segments.get()
        if segments is not None and output.token_ids:
            segments.append([output.extra_fields["global_steps"], len(output.token_ids)])
        return output


class RecordingClient(FullyAsyncLLMServerClient, _SegmentClient):
    """verl's client with partial rollout, whose output says which weights generated how many of its tokens."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        segments: list[list[int]] = []
        token = _segments.set(segments)
        started = time.time()
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            _segments.reset(token)
        output.extra_fields |= {SEGMENTS: segments, STARTED: started, FINISHED: time.time()}
        return output


@ray.remote
class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined]
    """verl's agent loop worker that gives each response a seed of its own.

    The seed depends on ``sat_verl.seed``, the prompt's place in the run (validation: its row) and the number of the
    response, so that what is sampled does not depend on which requests the engine happens to run together.
    """

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        place = ("val", int(trajectory["sample_index"])) if trajectory["validate"] else ("train", kwargs["uid"])
        seed = request_seed(self.config.sat_verl.seed, *place, int(kwargs["session_id"]))
        return await super()._run_agent_loop(sampling_params | {"seed": seed}, trajectory, **kwargs)


class SeededAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SeededAgentLoopWorker
