"""Memory of a GPU that trains."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.plan import activations
from recipes.plan.layout import Trainer
from recipes.plan.model import Model
from recipes.plan.quantities import GIB, ZERO, Memory, Range, Row, count, total

CONTEXT = Range(1.0 * GIB, 3.0 * GIB)
"""CUDA context and kernels, NCCL's buffers of several groups; not measured here."""
UNUSED_BLOCKS = 0.08
"""Most of what changes within a step that the allocator holds beyond it; not measured here."""
_DISTRIBUTED = "Megatron Core guide, distributed optimizer; verl megatron_utils.offload_megatron_model_to_cpu"
_FSDP = "torch fully_shard with verl's mixed precision (fsdp/transformer_impl.py)"


@dataclass(frozen=True)
class Held:
    """Parameters that the fullest rank holds: of the dense part and the replicated, and of its experts."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def held(model: Model, trainer: Trainer) -> Held:
    """Parameters of the fullest rank, before any sharding over data-parallel ranks."""
    parts = model.parameters
    inner = (parts.attention + parts.mlp) / trainer.tensor + parts.router + parts.norm
    ends = parts.embedding + parts.lm_head if trainer.pipeline == 1 else model.head_parameters
    experts = parts.experts / (trainer.expert * trainer.expert_tensor)
    return Held(inner / trainer.pipeline + ends / trainer.tensor, experts / trainer.pipeline)


def sharded(trainer: Trainer, rank: Held, nbytes: float) -> float:
    """Bytes of the fullest rank's shard, of ``nbytes`` per parameter that it holds."""
    return nbytes * (rank.dense / trainer.shards + rank.experts / trainer.expert_shards)


def state_rows(model: Model, trainer: Trainer, whose: str = "") -> tuple[Row, ...]:
    """Weights, gradients and optimizer of one network."""
    rank, optimizer = held(model, trainer), trainer.optimizer
    split = f"{count(rank.total)} of {count(model.parameters.total)} parameters"
    over = f"{trainer.shards}" + (f" (experts {trainer.expert_shards})" if model.experts else "")
    state = sharded(trainer, rank, optimizer.master + optimizer.moments) * optimizer.on_gpu
    away = f", {optimizer.on_gpu:.0%} on the GPU" if optimizer.on_gpu < 1 else ""
    per = f"({optimizer.master} B master + {optimizer.moments} B moments)"
    if trainer.engine == "megatron":
        return (
            Row(whose + "weights", Range.exactly(rank.total * trainer.weights),
                f"{split} x {trainer.weights} B", _DISTRIBUTED),
            Row(whose + "gradients", Range.exactly(rank.total * trainer.gradients),
                f"{split} x {trainer.gradients} B, one buffer on every rank", _DISTRIBUTED),
            Row(whose + "optimizer", Range.exactly(state), f"{split} x {per} / {over}{away}", _DISTRIBUTED),
        )  # fmt: skip
    on_gpu = 0.0 if optimizer.on_gpu == 0 else 1.0  # FSDP2's offload policy takes weights and gradients along
    return (
        Row(whose + "weights", Range.exactly(sharded(trainer, rank, trainer.weights) * on_gpu),
            f"{split} x {trainer.weights} B / {over}{away}", _FSDP),
        Row(whose + "gradients", Range.exactly(sharded(trainer, rank, trainer.gradients) * on_gpu),
            f"{split} x {trainer.gradients} B / {over}{away}", _FSDP),
        Row(whose + "optimizer", Range.exactly(state), f"{split} x {per} / {over}{away}", "torch.optim.AdamW"),
    )  # fmt: skip


def _gathered(model: Model, trainer: Trainer) -> tuple[Row, ...]:
    """What FSDP gathers of the weights, and holds of gradients before it divides them."""
    number, head, layer = trainer.compute, model.head_parameters, model.layer_parameters
    rows = [
        Row("lm head, gathered, with its gradient", Range.exactly(2 * head * number),
            f"{count(head)} x 2 x {number} B: FSDP's root unit stays gathered", _FSDP),
    ]  # fmt: skip
    if trainer.reshard:
        units = Range(2 * layer * number, layer * (3 * number + number + 4))
        formula = f"{count(layer)} x 2 x {number} B, to 3 x {number} B and a gradient in {number} + 4 B"
        rows.append(Row("layers, gathered", units, formula, _FSDP))
    else:
        whole = model.layers * layer * number
        rows.append(Row("layers, gathered", Range.exactly(whole), "all of them: reshard_after_forward=false", _FSDP))
    if trainer.unsharded_gradients:
        whole = model.parameters.total * number
        rows.append(Row("gradients, not divided yet", Range.exactly(whole), f"all x {number} B: no_sync", _FSDP))
    return tuple(rows)


def _routes(model: Model, trainer: Trainer) -> Row:
    assert model.router is not None
    nbytes = model.router.nbytes(trainer.tokens * trainer.context)
    wide = trainer.tokens * trainer.context * model.router.layers * model.router.top_k * 8
    formula = f"{trainer.tokens * trainer.context} tokens x {model.router.layers} x {model.router.top_k}, 1 to 8 B each"
    return Row("routes to replay", Range(nbytes, wide), formula, "sat_verl.routes; indices become int64")


