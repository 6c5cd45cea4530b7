"""Bytes of activations: what one token leaves behind in one layer, for the two training engines.

Both lists follow the modules one by one. transformers' was compared with the tensors that torch really saves
(``tests/test_plan.py``: equal to the byte); Megatron's is the list of Korthikanti et al. (arXiv 2205.05198, section 4)
for grouped queries, SwiGLU, flash attention and experts, with TransformerEngine's fused norms; nothing measured it.
"""

from __future__ import annotations

from recipes.plan.layout import Trainer
from recipes.plan.model import Model
from recipes.plan.quantities import Range, Row

IMBALANCE = Range(1.0, 2.0)
"""Tokens of the fullest expert rank over the mean; a base model's router is not balanced by any loss here."""
MEGATRON_SLACK = Range(1.0, 1.3)
"""Unfused rotary embedding, buffers of sequence parallelism and of the experts' dispatch."""
TRANSFORMERS_SLACK = Range(1.0, 1.6)
"""Gradients of activations that stand beside the layer that is being recomputed; 1.58 in torch's MemTracker."""
_KORTHIKANTI = "arXiv 2205.05198, section 4; megatron-core 0.16"
_TRANSFORMERS = "modules of transformers 5.10; equal to torch's saved tensors in tests/test_plan.py"


def transformers_layer(model: Model, number: int, *, experts: bool) -> int:
    """Bytes that a token leaves in one decoder layer of transformers without checkpointing.

    Args:
        model: of a family whose layers are Llama's (RMSNorm, rotary, grouped queries, SwiGLU).
        number: bytes of a number of the computation.
        experts: whether the layer has experts.
    """
    norms = 2 * (model.hidden * (4 + 2 * number) + 4)  # the input in float32, normalised, and the output; 1/rms
    heads = (4 + number) * (model.q + model.kv) + 4 * (model.heads + model.kv_heads) if model.qk_norm else 0
    attention = number * (2 * model.q + 2 * model.kv) + 4 * model.heads  # q, k, v, output; log-sum-exp
    if not experts:
        return norms + heads + attention + 4 * number * model.ffn  # gate, silu(gate), up, product
    # As above per chosen expert, with its input and output; indices and weights. Router probabilities in float32.
    routed = model.top_k * (number * (2 * model.hidden + 4 * model.expert_ffn + 1) + 33)
    return norms + heads + attention + routed + 4 * model.experts


def megatron_layer(model: Model, trainer: Trainer, *, experts: bool, imbalance: float = 1.0) -> float:
    """Bytes that a token leaves in one layer of one of Megatron's ranks, after what ``recompute`` drops of it.

    A rank sees all tokens of its micro-batch in attention and matrices, and with sequence parallelism its part of them
    in norms and before the experts.
    """
    number, tensor = trainer.compute, trainer.tensor
    spread = tensor if trainer.sequence_parallel else 1
    dropped = set(trainer.recompute.parts) if trainer.recompute.kind == "parts" else set()
    norms = (number * model.hidden * (2 if "layernorm" in dropped else 4) + 8) / spread
    heads = number * (model.q + model.kv) / tensor if model.qk_norm else 0
    attention = (number * (2 * model.q + 2 * model.kv) + 4 * model.heads) / tensor
    if not experts:
        kept = 0 if "mlp" in dropped else 2 * model.ffn + (0 if "moe_act" in dropped else model.ffn)
        return norms + heads + attention + number * kept / tensor
    if "moe" in dropped:
        return norms + heads + attention
    inner = model.expert_ffn * (2 if "moe_act" in dropped else 3)
    routed = model.top_k * number * (2 * model.hidden * trainer.expert_tensor + inner) * imbalance
    return norms + heads + attention + (routed + 9 * model.experts) / spread


def _layer(model: Model, trainer: Trainer, imbalance: float) -> float:
    """Bytes of a token in an average layer."""
    share = model.moe_layers / model.layers
    if trainer.engine == "megatron":
        dense = megatron_layer(model, trainer, experts=False)
        routed = megatron_layer(model, trainer, experts=True, imbalance=imbalance) if share else 0
    else:
        dense = transformers_layer(model, trainer.compute, experts=False)
        routed = transformers_layer(model, trainer.compute, experts=True) if share else 0
    return (1 - share) * dense + share * routed


def rows(model: Model, trainer: Trainer) -> tuple[Row, ...]:
    """Activations of one micro-batch that the fullest rank holds when its backward pass begins."""
    is_megatron = trainer.engine == "megatron"
    source = _KORTHIKANTI if is_megatron else _TRANSFORMERS
    slack = MEGATRON_SLACK if is_megatron else TRANSFORMERS_SLACK
    spread = trainer.tensor if trainer.sequence_parallel else 1
    layers = -(-model.layers // trainer.pipeline)
    flying = min(trainer.pipeline, trainer.micro_batches[1])  # micro-batches of the first stage of a pipeline
    recompute, tokens = trainer.recompute, trainer.tokens
    per_layer = Range(
        _layer(model, trainer, IMBALANCE.low), _layer(model, trainer, IMBALANCE.high if model.moe_layers else 1.0)
    )
    words = f"{tokens} tokens ({trainer.tokens_formula})"
    if recompute.kind != "layers":
        each = Range(per_layer.low, per_layer.high * (slack.high if is_megatron else 1.0))
        whole = each * (tokens * layers * flying)
        if not is_megatron:  # beside the layer whose backward pass runs
            whole += Range(0.0, tokens * per_layer.high * (slack.high - 1))
        formula = f"{words} x {layers} layers x {each.low:.0f} to {each.high:.0f} B x {flying} micro-batches"
        return (Row("activations", whole, formula, source),)
    treated = layers if recompute.layers is None else min(recompute.layers, layers)
    inputs = trainer.compute * model.hidden / spread
    chunks = -(-treated // recompute.every)
    kept = Range.exactly(tokens * flying * chunks * inputs) + per_layer * (tokens * flying * (layers - treated))
    again = per_layer * (tokens * recompute.every)
    return (
        Row(
            "activations kept", kept,
            f"{words} x {chunks} inputs x {inputs:.0f} B x {flying} micro-batches"
            + (f" + {layers - treated} whole layers" if treated < layers else ""), source,
        ),
        Row(
            "layer computed again", Range(again.low * slack.low, again.high * slack.high),
            f"{tokens} tokens x {recompute.every} x {per_layer.low:.0f} to {per_layer.high * slack.high:.0f} B", source,
        ),
    )  # fmt: skip


def logits(model: Model, trainer: Trainer) -> Row:
    """Logits, what the log-probs keep of them, and their gradient."""
    number = trainer.compute
    if trainer.fused_logits:
        chunk = 512 * model.vocab // trainer.tensor
        formula = f"chunks of 512 tokens x {model.vocab} / TP {trainer.tensor} x 4 to 12 B"
        return Row("logits (fused, in chunks)", Range(4 * chunk, 12 * chunk), formula, "verl use_fused_kernels")
    if trainer.engine == "megatron":
        each, source = Range(number + 4, 3 * number + 4), "logits and float32 softmax; gradient: megatron cross_entropy"
    else:
        most = 3 * number if number < 4 else 4 * number
        each, source = Range(number, most), "flash-attn's loss in place, to torch's log_softmax by rows"
    entries = trainer.tokens * model.vocab / trainer.tensor
    formula = f"{trainer.tokens} tokens x {model.vocab} / TP {trainer.tensor} x {each.low:.0f} to {each.high:.0f} B"
    return Row("logits", each * entries, formula, source)
