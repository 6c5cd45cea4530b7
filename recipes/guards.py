"""Guard rails: what would fail late, or be silently wrong, is refused before Ray starts.

Values are checked by :mod:`recipes.values` before the config is derived. Each check here takes the derived config and
raises :class:`~recipes.errors.ConfigError`; :func:`check` runs them all, with those of
:mod:`recipes.ratio_guards`, :mod:`recipes.divisibility` and :mod:`recipes.file_guards`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipes import benchmark, divisibility, file_guards, megatron, ratio_guards, trackers
from recipes.derive import SPARE_POSITIONS
from recipes.errors import ConfigError
from recipes.models.published import describe
from recipes.upstream import upstream
from sat_verl.cpu.placement import usable_cores

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (0.27.1); with another, the engine dies at the first request."""

__all__ = ["check", "check_config", "upstream"]


def support(cfg: DictConfig) -> None:
    """What this version runs; verl can do more."""
    only: dict[str, tuple[object, ...]] = {
        "trainer.use_v1": (True,),
        "trainer.v1.trainer_mode": ("sat_async",),
        "actor_rollout_ref.rollout.name": ("vllm", "sglang"),
        "actor_rollout_ref.actor.strategy": ("fsdp2", "fsdp", "megatron"),
    }
    one_node: dict[str, tuple[object, ...]] = {"trainer.nnodes": (1,), "actor_rollout_ref.rollout.nnodes": (1,)}
    if cfg.backend.name == "cpu":
        only |= {**one_node, "trainer.device": ("cpu",), "actor_rollout_ref.rollout.name": ("vllm",)}
    elif cfg.backend.shared_gpu:
        only |= {**one_node, "trainer_ranks": (1,), "actor_rollout_ref.rollout.n_gpus_per_node": (1,)}
    for key, allowed in only.items():
        value = OmegaConf.select(cfg, key)
        if value not in allowed:
            names = " or ".join(map(str, allowed))
            raise ConfigError(
                key, value, f"backend={cfg.choices.backend} runs {names} only", f"leave it at {allowed[0]}"
            )
    if (cfg.algorithm.adv_estimator == "gae") != bool(cfg.critic.enable):
        what = "needs a critic" if cfg.algorithm.adv_estimator == "gae" else "would not use the critic"
        raise ConfigError("algorithm.adv_estimator", cfg.algorithm.adv_estimator, f"it {what}", "use algorithm=ppo")


def sizes(cfg: DictConfig) -> None:
    actor = cfg.actor_rollout_ref.actor
    window = cfg.trainer.v1.separate_async.parameter_sync_step
    needed = window * actor.ppo_mini_batch_size
    if cfg.data.train_batch_size != needed:
        raise ConfigError(
            "data.train_batch_size",
            cfg.data.train_batch_size,
            f"it must be parameter_sync_step * prompts_per_step = {window} * {actor.ppo_mini_batch_size} = {needed}",
            "leave it out: it is derived",
        )
    responses = actor.ppo_mini_batch_size * cfg.responses_per_prompt
    parts = megatron.data_parallel(cfg)
    if responses % parts:
        raise ConfigError(
            "trainer_ranks",
            cfg.trainer_ranks,
            f"prompts_per_step * responses_per_prompt = {responses} responses cannot be divided among the ranks",
            "choose a number of ranks that divides it",
        )
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and (responses // parts) % micro:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            micro,
            f"each rank has {responses // parts} responses, which it does not divide",
            "choose a divisor, or null for one micro-batch",
        )
    if cfg.responses_per_prompt < 2 and cfg.algorithm.adv_estimator == "grpo":
        raise ConfigError(
            "responses_per_prompt",
            cfg.responses_per_prompt,
            "the group-normalised advantage of one response is 0",
            "set 2 or more",
        )
    _lengths(cfg)
    if cfg.task.name != "parquet":
        file_guards.enough("task.train_size", cfg.task.train_size, cfg.task.train_size, cfg)


def _lengths(cfg: DictConfig) -> None:
    rollout, length = cfg.actor_rollout_ref.rollout, cfg.data.max_prompt_length + cfg.data.max_response_length
    needed = length + SPARE_POSITIONS.get(rollout.name, 0)
    if rollout.max_model_len < needed:
        raise ConfigError(
            "actor_rollout_ref.rollout.max_model_len",
            rollout.max_model_len,
            f"prompt and response may take {length} tokens, for which {rollout.name} needs {needed}",
            "leave it out: it is derived",
        )
    for ours, theirs in (("max_prompt_length", "prompt_length"), ("max_response_length", "response_length")):
        if rollout[theirs] != cfg.data[ours]:
            key = f"actor_rollout_ref.rollout.{theirs}"
            raise ConfigError(key, rollout[theirs], f"it follows from data.{ours}={cfg.data[ours]}", f"set data.{ours}")


