"""What SAT costs in the loss: ``python -m benchmarks.speed loss``.

Forward and backward of ``sat_grpo`` and ``sat_gspo`` beside verl's ``vanilla`` and ``gspo`` on the same tensors, taken
in turn in one process; and the floor, which reads each input once and writes the gradient once. Ratios are medians over
the repeats of the ratio within one repeat.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from benchmarks.arguments import result_file
from benchmarks.speed.timing import in_turn, peak_bytes, spread
from recipes import provenance
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m benchmarks.speed loss [sizes=64x1k,16x8k,8x32k] [repeats=21] [device=cpu|cuda]
           [out=benchmarks/results/speed_loss.json]
Time and peak memory of forward and backward: SAT, verl's own losses, and the cost of one q per optimizer step."""
DEFAULTS: dict[str, Any] = {
    "sizes": "64x1k,16x8k,8x32k",
    "repeats": 21,
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "out": "benchmarks/results/speed_loss.json",
}
PAIRS = {"sat_grpo": "vanilla", "sat_gspo": "gspo"}
STALE, MODEL_SHAPE = 0.05, (8, 256)


class Batch(NamedTuple):
    """What verl hands to a loss; all of shape ``(B, T)``, float32, the mask bool."""

    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    advantages: torch.Tensor
    response_mask: torch.Tensor


def batch_of(responses: int, length: int, device: torch.device) -> Batch:
    """Responses of heavy-tailed length, a tenth cut off at ``length``, most tokens where engines and policies agree.

    ``log pi - log mu`` is Student's t with 2 degrees of freedom at the scale .003, and ten times as far on the 5 % of
    responses that are stale; the advantage is one for a response.
    """
    g = torch.Generator().manual_seed(0)
    shape = (responses, length)
    lengths = (length * torch.exp(0.6 * torch.randn(responses, 1, generator=g) - 0.8)).clamp(1, length)
    scale = torch.where(torch.rand(responses, 1, generator=g) < STALE, 0.03, 0.003)
    normal, *others = torch.randn((3, *shape), generator=g)
    distance = scale * normal / (sum(x.square() for x in others) / 2).sqrt()
    old = torch.empty(shape).exponential_(2.0, generator=g).neg_()
    advantages = torch.randn(responses, 1, generator=g).expand(shape).contiguous()
    mask = torch.arange(length) < lengths
    return Batch(*(value.to(device) for value in (old, old + distance, advantages, mask)))


def config_of(**options: Any) -> Any:
    """verl's actor config with SAT's options."""
    from verl.workers.config import FSDPActorConfig

    from sat_verl.config import SATPolicyLossConfig

    return FSDPActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=SATPolicyLossConfig(**{"alpha": 0.9, **options})
    )


def step(loss_mode: str, batch: Batch, config: Any, context: Callable[[], AbstractContextManager] = nullcontext) -> Any:
    """Forward and backward of a loss; returns its metrics."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import sat_verl.policy_loss  # noqa: F401  registers the losses

    log_prob = batch.log_prob.detach().requires_grad_()
    with context():
        loss, metrics = get_policy_loss_fn(loss_mode)(
            old_log_prob=batch.old_log_prob,
            log_prob=log_prob,
            advantages=batch.advantages,
            response_mask=batch.response_mask,
            loss_agg_mode="token-mean",
            config=config,
        )
    loss.backward()
    return metrics


def floor(batch: Batch) -> None:
    """Read each input once, write the gradient once, bring one number to the host."""
    total = batch.old_log_prob.sum() + batch.log_prob.sum() + batch.advantages.sum()
    (total + torch.count_nonzero(batch.response_mask)).item()
    torch.zeros_like(batch.log_prob)


@contextmanager
def one_rank(device: torch.device) -> Iterator[Any]:
    """A data-parallel group of this process alone."""
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def model_passes(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Of the recipes' tiny dense model on :data:`MODEL_SHAPE` tokens: ``step``, forward and backward; ``forward``.

    The latter as ``quantile_scope=batch`` adds it where a step has several micro-batches: without a graph.
    """
    from recipes.models.architectures import build_model
    from recipes.models.tokenizer import build_tokenizer

    model: Any = build_model("tiny", build_tokenizer(MODEL_SHAPE[1]), seed=0)
    model.to(device)
    ids = torch.randint(10, MODEL_SHAPE, generator=torch.Generator().manual_seed(0)).to(device)

    def log_probs() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits.log_softmax(-1).gather(-1, ids[..., None])

    def train() -> None:
        log_probs().sum().backward()
        model.zero_grad()

    return {"step": train, "forward": torch.no_grad()(log_probs)}


