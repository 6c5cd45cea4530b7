"""A CPU platform for verl, registered as ``cpu`` and chosen by ``VERL_PLATFORM=cpu``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from sat_verl.cpu.placement import ROLLOUT_CPUS_ENV


def _resident_bytes(*_: Any) -> int:
    return psutil.Process().memory_info().rss


def _mem_get_info(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class _CpuDeviceModule(ModuleType):
    """``torch.cpu`` with the part of the ``torch.cuda`` interface that verl calls.

    Memory figures are the resident set of the process, in bytes.
    """

    memory_allocated = max_memory_allocated = staticmethod(_resident_bytes)
    memory_reserved = max_memory_reserved = staticmethod(_resident_bytes)
    mem_get_info = staticmethod(_mem_get_info)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    @staticmethod
    def _nothing(*_: Any, **__: Any) -> None:
        return None

    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = synchronize = _nothing

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host's cores as verl's device. One logical device per Ray worker; the index is ignored."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule("sat_verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never auto-detected: a machine with a GPU must not silently train on its CPU.
        return False

    def current_device(self) -> torch.device:  # type: ignore[override]
        # verl passes the result to tensor.to(...): an index would mean "cuda:<index>".
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # verl asks Ray for the accelerator ids of a worker, and Ray gives ids only for resources that it knows:
        # one logical "GPU" is one worker's slot here (`ray_init.num_gpus`).
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        # The rollout processes get their own share of the cores (see sat_verl.cpu.placement).
        value = os.environ.get(ROLLOUT_CPUS_ENV)
        return {ROLLOUT_CPUS_ENV: value} if value else {}

    def cudart(self) -> None:
        return None
