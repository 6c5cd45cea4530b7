"""How the rollout's GPUs hold the model: read from a composed and derived config."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from recipes import divisibility
from recipes.errors import ConfigError
from recipes.plan.layout import dtype_bytes, select

ROLLOUT = "actor_rollout_ref.rollout."


@dataclass(frozen=True)
class Rollout:
    """The rollout's GPUs.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        gpus: all GPUs that generate.
        replicas: independent servers.
        tensor, expert, data: sizes of a server's splits.
        weights, cache: bytes per parameter, and per number in the KV cache.
        utilization: share of the GPU that the engine takes.
        sequences: most sequences that a server runs at once.
        batched_tokens: most tokens of one of its steps.
        length: most tokens of a sequence.
        eager: whether it goes without CUDA graphs.
        cache_bytes: size of the KV cache where it is set by hand.
        shared: whether it runs on the trainer's own GPU.
    """

    engine: str
    gpus: int
    replicas: int
    tensor: int
    expert: int
    data: int
    weights: int
    cache: int
    utilization: float
    sequences: int
    batched_tokens: int
    length: int
    eager: bool
    cache_bytes: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class Sync:
    """The weight sync: bytes of a bucket, and whether buckets go by NCCL (else through the host's shared memory)."""

    bucket: int
    nccl: bool = True


def sync_of(cfg: DictConfig) -> Sync:
    """The weight sync of a config."""
    bucket = int(select(cfg, ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes", 2048)) * 2**20
    return Sync(bucket, select(cfg, ROLLOUT + "checkpoint_engine.backend") != "shm")


def rollout_of(cfg: DictConfig) -> Rollout:
    """The rollout's layout.

    Raises:
        ConfigError: GPUs that the size of a server does not divide.
    """
    tensor, pipeline = (select(cfg, f"{ROLLOUT}{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    size = divisibility.engine_size(cfg)
    gpus = max(select(cfg, ROLLOUT + "nnodes", 1), 1) * select(cfg, ROLLOUT + "n_gpus_per_node", 1)
    if gpus % size:
        problem = f"a server of {size} GPUs does not divide {gpus} GPUs"
        key = ROLLOUT + "tensor_model_parallel_size"
        raise ConfigError(key, tensor, problem, "set a divisor of the rollout's GPUs")
    weights = dtype_bytes(select(cfg, ROLLOUT + "dtype", "bfloat16"))
    if "8" in str(select(cfg, ROLLOUT + "quantization", "")):
        weights = 1
    engine = select(cfg, ROLLOUT + "name")
    options = ROLLOUT + f"engine_kwargs.{engine}."
    return Rollout(
        engine=engine, gpus=gpus, replicas=gpus // size, tensor=tensor * pipeline,
        expert=select(cfg, ROLLOUT + "expert_parallel_size", 1),
        data=select(cfg, ROLLOUT + "data_parallel_size", 1), weights=weights,
        cache=dtype_bytes(select(cfg, options + "kv_cache_dtype", "auto"), weights if weights > 1 else 2),
        utilization=float(select(cfg, ROLLOUT + "gpu_memory_utilization", 0.5)),
        sequences=select(cfg, ROLLOUT + "max_num_seqs", 256),
        batched_tokens=select(cfg, ROLLOUT + "max_num_batched_tokens", 8192),
        length=select(cfg, ROLLOUT + "max_model_len", cfg.data.max_prompt_length + cfg.data.max_response_length),
        eager=bool(select(cfg, ROLLOUT + "enforce_eager", False)),
        cache_bytes=select(cfg, options + "kv_cache_memory_bytes"),
        shared=bool(select(cfg, "backend.shared_gpu", False)),
    )  # fmt: skip