def measure(responses: int, length: int, repeats: int, device: torch.device, group: Any) -> dict[str, Any]:
    """All calls on one batch."""
    from sat_verl.batch_quantile import active_distances, distributed_tail_reference, one_micro_batch

    batch, per_call, per_step = batch_of(responses, length, device), config_of(), config_of(quantile_scope="batch")
    calls: dict[str, Callable[[], Any]] = {"floor": lambda: floor(batch)}
    for sat, base in PAIRS.items():
        for name in (base, sat):
            calls[name] = lambda name=name: step(name, batch, per_call)  # type: ignore[misc]
        calls[f"{sat}, scope batch"] = lambda name=sat: step(  # type: ignore[misc]
            name, batch, per_step, lambda: one_micro_batch(group)
        )
    arguments = (batch.log_prob, batch.old_log_prob, batch.response_mask)
    calls["selection alone"] = lambda: distributed_tail_reference(*active_distances("sat_grpo", *arguments), 0.9, group)
    spent = in_turn(calls, repeats, device)
    size = responses * length * 4
    metrics = {name: step(name, batch, per_call) for name in PAIRS}
    rows = {
        name: {
            "ms": spread([clock for clock, _ in times]),
            "cpu_ms": spread([cpu for _, cpu in times]),
            "peak_mib": round((peak := peak_bytes(calls[name], device)) / 2**20, 3),
            "peak_tensors": round(peak / size, 2),
        }
        for name, times in spent.items()
    }
    against = [*PAIRS.items(), *((f"{sat}, scope batch", sat) for sat in PAIRS), *((x, "floor") for x in PAIRS)]
    ratios = {
        f"{one} / {other}": {
            name: spread([a[at] / b[at] for a, b in zip(spent[one], spent[other], strict=True)])
            for at, name in enumerate(("clock", "cpu"))
        }
        for one, other in against
    }
    return {
        "responses": responses,
        "length": length,
        "active_share": round(float(batch.response_mask.float().mean()), 4),
        "gate_rate": {name: found["actor/sat/gate_rate"] for name, found in metrics.items()},
        "q": {name: found["actor/sat/q"] for name, found in metrics.items()},
        "calls": rows,
        "ratios": ratios,
    }


def table(cells: Sequence[dict[str, Any]], clock: str) -> str:
    """Markdown: ``clock`` is ``ms`` or ``cpu_ms``."""
    lines = [
        "| tensors | loss | ms (quartiles) | against verl's (quartiles) | against the floor | peak MiB | tensors |",
        "|---|---|---|---|---|---|---|",
    ]
    kind = "cpu" if clock == "cpu_ms" else "clock"
    for cell in cells:
        for name, row in cell["calls"].items():
            base = PAIRS.get(name) or (name.partition(",")[0] if "," in name else None)
            ratio = cell["ratios"].get(f"{name} / {base}", {}).get(kind)
            floor_ratio = cell["ratios"].get(f"{name} / floor", {}).get(kind)
            words = [
                f"{cell['responses']} x {cell['length']}",
                name,
                _quartiles(row[clock]),
                f"{_quartiles(ratio)} of {base}" if ratio else "",
                f"{floor_ratio['median']:.1f}" if floor_ratio else "",
                f"{row['peak_mib']:.2f}",
                f"{row['peak_tensors']:.1f}",
            ]
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def _quartiles(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def sizes_of(text: str) -> list[tuple[int, int]]:
    """``64x1k,8x32k`` as numbers of responses and of tokens."""
    found = []
    for word in str(text).split(","):
        match = re.fullmatch(r"(\d+)x(\d+)(k?)", word)
        if not match or not int(match[1]) * int(match[2]):
            raise ConfigError("sizes", word, "it is not responses x tokens", "write e.g. sizes=64x1k,8x32k")
        found.append((int(match[1]), int(match[2]) * (1024 if match[3] else 1)))
    return found


def main(words: Sequence[str]) -> int:
    """Run the command; its settings are in :data:`USAGE`."""
    settings = parse_settings(words, DEFAULTS, ())
    out = result_file(settings["out"])
    for name, value in settings.pop("difficulty").items():
        raise ConfigError(name, value, "there is no such setting", f"choose among {', '.join(DEFAULTS)}")
    sizes, repeats = sizes_of(settings["sizes"]), settings["repeats"]
    if repeats < 1:
        raise ConfigError("repeats", repeats, "it is not positive", "write e.g. repeats=21")
    if settings["device"] not in ("cpu", "cuda") or (settings["device"] == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("device", settings["device"], "there is no such device here", "use device=cpu")
    device = torch.device(settings["device"])
    with one_rank(device) as group:
        cells = [measure(responses, length, repeats, device, group) for responses, length in sizes]
    model = in_turn(model_passes(device), repeats, device)
    tokens = MODEL_SHAPE[0] * MODEL_SHAPE[1]
    clocks = list(enumerate(("clock", "cpu")))
    per_token = {name: spread([1e3 * pair[at] / tokens for pair in model["step"]]) for at, name in clocks}
    pairs = list(zip(model["forward"], model["step"], strict=True))
    extra = {name: spread([forward[at] / step[at] for forward, step in pairs]) for at, name in clocks}
    clock, kind = ("ms", "clock") if device.type == "cuda" else ("cpu_ms", "cpu")
    found = {
        "settings": {name: settings[name] for name in ("sizes", "repeats", "device")},
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "cells": cells,
        "tiny_model_us_per_token": per_token,
        "tiny_model_forward_share": extra,
        "table": table(cells, clock),
        "provenance": provenance.collect(["python", "-m", "benchmarks.speed", "loss", *words]),
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(found["table"])
    for cell in cells:
        selection = cell["calls"]["selection alone"][clock]["median"]
        step_ms = 1e-3 * per_token[kind]["median"] * cell["responses"] * cell["length"]
        print(
            f"\nq of the step, {cell['responses']} x {cell['length']}: {selection:.2f} ms, "
            f"{selection / step_ms:.3%} of the tiny model's forward and backward on as many tokens"
        )
    print(
        f"\nthe forward pass before it, with several micro-batches: {_quartiles(extra[kind])} of the tiny model's "
        "forward and backward"
    )
    return 0
