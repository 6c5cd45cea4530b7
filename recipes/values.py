"""Types and ranges of the settings, checked before anything is computed from them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipes import one_source
from recipes.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_REF = "actor_rollout_ref.ref."
_AT_LEAST = {
    "steps": 1,
    "prompts_per_step": 1,
    "responses_per_prompt": 1,
    "trainer_ranks": 1,
    "rollout_replicas": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "benchmark_samples": 1,
    "trainer.nnodes": 1,
    "trainer.v1.sampler.sampler_kwargs.failure_limit": 1,
    _ROLLOUT + "nnodes": 1,
    _ROLLOUT + "max_num_seqs": 1,
    _ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes": 1,
    _ACTOR + "ulysses_sequence_parallel_size": 1,
    _ACTOR + "fsdp_config.ulysses_sequence_parallel_size": 1,
    "seed": 0,
    "task.seed": 0,
    "model.seed": 0,
    "task.train_size": 1,
    "task.test_size": 1,
}
_AT_LEAST_OR_NULL = {
    "validate_every": 1,
    "backend.cores": 1,
    "data.train_batch_size": 1,
    _ACTOR + "ppo_micro_batch_size_per_gpu": 1,
    _ACTOR + "megatron.override_transformer_config.recompute_num_layers": 1,
    _REF + "log_prob_micro_batch_size_per_gpu": 1,
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": 1,
    _ROLLOUT + "max_model_len": 1,
    _ROLLOUT + "max_num_batched_tokens": 1,
}
_SHARES = {
    # whether 0 is one as well
    _ROLLOUT + "gpu_memory_utilization": False,
    _ACTOR + "optim.override_optimizer_config.optimizer_offload_fraction": True,
}
_DTYPES = (None, 16, "16", "fp16", "float16", 32, "32", "fp32", "float32", "bf16", "bfloat16")
"""verl's names of the number types of FSDP's weights."""
_TRUNCATIONS = ("error", "left", "right", "middle")
"""verl's, of prompts that are too long."""
_KL_BASES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_KL = (*_KL_BASES, *(f"{name}+" for name in _KL_BASES))
"""verl's estimators of the KL loss; with +, with the gradient of k2."""
_SWITCHES = (
    "algorithm.rollout_correction.bypass_mode",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.actor.use_dynamic_bsz",
)
_POSITIVE = (
    _ACTOR + "optim.lr",
    _ACTOR + "optim.clip_grad",
    "sat_verl.wait_limit_s",
    "trainer.v1.sampler.sampler_kwargs.poll_interval_s",
    "trainer.v1.sampler.sampler_kwargs.stall_timeout_s",
)
_MAPPINGS = (
    "algorithm",
    "actor_rollout_ref.actor.policy_loss",
    "backend",
    "benchmark_data",
    "checkpoint",
    "data",
    "lag",
    "model",
    "sat_verl",
    "task",
    "trainer.v1.sampler.sampler_kwargs",
)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a setting is a finite number (true and false are none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(cfg: DictConfig, key: str, good: Callable[[Any], bool], problem: str, fix: str) -> None:
    value = OmegaConf.select(cfg, key, throw_on_missing=False)
    if not good(value):
        raise ConfigError(key, "null" if value is None else value, problem, fix)


def _given(cfg: DictConfig, key: str) -> bool:
    """Whether the config has the setting, with whatever value."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and name in node


def groups(cfg: DictConfig) -> None:
    """Whole groups of settings must be there, and paths must be text."""
    for key in _MAPPINGS:
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, DictConfig):
            raise ConfigError(key, value, "it is a group of settings", f"leave it, and set {key}.NAME=VALUE")
    for key in ("run_dir", "cache_dir"):
        value = OmegaConf.select(cfg, key)
        if not isinstance(value, str) and not (key == "run_dir" and value is None):
            raise ConfigError(key, value, "it must be the path of a folder", f"write {key}=./{value}")


def benchmark(cfg: DictConfig) -> None:
    good = "it must be the name of a benchmark or a file, or null"
    _require(cfg, "benchmark", lambda v: v is None or (isinstance(v, str) and v != ""), good, "set benchmark=aime24")


def integers(cfg: DictConfig) -> None:
    for key, low in {**_AT_LEAST, **_AT_LEAST_OR_NULL}.items():
        if not _given(cfg, key):
            continue  # a parquet task has no size, a model from the hub no seed
        optional = " or null" if key in _AT_LEAST_OR_NULL else ""
        problem = f"it must be a whole number of at least {low}{optional}"
        ok = (
            (lambda v, low=low: v is None or (_whole(v) and v >= low))
            if optional
            else (lambda v, low=low: _whole(v) and v >= low)
        )
        _require(cfg, key, ok, problem, f"set {key}={low} or more")
    cores = os.cpu_count() or 1
    if cfg.backend.get("cores") is not None and cfg.backend.cores > cores:
        raise ConfigError(
            "backend.cores", cfg.backend.cores, f"this machine has {cores} cores", f"set it from 1 to {cores}"
        )


def shares(cfg: DictConfig) -> None:
    for key, zero in _SHARES.items():
        if not _given(cfg, key) or (OmegaConf.select(cfg, key) is None and key != _ROLLOUT + "gpu_memory_utilization"):
            continue
        low = "from 0" if zero else "above 0"
        good = (lambda v: is_number(v) and 0 <= v <= 1) if zero else (lambda v: is_number(v) and 0 < v <= 1)
        _require(cfg, key, good, f"it must be a share {low} to 1", f"set {key}=0.8, say")


def fsdp(cfg: DictConfig) -> None:
    """FSDP's groups of ranks, and the types of its weights."""
    ranks = cfg.trainer_ranks * cfg.trainer.nnodes
    for side in (_ACTOR, _REF):
        key = side + "fsdp_config."
        if _given(cfg, key + "fsdp_size"):
            # verl takes a group that is larger than all ranks for all of them.
            problem = f"it must be -1 (all ranks), or a divisor of the {ranks} ranks"
            _require(
                cfg, key + "fsdp_size", lambda v: _whole(v) and (v == -1 or v >= ranks or (v >= 1 and ranks % v == 0)),
                problem, "set -1",
            )  # fmt: skip
        if _given(cfg, key + "model_dtype"):
            names = "fp32, bf16 or fp16"
            _require(cfg, key + "model_dtype", lambda v: v in _DTYPES, f"it must be {names}", f"set {names}")


def betas(cfg: DictConfig) -> None:
    """Of Adam."""
    value = OmegaConf.select(cfg, _ACTOR + "optim.betas")
    if not (
        isinstance(value, ListConfig) and len(value) == 2 and all(is_number(one) and 0 <= one < 1 for one in value)
    ):
        problem = "it must be two numbers from 0 to below 1"
        raise ConfigError(
            _ACTOR + "optim.betas", "null" if value is None else value, problem, "set it to [0.9,0.999], say"
        )


def batched_tokens(cfg: DictConfig) -> None:
    """vLLM wants room for a token of every sequence in a step."""
    rollout = cfg.actor_rollout_ref.rollout
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    # Without chunked prefill verl raises it to a whole sequence.
    if rollout.name != "vllm" or not rollout.enable_chunked_prefill or tokens is None or tokens >= sequences:
        return
    problem = f"vLLM runs up to max_num_seqs={sequences} sequences, each of which takes a token of a step"
    key = _ROLLOUT + "max_num_batched_tokens"
    raise ConfigError(key, tokens, problem, f"set {sequences} or more, or lower max_num_seqs")


def switch(cfg: DictConfig, key: str) -> bool:
    """Value of a setting that is true or false.

    Raises:
        ConfigError: it is neither.
    """
    _require(cfg, key, lambda value: isinstance(value, bool), "it must be true or false", f"set {key}=true")
    return OmegaConf.select(cfg, key)


def names(cfg: DictConfig) -> None:
    """Settings of verl that are one of a few words, which it looks at in the middle of a step."""
    kinds: dict[str, tuple[str, ...]] = {"data.truncation": _TRUNCATIONS}
    if cfg.actor_rollout_ref.actor.use_kl_loss is True:
        kinds[_ACTOR + "kl_loss_type"] = _KL
    for key, known in kinds.items():
        _require(cfg, key, known.__contains__, "verl knows no such name", f"choose one of {', '.join(known)}")


def switches(cfg: DictConfig) -> None:
    for key in _SWITCHES:
        switch(cfg, key)


def radii(cfg: DictConfig) -> None:
    for name in ("clip_ratio_low", "clip_ratio_high"):
        _require(
            cfg, _ACTOR + name, lambda v: is_number(v) and v > 0, "it must be a positive number", "set it to 0.2, say"
        )
    low = cfg.actor_rollout_ref.actor.clip_ratio_low
    # CISPO clips a weight, which it may leave without a lower bound.
    if low >= 1 and OmegaConf.select(cfg, _ACTOR + "policy_loss.loss_mode") != "cispo":
        raise ConfigError(
            _ACTOR + "clip_ratio_low", low, "the lower end of the interval would not be positive", "set it below 1"
        )
    if cfg.actor_rollout_ref.actor.clip_ratio != 0.2:
        value = cfg.actor_rollout_ref.actor.clip_ratio
        raise ConfigError(
            _ACTOR + "clip_ratio", value, "clip_ratio_low and clip_ratio_high win over it", "set those two instead"
        )


def positive(cfg: DictConfig) -> None:
    unused = OmegaConf.select(cfg, _ACTOR + "grad_clip")
    if unused not in (None, 1.0):
        fix = f"set {_ACTOR}optim.clip_grad instead"
        raise ConfigError(_ACTOR + "grad_clip", unused, "verl's engines do not read it", fix)
    for key in _POSITIVE:
        _require(cfg, key, lambda v: is_number(v) and v > 0, "it must be a positive number", f"set {key}=1, say")
    good = ("stop", "skip")
    problem = f"it must be {' or '.join(good)}"
    _require(cfg, "sat_verl.on_nonfinite", lambda v: v in good, problem, "set sat_verl.on_nonfinite=stop")


def check(cfg: DictConfig) -> None:
    """Raise :class:`ConfigError` for the first setting that is out of range."""
    for one in (
        groups, benchmark, integers, shares, fsdp, betas, batched_tokens, names, switches, radii, positive,
        one_source.check,
    ):  # fmt: skip
        one(cfg)
