"""Patches of megatron-core and mbridge for tensors that are on the CPU; see :mod:`sat_verl.cpu.megatron`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("megatron.core", "mbridge")
_CPU = torch.device("cpu")


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

        torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
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
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                # Loaded as one tensor for all weights, which each of them then advances; or not at all.
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    DistributedOptimizer.load_state_dict = load_state_dict
