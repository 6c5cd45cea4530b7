"""Every setting has one source: what follows from another, or is said under two names, may not be contradicted.

What verl's config has and a run of the recipes would overwrite or never read is refused, too: a data file or a reward
that is named and not used is the silent kind of wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes import resume
from recipes.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout."
_MODEL = "actor_rollout_ref.model.path"
_OWN = {
    # verl's setting: ours, from which it is computed
    _ROLLOUT + "n": "responses_per_prompt",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "prompts_per_step",
    "trainer.n_gpus_per_node": "trainer_ranks",
    "sat_verl.seed": "seed",
    "sat_verl.keep_checkpoints": "checkpoint.keep",
    "sat_verl.lag.schedule": "lag.schedule",
    "sat_verl.lag.steps": "lag.steps",
}
_OWN_CPU = {_ROLLOUT + "n_gpus_per_node": "rollout_replicas"}
_DATA = {
    # verl's setting, which the run fills in: ours
    "data.train_files": "task=TRAIN.parquet",
    "data.val_files": "task=TRAIN.parquet task.test_file=TEST.parquet, or benchmark=NAME,",
}
_LEGACY = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""Groups that older versions of verl read, and that its V1 trainer does not; all null."""
_BOTH = {name: name for name in ("dtype", "quantization", "load_format")}
_ENGINE = {
    # verl lets the engine's own argument win over its setting, from which plan, checks and records are made
    "vllm": {
        **{name: name for name in (
            "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
            "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "data_parallel_size", "seed",
        )},
        **_BOTH,
        "tensor_parallel_size": "tensor_model_parallel_size",
        "pipeline_parallel_size": "pipeline_model_parallel_size",
    },
    "sglang": {
        **_BOTH,
        "mem_fraction_static": "gpu_memory_utilization",
        "max_running_requests": "max_num_seqs",
        "disable_cuda_graph": "enforce_eager",
        "tp_size": "tensor_model_parallel_size",
        "dp_size": "data_parallel_size",
        "ep_size": "expert_parallel_size",
    },
}  # fmt: skip


def check(cfg: DictConfig) -> None:
    """Check a composed config, before anything is derived.

    Raises:
        ConfigError: a setting that contradicts its source, or that nothing would read.
    """
    for key, ours in {**_OWN, **(_OWN_CPU if cfg.backend.name == "cpu" else {})}.items():
        value, expected = OmegaConf.select(cfg, key), OmegaConf.select(cfg, ours)
        if value != expected:
            raise ConfigError(key, value, f"it follows from {ours}={expected}", f"set {ours} instead")
    given = resume.given(cfg)
    for key, ours in _DATA.items():
        if key in given:
            problem = "it follows from the task, and would be overwritten"
            raise ConfigError(key, given[key], problem, f"set {ours} instead")
    _model(cfg, given)
    for group in _LEGACY:
        for key, value in _leaves(cfg.get(group), group):
            raise ConfigError(key, value, "verl's V1 trainer does not read it", f"set reward.{key} instead")
    _engine(cfg, given)


def _model(cfg: DictConfig, given: Mapping[str, str]) -> None:
    """The policy's model is the one that is checked, planned and recorded."""
    if cfg.model.name != "hf":
        if _MODEL in given:
            raise ConfigError(
                _MODEL, given[_MODEL], f"it follows from model={cfg.model.name}", f"set model={given[_MODEL]}"
            )
    elif not OmegaConf.is_missing(cfg.model, "path") and OmegaConf.select(cfg, _MODEL) != cfg.model.path:
        value = str(OmegaConf.select(cfg, _MODEL))
        raise ConfigError(_MODEL, value, f"it follows from model.path={cfg.model.path}", f"set model={value} instead")


def _engine(cfg: DictConfig, given: Mapping[str, str]) -> None:
    groups = OmegaConf.select(cfg, _ROLLOUT + "engine_kwargs")
    for engine, names in _ENGINE.items():
        options = groups.get(engine) if isinstance(groups, DictConfig) else None
        for name, value in options.items() if isinstance(options, DictConfig) else ():
            key = f"{_ROLLOUT}engine_kwargs.{engine}.{name!s}"
            if value is None:
                continue
            if engine != cfg.actor_rollout_ref.rollout.name:
                if key not in given:
                    continue  # a preset's, of the engine that it has by default
                problem = f"the rollout engine is {cfg.actor_rollout_ref.rollout.name}, which does not read it"
                raise ConfigError(key, value, problem, "leave it out")
            if str(name) in names:
                problem = f"it would win over {_ROLLOUT}{names[str(name)]}, which the plan and the checks read"
                raise ConfigError(key, value, problem, f"set {_ROLLOUT}{names[str(name)]} instead")


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Settings below a group that are not null."""
    if isinstance(node, DictConfig):
        for name, child in node.items():
            yield from _leaves(child, f"{prefix}.{name!s}")
    elif node is not None:
        yield prefix, node
