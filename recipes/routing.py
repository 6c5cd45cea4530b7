"""Routing replay: the settings of verl that follow from ``routing_replay``, and where replay cannot work."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import schedule
from recipes.errors import ConfigError

MODES = {"none": "disabled", "r3": "R3"}
"""Ours, and verl's names for them."""
OPTIONS = "sat_verl.routing.config.RouterReplayConfig"
_ACTOR = "actor_rollout_ref.actor."
_RETURNED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ENGINES = {"fsdp2": "fsdp_config", "fsdp": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}
"""By ``actor.strategy``, where verl keeps the settings of its engine."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def values(cfg: DictConfig) -> None:
    """Types and ranges of ``routing_replay``."""
    ours = OmegaConf.select(cfg, "routing_replay")
    if not isinstance(ours, DictConfig):
        problem, fix = "it is a group of settings", "set routing_replay.mode=r3"
        raise ConfigError("routing_replay", ours, problem, fix)
    for name, allowed in {"mode": tuple(MODES), "incomplete": ("native", "fail"), "compare": (True, False)}.items():
        value = ours.get(name)
        if type(value) is type(allowed[0]) and value in allowed:
            continue
        names = " or ".join(str(one).lower() for one in allowed)
        problem = "R2 replays the routes of a recompute, which no recipe does; " if value == "r2" else ""
        raise ConfigError(f"routing_replay.{name}", value, f"{problem}it must be {names}", f"choose {names}")


def derive(cfg: DictConfig) -> None:
    """With ``routing_replay.mode=r3``: the actor's engine replays, and the rollout returns the routes."""
    values(cfg)
    ours, actor = cfg.routing_replay, cfg.actor_rollout_ref.actor
    if ours.mode == "none":
        return
    engine = _ENGINES.get(actor.strategy, "fsdp_config")
    follow = {f"{_ACTOR}{engine}.router_replay.mode": MODES[ours.mode], _RETURNED: True}
    with open_dict(cfg):
        for key, value in follow.items():
            if OmegaConf.select(cfg, key) in (None, False, "disabled"):
                OmegaConf.update(cfg, key, None)
            schedule.follow(cfg, key, value, f"routing_replay.mode={ours.mode}")
        if engine == "fsdp_config":
            settings = {"_target_": OPTIONS, "incomplete": ours.incomplete, "compare": ours.compare}
            OmegaConf.update(cfg, f"{_ACTOR}{engine}.router_replay", settings, merge=True)


def router_replay(cfg: DictConfig) -> None:
    """Replay that would be ignored, or fail after the first rollout, is refused.

    R2 replays the routes of the old log-prob recompute, which bypass mode never does, and which FSDP2 does not record.
    R3 needs a model with experts and an engine that returns their numbers.
    """
    actor = cfg.actor_rollout_ref.actor
    for engine in actor:
        settings = OmegaConf.select(actor, engine)
        mode = OmegaConf.select(settings, "router_replay.mode") if OmegaConf.is_dict(settings) else None
        if mode in (None, "disabled"):
            continue
        key = f"{_ACTOR}{engine}.router_replay.mode"
        if mode == "R2" and OmegaConf.select(cfg, _BYPASS):
            problem = f"it replays the routes of the old log-prob recompute, which {_BYPASS}=true leaves out"
            fix = f"set {key}=disabled, or R3 (the rollout's routes) where the engine has it"
            raise ConfigError(key, mode, problem, fix)
        if engine != _ENGINES.get(actor.strategy):
            problem = f"actor.strategy={actor.strategy} does not read it"
            raise ConfigError(key, mode, problem, f"set {key}=disabled, or routing_replay=r3, which names the engine")
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
            fix = f"set {name}={str(needed).lower()}, or routing_replay=none"
            raise ConfigError(name, value, f"with routing replay: {problem}", fix)


def _routes(cfg: DictConfig, key: str) -> None:
    """R3 needs experts in the model and their numbers from the rollout."""
    if not OmegaConf.select(cfg, _RETURNED):
        problem = f"{key}=R3 needs the routes, and the rollout would not return them"
        raise ConfigError(_RETURNED, False, problem, f"set {_RETURNED}=true, or routing_replay=none")
    if _dense(cfg):
        name = cfg.model.path if cfg.model.name == "hf" else cfg.model.name
        problem = "routing replay needs a mixture-of-experts model, and this one is dense"
        raise ConfigError("model", name, problem, "set routing_replay=none, or model=tiny_moe")


def _dense(cfg: DictConfig) -> bool:
    """Whether the model is known to have no experts (one from the hub is looked at when it is loaded)."""
    if cfg.model.name != "hf":
        return "moe" not in cfg.model.name
    if OmegaConf.is_missing(cfg.model, "path"):
        return False
    described = Path(str(cfg.model.path)).expanduser() / "config.json"
    if not described.is_file():
        return False
    config = json.loads(described.read_text())
    return not any(part.get(name) for part in (config, config.get("text_config") or {}) for name in EXPERTS)
