"""Routing replay: the settings of verl that follow from ``routing_replay``, where it cannot work, what it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import schedule
from recipes.errors import ConfigError
from recipes.models.published import describe
from sat_verl.routes import Router, route_dtype, router_of

KEY = "routing_replay"
MODES = {"none": "disabled", "r3": "R3"}
"""Ours, and verl's names for them."""
ROLLOUT_SWITCH = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
TRAINERS = {"fsdp2": "fsdp_config", "fsdp": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}
"""By ``actor.strategy``, where verl keeps the settings of an engine that can have a replay mode."""
TARGETS = dict.fromkeys(("fsdp_config", "megatron"), "sat_verl.routing.config.RouterReplayConfig")
"""The typed config of a replay mode where it is not verl's."""
VERL_TARGET = "verl.workers.config.EngineRouterReplayConfig"
SGLANG_TOKENIZER = "actor_rollout_ref.rollout.skip_tokenizer_init"
ROLLOUTS = ("vllm", "sglang")
"""Rollout engines of verl that return routes."""
OPTIONS: dict[str, str | bool] = {"incomplete": "native", "compare": False}
"""Of our replay in FSDP2 and our watch over Megatron's, with their defaults; verl's own have none of them."""
_ACTOR = "actor_rollout_ref.actor."
_PIPELINE = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_OFF = (None, "disabled")
_NONE = f"{KEY}=none"


def _mode_key(engine: str) -> str:
    return f"{_ACTOR}{engine}.router_replay.mode"


def values(cfg: DictConfig) -> None:
    """Types and ranges of ``routing_replay``; a mode of null becomes ``none``.

    Raises:
        ConfigError: a value out of range.
    """
    ours = cfg[KEY]
    if not isinstance(ours, DictConfig):
        raise ConfigError(KEY, ours, "it is a group of settings", f"set {KEY}.mode=r3")
    if ours.get("mode") is None:
        ours.mode = "none"
    for name, allowed in {"mode": tuple(MODES), "incomplete": ("native", "fail"), "compare": (True, False)}.items():
        value = ours.get(name)
        if type(value) is type(allowed[0]) and value in allowed:
            continue
        names = " or ".join(str(one).lower() for one in allowed)
        problem = "R2 replays the routes of a recompute, which no recipe does; " if value == "r2" else ""
        raise ConfigError(f"{KEY}.{name}", value, f"{problem}it must be {names}", f"choose {names}")


def derive(cfg: DictConfig) -> None:
    """Write what follows from ``routing_replay`` into the config: both sides are on, or neither is.

    Raises:
        ConfigError: a value out of range, verl's own settings against it, or a trainer that replays no routes.
    """
    with open_dict(cfg):
        values(cfg)
        ours, strategy = cfg[KEY], cfg.actor_rollout_ref.actor.strategy
        engine = TRAINERS.get(strategy)
        if ours.mode == "none":
            _refuse_by_hand(cfg, engine)
            return
        if engine is None:
            known = ", ".join(TRAINERS)
            problem = f"the {strategy} trainer replays no routes"
            raise ConfigError(KEY, ours.mode, problem, f"choose one of {known}, or {_NONE}")
        settings = f"{_ACTOR}{engine}.router_replay"
        target = OmegaConf.select(cfg, settings + "._target_")
        if target in (None, VERL_TARGET):
            target = TARGETS.get(engine, VERL_TARGET)
        OmegaConf.update(cfg, settings + "._target_", target, force_add=True)
        for key, value in {_mode_key(engine): MODES[ours.mode], ROLLOUT_SWITCH: True}.items():
            if OmegaConf.select(cfg, key) in (*_OFF, False):
                OmegaConf.update(cfg, key, None, force_add=True)
            schedule.follow(cfg, key, value, f"{KEY}.mode={ours.mode}")
        if cfg.actor_rollout_ref.rollout.name == "sglang":
            # Only so verl decodes the routes, which SGLang (from 0.5.10 on) returns as text.
            OmegaConf.update(cfg, SGLANG_TOKENIZER, False)
        for name, default in OPTIONS.items():
            if engine in TARGETS:
                schedule.follow(cfg, f"{settings}.{name}", ours[name], f"{KEY}.{name}")
            elif ours[name] != default:
                problem = f"verl's {strategy} engine, which replays by itself, does not have it"
                raise ConfigError(f"{KEY}.{name}", ours[name], problem, "leave it out, or use actor.strategy=fsdp2")


