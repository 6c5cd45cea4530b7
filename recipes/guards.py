"""Guard rails: what would fail late, or be silently wrong, is refused before Ray starts.

Each check takes the derived config and raises :class:`~recipes.errors.ConfigError`; :func:`check` runs them all.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.models.limits import MAX_POSITIONS

CLIPPED_LOSSES = ("vanilla", "gspo", "sat_grpo", "sat_gspo")
"""Losses whose clip acts on the ratio to the old log-probs."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (0.27.1); with another, the engine dies at the first request."""

_POSITIVE_INTEGERS = (
    "steps",
    "prompts_per_step",
    "responses_per_prompt",
    "trainer_ranks",
    "rollout_replicas",
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.v1.separate_async.parameter_sync_step",
)


def numbers(cfg: DictConfig) -> None:
    for key in _POSITIVE_INTEGERS:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(key, value, "it must be a whole number of at least 1", f"set {key}=1 or more")
    if isinstance(cfg.seed, bool) or not isinstance(cfg.seed, int) or not 0 <= cfg.seed < 2**31:
        raise ConfigError("seed", cfg.seed, "it must be a whole number from 0 to 2147483647", "set seed=0")
    actor = cfg.actor_rollout_ref.actor
    for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        value = actor[key]
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"actor_rollout_ref.actor.{key}", value, "it must be a positive number", "set it above 0")
    if actor.clip_ratio_low >= 1:
        key = "actor_rollout_ref.actor.clip_ratio_low"
        raise ConfigError(
            key, actor.clip_ratio_low, "the lower end of the interval would not be positive", "set it below 1"
        )
    if actor.clip_ratio_c <= 1:
        raise ConfigError("dual_clip", cfg.dual_clip, "a dual clip must exceed 1", "set dual_clip=3, or null for none")
    if not actor.optim.lr > 0:
        raise ConfigError("actor_rollout_ref.actor.optim.lr", actor.optim.lr, "it must be positive", "set 1e-6 or so")


def denominator(cfg: DictConfig) -> None:
    """A clip does nothing when the ratio's denominator is a recompute by the very weights being updated."""
    loss_mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss_mode not in CLIPPED_LOSSES:
        return
    why = f"{loss_mode} clips the ratio to the rollout engine's log-probs, and they would"
    if not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        key = "actor_rollout_ref.rollout.calculate_log_probs"
        raise ConfigError(key, False, f"{why} not be recorded", f"set {key}=true")
    if not cfg.algorithm.rollout_correction.get("bypass_mode", False):
        key = "algorithm.rollout_correction.bypass_mode"
        raise ConfigError(
            key,
            False,
            f"{why} be replaced by a recompute with the trainer's own weights (ratio about 1)",
            f"set {key}=true",
        )


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
    if responses % cfg.trainer_ranks:
        raise ConfigError(
            "trainer_ranks",
            cfg.trainer_ranks,
            f"prompts_per_step * responses_per_prompt = {responses} responses cannot be divided among the ranks",
            "choose a number of ranks that divides it",
        )
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and (responses // cfg.trainer_ranks) % micro:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            micro,
            f"each rank has {responses // cfg.trainer_ranks} responses, which it does not divide",
            "choose a divisor, or null for one micro-batch",
        )
    if cfg.responses_per_prompt < 2 and cfg.algorithm.adv_estimator == "grpo":
        raise ConfigError(
            "responses_per_prompt",
            cfg.responses_per_prompt,
            "the group-normalised advantage of one response is 0",
            "set 2 or more",
        )
    if cfg.task.name == "parquet":
        return
    if cfg.task.train_size < cfg.data.train_batch_size:
        raise ConfigError(
            "task.train_size",
            cfg.task.train_size,
            f"one weight-sync window takes {cfg.data.train_batch_size} prompts",
            f"set task.train_size={cfg.data.train_batch_size} or more",
        )


def files(cfg: DictConfig) -> None:
    if cfg.task.name == "parquet":
        for key in ("train_file", "test_file"):
            if OmegaConf.is_missing(cfg.task, key):
                raise ConfigError(f"task.{key}", "", "a parquet task needs it", f"add task.{key}=FILE.parquet")
            if not Path(cfg.task[key]).is_file():
                raise ConfigError(
                    f"task.{key}", cfg.task[key], "there is no such file", "give the path of a parquet file"
                )
    if cfg.model.name == "hf":
        path = str(cfg.model.path)
        looks_local = path.startswith(("/", ".", "~")) or Path(path).exists()
        if looks_local and not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigError(
                "model", path, "the folder holds no config.json", "give a Hugging Face model folder or hub id"
            )


def model(cfg: DictConfig) -> None:
    """What the model's own config rules out (a local folder or a tiny model; a hub id is checked when it is loaded)."""
    folder = Path(str(cfg.model.path)).expanduser() if cfg.model.name == "hf" else None
    if folder is not None and not (folder / "config.json").is_file():
        return
    described = (
        json.loads((folder / "config.json").read_text()) if folder else {"max_position_embeddings": MAX_POSITIONS}
    )
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    positions = described.get("max_position_embeddings")
    if positions and length > positions:
        raise ConfigError(
            "data.max_response_length",
            cfg.data.max_response_length,
            f"prompt and response may take {length} tokens, the model has {positions} positions",
            f"keep data.max_prompt_length + data.max_response_length within {positions}",
        )
    heads = described.get("num_attention_heads")
    head_dim = described.get("head_dim") or (
        described["hidden_size"] // heads if heads and "hidden_size" in described else None
    )
    if cfg.backend.name == "cpu" and head_dim and head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(
            "model", folder, f"vLLM's CPU attention has no kernel for head_dim {head_dim}", f"choose one of {sizes}"
        )


def run_folder(cfg: DictConfig) -> None:
    run_dir = Path(cfg.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("run_dir", run_dir, "it is a file", "name a folder")
    if not cfg.resume and run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            "run_dir", run_dir, "the folder is not empty", "name a new one, or continue it with resume=true"
        )
    parent = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError("run_dir", run_dir, f"{parent} cannot be written", "name a folder that you may write")


def device(cfg: DictConfig) -> None:
    if cfg.backend.name != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("backend", cfg.backend.name, "torch sees no CUDA device here", "set backend=cpu")
        return
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    if shm is not None and shm < 256 * 2**20:
        raise ConfigError(
            "backend", "cpu", f"/dev/shm has {shm >> 20} MiB free; the weight sync and Ray need 256 MiB or more",
            "enlarge it (docker run --shm-size=2g)",
        )  # fmt: skip
    if cfg.backend.cores is not None and (cfg.backend.cores < 1 or cfg.backend.cores > (os.cpu_count() or 1)):
        raise ConfigError(
            "backend.cores", cfg.backend.cores, f"this machine has {os.cpu_count()} cores", "set it within that"
        )


def upstream(cfg: DictConfig) -> None:
    """verl's own validation: its dataclasses and `validate_config`, with its message."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # it warns that GRPO has no critic
            validate_config(cfg, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    except Exception as error:  # verl and Hydra raise many kinds; the message is what helps
        text = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError("verl config", "", text, "change the setting that verl names") from error


CHECKS = (numbers, denominator, sizes, files, model, run_folder, device)


def check(cfg: DictConfig) -> None:
    """Run every guard rail on a derived config."""
    for one in CHECKS:
        one(cfg)
