"""What routing replay costs in an optimizer step: ``python -m benchmarks.replay_cost [out=FILE.json]``.

verl's training worker with its FSDP2 engine and with its Megatron engine, on this machine's CPU, as the recipes
configure them for the tiny mixture of experts. Steps with replay and without are taken in turn; their CPU time is
compared (what else the machine does has little part in it). No Ray and no rollout: routes are drawn at random.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from statistics import median
from typing import Any

from benchmarks.arguments import result_file
from recipes.errors import ConfigError

USAGE = "usage: python -m benchmarks.replay_cost [out=FILE.json]"
RESPONSES, PROMPT, TOKENS, REPEATS, WARM_UP = 128, 8, 64, 12, 2
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "",
    "MASTER_PORT": "0",
}


def worker_of(backend: str) -> Any:
    """The recipes' actor worker of a backend, on the tiny mixture of experts; and its actor config."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig

    from recipes.compose import compose
    from recipes.derive import derive
    from recipes.launch import build_model
    from sat_verl.drift import ppo_loss_with_drift
    from sat_verl.worker import BatchQuantileWorker

    cfg = derive(compose([f"backend={backend}", "model=tiny_moe", "algorithm=sat_gspo", "routing_replay=r3"]))
    cfg.actor_rollout_ref.model.path = build_model(cfg)
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    worker = BatchQuantileWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(cfg.actor_rollout_ref.model),
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss_with_drift, config=actor))
    return worker


def batch(replay: bool) -> Any:
    """A step's samples, always the same: random tokens, routes and advantages."""
    import torch
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(0)
    length = TOKENS - PROMPT
    ids = torch.randint(0, 10, (RESPONSES, TOKENS), generator=generator)
    routes = torch.rand(RESPONSES, TOKENS, 2, 8, generator=generator).argsort(-1)[..., :2].to(torch.uint8)
    ones = torch.ones(RESPONSES, length, dtype=torch.long)
    fields = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS).expand(RESPONSES, -1),
        "response_mask": ones,
        "loss_mask": ones,
        "old_log_probs": torch.full((RESPONSES, length), -2.0),
        "advantages": torch.randn(RESPONSES, 1, generator=generator).expand(-1, length),
        "routed_experts": routes,
    }
    nested = {k: torch.nested.as_nested_tensor(list(v.unbind()), layout=torch.jagged) for k, v in fields.items()}
    data = tu.get_tensordict(nested)
    settings = {"temperature": 1.0, "global_batch_size": RESPONSES, "calculate_entropy": True}
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=RESPONSES, **settings)
    tu.assign_non_tensor_data(data, "enable_routing_replay", replay)
    return data


def measure(backend: str) -> dict[str, float]:
    """Median CPU seconds of a step with replay and without, and their ratio."""
    worker = worker_of(backend)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(REPEATS):
        for replay in seconds:
            data, started = batch(replay), time.process_time()
            worker.train_batch(data)
            if repeat >= WARM_UP:
                seconds[replay].append(time.process_time() - started)
    replayed, native = median(seconds[True]), median(seconds[False])
    return {"replayed_cpu_s": replayed, "native_cpu_s": native, "ratio": replayed / native}


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if len(options) != len(arguments) or set(options) - {"out"}:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        out = result_file(options["out"]) if "out" in options else None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= ENVIRONMENT | {"DIST_INIT_METHOD": f"file://{folder}/rendezvous"}
        results = {backend: measure(backend) for backend in ("cpu", "cpu_megatron")}
    from recipes import provenance

    sizes = {"responses": RESPONSES, "tokens": TOKENS, "repeats": REPEATS - WARM_UP}
    report = {
        "results": results,
        **sizes,
        "provenance": provenance.collect(["python", "-m", "benchmarks.replay_cost", *arguments]),
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    for backend, row in results.items():
        print(f"{backend}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
