"""Options of verl's Megatron engine on a CPU, chosen with ``actor.megatron._target_``."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import McoreEngineConfig

__all__ = ["CpuMcoreEngineConfig"]


@dataclass
class CpuMcoreEngineConfig(McoreEngineConfig):
    """verl's, which takes ``dtype=float32`` as well: the rest of the engine has it, only verl's config refuses it.

    In float32 trainer, rollout and FSDP2 agree to about 1e-6 per token; in bfloat16 to about 1e-3.

    Raises:
        ValueError: another dtype than float32, bfloat16 and float16.
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"actor.megatron.dtype={dtype}: it must be float32, bfloat16 or float16")
        object.__setattr__(self, "dtype", "bfloat16")  # the fields are frozen, and verl asserts on this one
        try:
            super().__post_init__()
        finally:
            object.__setattr__(self, "dtype", dtype)