def _refuse_by_hand(cfg: DictConfig, engine: str | None) -> None:
    """One side alone, or both behind our back: then the run's own settings would not say that it replays."""
    fix = f"leave it out, set {KEY}=r3"
    if OmegaConf.select(cfg, ROLLOUT_SWITCH):
        problem = f"{_NONE}: the routes would be moved, and the trainer would not replay them"
        raise ConfigError(ROLLOUT_SWITCH, True, problem, fix)
    if engine and OmegaConf.select(cfg, _mode_key(engine)) == "R3":
        problem = f"{_NONE}: the rollout would return no routes to replay"
        raise ConfigError(_mode_key(engine), "R3", problem, fix)


def check(cfg: DictConfig) -> None:
    """Replay that would be ignored, or fail after the first rollout, is refused; takes the derived config.

    R2 replays the routes of the old log-prob recompute, which bypass mode never does, and which FSDP2 does not record.
    R3 needs a model with experts and an engine that returns their numbers.

    Raises:
        ConfigError: as said.
    """
    actor = cfg.actor_rollout_ref.actor
    for engine in actor:
        settings = OmegaConf.select(actor, engine)
        mode = OmegaConf.select(settings, "router_replay.mode") if OmegaConf.is_dict(settings) else None
        if mode in _OFF:
            continue
        key = _mode_key(engine)
        if mode == "R2" and OmegaConf.select(cfg, _BYPASS):
            problem = f"it replays the routes of the old log-prob recompute, which {_BYPASS}=true leaves out"
            fix = f"set {key}=disabled, or R3 (the rollout's routes) where the engine has it"
            raise ConfigError(key, mode, problem, fix)
        if engine != TRAINERS.get(actor.strategy):
            problem = f"actor.strategy={actor.strategy} does not read it"
            raise ConfigError(key, mode, problem, f"set {key}=disabled, or {KEY}=r3, which names the engine")
        if engine == "fsdp_config":
            _fsdp(cfg, key, mode)
        if mode == "R3":
            _routes(cfg, key)


def _fsdp(cfg: DictConfig, key: str, mode: str) -> None:
    """What replay with FSDP2 is not built for."""
    if mode != "R3":
        problem = "the FSDP engine records no routes, it replays the rollout's"
        raise ConfigError(key, mode, problem, f"set {key}=R3 or disabled")
    others = {
        _ACTOR + "strategy": ("fsdp2", "routes are replayed with FSDP2 only"),
        _ACTOR + "fsdp_config.ulysses_sequence_parallel_size": (1, "replay over split sequences is not built"),
        _ACTOR + "ulysses_sequence_parallel_size": (1, "replay over split sequences is not built"),
        "actor_rollout_ref.model.enable_activation_offload": (False, "it reruns layers where replay cannot reach them"),
    }
    for name, (needed, problem) in others.items():
        value = OmegaConf.select(cfg, name)
        if value not in (None, needed):
            fix = f"set {name}={str(needed).lower()}, or {_NONE}"
            raise ConfigError(name, value, f"with routing replay: {problem}", fix)


def _routes(cfg: DictConfig, key: str) -> None:
    """R3 needs routes from the rollout, and experts in the model (see :func:`plan` for one that is unknown yet)."""
    rollout = cfg.actor_rollout_ref.rollout
    if not OmegaConf.select(cfg, ROLLOUT_SWITCH):
        problem = f"{key}=R3 needs the routes, and the rollout would not return them"
        raise ConfigError(ROLLOUT_SWITCH, False, problem, f"set {ROLLOUT_SWITCH}=true, or {_NONE}")
    if rollout.name not in ROLLOUTS:
        problem = "routing replay needs routes, and this rollout engine returns none"
        fix = f"choose one of {', '.join(ROLLOUTS)}, or {_NONE}"
        raise ConfigError("actor_rollout_ref.rollout.name", rollout.name, problem, fix)
    if (ranks := OmegaConf.select(cfg, _PIPELINE)) not in (None, 1):
        problem = "with routing replay: no engine returns the routes of a pipeline"
        raise ConfigError(_PIPELINE, ranks, problem, f"set {_PIPELINE}=1, or {_NONE}")
    if (found := describe(cfg)) is not None:
        _router(cfg, found.numbers)


def _router(cfg: DictConfig, described: Mapping[str, Any]) -> Router:
    router = router_of(described)
    if router is None:
        name = cfg.model.path if cfg.model.name == "hf" else cfg.model.name
        problem = "routing replay needs a mixture-of-experts model, and this one is dense"
        raise ConfigError("model", name, problem, f"set {_NONE}, or model=tiny_moe")
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
    if cfg[KEY].mode == "none":
        return None
    from transformers import PretrainedConfig

    described, _ = PretrainedConfig.get_config_dict(str(cfg.actor_rollout_ref.model.path))
    tokens = cfg.data.max_prompt_length + cfg.data.max_response_length
    return payload(_router(cfg, described), tokens, cfg.prompts_per_step * cfg.responses_per_prompt)
