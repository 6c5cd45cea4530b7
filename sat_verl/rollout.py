"""The rollout side of the proof: every response says which policy versions generated it, when, and how it ended.

Used through verl's own seams: the trainer hands :class:`RecordingClient` to the agent loops, and
``rollout.agent.agent_loop_manager_class`` names :class:`RecordingAgentLoopManager`, or :class:`SeededAgentLoopManager`,
which also gives each response a seed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from typing import Any

import ray
import torch
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sat_verl import routes
from sat_verl.admission import Dealing, OldestFirst
from sat_verl.agent_loops import Frugal
from sat_verl.batch_record import FINISH_REASON, FINISHED, SEGMENTS, STARTED

_NOT_TEXT = ("image_data", "video_data", "audio_data")

_segments: ContextVar[list[list[int]] | None] = ContextVar("policy_segments", default=None)


def request_seed(*identity: object) -> int:
    """A seed of 62 bits that depends on all of ``identity`` and on nothing else."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def finish_reason(
    prompt_ids: Sequence[int], response_ids: Sequence[int], stop_ids: Collection[int], longest: int, context: int | None
) -> str:
    """How a response ended.

    Args:
        prompt_ids: tokens of the prompt.
        response_ids: tokens of the response, those of tools included.
        stop_ids: tokens that end a response.
        longest: most tokens of a response.
        context: most tokens of prompt and response; None: no such limit.

    Returns:
        "length" if a limit is reached and the last token is none that ends a response, else "stop".
    """
    full = len(response_ids) >= longest or (context is not None and len(prompt_ids) + len(response_ids) >= context)
    return "length" if full and not (response_ids and response_ids[-1] in stop_ids) else "stop"


def stop_tokens(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """The tokens at which the engine ends a response: the tokenizer's, and those of the model's generation config."""
    found = [tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
    ids = [one for entry in found for one in (entry if isinstance(entry, list | tuple) else [entry])]
    return frozenset(int(one) for one in ids if one is not None)


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
    """verl's client with partial rollout, whose output says which weights generated how many of its tokens.

    Of a resumed response verl keeps the routes of the first request and adds those of the new tokens from each later
    one, so that every token has the route under the weights that read it first. That they line up is checked (not with
    images and the like, where the engine has more tokens than the request).

    Args:
        only_server: address and handle of the rollout's server where there is but one: it is not asked for each request
            which server is to have it, nor told that it is done.
    """

    _only_server: tuple[str, Any] | None = None

    def __init__(self, *args: Any, only_server: tuple[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._only_server = only_server

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return self._only_server or await super()._acquire_server(request_id, **extra)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if self._only_server is None:
            super()._release_server(server_id, request_id=request_id)

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        segments: list[list[int]] = []
        token = _segments.set(segments)
        started = time.time()
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            _segments.reset(token)
        if output.routed_experts is not None and not any(kwargs.get(name) for name in _NOT_TEXT):
            routes.check_rows(output.routed_experts, len(kwargs["prompt_ids"]), len(output.token_ids))
        output.extra_fields |= {SEGMENTS: segments, STARTED: started, FINISHED: time.time()}
        return output


class _TellsTheEnd:
    """For verl's agent loop worker: tells the reward function how a response ended.

    verl reports it nowhere, and its reward managers differ in what they pass on of ``extra_fields``; all of them pass
    on ``extra_info``. A class without a base, since Ray copies verl's worker class by value and this one by name.
    """

    tokenizer: Any
    model_config: Any
    rollout_config: Any

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        stops = stop_tokens(self.tokenizer, self.model_config.generation_config)
        limits = (self.rollout_config.response_length, self.rollout_config.max_model_len)
        for output in outputs:
            reason = finish_reason(output.prompt_ids, output.response_ids, stops, *limits)
            output.extra_fields[FINISH_REASON] = reason
        # A copy: the responses to a prompt share it.
        extra = dict(kwargs.get("extra_info") or {}) | {FINISH_REASON: outputs[-1].extra_fields[FINISH_REASON]}
        await super()._compute_score(outputs, kwargs=kwargs | {"extra_info": extra})  # type: ignore[misc]


class PackedOutput(AgentLoopOutput):
    """verl's output of an agent loop, its routes as :func:`sat_verl.routes.pack` made them: verl stores ``int16``."""

    routed_experts: Any = None

    def as_dict(self) -> dict[str, Any]:
        packed, self.routed_experts = self.routed_experts, None
        return super().as_dict() | {routes.ROUTES: torch.from_numpy(packed)}


class _PacksRoutes:
    """For verl's agent loop worker: stores a training sample's routes once, small and whole, a validation's not."""

    model_config: Any
    rollout_config: Any

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if self.rollout_config.enable_rollout_routing_replay:
            output = [self._packed(one, validate) for one in (output if isinstance(output, list) else [output])]
        await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]

    def _packed(self, output: AgentLoopOutput, validate: bool) -> AgentLoopOutput:
        if validate:
            output.routed_experts = None
            return output
        router = routes.router_of(self.model_config.hf_config.to_dict())
        if router is None:
            raise routes.IncompleteRoutesError("the model's config names no experts, so it has no routes")
        known, prompt = output.routed_experts, len(output.prompt_ids)
        packed = PackedOutput.model_construct(_fields_set=set(output.model_fields_set), **vars(output))
        packed.routed_experts = routes.pack(known, router.experts, prompt, output.response_mask)
        packed.extra_fields[routes.ROUTES_BYTES] = packed.routed_experts.nbytes
        return packed


class _Worker(OldestFirst, Frugal, _PacksRoutes, _TellsTheEnd):
    """What the project's agent loop workers add to verl's, without that one as a base, for the reason above."""


@ray.remote
class RecordingAgentLoopWorker(_Worker, AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined]
    """The worker of :class:`RecordingAgentLoopManager`."""


@ray.remote
class SeededAgentLoopWorker(_Worker, AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined]
    """The same that gives each response a seed of its own.

    The seed depends on ``sat_verl.seed``, the prompt's place in the run (validation: its row) and the number of the
    response, so that what is sampled does not depend on which requests the engine happens to run together.
    """

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        place = ("val", int(trajectory["sample_index"])) if trajectory["validate"] else ("train", kwargs["uid"])
        seed = request_seed(self.config.sat_verl.seed, *place, int(kwargs["session_id"]))
        return await super()._run_agent_loop(sampling_params | {"seed": seed}, trajectory, **kwargs)


class RecordingAgentLoopManager(Dealing, AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = RecordingAgentLoopWorker


class SeededAgentLoopManager(Dealing, AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SeededAgentLoopWorker
