"""Megatron as the training engine: how its ranks are split, and what cannot work."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes import schedule
from recipes.errors import ConfigError
from sat_verl.routes import router_of

_MEGATRON = "actor_rollout_ref.actor.megatron."
_SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_SPLITS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
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
_FIXED: dict[str, tuple[object, str]] = {
    _MEGATRON + "use_mbridge": (True, "verl's Megatron engine loads models through a bridge only"),
    _MEGATRON + "use_dist_checkpointing": (
        False,
        "weights would be read from Megatron's own checkpoint format, not from the model's folder, and a run's "
        "checkpoints and weights are Hugging Face's",
    ),
    _MEGATRON + "use_megatron_fsdp": (False, "the recipes' batch quantile, replay and checkpoints know Megatron's DDP"),
    _MEGATRON + "use_distributed_optimizer": (True, "verl's engine loads no other"),
    "actor_rollout_ref.actor.optim.optimizer": ("adam", "Megatron's distributed optimizer takes Adam alone"),
}
"""Settings with which verl's Megatron engine fails when it starts, or does what no run has tried."""
_DEFAULT_BETAS = [0.9, 0.999]
"""Of both verl and Megatron."""
_DISPATCHER = _MEGATRON + "override_transformer_config.moe_token_dispatcher_type"
_BACKENDS = {"cpu": "cpu_megatron", "cuda": "cuda_megatron"}


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
        split = sequence_split(cfg)
        if ranks % split:
            problem = f"Ulysses sequence parallelism over {split} does not divide {ranks} ranks"
            raise ConfigError("trainer_ranks", cfg.trainer_ranks, problem, f"set a multiple of {split}")
        return ranks // split
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


def sequence_split(cfg: DictConfig) -> int:
    """Number of ranks that share one sequence: Megatron's context parallelism, FSDP's Ulysses."""
    if chosen(cfg):
        return _size(cfg, "context_parallel_size")
    actor = "actor_rollout_ref.actor."
    given = [
        OmegaConf.select(cfg, actor + prefix + "ulysses_sequence_parallel_size") for prefix in ("", "fsdp_config.")
    ]
    return max([1, *(value for value in given if isinstance(value, int))])


def _size(cfg: DictConfig, name: str) -> int:
    value = OmegaConf.select(cfg, _MEGATRON + name)
    if value is None:  # as Megatron has it
        return _size(cfg, "tensor_model_parallel_size") if name == "expert_tensor_parallel_size" else 1
    if type(value) is not int or value < 1:
        raise ConfigError(_MEGATRON + name, value, "it must be a number of ranks", "set 1 or more")
    return value


def derive(cfg: DictConfig) -> None:
    """Give Megatron's Adam the betas of the optimizer's config, which verl (0.9.1) does not pass on.

    Raises:
        ConfigError: other betas in ``override_optimizer_config``.
    """
    optim = "actor_rollout_ref.actor.optim."
    betas = OmegaConf.select(cfg, optim + "betas")
    if not chosen(cfg) or list(betas) == _DEFAULT_BETAS:
        return
    for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        schedule.follow(cfg, f"{optim}override_optimizer_config.{name}", value, optim + "betas")


def consistent(cfg: DictConfig) -> None:
    """The engine's settings are there, and actor and reference have the same engine; before anything is derived.

    Raises:
        ConfigError: as said.
    """
    strategy, engine = cfg.actor_rollout_ref.actor.strategy, OmegaConf.select(cfg, "model_engine")
    if chosen(cfg) != (engine == "megatron"):
        megatron_backend = _BACKENDS.get(cfg.backend.name, "cuda_megatron")
        wanted = megatron_backend if chosen(cfg) else cfg.backend.name
        problem = f"backend={cfg.choices.backend} has the settings of another engine ({engine})"
        fix = f"leave it out, and set backend={wanted}"
        raise ConfigError("actor_rollout_ref.actor.strategy", strategy, problem, fix)
    others = "fsdp_config" if chosen(cfg) else "megatron"
    for side in ("actor", "ref"):
        if others in cfg.actor_rollout_ref[side]:
            recipe = cfg.choices.get("recipe")
            of = f" (recipe={recipe})" if recipe else ""
            problem = f"actor_rollout_ref.{side}.{others} is of another engine{of}"
            fix = "leave backend out, or choose another recipe" if recipe else f"leave {others} out"
            raise ConfigError("backend", cfg.choices.backend, problem, fix)
    reference = cfg.actor_rollout_ref.ref.strategy
    if reference != strategy:
        key = "actor_rollout_ref.ref.strategy"
        problem = f"the reference policy has the engine of the actor ({strategy}), whose settings it is given"
        raise ConfigError(key, reference, problem, "leave it out: it follows")
    for name in (*_SPLITS, *_EXPERT_SPLITS) if chosen(cfg) else ():
        # One process holds both, and Megatron's groups of ranks are the process's.
        key = f"actor_rollout_ref.ref.megatron.{name}"
        value, actors = OmegaConf.select(cfg, key), OmegaConf.select(cfg, _MEGATRON + name)
        if value != actors:
            raise ConfigError(key, value, f"the actor has {name}={actors}, and they share ranks", "leave it out")


