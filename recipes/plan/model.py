"""What a plan has to know of a model: dimensions, and parameters by kind, from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sat_verl.routes import Router, expert_layers, router_of

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` that are counted in closed form; others are built on torch's meta device."""

_NEEDED = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size",
)  # fmt: skip


class MissingSizeError(KeyError):
    """A config has no such dimension; the message is its name."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by kind; an embedding that is also the lm head counts once, as embedding."""

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norm: int = 0
    lm_head: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Model:
    """Dimensions and parameters of a decoder.

    Attributes:
        name: path or hub id, as the run has it.
        source: where the config comes from.
        family: its ``model_type``.
        layers, hidden, heads, kv_heads, head_dim, vocab: as usual.
        ffn: width of a dense MLP; 0 where every layer has experts.
        moe_layers: layers with experts.
        expert_ffn, experts, top_k: of such a layer; 0 in a dense model.
        qk_norm: whether queries and keys are normalised.
        tied: whether the embedding is the lm head.
        positions: the longest sequence that the config allows, None if it says none.
        parameters: by kind.
        router: what decides the size of routes; None for a dense model.
        exact: whether the parameters are counted in closed form, and checked against transformers.
    """

    name: str
    source: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    moe_layers: int
    expert_ffn: int
    experts: int
    top_k: int
    qk_norm: bool
    tied: bool
    positions: int | None
    parameters: Parameters
    router: Router | None
    exact: bool = True

    @property
    def q(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all keys (or of all values) together."""
        return self.kv_heads * self.head_dim

    @property
    def active(self) -> int:
        """Parameters that one token meets: all but the experts that it is not sent to."""
        idle = self.parameters.experts * (self.experts - self.top_k) // self.experts if self.experts else 0
        return self.parameters.total - idle

    @property
    def matmul(self) -> int:
        """Multiply-adds of one token in the matrices: active weights and lm head, without the embedding's look-up."""
        per_layer = self.hidden * (2 * self.q + 2 * self.kv)
        dense = (self.layers - self.moe_layers) * 3 * self.hidden * self.ffn
        routed = self.moe_layers * self.hidden * (3 * self.top_k * self.expert_ffn + self.experts)
        return self.layers * per_layer + dense + routed + self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of an average layer."""
        of_layers = self.parameters.total - self.parameters.embedding - self.parameters.lm_head
        return of_layers // self.layers

    @property
    def head_parameters(self) -> int:
        """Parameters of the lm head, whether tied or not."""
        return self.vocab * self.hidden


def _closed_form(config: Mapping[str, Any], shape: Mapping[str, int], tied: bool, qk_norm: bool) -> Parameters:
    """Parameters of the families in :data:`FAMILIES`, from the modules that transformers builds for them."""
    hidden, layers, moe = shape["hidden"], shape["layers"], shape["moe_layers"]
    q, kv, head_dim = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"], shape["head_dim"]
    attention = hidden * (q + 2 * kv) + q * hidden
    if config["model_type"] == "qwen2":
        attention += q + 2 * kv
    elif config.get("attention_bias"):
        attention += q + 2 * kv + hidden
    mlp = 3 * hidden * shape["ffn"]
    if config.get("mlp_bias"):
        mlp += 2 * shape["ffn"] + hidden
    return Parameters(
        embedding=shape["vocab"] * hidden,
        attention=layers * attention,
        mlp=(layers - moe) * mlp,
        experts=moe * shape["experts"] * 3 * hidden * shape["expert_ffn"],
        router=moe * shape["experts"] * hidden,
        norm=layers * (2 * hidden + (2 * head_dim if qk_norm else 0)) + hidden,
        lm_head=0 if tied else shape["vocab"] * hidden,
    )


def built(config: Mapping[str, Any]) -> Parameters:
    """Parameters of any causal language model, counted in the modules that transformers builds on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    described = AutoConfig.for_model(config["model_type"], **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    counts = dict.fromkeys((one.name for one in fields(Parameters)), 0)
    for name, parameter in model.named_parameters():  # a tied one comes once
        counts[_kind(name)] += parameter.numel()
    return Parameters(**counts)


def _kind(name: str) -> str:
    """The kind of a parameter, by its name in transformers."""
    kinds = (
        ("lm_head", "lm_head"), ("embed", "embedding"), ("norm", "norm"), ("attn", "attention"),
        ("experts", "experts"), ("mlp.gate.", "router"), ("router", "router"),
    )  # fmt: skip
    return next((kind for part, kind in kinds if part in name), "mlp")


def model_of(config: Mapping[str, Any], name: str, source: str) -> Model:
    """A model from its Hugging Face config.

    Args:
        config: as in ``config.json`` (of a multi-modal model, the text part is taken).
        name: for the plan.
        source: where the config comes from, for the plan.

    Raises:
        MissingSizeError: a dimension is missing.
    """
    config = {**config, **(config.get("text_config") or {})}
    for needed in _NEEDED:
        if config.get(needed) is None:
            raise MissingSizeError(needed)
    family = config["model_type"]
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    router = router_of(config)
    moe = expert_layers(config) if router else 0
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab": config["vocab_size"],
        "ffn": config["intermediate_size"] if moe < layers else 0,
        "moe_layers": moe,
        "expert_ffn": (config.get("moe_intermediate_size") or config["intermediate_size"]) if router else 0,
        "experts": router.experts if router else 0,
        "top_k": router.top_k if router else 0,
    }
    tied = bool(config.get("tie_word_embeddings", False))
    qk_norm = family.startswith("qwen3")
    exact = family in FAMILIES
    parameters = _closed_form(config, shape, tied, qk_norm) if exact else built(config)
    return Model(
        name=name, source=source, family=family, qk_norm=qk_norm, tied=tied, parameters=parameters, router=router,
        positions=config.get("max_position_embeddings"), exact=exact, **shape,
    )  # fmt: skip