def _sync(model: Model, trainer: Trainer, bucket: int) -> tuple[Row, ...]:
    tensor = model.head_parameters * trainer.compute
    layer = model.parameters.experts / model.moe_layers * trainer.compute if model.moe_layers else 0
    return (
        Row("weight-sync buckets", Range.exactly(2 * bucket),
            "2 x update_weights_bucket_megabytes, to send and to receive", "verl nccl_checkpoint_engine.prepare"),
        Row("largest tensor, gathered", Range(tensor, max(tensor, layer) + tensor),
            "the lm head whole; at most " + ("with one layer's experts" if layer else "twice"),
            "verl get_per_tensor_param"),
    )  # fmt: skip


def _slack(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    most = total(rows).high * UNUSED_BLOCKS
    words = f"0 to {UNUSED_BLOCKS:.0%} of the rows above"
    return (*rows, Row("allocator's unused blocks", Range(0.0, most), words, "assumed"))


def plan(model: Model, trainer: Trainer, bucket: int, *, replay: bool, beside: Range = ZERO) -> Memory:
    """Memory of the fullest rank that trains.

    Args:
        model: what is trained.
        trainer: its layout.
        bucket: bytes of a bucket of the weight sync, 0 where none is on the GPU.
        replay: whether the rollout's routes are replayed.
        beside: bytes that a rollout on the same GPU takes outside its share.
    """
    standing = list(state_rows(model, trainer))
    if trainer.reference:
        rank = held(model, trainer)
        away = 0.0 if trainer.engine == "fsdp" or not trainer.reference_on_gpu else rank.total * trainer.weights
        words = f"{count(rank.total)} x {trainer.weights} B" if away else "on the host between its forward passes"
        standing.append(Row("reference model", Range.exactly(away), words, "verl ref (forward_only)"))
    if trainer.critic:
        standing += state_rows(model, trainer, "critic's ")
    standing.append(Row("CUDA context, NCCL", CONTEXT, "1 to 3 GiB", "assumed"))
    if beside.high:
        words = "its second CUDA context; at most with all that is outside gpu_memory_utilization"
        standing.append(Row("rollout, outside its share", beside, words, "the rows of a GPU that generates"))
    work = [*activations.rows(model, trainer), activations.logits(model, trainer)]
    if trainer.engine == "fsdp":
        work += _gathered(model, trainer)
    if replay:
        work.append(_routes(model, trainer))
    scratch = sharded(trainer, held(model, trainer), trainer.optimizer.scratch) * trainer.optimizer.on_gpu
    step = Row(
        "optimizer's scratch", Range(0.0, scratch), "torch's foreach AdamW: one copy of the shard", "torch.optim"
    )
    phases = {
        "forward and backward": _slack(tuple(work)),
        "optimizer step": (step,),
        "weight sync": _sync(model, trainer, bucket),
    }
    return Memory("a GPU that trains", tuple(standing), phases, tuple(_notes(trainer)))


def _notes(trainer: Trainer) -> list[str]:
    notes = []
    if trainer.returned:
        names = " and ".join(f"{name}_offload" for name in trainer.returned)
        notes.append(
            f"{names} gives memory back between two updates only: verl loads all of it for the whole update, so the "
            "peak stays (an optimizer that stays on the host is "
            "optim.override_optimizer_config.optimizer_cpu_offload for Megatron, fsdp_config.offload_policy for FSDP2)"
        )
    if trainer.engine == "megatron" and trainer.recompute.kind == "none":
        notes.append(
            "nothing is recomputed: Megatron does not read model.enable_gradient_checkpointing, but "
            "actor.megatron.override_transformer_config.recompute_granularity, _method and _num_layers"
        )
    if trainer.pipeline > 1:
        notes.append(
            "pipeline: the first stage's activations and the last stage's logits are added, though no rank has both"
        )
    return notes


def host_rows(model: Model, trainer: Trainer, gpus_per_node: int) -> tuple[Row, ...]:
    """What the trainer's ranks of one node keep on the host."""
    rank, optimizer = held(model, trainer), trainer.optimizer
    state = sharded(trainer, rank, optimizer.master + optimizer.moments + 4) * (1 - optimizer.on_gpu)
    rows = []
    if state and trainer.engine == "fsdp":
        state = sharded(trainer, rank, 2 * trainer.weights + optimizer.moments)
    if state:
        words = "what of the optimizer is not on the GPU, with its gradients and weights in float32"
        rows.append(Row("optimizer on the host", Range.exactly(state * gpus_per_node), words, "pinned memory"))
    if trainer.returned:
        back = rank.total * trainer.weights if trainer.engine == "megatron" else sharded(trainer, rank, trainer.weights)
        most = back * ("param" in trainer.returned)
        most += sharded(trainer, rank, optimizer.master + optimizer.moments) * ("optimizer" in trainer.returned)
        rows.append(
            Row("returned between updates", Range.exactly(most * gpus_per_node), "param/optimizer_offload", "verl")
        )
    if trainer.reference and not (trainer.engine == "megatron" and trainer.reference_on_gpu):
        kept = rank.total * trainer.weights if trainer.engine == "megatron" else sharded(trainer, rank, 4)
        rows.append(Row("reference model on the host", Range.exactly(kept * gpus_per_node), "its weights", "verl ref"))
    return tuple(rows)