def model(cfg: DictConfig) -> None:
    """What the model's own config rules out (of a model that nothing is known of yet: when it is loaded)."""
    found = describe(cfg)
    if found is None:
        return
    described = found.numbers
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    rollout = cfg.actor_rollout_ref.rollout
    spare = SPARE_POSITIONS.get(rollout.name, 0)
    positions = described.get("max_position_embeddings")
    if positions and length + spare > positions:
        more = f" and {rollout.name} needs {spare} more" if spare else ""
        raise ConfigError(
            "data.max_response_length",
            cfg.data.max_response_length,
            f"prompt and response may take {length} tokens{more}, the model has {positions} positions",
            f"keep data.max_prompt_length + data.max_response_length within {positions - spare}",
        )
    if positions and rollout.max_model_len > positions:
        key = "actor_rollout_ref.rollout.max_model_len"
        problem = f"the model has {positions} positions"
        raise ConfigError(key, rollout.max_model_len, problem, "leave it out: it is derived")
    heads, hidden = described.get("num_attention_heads"), described.get("hidden_size")
    head_dim = described.get("head_dim") or (hidden // heads if heads and hidden else None)
    if cfg.backend.name == "cpu" and head_dim and head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        name = cfg.model.path if cfg.model.name == "hf" else cfg.model.name
        raise ConfigError(
            "model", name, f"vLLM's CPU attention has no kernel for head_dim {head_dim}", f"choose one of {sizes}"
        )


def processes(cfg: DictConfig) -> None:
    """A CPU run cannot carry many processes: each engine takes a gibibyte and a core's worth of polling."""
    if cfg.backend.name != "cpu":
        return
    cores = cfg.backend.cores or len(usable_cores())
    wanted, most = cfg.trainer_ranks + cfg.rollout_replicas, max(4, 2 * cores)
    if wanted > most:
        raise ConfigError(
            "trainer_ranks",
            cfg.trainer_ranks,
            f"with rollout_replicas={cfg.rollout_replicas} they are {wanted} processes on {cores} cores",
            f"keep the two together within {most}",
        )


def device(cfg: DictConfig) -> None:
    """GPUs of this machine, if the run is to be on it (and not on a Ray cluster that is there already)."""
    if cfg.backend.name != "cpu":
        if cluster(cfg) is None:
            _gpus(cfg)
        return
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    if shm is not None and shm < 256 * 2**20:
        raise ConfigError(
            "backend", "cpu", f"/dev/shm has {shm >> 20} MiB free; the weight sync and Ray need 256 MiB or more",
            "enlarge it (docker run --shm-size=2g)",
        )  # fmt: skip


def cluster(cfg: DictConfig) -> str | None:
    """Address of the Ray cluster that the run joins; None: it starts one on this machine."""
    own = OmegaConf.select(cfg, "ray_kwargs.ray_init.address")
    address = own or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def _gpus(cfg: DictConfig) -> None:
    import torch

    if not torch.cuda.is_available():
        problem = "torch sees no CUDA device here, and RAY_ADDRESS names no cluster to run on"
        fix = "set backend=cpu, or dry_run=true to check the config alone"
        raise ConfigError("backend", cfg.choices.backend, problem, fix)
    rollout = cfg.actor_rollout_ref.rollout
    wanted = cfg.trainer_ranks * cfg.trainer.nnodes + rollout.n_gpus_per_node * rollout.nnodes
    wanted, there = (1 if cfg.backend.shared_gpu else wanted), torch.cuda.device_count()
    if wanted > there:
        problem = (
            f"with the rollout's {rollout.n_gpus_per_node * rollout.nnodes} the run needs {wanted} GPUs, {there} here"
        )
        fix = "lower trainer_ranks and rollout_replicas, or name a Ray cluster in RAY_ADDRESS"
        raise ConfigError("trainer_ranks", cfg.trainer_ranks, problem, fix)


def validation(cfg: DictConfig) -> None:
    """The benchmark is there and whole; and the own test file is not named beside it, where it would not be used."""
    if cfg.benchmark is None:
        return
    if cfg.task.name == "parquet" and cfg.task.test_file is not None:
        raise ConfigError(
            "task.test_file", cfg.task.test_file, f"the run validates on benchmark={cfg.benchmark}",
            f"leave one of them out (benchmark={cfg.task.test_file} validates on this file as a benchmark)",
        )  # fmt: skip
    benchmark.load(cfg)


CONFIG_CHECKS = (support, megatron.check, *ratio_guards.CHECKS, sizes, *divisibility.CHECKS, model)
"""What the config alone decides."""

CHECKS = (
    *CONFIG_CHECKS, megatron.installed, file_guards.files, file_guards.model_folder, validation, trackers.check,
    file_guards.folders, processes, device,
)  # fmt: skip
"""These, and what this machine has."""


def check(cfg: DictConfig) -> None:
    """Run every guard rail on a derived config."""
    for one in CHECKS:
        one(cfg)


def check_config(cfg: DictConfig) -> None:
    """Run the guard rails that need nothing of this machine on a derived config."""
    for one in CONFIG_CHECKS:
        one(cfg)
