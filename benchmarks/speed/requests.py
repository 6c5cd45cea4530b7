"""What a rollout request costs outside the engine: ``python -m benchmarks.speed requests``.

The same prompts go, so many at a time, through three paths to one engine, in turn: the engine alone (calls of vLLM's
``AsyncLLM`` in the process that holds it), verl's agent loops and client as they are, and the project's. The last two
end when every response has its reward and lies in TransferQueue.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.arguments import result_file
from benchmarks.speed import result, stack
from benchmarks.speed.timing import spread
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m benchmarks.speed requests [in_flight=1,8,64,256] [repeats=7] [run_dir=runs/speed/requests]
           [out=benchmarks/results/speed_requests.json] [overrides of recipes.train]
Requests per second through the whole rollout path, verl's and the project's, beside the engine alone."""
DEFAULTS: dict[str, Any] = {
    "in_flight": "1,8,64,256",
    "repeats": 7,
    "run_dir": "runs/speed/requests",
    "out": "benchmarks/results/speed_requests.json",
}
ENGINE, VERL, OURS = "engine alone", "verl", "sat_verl"
GROUP = 8
"""Responses to a prompt, as GRPO wants them; fewer where fewer are in flight."""
WARM_UP = 2


def main(words: Sequence[str]) -> int:
    settings = parse_settings(words, DEFAULTS, [])
    out = result_file(settings["out"])
    sizes = [int(word) for word in str(settings["in_flight"]).split(",") if word.isdigit()]
    if not sizes or any(size > GROUP and size % GROUP for size in sizes):
        raise ConfigError(
            "in_flight",
            settings["in_flight"],
            f"from {GROUP} on, multiples of {GROUP}",
            f"write {DEFAULTS['in_flight']}",
        )
    overrides = [f"{name}={value}" for name, value in settings["difficulty"].items()]
    prompts = max(1, max(sizes) // GROUP)
    fixed = [f"prompts_per_step={prompts}", f"responses_per_prompt={GROUP}", "steps=2", "lag=1"]
    todo = {"in_flight": sizes, "repeats": settings["repeats"]}
    rows = stack.measured("requests", todo, [*fixed, *overrides], Path(settings["run_dir"]).absolute())
    result.save(out, ["requests", *words], {"rows": rows, "overrides": [*fixed, *overrides]})
    print(table(rows))
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: requests per second, the ratio to verl's path, and milliseconds of CPU time outside the engine."""
    lines = [
        "| in flight | engine, requests/s | verl | sat_verl | sat_verl / verl | CPU ms outside: verl | sat_verl |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = {name: row["paths"][name]["requests_per_s"]["median"] for name in (ENGINE, VERL, OURS)}
        cpu = {name: row["paths"][name]["cpu_ms_outside"]["median"] for name in (VERL, OURS)}
        ratio = row["ratio"]
        lines.append(
            f"| {row['in_flight']} | {rate[ENGINE]:.1f} | {rate[VERL]:.1f} | {rate[OURS]:.1f} | {ratio['median']:.2f} "
            f"({ratio['low']:.2f}-{ratio['high']:.2f}) | {cpu[VERL]:.1f} | {cpu[OURS]:.1f} |"
        )
    return "\n".join(lines)


# --- in the process that would train


def measure(trainer: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table, one for each number of requests in flight."""
    rollout = Rollout(trainer)
    rows = []
    for size in settings["in_flight"]:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rollout.paths}
        for repeat in range(-WARM_UP, settings["repeats"]):
            names = list(rollout.paths)
            for name in names[repeat % 3 :] + names[: repeat % 3]:
                spent = timed(rollout.paths[name], size)
                if repeat >= 0:
                    found[name].append(spent)
        rows.append(row(size, found))
    return rows


def row(size: int, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians and quartiles over the repeats of one size, whose entries are seconds by the clock and of CPU time."""
    paths = {}
    for name, spent in found.items():
        engine = [cpu for _, cpu in found[ENGINE]]
        outside = [1e3 * (cpu - alone) / size for (_, cpu), alone in zip(spent, engine, strict=True)]
        paths[name] = {
            "requests_per_s": spread([size / seconds for seconds, _ in spent]),
            "cpu_ms": spread([1e3 * cpu / size for _, cpu in spent]),
            "cpu_ms_outside": spread(outside),
        }
    ratio = [theirs / ours for (ours, _), (theirs, _) in zip(found[OURS], found[VERL], strict=True)]
    return {"in_flight": size, "repeats": len(ratio), "paths": paths, "ratio": spread(ratio)}


def timed(path: Callable[[int], float | None], size: int) -> tuple[float, float]:
    """Seconds by the clock and of CPU time, of all processes of the run; a path may tell its own time by the clock."""
    started, cpu = time.perf_counter(), cpu_seconds()
    own = path(size)
    return own or time.perf_counter() - started, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Of every process below the run's supervisor so far."""
    parents = psutil.Process().parents()
    supervisor = next((one for one in parents if "recipes.supervisor" in one.cmdline()), parents[-1])
    spent = 0.0
    for process in supervisor.children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system
    return spent


class Rollout:
    """The three paths: each generates and returns when it is done; the engine's returns its own seconds."""

    def __init__(self, trainer: Any) -> None:
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
        from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

        self.trainer = trainer
        self.names = (f"{place:010d}" for place in itertools.count())
        self.batch = trainer._next_train_batch(trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        servers = trainer.standalone_server_manager
        self.server = servers.server_handles[0]
        verls = AgentLoopManagerTQ.create(
            config=trainer.config,
            llm_client=servers.get_client(client_cls=FullyAsyncLLMServerClient),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        ours = trainer.agent_loop_manager
        self.prompts: dict[int, list[list[int]]] = {}
        self.paths: dict[str, Callable[[int], float | None]] = {
            VERL: lambda size: self.through(verls, size),
            OURS: lambda size: self.through(ours, size),
            ENGINE: self.engine,
        }

    def through(self, manager: Any, size: int) -> None:
        """Generate by agent loops; done when the last prompt's responses are stored."""
        import transfer_queue as tq
        from verl.utils import tensordict_utils as tu

        group = min(size, GROUP)
        batch = self.batch[: size // group].clone()
        uids = [next(self.names) for _ in range(len(batch))]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        tu.assign_non_tensor_stack(batch, "__rollout_n__", [group] * len(batch))
        tu.assign_non_tensor_data(batch, "global_steps", self.trainer.global_steps)
        self.trainer.agent_loop_manager = manager
        self.trainer._submit_batch_to_rollout(batch)
        keys = self._finished(uids, size)
        if size not in self.prompts:
            stored = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["prompts"])
            self.prompts[size] = [row.tolist() for row in stored["prompts"].unbind()]
        tq.kv_clear(keys=[*keys, *uids], partition_id="train")

    def _finished(self, uids: list[str], size: int) -> list[str]:
        """Wait for the prompts, and return the keys of their responses; looks as seldom as 3 % of the time allows."""
        started, buffer = time.perf_counter(), self.trainer.replay_buffer
        while True:
            buffer._sync_metadata_from_transfer_queue()
            if buffer.failure_keys["train"]:
                raise RuntimeError(f"the rollout failed: {sorted(buffer.failure_keys['train'])}")
            if buffer.finished_keys["train"].issuperset(uids):
                keys = list(buffer.partitions["train"])
                assert len(keys) == size, f"{len(keys)} responses for {size} requests"
                return keys
            time.sleep(max(0.002, 0.03 * (time.perf_counter() - started)))

    def engine(self, size: int) -> float:
        """The same prompts by the engine alone, all at once."""
        import ray

        if size not in self.prompts:
            self.through(self.trainer.agent_loop_manager, size)
        rollout = self.trainer.config.actor_rollout_ref.rollout
        sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        sampling |= {"max_tokens": rollout.response_length, "logprobs": 0}
        prefix = next(self.names)
        ray.get(self.server.__ray_call__.remote(begin, self.prompts[size], sampling, prefix))
        while (seconds := ray.get(self.server.__ray_call__.remote(end))) is None:
            time.sleep(0.02)
        return seconds


# --- in the process that holds the engine


def begin(server: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], prefix: str) -> None:
    """Start the requests in the event loop of the engine; Ray runs this call in another thread."""
    import asyncio

    loop = server.engine.output_handler.get_loop()
    server._speed = asyncio.run_coroutine_threadsafe(alone(server, prompts, sampling, prefix), loop)


def end(server: Any) -> float | None:
    """Seconds that the requests took; None while they run."""
    return server._speed.result() if server._speed.done() else None


async def alone(server: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], prefix: str) -> float:
    import asyncio

    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def one(place: int, tokens: Sequence[int]) -> None:
        params = SamplingParams(**sampling, seed=place)
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        async for _ in server.engine.generate(prompt=prompt, sampling_params=params, request_id=f"{prefix}-{place}"):
            pass

    started = time.perf_counter()
    await asyncio.gather(*(one(place, tokens) for place, tokens in enumerate(prompts)))
    return time.perf_counter() - started
