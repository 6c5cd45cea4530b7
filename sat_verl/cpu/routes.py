"""vLLM's CPU kernels of mixture-of-experts layers tell which experts they used.

vLLM returns the routes of a request (``enable_return_routed_experts``) from what its routers, or its GPU kernels that
route themselves, hand to a capturer. Its CPU kernels route themselves and hand on nothing, so it refuses them. The two
patches here add the missing hand-over; capturer, bookkeeping by cache slot and the way to the caller are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

SINK = "sat_verl_routes_sink"
"""Attribute of a layer's ``RoutedExperts``: takes the chosen experts of a forward pass. The kernel object is no place
for it: vLLM makes a new one after every weight sync."""

KERNELS = ("forward_torch", "forward_grouped_gemm")


class NoRoutesError(RuntimeError):
    """The routes of a model were asked for, and it has no layer that could tell them."""


def tell_routes(module: Any) -> None:
    """Patch ``vllm...cpu_fused_moe``: both kernels of ``CPUFusedMOE`` show the experts to the layer's sink."""
    for name in KERNELS:
        setattr(module.CPUFusedMOE, name, _telling(getattr(module.CPUFusedMOE, name)))


def _telling(kernel: Callable) -> Callable:
    @wraps(kernel)
    def telling(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """``topk_ids``: shape ``(tokens, top_k)``, int32, in no particular order of the experts."""
        sink = getattr(layer, SINK, None)
        if sink is not None:
            sink(topk_ids)
        return kernel(self, layer, x, topk_weights, topk_ids, *args, **kwargs)

    return telling


def bind_routes(module: Any) -> None:
    """Patch ``vllm.v1.worker.gpu_model_runner``: layers with a CPU kernel get the capturer as their sink."""
    original = module.GPUModelRunner._bind_routed_experts_capturer

    @wraps(original)
    def bind(self: Any, capturer: Any) -> None:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        layers = [layer for layer in self.model.modules() if isinstance(layer, MoERunner)]
        if not layers:
            raise NoRoutesError(f"{type(self.model).__name__} has no mixture-of-experts layer that vLLM runs itself")
        if not all(isinstance(getattr(one._quant_method, "cpu_fused_moe", None), CPUFusedMOE) for one in layers):
            original(self, capturer)  # with its own refusal of kernels that tell nothing
            return
        for layer in layers:
            setattr(layer.routed_experts, SINK, partial(capturer.capture, layer.layer_id))

    module.GPUModelRunner._bind_routed_experts_capturer = bind
