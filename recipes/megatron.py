"""Megatron as the training engine: how its ranks are split, and what cannot work."""

from __future__ import annotations

import importlib.util

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from sat_verl.routes import router_of

_MEGATRON = "actor_rollout_ref.actor.megatron."
_SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_FIXED_ON_CPU: dict[str, tuple[object, str]] = {
    _MEGATRON + "vanilla_mbridge": (True, "Megatron-Bridge needs TransformerEngine"),
    # The worker overwrites the engine's setting by the model's.
    "actor_rollout_ref.model.use_remove_padding": (True, "padded batches are not bridged"),
    _MEGATRON + "use_remove_padding": (True, "padded batches are not bridged"),
    "actor_rollout_ref.model.use_fused_kernels": (False, "the kernels are Triton's"),
    _MEGATRON + "context_parallel_size": (1, "a split of sequences over ranks is not bridged"),
    _MEGATRON + "dynamic_context_parallel": (False, "a split of sequences over ranks is not bridged"),
    _MEGATRON + "use_distributed_optimizer": (True, "verl's engine loads no other"),
    _MEGATRON + "override_transformer_config.persist_layer_norm": (False, "the kernel is Apex's"),
    _MEGATRON + "override_transformer_config.moe_grouped_gemm": (False, "the kernel is TransformerEngine's"),
}
"""Settings that the bridge in :mod:`sat_verl.cpu.megatron` is made for, and why."""


def chosen(cfg: DictConfig) -> bool:
    """Whether the trainer's engine is Megatron."""
    return cfg.actor_rollout_ref.actor.strategy == "megatron"


def data_parallel(cfg: DictConfig) -> int:
    """Number of parts that the trainer's ranks divide a batch into.

    Raises:
        ConfigError: ranks that cannot be split as the config says.
    """
    ranks = cfg.trainer_ranks * cfg.trainer.nnodes
    if not chosen(cfg):
        return ranks
    model_parallel = 1
    for name in _SPLITS:
        model_parallel *= _size(cfg, name)
    if ranks % model_parallel:
        problem = f"tensor x pipeline x context parallel = {model_parallel} does not divide {ranks} ranks"
        raise ConfigError("trainer_ranks", cfg.trainer_ranks, problem, f"set a multiple of {model_parallel}")
    experts, tensor = _size(cfg, "expert_model_parallel_size"), _size(cfg, "expert_tensor_parallel_size")
    if (ranks // _size(cfg, "pipeline_model_parallel_size")) % (experts * tensor):
        problem = f"expert x expert-tensor parallel = {experts * tensor} does not divide the ranks of a pipeline stage"
        raise ConfigError(_MEGATRON + "expert_model_parallel_size", experts, problem, "set a divisor")
    return ranks // model_parallel


def _size(cfg: DictConfig, name: str) -> int:
    value = OmegaConf.select(cfg, _MEGATRON + name)
    if value is None:  # as Megatron has it
        return _size(cfg, "tensor_model_parallel_size") if name == "expert_tensor_parallel_size" else 1
    if type(value) is not int or value < 1:
        raise ConfigError(_MEGATRON + name, value, "it must be a number of ranks", "set 1 or more")
    return value


def check(cfg: DictConfig) -> None:
    """Settings that would fail in the workers, or train another model than the one given.

    Raises:
        ConfigError: as said.
    """
    engine = OmegaConf.select(cfg, "model_engine")
    if chosen(cfg) != (engine == "megatron"):
        problem = f"the backend's settings are those of another engine ({engine})"
        fix = "leave it out, and set backend=cpu_megatron or backend=cpu"
        raise ConfigError("actor_rollout_ref.actor.strategy", cfg.actor_rollout_ref.actor.strategy, problem, fix)
    if not chosen(cfg):
        return
    if cfg.algorithm.adv_estimator == "gae":
        problem = "the critic of the presets trains with FSDP2"
        raise ConfigError("algorithm", cfg.choices.algorithm, problem, "set backend=cpu, or another algorithm")
    missing = [name for name in ("megatron.core", "mbridge") if not _installed(name)]
    if missing:
        fix = "pip install --no-deps megatron-core==0.16.1 mbridge==0.15.1, or set backend=cpu"
        raise ConfigError("backend", cfg.choices.backend, f"{' and '.join(missing)} not installed", fix)
    if cfg.backend.name == "cpu":
        for name, (needed, problem) in _FIXED_ON_CPU.items():
            value = OmegaConf.select(cfg, name)
            if value != needed:
                raise ConfigError(name, value, f"on a CPU {problem}", f"set it to {str(needed).lower()}")
        name = "expert_tensor_parallel_size"
        if (size := _size(cfg, name)) != (tensor := _size(cfg, "tensor_model_parallel_size")):
            problem = "on a CPU the matrices of experts are split as all others"
            raise ConfigError(_MEGATRON + name, size, problem, f"leave it out, or set it to {tensor}")
    _interleaved(cfg)


def _interleaved(cfg: DictConfig) -> None:
    """Megatron's interleaved pipeline asks for stages, and verl for micro-batches that they divide."""
    name = "virtual_pipeline_model_parallel_size"
    if OmegaConf.select(cfg, _MEGATRON + name) is None:
        return
    parts, stages = _size(cfg, name), _size(cfg, "pipeline_model_parallel_size")
    if stages < 2:
        raise ConfigError(_MEGATRON + name, parts, "there is no pipeline to divide", "leave it out")
    actor = cfg.actor_rollout_ref.actor
    share = actor.ppo_mini_batch_size * cfg.responses_per_prompt // data_parallel(cfg)
    if parts > 1 and not actor.use_dynamic_bsz and share // actor.ppo_micro_batch_size_per_gpu % stages:
        problem = f"with {name}={parts} the {stages} stages must divide the number of micro-batches"
        fix = f"set {max(1, share // stages)}, or leave {name} out"
        raise ConfigError("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", share, problem, fix)


def check_model(cfg: DictConfig) -> None:
    """Models that mbridge would load as another one, and splits that do not fit; the model's path is known.

    Raises:
        ConfigError: as said.
    """
    if not chosen(cfg) or not OmegaConf.select(cfg, _MEGATRON + "vanilla_mbridge"):
        return
    from transformers import PretrainedConfig

    described, _ = PretrainedConfig.get_config_dict(str(cfg.actor_rollout_ref.model.path))
    router = router_of(described)
    experts = router.experts if router else None
    problem = None
    if experts and not described.get("norm_topk_prob", False):
        problem = "its gates are not normalised over the chosen experts (norm_topk_prob), and mbridge would do it"
    elif experts and described.get("mlp_only_layers"):
        problem = "it has dense layers among those with experts (mlp_only_layers), which mbridge does not read"
    if problem:
        name = cfg.model.path if cfg.model.name == "hf" else cfg.model.name
        raise ConfigError("model", name, f"with Megatron: {problem}", "use an FSDP2 backend for it")
    layers = described.get("num_hidden_layers")
    layers_of_a_stage = layers and layers // _size(cfg, "pipeline_model_parallel_size")
    heads = described.get("num_key_value_heads") or described.get("num_attention_heads")
    for name, number, what in (
        ("expert_model_parallel_size", experts, "experts"),
        ("tensor_model_parallel_size", heads, "key-value heads"),
        ("pipeline_model_parallel_size", layers, "layers"),
        ("virtual_pipeline_model_parallel_size", layers_of_a_stage, "layers of a stage"),
    ):
        if number and number % (size := _size(cfg, name)):
            problem = f"it does not divide the model's {number} {what}"
            raise ConfigError(_MEGATRON + name, size, problem, "set a divisor")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
