"""verl's and Megatron's own validation of a derived config: their registries, dataclasses and checks, their message."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import megatron, ratio_guards
from recipes.errors import ConfigError
from sat_verl.routes import router_of

_OVERRIDES = "actor_rollout_ref.actor.megatron.override_transformer_config"


def upstream(cfg: DictConfig) -> None:
    """verl's own validation: its registries, its dataclasses and `validate_config`, with its message.

    Raises:
        ConfigError: what verl says of the first thing that it refuses.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    loss = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    for key, value, known in (
        ("actor_rollout_ref.actor.policy_loss.loss_mode", loss, POLICY_LOSS_REGISTRY),
        ("algorithm.adv_estimator", cfg.algorithm.adv_estimator, ADV_ESTIMATOR_REGISTRY),
    ):
        if value not in known:
            raise ConfigError(
                key, value, "verl knows no such name", f"choose one of {', '.join(sorted(map(str, known)))}"
            )
    ratio_guards.correction_values(cfg)
    with _refusals("verl"):
        validate_config(cfg, use_reference_policy=need_reference_policy(cfg), use_critic=False)
        if need_critic(cfg):
            _critic(cfg)


@contextlib.contextmanager
def _refusals(who: str) -> Iterator[None]:
    """Anything raised inside, as one line of a :class:`ConfigError`; what is printed and warned of is dropped."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # verl warns that GRPO has no critic
            yield
    except ConfigError:
        raise
    except Exception as error:  # verl and Hydra raise many kinds; the message is what helps
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        problem, fix = lines[0].rstrip("."), "change the setting that the message names"
        raise ConfigError(f"{who} refuses the config", "", problem, fix) from error


def _critic(cfg: DictConfig) -> None:
    """verl's validation of a critic, which builds its config with the model; that is not there yet, so without."""
    from verl.utils.config import omega_conf_to_dataclass

    critic = cfg.critic.copy()
    with open_dict(critic):
        del critic.model
    critic = OmegaConf.create(OmegaConf.to_container(critic, resolve=True))
    ranks = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    omega_conf_to_dataclass(critic).validate(ranks, cfg.data.train_batch_size)


def dataclasses_of(cfg: DictConfig) -> dict[str, Any]:
    """The dataclasses that verl's workers and servers make of the config, by name.

    Actor (with its engine, optimizer and checkpoint), reference policy (as the worker completes it, if there is one),
    rollout (with its checkpoint engine and the agent loops). Not the model: its dataclass loads the model's files.

    Raises:
        ConfigError: what one of them says.
    """
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass

    with _refusals("verl"):
        parts = cfg.actor_rollout_ref
        found = {"actor": omega_conf_to_dataclass(parts.actor), "rollout": omega_conf_to_dataclass(parts.rollout)}
        omega_conf_to_dataclass(parts.rollout.checkpoint_engine)
        if need_reference_policy(cfg):
            found["ref"] = omega_conf_to_dataclass(_reference(cfg))
    return found


def _reference(cfg: DictConfig) -> DictConfig:
    """The reference policy's config as verl's worker completes it before it builds the policy."""
    whole = OmegaConf.create({"actor_rollout_ref": OmegaConf.to_container(cfg.actor_rollout_ref, resolve=True)})
    ref = whole.actor_rollout_ref.ref
    with open_dict(ref):
        ref.ppo_mini_batch_size = whole.actor_rollout_ref.actor.ppo_mini_batch_size
        for name, theirs in {
            "log_prob_micro_batch_size": "ppo_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
        }.items():
            ref[theirs] = ref.pop(name, None)
    return ref


def megatron_arguments(cfg: DictConfig, numbers: Mapping[str, Any]) -> tuple[Any, Any]:
    """Megatron's own configs of the trainer's model and optimizer, as verl's engine makes them.

    Args:
        cfg: the derived config, of a Megatron trainer; megatron-core is installed.
        numbers: the model's own config.

    Returns:
        Megatron's ``TransformerConfig`` and ``OptimizerConfig``. Of the model, what the recipe decides (splits,
        recomputation, kernels, types) with the model's sizes: the rest is the bridge's, which reads the model's files.

    Raises:
        ConfigError: a setting that Megatron does not have, or what it says.
    """
    import torch

    with _refusals("Megatron"):  # and its warnings of what is not installed
        from megatron.core.transformer.transformer_config import TransformerConfig
        from verl.utils.megatron.optimizer import init_megatron_optim_config
        from verl.utils.megatron_utils import mapping_string_to_attn_backend

    actor = dataclasses_of(cfg)["actor"]
    engine = actor.megatron
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name, value in engine.override_transformer_config.items():
        if name not in known:
            problem = "Megatron's TransformerConfig has no such setting"
            raise ConfigError(f"{_OVERRIDES}.{name}", value, problem, "leave it out")
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
        if numbers.get(name) is None:
            problem = f"its config.json has no {name}, which Megatron needs"
            raise ConfigError("model", "", problem, "use an FSDP2 backend")
    heads = numbers["num_attention_heads"]
    sizes: dict[str, Any] = {
        "num_layers": numbers["num_hidden_layers"],
        "hidden_size": numbers["hidden_size"],
        "ffn_hidden_size": numbers["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": numbers.get("num_key_value_heads") or heads,
        "kv_channels": numbers.get("head_dim") or numbers["hidden_size"] // heads,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        # verl's, of dense models, too: with variable sequence lengths Megatron refuses its own default.
        "moe_token_dispatcher_type": "alltoall",
    }
    router = router_of(numbers)
    if router is not None:
        sizes |= {
            "num_moe_experts": router.experts,
            "moe_router_topk": router.top_k,
            "moe_ffn_hidden_size": numbers.get("moe_intermediate_size") or numbers["intermediate_size"],
            "moe_router_load_balancing_type": "none",
        }
    names = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
        "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    )  # fmt: skip
    splits = {name: getattr(engine, name) for name in names}
    dtype = getattr(torch, engine.dtype)
    types = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    if (splits["pipeline_model_parallel_size"] or 1) > 1:
        types["pipeline_dtype"] = dtype
    with _refusals("Megatron"), _transformer_engine():
        given = mapping_string_to_attn_backend({**engine.override_transformer_config})
        model = TransformerConfig(**{**sizes, **splits, **types, "variable_seq_lengths": True, **given})
        optimizer = init_megatron_optim_config(
            actor.optim, engine.use_distributed_optimizer, fp16=bool(types["fp16"]), bf16=bool(types["bf16"])
        )
    return model, optimizer


@contextlib.contextmanager
def _transformer_engine() -> Iterator[None]:
    """Where TransformerEngine is not installed, Megatron compares its version with None; it is then taken for new."""
    from megatron.core import utils
    from packaging.version import Version

    if utils.get_te_version() is not None:
        yield
        return
    utils._te_version = Version("2.10.0")
    try:
        yield
    finally:
        utils._te_version = None


def megatron_here() -> bool:
    """Whether megatron-core is installed."""
    return megatron.package_installed("megatron.core")
