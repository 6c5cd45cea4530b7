"""What vLLM returns as routes, drawn in a process of its own: ``python routes_engine.py OLD NEW OUT``.

``OLD`` and ``NEW`` are model folders of one architecture. The engine starts on the first and gets the weights of the
second in the middle of some requests, as verl gives them. ``OUT`` receives a pickled dictionary of lists of
:class:`Response`, and of numbers.
"""

import asyncio
import dataclasses
import pickle
import random
import sys
from pathlib import Path

import numpy as np

BLOCK = 16
BUDGET = 48
"""Tokens of one forward pass: longer prompts are chunked."""
BLOCKS = 30
"""Of the cache: fewer than eight long requests need, so that some are preempted."""


@dataclasses.dataclass
class Response:
    prompt: list[int]
    tokens: list[int]
    routes: np.ndarray
    cached: int = 0
    segments: list = dataclasses.field(default_factory=list)


class Reload:
    """The worker extension that loads weights as verl's does after a sync."""

    def load(self, folder):
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model = self.model_runner.model
        model.load_weights(load_file(Path(folder) / "model.safetensors").items())
        process_weights_after_loading(model, self.model_runner.model_config, self.device)

    def kernel(self):
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner = next(module for module in self.model_runner.model.modules() if isinstance(module, MoERunner))
        return type(runner._quant_method.cpu_fused_moe).__name__


def engine(folder):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            block_size=BLOCK,
            max_num_batched_tokens=BUDGET,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            num_gpu_blocks_override=BLOCKS,
            kv_cache_memory_bytes=1 << 24,
            enable_return_routed_experts=True,
            worker_extension_cls="routes_engine.Reload",
        )
    )


async def draw(llm, prompt, count, name, on_token=lambda count: None):
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True)
    async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id=name):
        on_token(len(output.outputs[0].token_ids))
        last = output
    return last


async def responses(llm, prompts, count, name):
    found = await asyncio.gather(*[draw(llm, one, count, f"{name}{row}") for row, one in enumerate(prompts)])
    return [
        Response(prompt, list(one.outputs[0].token_ids), one.outputs[0].routed_experts, one.num_cached_tokens)
        for prompt, one in zip(prompts, found, strict=True)
    ]


class Server:
    """What verl's server does with a request, without Ray: ``sat_verl.rollout.RecordingClient`` talks to it."""

    def __init__(self, llm):
        self.llm, self.version, self.calls, self.progress = llm, 0, 0, {}

    async def generate(self, client, request_id, *, prompt_ids, sampling_params, **kwargs):
        from verl.workers.rollout.replica import TokenOutput

        version, self.calls = self.version, self.calls + 1

        def note(count):
            self.progress[request_id] = count

        final = await draw(self.llm, prompt_ids, sampling_params["max_tokens"], f"{request_id}-{self.calls}", note)
        output = final.outputs[0]
        return TokenOutput(
            token_ids=list(output.token_ids),
            routed_experts=output.routed_experts,
            stop_reason="aborted" if output.finish_reason == "abort" else "completed",
            extra_fields={"global_steps": version, "num_cached_tokens": final.num_cached_tokens},
        )


async def interrupted(llm, prompts, count, new):
    """Requests that a weight sync aborts after a few tokens, and that verl's client resumes on the new weights."""
    from verl.workers.rollout import llm_server

    from sat_verl.batch_record import SEGMENTS
    from sat_verl.rollout import RecordingClient

    server = Server(llm)
    llm_server.LLMServerClient.generate = lambda self, request_id, **kwargs: server.generate(self, request_id, **kwargs)
    client = object.__new__(RecordingClient)
    client.config = None
    running = [
        asyncio.create_task(client.generate(str(row), prompt_ids=prompt, sampling_params={"max_tokens": count}))
        for row, prompt in enumerate(prompts)
    ]
    while sum(server.progress.get(str(row), 0) >= 3 for row in range(len(prompts))) < 2:
        await asyncio.sleep(0.001)
    await llm.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
    await llm.collective_rpc("load", args=(str(new),))
    server.version = 1
    await llm.resume_generation()
    outputs = await asyncio.gather(*running)
    return [
        Response(prompt, list(one.token_ids), one.routed_experts, segments=one.extra_fields[SEGMENTS])
        for prompt, one in zip(prompts, outputs, strict=True)
    ]


def preemptions():
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    )


async def everything(old, new):
    llm = engine(old)
    rng = random.Random(0)
    vocabulary = llm.model_config.get_vocab_size()

    def prompt(length):
        return [rng.randrange(vocabulary) for _ in range(length)]

    try:
        found = {"kernels": await llm.collective_rpc("kernel")}
        found["chunked"] = await responses(llm, [prompt(length) for length in (1, 7, 47, 49, 130)], 12, "chunked")
        shared = prompt(100)
        found["warm"] = await responses(llm, [shared], 4, "warm")
        found["cached"] = await responses(llm, [shared, shared + prompt(30), shared[:64] + prompt(5)], 10, "cached")
        before = preemptions()
        found["crowded"] = await responses(llm, [prompt(40) for _ in range(8)], 60, "crowded")
        found["preemptions"] = preemptions() - before
        resumed = [*[prompt(length) for length in (3, 20, 60)], shared]
        found["resumed"] = await interrupted(llm, resumed, 40, new)
        found["after"] = await responses(llm, [shared, prompt(5), prompt(70)], 12, "after")
        return found
    finally:
        llm.shutdown()


if __name__ == "__main__":
    old, new, out = map(Path, sys.argv[1:])
    found = asyncio.run(everything(old, new))
    import routes_engine  # the classes by the name that a reader can import

    renamed = {
        name: [routes_engine.Response(**vars(one)) if isinstance(one, Response) else one for one in value]
        if isinstance(value, list)
        else value
        for name, value in found.items()
    }
    out.write_bytes(pickle.dumps(renamed))
