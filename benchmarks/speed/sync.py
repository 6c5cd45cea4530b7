"""How long the rollout waits for new weights, by model size: ``python -m benchmarks.speed sync``.

The recipe's own weight sync, trainer to rollout server, with nothing else going on: the whole of it, its parts, and
beside it the floor: the same number of bytes copied once in memory, by the process that measures.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import result_file
from benchmarks.speed import result, stack
from benchmarks.speed.timing import spread
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m benchmarks.speed sync [sizes=500k,5m,50m,500m] [repeats=7] [run_dir=runs/speed/sync]
           [out=benchmarks/results/speed_sync.json] [overrides of recipes.train]
Seconds from the trainer's weights to the rollout's, for dense models of these numbers of parameters."""
DEFAULTS: dict[str, Any] = {
    "sizes": "500k,5m,50m,500m",
    "repeats": 7,
    "run_dir": "runs/speed/sync",
    "out": "benchmarks/results/speed_sync.json",
}
SHAPES = {"500k": (2, 128), "5m": (6, 256), "50m": (12, 576), "500m": (24, 1280)}
"""Layers and width; about 13 x layers x width^2 parameters."""
PARTS = {
    "abort_replicas": "stop requests",
    "release_kv_cache_replicas": "release cache",
    "build_process_group": "open",
    "resume_kv_cache_replicas": "restore cache",
    "resume_generation_replicas": "resume requests",
}
"""Methods of verl's checkpoint engine manager; what remains of a sync is the weights' way."""
WARM_UP = 1


def main(words: Sequence[str]) -> int:
    settings = parse_settings(words, DEFAULTS, [])
    out = result_file(settings["out"])
    sizes = str(settings["sizes"]).split(",")
    for size in sizes:
        if size not in SHAPES:
            raise ConfigError("sizes", size, "there is no such size", f"choose among {','.join(SHAPES)}")
    rows = []
    fixed = ["steps=2", "lag=1", "prompts_per_step=2", "responses_per_prompt=2", "checkpoint.every=1000000"]
    overrides = [*fixed, *(f"{name}={value}" for name, value in settings["difficulty"].items())]
    for size in sizes:
        folder = Path(settings["run_dir"]).absolute()
        model = dense_model(folder / "models" / size, *SHAPES[size])
        todo = {"repeats": settings["repeats"]}
        row = stack.measured("sync", todo, [*overrides, f"model={model}"], folder / size)
        rows.append({"size": size, "layers": SHAPES[size][0], "width": SHAPES[size][1]} | row)
        result.save(out, ["sync", *words], {"rows": rows, "overrides": overrides})  # so far
        print(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:]).splitlines()[-1], flush=True)
    return 0


def dense_model(folder: Path, layers: int, width: int) -> Path:
    """A Qwen3 with random float32 weights and the tiny models' tokenizer; built once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from recipes.models.tokenizer import build_tokenizer

    disable_progress_bar()
    if not (folder / "config.json").is_file():
        tokenizer = build_tokenizer(max_length=512)
        config = Qwen3Config(
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=3 * width,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            head_dim=64,
            max_position_embeddings=512,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
        tokenizer.save_pretrained(folder)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: seconds of a sync, of its parts, and the ratio to one copy of the bytes."""
    names = ["weights", *PARTS.values()]
    lines = [
        f"| parameters | MB | sync, s | one copy, s | ratio | {' | '.join(names)} |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in rows:
        parts = " | ".join(f"{row['parts'][name]['median']:.3f}" for name in names)
        lines.append(
            f"| {row['parameters'] / 1e6:.1f} M | {row['bytes'] / 1e6:.0f} | {row['sync_s']['median']:.2f} | "
            f"{row['copy_s']['median']:.3f} | {row['ratio']['median']:.1f} | {parts} |"
        )
    return "\n".join(lines)


# --- in the process that would train


def measure(trainer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """One row: what a sync takes, what its parts take, and one copy of the weights' bytes."""
    size = weights_of(Path(trainer.config.actor_rollout_ref.model.path))
    manager = trainer.standalone_checkpoint_manager
    spent: dict[str, float] = {}
    for name, label in PARTS.items():
        setattr(manager, name, clocked(manager, name, label, spent))
    syncs, copies, parts = [], [], []
    for repeat in range(-WARM_UP, settings["repeats"]):
        spent.clear()
        started = time.perf_counter()
        manager.update_weights(trainer.global_steps + repeat + WARM_UP)
        seconds = time.perf_counter() - started
        if repeat >= 0:
            syncs.append(seconds)
            parts.append(spent | {"weights": seconds - sum(spent.values())})
            copies.append(copy_seconds(size["bytes"]))
    return size | {
        "sync_s": spread(syncs),
        "copy_s": spread(copies),
        "ratio": spread([sync / copy for sync, copy in zip(syncs, copies, strict=True)]),
        "parts": {name: spread([part[name] for part in parts]) for name in parts[0]},
    }


def clocked(manager: Any, name: str, label: str, spent: dict[str, float]) -> Callable:
    """A method of the manager that adds its seconds to ``spent[label]``; verl awaits those that are coroutines."""
    method = inspect.unwrap(getattr(type(manager), name))

    @contextmanager
    def clock() -> Iterator[None]:
        started = time.perf_counter()
        yield
        spent[label] = spent.get(label, 0.0) + time.perf_counter() - started

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with clock():
            return await method(manager, *args, **kwargs)

    def called(*args: Any, **kwargs: Any) -> Any:
        with clock():
            return method(manager, *args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else called


def weights_of(folder: Path) -> dict[str, int]:
    """Number of parameters and their bytes in a model's safetensors files."""
    from safetensors import safe_open

    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                shape = weights.get_slice(name).get_shape()
                elements = 1
                for length in shape:
                    elements *= length
                count += elements
    return {"parameters": count, "bytes": 4 * count}  # trainer and rollout hold float32 on the CPU


def copy_seconds(size: int) -> float:
    """One copy of so many bytes into memory that has been touched before."""
    import torch

    source = torch.ones(size // 4)
    target = torch.empty_like(source).fill_(0)
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started
