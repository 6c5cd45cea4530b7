"""Sizes that have to divide each other: the batch among ranks, engines among GPUs, the model among both.

What verl, Megatron and the rollout engines would refuse after minutes of starting, from the config and from the numbers
of the model's own config (:mod:`recipes.models.published`). Each check takes the derived config and raises
:class:`~recipes.errors.ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes import megatron
from recipes.errors import ConfigError
from recipes.models.published import describe
from sat_verl.routes import router_of

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_REF = "actor_rollout_ref.ref."


def _positive(cfg: DictConfig, key: str) -> int:
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(key, value, "it must be a whole number of at least 1", f"set {key}=1")
    return value


def engine_size(cfg: DictConfig) -> int:
    """GPUs of one rollout engine.

    Raises:
        ConfigError: a size that is no whole number of at least 1.
    """
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    size = 1
    for name in names:
        size *= _positive(cfg, _ROLLOUT + name)
    return size


def rollout_gpus(cfg: DictConfig) -> int:
    """GPUs of one rollout node that ``rollout_replicas`` engines take.

    Raises:
        ConfigError: engines that the nodes do not divide.
    """
    total, nodes = cfg.rollout_replicas * engine_size(cfg), _positive(cfg, _ROLLOUT + "nnodes")
    if total % nodes:
        problem = f"with {engine_size(cfg)} GPUs each they have {total}, which {nodes} nodes cannot share alike"
        raise ConfigError("rollout_replicas", cfg.rollout_replicas, problem, f"set a multiple of {nodes}")
    return total // nodes


def engines(cfg: DictConfig) -> None:
    """Rollout engines lie within a node, or on whole nodes."""
    if cfg.backend.name == "cpu":
        return
    gpus, size = _positive(cfg, _ROLLOUT + "n_gpus_per_node"), engine_size(cfg)
    if max(gpus, size) % min(gpus, size):
        problem = f"an engine has {size} GPUs and a rollout node {gpus}: one must divide the other"
        raise ConfigError(_ROLLOUT + "tensor_model_parallel_size", size, problem, f"set a divisor of {gpus}")
    experts = _positive(cfg, _ROLLOUT + "expert_parallel_size")
    if experts not in (1, size):
        problem = f"verl spreads the experts over the {size} GPUs of an engine, or over none"
        raise ConfigError(_ROLLOUT + "expert_parallel_size", experts, problem, f"set {size} or 1")


def micro_batches(cfg: DictConfig) -> None:
    """Micro-batches of the forward passes without gradient; those of the update are checked with the batch."""
    rollout, actor, ref = (cfg.actor_rollout_ref[name] for name in ("rollout", "actor", "ref"))
    dynamic = bool(actor.use_dynamic_bsz)
    uses_ref = bool(actor.use_kl_loss or cfg.algorithm.use_kl_in_reward)
    sides = {_ROLLOUT: (rollout, not cfg.algorithm.rollout_correction.bypass_mode), _REF: (ref, uses_ref)}
    for prefix, (side, used) in sides.items():
        # verl's actor worker wants the rollout's alike in any case.
        asked = used or prefix == _ROLLOUT
        if asked and bool(side.log_prob_use_dynamic_bsz) != dynamic:
            key = prefix + "log_prob_use_dynamic_bsz"
            problem = f"{_ACTOR}use_dynamic_bsz={str(dynamic).lower()}, and verl wants both alike"
            raise ConfigError(key, side.log_prob_use_dynamic_bsz, problem, "leave it out: it follows")
        if dynamic or not used:
            continue
        key, micro = prefix + "log_prob_micro_batch_size_per_gpu", side.log_prob_micro_batch_size_per_gpu
        share = actor.ppo_mini_batch_size * cfg.responses_per_prompt // megatron.data_parallel(cfg)
        if micro is not None and share % micro:
            problem = f"each rank has {share} responses, which it does not divide"
            raise ConfigError(key, micro, problem, "choose a divisor")
    if dynamic:
        _token_budgets(cfg, uses_ref)


def _token_budgets(cfg: DictConfig, uses_ref: bool) -> None:
    """With dynamic batching the longest sequence must fit in one micro-batch."""
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    split = megatron.sequence_split(cfg)
    keys = [_ACTOR + "ppo_max_token_len_per_gpu", _ROLLOUT + "log_prob_max_token_len_per_gpu"]
    for key in [*keys, *([_REF + "log_prob_max_token_len_per_gpu"] if uses_ref else [])]:
        tokens = _positive(cfg, key)
        if tokens * split < length:
            per_gpu = f" on each of the {split} GPUs of a sequence" if split > 1 else ""
            problem = f"prompt and response may take {length} tokens, which do not fit{per_gpu}"
            raise ConfigError(key, tokens, problem, f"set {-(-length // split)} or more")


def model(cfg: DictConfig) -> None:
    """The splits of the trainer's and of the rollout's model, where its numbers are known."""
    found = describe(cfg)
    if found is None:
        return
    megatron.check_numbers(cfg, found.numbers)
    _ulysses(cfg, found.numbers)
    if cfg.backend.name != "cpu":
        _rollout(cfg, found.numbers)


def _divides(key: str, size: int, number: Any, what: str) -> None:
    if number and number % size:
        raise ConfigError(key, size, f"it does not divide the model's {number} {what}", "set a divisor")


def _ulysses(cfg: DictConfig, numbers: Mapping[str, Any]) -> None:
    if megatron.chosen(cfg) or (split := megatron.sequence_split(cfg)) == 1:
        return
    _divides(_ACTOR + "ulysses_sequence_parallel_size", split, numbers.get("num_attention_heads"), "attention heads")


def _rollout(cfg: DictConfig, numbers: Mapping[str, Any]) -> None:
    key = _ROLLOUT + "tensor_model_parallel_size"
    tensor = _positive(cfg, key)
    _divides(key, tensor, numbers.get("num_attention_heads"), "attention heads")
    groups = numbers.get("num_key_value_heads")
    if groups and max(groups, tensor) % min(groups, tensor):
        problem = f"the model has {groups} key-value heads: one must divide the other"
        raise ConfigError(key, tensor, problem, "set a divisor")
    router, experts = router_of(numbers), _positive(cfg, _ROLLOUT + "expert_parallel_size")
    if router and experts > 1:
        _divides(_ROLLOUT + "expert_parallel_size", experts, router.experts, "experts")
    elif router:
        _divides(key, tensor, numbers.get("moe_intermediate_size"), "columns of an expert")
    if router is None or numbers.get("mlp_only_layers"):
        _divides(key, tensor, numbers.get("intermediate_size"), "columns of the feed-forward layer")
    if router is None and experts > 1:
        problem = "the model has no experts"
        raise ConfigError(_ROLLOUT + "expert_parallel_size", experts, problem, "leave it at 1")


CHECKS = (engines, micro_batches, model)
