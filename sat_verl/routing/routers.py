"""The routers of Hugging Face MoE models that routes can be replayed in, found by class; the one place that names them.

Written for transformers 5.x, where a router is a module of its own whose forward maps hidden states to
``(router_logits, gates, experts)``. Older versions have the choice inside the MoE block, and are refused. Whether a
class still computes its gates as said here is also checked on its own output, at its first forward under replay.

Families, by what they make of the router logits (softmax in float32 over all experts, then top-k, unless said):

==========================================  ==========================================================================
Qwen2-MoE, Qwen3-MoE (-VL, -Omni, -Next),   renormalised if ``norm_topk_prob``, cast to the logits' dtype
OLMoE, FlexOLMo, Mellum
Qwen3.5-MoE                                 always renormalised, cast
Mixtral, MiniMax                            always renormalised, float32
GPT-OSS                                     *not built*: softmax over the chosen logits, the same number as a
                                            renormalised softmax; add a family with ``softmax(logits.gather(experts))``
DeepSeek-V3, GLM-4-MoE, dots1 and kin       *not built*: the router returns logits only, and the block's method
                                            ``route_tokens_to_experts`` chooses by ``sigmoid + e_score_correction_bias``
                                            within groups. There the method is what to replace: experts = the replayed
                                            ones (the bias and the groups only choose), gates =
                                            ``sigmoid(logits).gather(experts)``, divided by their sum + 1e-20 if
                                            ``norm_topk_prob``, times ``routed_scaling_factor``
Phi-MoE, Llama 4, Switch, NLLB              *not built*: noise in the choice, or one expert per token (a row of verl's
                                            zero filling would then be a valid route)
==========================================  ==========================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import transformers
from torch import nn

__all__ = ["Router", "UnsupportedModelError", "find_routers", "gates_of"]


class UnsupportedModelError(ValueError):
    """A model in which routes cannot be replayed."""


@dataclass(frozen=True)
class _Family:
    renormalised: bool | None = None
    """None: if the module's ``norm_topk_prob`` says so."""
    cast: bool = True
    """Whether gates have the dtype of the logits; float32 otherwise."""


_CONFIGURED, _ALWAYS, _WIDE = _Family(), _Family(renormalised=True), _Family(renormalised=True, cast=False)
FAMILIES = {
    "Qwen2MoeTopKRouter": _CONFIGURED,
    "Qwen3MoeTopKRouter": _CONFIGURED,
    "Qwen3NextTopKRouter": _CONFIGURED,
    "Qwen3VLMoeTextTopKRouter": _ALWAYS,
    "Qwen3OmniMoeThinkerTextTopKRouter": _CONFIGURED,
    "OlmoeTopKRouter": _CONFIGURED,
    "FlexOlmoTopKRouter": _CONFIGURED,
    "MellumTopKRouter": _CONFIGURED,
    "Qwen3_5MoeTopKRouter": _ALWAYS,
    "MixtralTopKRouter": _WIDE,
    "MiniMaxTopKRouter": _WIDE,
}
"""By the name of a class in ``transformers.models``."""


@dataclass(frozen=True)
class Router:
    """A router of a model: its module, the number of its decoder layer, and its position among the model's routers."""

    name: str
    layer: int
    position: int
    module: nn.Module
    family: _Family


def _version_guard() -> None:
    major = int(transformers.__version__.partition(".")[0])
    if major != 5:
        raise UnsupportedModelError(
            f"routing replay is written for the routers of transformers 5.x, this is {transformers.__version__}: "
            "install transformers 5, or switch replay off"
        )


def _class_names(module: nn.Module) -> list[str]:
    """Of the classes of a module that are transformers' own: FSDP2 puts a class of its own before them."""
    return [c.__name__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models.")]


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, wrapped with FSDP2 or not, in the order of its layers; at least one.

    Raises:
        UnsupportedModelError: a dense model, a router of another family, one expert per token, or other transformers.
    """
    _version_guard()
    routers: list[Router] = []
    for name, module in model.named_modules():
        names = _class_names(module)
        family = next((FAMILIES[n] for n in names if n in FAMILIES), None)
        if family is None:
            if any(n.endswith("Router") for n in names):
                raise UnsupportedModelError(
                    f"routes cannot be replayed in {names[0]} ({name}): sat_verl/routing/routers.py has "
                    f"{', '.join(sorted(FAMILIES))}; switch replay off, or add its family there"
                )
            continue
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is None or module.top_k < 2:
            why = "one expert per token" if layer else "its name holds no layers.NUMBER"
            raise UnsupportedModelError(f"routes cannot be replayed in {name} ({names[0]}): {why}; switch replay off")
        routers.append(Router(name, int(layer[1]), len(routers), module, family))
    if not routers:
        raise UnsupportedModelError(
            "the model has no router whose choice could be replayed (it is dense): switch replay off"
        )
    return routers


def gates_of(router: Router, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The gates of given experts, by the model's own arithmetic in its own order; gradients flow to the logits.

    Args:
        router: whose family and settings count.
        logits: router logits over all E experts, shape ``(T, E)``, any float dtype.
        experts: k different experts a token, shape ``(T, k)``, int64.

    Returns:
        Shape ``(T, k)``, dtype of the logits or float32, as the model has it.
    """
    gates = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
    renormalised = router.family.renormalised
    if router.module.norm_topk_prob if renormalised is None else renormalised:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return gates.to(logits.dtype) if router.family.cast else gates
