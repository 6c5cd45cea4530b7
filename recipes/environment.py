"""The environment variables of a run's training processes, and the folders that some of them name."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from recipes import trackers
from sat_verl.cpu import ENGINE_ENV, paths, placement


def environment(cfg: DictConfig, runtime_dir: Path) -> dict[str, str]:
    """Environment of the training processes.

    Args:
        cfg: the derived config.
        runtime_dir: the run's folder for sockets; folders are made in it, and one for weights in shared memory.
    """
    env = dict(os.environ)
    env |= {
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DEDUP_LOGS": "1",
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    env |= trackers.environment(cfg, env)
    if cfg.backend.name == "cpu":
        # Ray takes the devices named here for its logical ones.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env |= cpu_environment(cfg, runtime_dir)
    elif cfg.backend.shared_gpu:
        env |= shared_gpu_environment(env.get("CUDA_VISIBLE_DEVICES"), runtime_dir)
    return env


def shared_gpu_environment(visible: str | None, runtime_dir: Path) -> dict[str, str]:
    """One GPU for both pools of verl's: Ray counts it twice, and gives each pool one of its two entries.

    CUDA shows a process that sees both entries no device at all. Those are the driver and actors without a GPU; verl
    is told its platform, which it would look for there.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES`` as it is; its first entry is used, or GPU 0.
        runtime_dir: the run's folder for sockets.
    """
    card = (visible or "").split(",")[0].strip() or "0"
    weights = paths.shm_root() / runtime_dir.name
    weights.mkdir(mode=0o700)
    return {"CUDA_VISIBLE_DEVICES": f"{card},{card}", "VERL_PLATFORM": "nvidia", paths.SHM_DIR_ENV: str(weights)}


def cpu_environment(cfg: DictConfig, runtime_dir: Path) -> dict[str, str]:
    engine = cfg.actor_rollout_ref.actor.strategy
    cores = placement.usable_cores()
    if cfg.backend.cores is not None:
        cores = cores[: cfg.backend.cores]
    placed = placement.plan(cores, cfg.trainer_ranks, cfg.rollout_replicas)
    sockets, weights = runtime_dir / "s", paths.shm_root() / runtime_dir.name
    for folder in (sockets, weights):
        folder.mkdir(mode=0o700)
    return placed.environment() | {
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for cuda and npu; the class itself asks the platform for its device.
        "VERL_ENGINE_DEVICE": "cuda",
        ENGINE_ENV: engine,
        # vLLM's sampler and megatron-core compile small functions at their first call: 10 and 30 seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Of TransferQueue, for every put and get; with more than there are cores it writes a warning each time.
        "TQ_NUM_THREADS": "1",
        "TMPDIR": str(runtime_dir),
        paths.SOCKET_DIR_ENV: str(sockets),
        paths.SHM_DIR_ENV: str(weights),
    }
