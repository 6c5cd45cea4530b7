"""verl's Megatron engine on a CPU: what megatron-core and mbridge take for granted of a machine with CUDA.

megatron-core names ``torch.cuda`` all over, and without TransformerEngine it neither packs sequences nor is read by
mbridge. One function per patch; :data:`PATCHES` says why each is needed. :mod:`sat_verl.cpu.bridges` has them applied when
verl's Megatron engine is imported, where ``VERL_PLATFORM=cpu`` and nowhere else. torch itself stays as it is: the
modules of the two packages see a stand-in under the name ``torch`` (patching torch's own factories breaks others:
transformers, for one, then leaves buffers uninitialised).

Made for megatron-core 0.16.1, mbridge 0.15.1 and verl 0.9.1 without TransformerEngine, Apex and flash-attn, with
``vanilla_mbridge=true`` and packed sequences (``use_remove_padding=true``), without a context-parallel split.
``tests/test_megatron.py`` fails when one of them is no longer needed.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("megatron.core", "mbridge")
_CPU = torch.device("cpu")


# --- torch, as the modules of megatron-core and mbridge see it -------------------------------------------------------


class _Stream:
    """A CUDA stream or event of a machine that has none: all are one, and nothing has to wait."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Cuda(ModuleType):
    """``torch.cuda`` whose one device is the CPU."""

    Stream = Event = _Stream
    current_device = staticmethod(lambda: _CPU)
    current_stream = default_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(lambda _=None: contextlib.nullcontext())
    synchronize = empty_cache = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_, **__: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_, **__: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """``torch`` with :class:`_Cuda`, and with factories that make on the CPU what is asked for on ``cuda``."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs |= {"device": _CPU, "pin_memory": False}
        return factory(*args, **kwargs)

    return make


_TORCH = _Torch("torch")
for _name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
    setattr(_TORCH, _name, _on_cpu(getattr(torch, _name)))


def stand_in_for_torch() -> None:
    import mbridge  # noqa: F401  so that its modules are there

    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES) and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]


def _cpu_tensor_types(function: Callable) -> Callable:
    """``function`` with ``tensor.type()`` that says ``torch.cuda.FloatTensor`` for ``torch.FloatTensor``."""

    @contextlib.contextmanager
    def types() -> Iterator[None]:
        original = torch.Tensor.type

        def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dtype is None:
                return original(self).replace("torch.", "torch.cuda.")
            return original(self, dtype, *args, **kwargs)

        torch.Tensor.type = type_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.type = original  # type: ignore[method-assign]

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with types():
            return function(*args, **kwargs)

    return wrapped


def allow_cpu_tensors() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.transformer.module import MegatronModule

    distrib_optimizer.DistributedOptimizer.__init__ = _cpu_tensor_types(distrib_optimizer.DistributedOptimizer.__init__)
    clip = _cpu_tensor_types(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer, distrib_optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            module.clip_grad_by_total_norm_fp32 = clip
    MegatronModule.cuda = lambda self, *_: self


def cpu_random_states() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def split_sizes_as_numbers() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # torch.distributed takes the sizes of an all-to-all as numbers only.
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def load_float32_state() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_set_main_param_and_optimizer_states"
    setattr(DistributedOptimizer, name, torch.no_grad()(getattr(DistributedOptimizer, name)))


def own_step_counters() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict


# --- without TransformerEngine ---------------------------------------------------------------------------------------


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
    for begin, end in zip(bounds, bounds[1:], strict=False):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        one = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        sequences.append(one[0].transpose(0, 1))
    return torch.cat([*sequences, torch.zeros_like(query[bounds[-1] :])])


@dataclass(frozen=True)
class Patch:
    """One patch: what it does, and why it is needed."""

    name: str
    apply: Callable[[], None]
    reason: str


PATCHES = (
    Patch("stand_in_for_torch", stand_in_for_torch, "both packages name torch.cuda's device, streams and generators"),
    Patch("allow_cpu_tensors", allow_cpu_tensors, "Megatron's optimizer asks tensors whether they are CUDA's"),
    Patch("cpu_random_states", cpu_random_states, "Megatron forks and restores the generators of CUDA devices"),
    Patch("split_sizes_as_numbers", split_sizes_as_numbers, "experts on several ranks: only CUDA's are made numbers"),
    Patch("load_float32_state", load_float32_state, "without master weights the state is loaded into the weights"),
    Patch(
        "own_step_counters", own_step_counters, "a loaded torch Adam counts each step once per weight, in one tensor"
    ),
    Patch("plain_router_gemm", plain_router_gemm, "a NameError in the router where TransformerEngine is missing"),
    Patch("local_layers", local_layers, "mbridge builds its layers with TransformerEngine"),
    Patch("name_as_transformer_engine", name_as_transformer_engine, "mbridge reads and writes only those layers"),
    Patch("norm_of_split_sequences", norm_of_split_sequences, "Megatron's torch norm refuses sequence parallelism"),
    Patch("packed_attention", packed_attention, "Megatron's own attention refuses packed sequences"),
)


def apply() -> None:
    """Apply every patch; mbridge is imported."""
    for patch in PATCHES:
        patch.apply()
