"""Routing replay: what of verl's settings follows from ``routing_replay``, where it cannot work, what it moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from sat_verl.routes import Router, route_dtype, router_of

KEY = "routing_replay"
CHOICES = (None, "r3")
ROLLOUT_SWITCH = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
TRAINERS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}
"""Where the actor's config of an engine is that can have a replay mode, by ``actor.strategy``."""
TARGETS = {"fsdp_config": "sat_verl.routing.config.RouterReplayConfig"}
"""The typed config of a replay mode where it is not verl's."""
VERL_TARGET = "verl.workers.config.EngineRouterReplayConfig"
ROLLOUTS = ("vllm", "sglang")
"""Rollout engines of verl that return routes."""
_OFF = (None, "disabled")


def _mode_key(engine: str) -> str:
    return f"actor_rollout_ref.actor.{engine}.router_replay.mode"


def derive(cfg: DictConfig) -> None:
    """Write what follows from ``routing_replay`` into the config: both sides are on, or neither is.

    Raises:
        ConfigError: an unknown value, verl's own settings against it, or a trainer without a replay mode.
    """
    wanted = cfg[KEY]
    if wanted not in CHOICES:
        raise ConfigError(KEY, wanted, "there is no such replay", f"set {KEY}=r3, or null for none")
    strategy = cfg.actor_rollout_ref.actor.strategy
    engine = TRAINERS.get(strategy)
    if wanted is None:
        _refuse_by_hand(cfg, engine)
        return
    if engine is None:
        known = ", ".join(TRAINERS)
        raise ConfigError(KEY, wanted, f"the {strategy} trainer replays no routes", f"choose one of {known}")
    key = _mode_key(engine)
    found = OmegaConf.select(cfg, key)
    if found not in (*_OFF, "R3"):
        raise ConfigError(key, found, f"it follows from {KEY}={wanted}, which makes it R3", f"leave it out, set {KEY}")
    OmegaConf.update(cfg, ROLLOUT_SWITCH, True)
    settings = key.removesuffix(".mode")
    target = OmegaConf.select(cfg, settings + "._target_") or TARGETS.get(engine, VERL_TARGET)
    OmegaConf.update(cfg, settings, {"_target_": target, "mode": "R3"}, force_add=True)


def _refuse_by_hand(cfg: DictConfig, engine: str | None) -> None:
    if OmegaConf.select(cfg, ROLLOUT_SWITCH):
        problem = f"{KEY} is null: the routes would be moved, and the trainer would not replay them"
        raise ConfigError(ROLLOUT_SWITCH, True, problem, f"leave it out, set {KEY}=r3")
    if engine and OmegaConf.select(cfg, _mode_key(engine)) == "R3":
        problem = f"{KEY} is null: the rollout would return no routes to replay"
        raise ConfigError(_mode_key(engine), "R3", problem, f"leave it out, set {KEY}=r3")


def check(cfg: DictConfig) -> None:
    """Refuse replay where there is nothing to replay; takes the derived config.

    Raises:
        ConfigError: a dense model, or a rollout engine that returns no routes.
    """
    if cfg[KEY] is None:
        return
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name not in ROLLOUTS:
        raise ConfigError(
            KEY, cfg[KEY], f"the {rollout.name} rollout returns no routes", f"choose one of {', '.join(ROLLOUTS)}"
        )
    if OmegaConf.select(rollout, "pipeline_model_parallel_size") not in (None, 1):
        key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
        value = rollout.pipeline_model_parallel_size
        raise ConfigError(key, value, "vLLM returns no routes of a pipeline", f"set {key}=1, or {KEY}=null")
    described = _described(cfg)
    if described is not None:
        _router(cfg, described)


def _described(cfg: DictConfig) -> Mapping[str, Any] | None:
    """The model's own config, if it is here: of a tiny model, or of a local folder."""
    if cfg.model.name != "hf":
        from recipes.models.architectures import ARCHITECTURES

        return ARCHITECTURES[cfg.model.name]
    file = Path(str(cfg.model.path)).expanduser() / "config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _router(cfg: DictConfig, described: Mapping[str, Any]) -> Router:
    router = router_of(described)
    if router is None:
        problem = f"model={cfg.choices.model} is dense: it has no experts to route to"
        raise ConfigError(KEY, cfg[KEY], problem, f"choose a mixture of experts (model=tiny_moe), or {KEY}=null")
    return router


def payload(router: Router, tokens: int, responses: int) -> str:
    """What routing replay moves and stores, in words.

    Args:
        router: of the model.
        tokens: most tokens of prompt and response.
        responses: of one optimizer step.
    """
    one = router.nbytes(tokens)
    return (
        f"{router.layers} layers x top {router.top_k} in {route_dtype(router.experts)}: at most {_size(one)} per "
        f"response of {tokens} tokens, {_size(one * responses)} per optimizer step"
    )


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def plan(cfg: DictConfig) -> str | None:
    """The payload of a run whose model's path is known, None without replay.

    Raises:
        ConfigError: a dense model (one from the hub is seen here first).
    """
    if cfg[KEY] is None:
        return None
    from transformers import PretrainedConfig

    described, _ = PretrainedConfig.get_config_dict(str(cfg.actor_rollout_ref.model.path))
    tokens = cfg.data.max_prompt_length + cfg.data.max_response_length
    return payload(_router(cfg, described), tokens, cfg.prompts_per_step * cfg.responses_per_prompt)
