"""Patches of megatron-core and mbridge for layers without TransformerEngine; see :mod:`sat_verl.cpu.megatron`."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import torch


def plain_router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def local_layers() -> None:
    from mbridge.core.llm_bridge import LLMBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def spec(self: Any, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )

    LLMBridge._get_transformer_layer_spec = spec


def norm_of_split_sequences() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of such parameters over the ranks that share a sequence.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def name_in_transformer_engine(name: str, moe_layers: set[str], first_expert: int = 0) -> str:
    """The name that a weight of a local layer has in TransformerEngine's layers, which mbridge knows.

    Args:
        name: for instance ``decoder.layers.0.input_layernorm.weight``.
        moe_layers: prefixes of the layers that have a router, for instance ``decoder.layers.0``.
        first_expert: number in the whole model of this rank's expert 0.
    """
    if name.endswith(".input_layernorm.weight"):
        return name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    if match := _EXPERT.search(name):
        return f"{name[: match.start()]}.mlp.experts.{match[2]}.weight{first_expert + int(match[1])}"
    if name.endswith(".pre_mlp_layernorm.weight") and name.split(".pre_mlp")[0] not in moe_layers:
        return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return name


def name_as_transformer_engine() -> None:
    from mbridge.core.bridge import Bridge

    original = Bridge._weight_name_mapping_mcore_local_to_global

    def names(self: Any, model: Any, consider_ep: bool = True) -> dict[str, str]:
        found = original(self, model, consider_ep)
        moe_layers = {name.split(".mlp.router")[0] for name in found.values() if ".mlp.router" in name}
        first = 0
        if consider_ep and self.mpu.ep_size > 1:
            first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank
        return {local: name_in_transformer_engine(name, moe_layers, first) for local, name in found.items()}

    Bridge._weight_name_mapping_mcore_local_to_global = names


def packed_attention() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.forward

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return original(self, query, key, value, *args, **kwargs)
        padded = packed_seq_params.cu_seqlens_q_padded
        bounds = packed_seq_params.cu_seqlens_q if padded is None else padded
        return causal_by_sequence(query, key, value, bounds.tolist(), self.softmax_scale).flatten(1)

    DotProductAttention.forward = forward


def causal_by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int], scale: float
) -> torch.Tensor:
    """Causal attention within each of the packed sequences.

    Args:
        query: shape (tokens, heads, size).
        key: shape (tokens, groups, size); ``groups`` divides ``heads``.
        value: as ``key``.
        bounds: where the sequences begin, and where the last one ends; rows after that are padding.
        scale: of the logits.

    Returns:
        Shape (tokens, heads, size); zeros in the padding.
    """
    sequences = []
    for begin, end in itertools.pairwise(bounds):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        one = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        sequences.append(one[0].transpose(0, 1))
    return torch.cat([*sequences, torch.zeros_like(query[bounds[-1] :])])