def check(cfg: DictConfig) -> None:
    """Settings that would fail in the workers, or train another model than the one given.

    Raises:
        ConfigError: as said.
    """
    consistent(cfg)
    if not chosen(cfg):
        return
    if cfg.algorithm.adv_estimator == "gae":
        problem = "the critic of the presets trains with FSDP2"
        raise ConfigError("algorithm", cfg.choices.algorithm, problem, "set backend=cpu, or another algorithm")
    _fixed(cfg, _FIXED, "")
    if cfg.backend.name == "cpu":
        _fixed(cfg, _FIXED_ON_CPU, "on a CPU ")
        name = "expert_tensor_parallel_size"
        if (size := _size(cfg, name)) != (tensor := _size(cfg, "tensor_model_parallel_size")):
            problem = "on a CPU the matrices of experts are split as all others"
            raise ConfigError(_MEGATRON + name, size, problem, f"leave it out, or set it to {tensor}")
    _interleaved(cfg)
    _optimizer(cfg)
    dispatcher = OmegaConf.select(cfg, _DISPATCHER)
    if cfg.routing_replay.mode != "none" and dispatcher not in (None, "alltoall"):
        problem = "routing replay is made for the dispatcher that verl sets, alltoall: verl corrects its token counts"
        raise ConfigError(_DISPATCHER, dispatcher, problem, "leave it out, or set routing_replay=none")


def _fixed(cfg: DictConfig, settings: Mapping[str, tuple[object, str]], where: str) -> None:
    for name, (needed, problem) in settings.items():
        value = OmegaConf.select(cfg, name)
        if value != needed:
            raise ConfigError(name, value, f"{where}{problem}", f"set it to {str(needed).lower()}")


def _optimizer(cfg: DictConfig) -> None:
    """Megatron keeps Adam's state on the host only together with its precision-aware optimizer."""
    key = "actor_rollout_ref.actor.optim.override_optimizer_config"
    given = OmegaConf.select(cfg, key) or {}
    if given.get("optimizer_cpu_offload") and not given.get("use_precision_aware_optimizer"):
        key += ".use_precision_aware_optimizer"
        problem = "Megatron's optimizer_cpu_offload needs it"
        raise ConfigError(key, given.get("use_precision_aware_optimizer"), problem, "set it to true")


def installed(cfg: DictConfig) -> None:
    """The packages of Megatron's engine are there.

    Raises:
        ConfigError: as said.
    """
    missing = missing_packages(cfg)
    if not missing:
        return
    fix = 'pip install "sat-verl[megatron]"'
    if cfg.backend.name == "cpu":
        fix = "pip install --no-deps megatron-core==0.16.1 mbridge==0.15.1, or set backend=cpu"
    raise ConfigError("backend", cfg.choices.backend, f"{' and '.join(missing)} not installed", fix)


def missing_packages(cfg: DictConfig) -> list[str]:
    """Packages of Megatron's engine that are not installed here."""
    if not chosen(cfg):
        return []
    names = ["megatron.core"]
    names += ["mbridge"] if OmegaConf.select(cfg, _MEGATRON + "vanilla_mbridge") else ["megatron.bridge"]
    if cfg.backend.name != "cpu":
        names.append("transformer_engine")
    return [name for name in names if not package_installed(name)]


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
    """:func:`check_numbers` of the model's own config; its path is known, and it may come from the hub.

    Raises:
        ConfigError: as said.
    """
    if not chosen(cfg):
        return
    from transformers import PretrainedConfig

    described, _ = PretrainedConfig.get_config_dict(str(cfg.actor_rollout_ref.model.path))
    check_numbers(cfg, described)


def check_numbers(cfg: DictConfig, described: Mapping[str, Any]) -> None:
    """Models that mbridge would load as another one, and splits that do not fit.

    Args:
        cfg: the derived config.
        described: the model's own config.

    Raises:
        ConfigError: as said.
    """
    if not chosen(cfg):
        return
    router = router_of(described)
    experts = router.experts if router else None
    problem = None
    if OmegaConf.select(cfg, _MEGATRON + "vanilla_mbridge"):
        if experts and not described.get("norm_topk_prob", False):
            problem = "its gates are not normalised over the chosen experts (norm_topk_prob), and mbridge would do it"
        elif described.get("mlp_only_layers"):
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
        ("expert_tensor_parallel_size", experts and described.get("moe_intermediate_size"), "columns of an expert"),
        ("pipeline_model_parallel_size", layers, "layers"),
        ("virtual_pipeline_model_parallel_size", layers_of_a_stage, "layers of a stage"),
    ):
        if number and number % (size := _size(cfg, name)):
            problem = f"it does not divide the model's {number} {what}"
            raise ConfigError(_MEGATRON + name, size, problem, "set a divisor")
    if experts is None and (size := _size(cfg, "expert_model_parallel_size")) > 1:
        problem = "the model has no experts"
        raise ConfigError(_MEGATRON + "expert_model_parallel_size", size, problem, "leave it at 1")


def package_installed(name: str) -> bool:
    """Whether Python finds a package, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
