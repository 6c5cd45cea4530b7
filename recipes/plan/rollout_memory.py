"""Memory of a GPU that generates, and how many sequences its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.plan.model import Model
from recipes.plan.quantities import GIB, Range, Row, count, size, total
from recipes.plan.rollout_layout import Rollout, Sync

GRAPHS = Range(0.3 * GIB, 2.5 * GIB)
"""CUDA graphs of vLLM and SGLang; they depend on the captured sizes; not measured here."""
CONTEXT = Range(0.6 * GIB, 2.0 * GIB)
"""CUDA context, NCCL and what else is not torch's; not measured here."""
WORKER_CONTEXT = Range(0.4 * GIB, 1.5 * GIB)
"""CUDA context and NCCL of verl's worker, a second process on the GPU; not measured here."""
SAMPLER_COPIES = Range(1.0, 3.0)
"""Float32 copies of the logits of one decoding step, for log-probs and sampling."""


@dataclass(frozen=True)
class RolloutMemory:
    """One GPU of a rollout server.

    Attributes:
        rows: what stands beside the KV cache.
        worker: what verl's process for the weight sync takes, outside the engine's share.
        cache: bytes of the KV cache.
        outside: bytes beyond the share that the engine is told to take: ``worker``, and SGLang's activations and
            graphs.
        token: bytes of one token in the cache of this GPU.
        tokens: tokens that the cache of one server holds.
        full: sequences of the greatest length that it holds.
        running: sequences of the expected length that a server runs at once.
        needed: sequences that one weight-sync window gives it.
        notes: what follows.
    """

    rows: tuple[Row, ...]
    worker: tuple[Row, ...]
    cache: Range
    outside: Range
    token: int
    tokens: Range
    full: Range
    running: Range
    needed: int
    notes: tuple[str, ...] = ()


def weights(model: Model, rollout: Rollout) -> float:
    """Parameters on one GPU of a server: matrices are divided, norms and routers are not."""
    parts, tensor = model.parameters, rollout.tensor
    copies = max(1.0, tensor / model.kv_heads)  # key-value heads that several ranks have to have
    queries = 2 * model.hidden * model.q * model.layers
    keys = parts.attention - queries
    dense = (parts.embedding + parts.lm_head + parts.mlp + queries + keys * copies) / tensor
    experts = parts.experts / (tensor * (rollout.data if rollout.expert > 1 else 1))
    return dense + experts + parts.norm + parts.router


def cache_bytes(model: Model, rollout: Rollout) -> int:
    """Bytes that one token takes in the KV cache of one GPU: keys and values of every layer."""
    heads = -(-model.kv_heads // rollout.tensor)
    return 2 * model.layers * heads * model.head_dim * rollout.cache


def _activations(model: Model, rollout: Rollout) -> Row:
    """Of one step of ``max_num_batched_tokens``, and of the sampler's logits."""
    number, tensor = 2 if rollout.weights < 4 else 4, rollout.tensor
    inner = max(2 * model.ffn, model.top_k * (2 * model.expert_ffn + model.hidden)) / tensor
    token = number * (4 * model.hidden + (model.q + 2 * model.kv) / tensor + inner)
    sampled = rollout.sequences * model.vocab * 4
    low = rollout.batched_tokens * token + SAMPLER_COPIES.low * sampled
    high = 2 * rollout.batched_tokens * token + SAMPLER_COPIES.high * sampled
    words = (
        f"{rollout.batched_tokens} tokens x {token:.0f} B (to twice that), "
        f"{rollout.sequences} x {model.vocab} logits x 4 to 12 B"
    )
    return Row("activations, logits", Range(low, high), words, "vLLM profiles this at its start")


def _worker(rollout: Rollout, sync: Sync) -> tuple[Row, ...]:
    """verl's worker beside the engine: it receives the weights and hands them over."""
    passed = Range(sync.bucket, 2 * sync.bucket) if rollout.engine == "sglang" else Range.exactly(sync.bucket)
    copies = "1 to 2" if rollout.engine == "sglang" else "1"
    rows = [
        Row("second CUDA context, NCCL", WORKER_CONTEXT, "0.4 to 1.5 GiB", "assumed"),
        Row("weight-sync bucket, by CUDA IPC", passed, f"{copies} x update_weights_bucket_megabytes",
            "verl bucketed_weight_transfer; sglang_rollout"),
    ]  # fmt: skip
    if sync.nccl:
        both = Range.exactly(2 * sync.bucket)
        words = "2 x update_weights_bucket_megabytes, to receive and to send"
        rows.append(Row("weight-sync buckets", both, words, "verl nccl_checkpoint_engine.prepare"))
    return tuple(rows)


def plan(model: Model, rollout: Rollout, memory: float, expected: Range, window: int, sync: Sync) -> RolloutMemory:
    """Memory of a GPU that generates.

    Args:
        model: what generates.
        rollout: its layout.
        memory: bytes of the GPU.
        expected: tokens of prompt and response that a sequence is expected to have.
        window: responses of one weight-sync window.
        sync: how the weights arrive.
    """
    parameters, routers = weights(model, rollout), ", routers" if model.experts else ""
    own = Row(
        "weights", Range.exactly(parameters * rollout.weights), f"{count(parameters)} parameters on one of TP "
        f"{rollout.tensor} x {rollout.weights} B", f"vLLM / SGLang: norms{routers} and spare key-value heads in full",
    )  # fmt: skip
    graphs = Row("CUDA graphs", Range(0, 0) if rollout.eager else GRAPHS, "0.3 to 2.5 GiB", "assumed")
    context = Row("CUDA context, NCCL", CONTEXT, "0.6 to 2 GiB", "assumed")
    work = (_activations(model, rollout), graphs)
    rows, notes = (own, context, *work), []
    beside = total((own, context)) if rollout.engine == "sglang" else total(rows)
    worker = _worker(rollout, sync)
    outside = total((*worker, *work) if rollout.engine == "sglang" else worker)
    budget = memory * rollout.utilization
    cache = Range(max(0.0, budget - beside.high), max(0.0, budget - beside.low))
    if rollout.cache_bytes is not None:
        cache = Range.exactly(rollout.cache_bytes)
    token = cache_bytes(model, rollout)
    tokens = cache * (rollout.data / token)
    full = tokens * (1 / rollout.length)
    running = tokens.over(expected)
    cap = rollout.sequences * rollout.data
    running = Range(min(running.low, cap), min(running.high, cap))
    needed = -(-window // rollout.replicas)
    if outside.high > memory - budget:
        notes.append(
            f"{size(outside.low)} to {size(outside.high)} stand outside gpu_memory_utilization={rollout.utilization} "
            f"({'activations, graphs and ' * (rollout.engine == 'sglang')}the weight sync), which leaves "
            f"{size(memory - budget)} for them: lower it, or update_weights_bucket_megabytes"
        )
    if running.high < needed:
        most = "max_num_seqs" if running.high >= cap else "the KV cache"
        most = f"{running.high:.0f} run at once at most ({most})"
        notes.append(f"a window brings a server {needed} sequences, of which {most}")
    return RolloutMemory(rows, worker, cache, outside, token, tokens, full, running, needed, tuple(notes))


def fits(plan_: RolloutMemory, memory: float, utilization: float) -> str:
    """``fits``: a sequence of the greatest length, and what is outside the engine's share, surely have room.

    ``tight``: they may have; else ``does not fit``.
    """
    room = memory * (1 - utilization)
    if plan_.full.high < 1 or plan_.outside.low > room:
        return "does not fit"
    return "fits" if plan_.full.low >= 1 and plan_.outside.high <= room else "tight"
