"""Clip radii and dual clip in one word each, for every arm alike; a loss that has none refuses it."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import resume, schedule
from recipes.errors import ConfigError
from recipes.values import is_number

NO_DUAL_CLIP = 1.0e9
"""verl has no switch for the dual clip; a bound that no ratio reaches is none."""

DUAL_CLIP_LOSSES = ("vanilla", "sat_grpo", "dppo_clip", "bypass_mode")
"""Losses that read ``clip_ratio_c`` as the dual clip."""

RATIO_CAPS = {"dppo_tv": 1.0e4, "dppo_kl": 1.0e4}
"""Losses that read ``clip_ratio_c`` as the largest weight of a token, whatever the sign of A, and the value of verl's
example: verl's default of 3 for the dual clip would win over the loss's own default of 20."""

NO_RADII_LOSSES = ("sapo", "m2po", "gpg", "dro", "kl_cov")
"""Losses that do not read the clip radii."""

_ACTOR = "actor_rollout_ref.actor."
_SIDES = ("clip_ratio_low", "clip_ratio_high")


def derive(cfg: DictConfig) -> None:
    """Write ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high`` and ``dual_clip`` into verl's actor config.

    ``clip_ratio`` is both sides; a side of its own wins over it, and all win over the preset.

    Raises:
        ConfigError: a value out of range, verl's own setting beside ours, or a loss that has no such thing.
    """
    with open_dict(cfg):
        _radii(cfg)
        _dual_clip(cfg)


def _radii(cfg: DictConfig) -> None:
    given = {name: OmegaConf.select(cfg, name) for name in ("clip_ratio", *_SIDES)}
    given = {name: value for name, value in given.items() if value is not None}
    loss = OmegaConf.select(cfg, _ACTOR + "policy_loss.loss_mode")
    by_hand = resume.given(cfg)
    for name, value in given.items():
        if not (is_number(value) and value > 0):
            raise ConfigError(name, value, "it must be a positive number, or null", f"set {name}=0.2, say")
        if loss in NO_RADII_LOSSES:
            raise ConfigError(name, value, f"{loss} does not clip, and reads no radii", "leave it out")
        for side in _SIDES:
            if name in ("clip_ratio", side) and _ACTOR + side in by_hand:
                raise ConfigError(_ACTOR + side, cfg.actor_rollout_ref.actor[side], f"{name} sets it", "leave one out")
    for side in _SIDES:
        if (value := given.get(side, given.get("clip_ratio"))) is not None:
            OmegaConf.update(cfg, _ACTOR + side, value)


def _dual_clip(cfg: DictConfig) -> None:
    value, loss = cfg.dual_clip, OmegaConf.select(cfg, _ACTOR + "policy_loss.loss_mode")
    key = _ACTOR + "clip_ratio_c"
    if value is not None and not (is_number(value) and value > 1):
        good = "a dual clip must be a number above 1, or null"
        raise ConfigError("dual_clip", value, good, "set dual_clip=3, or null for none")
    if value is not None and loss not in DUAL_CLIP_LOSSES:
        having = ", ".join(DUAL_CLIP_LOSSES)
        problem = f"the loss {loss} has no dual clip, so this would change nothing"
        raise ConfigError("dual_clip", value, problem, f"leave it out (losses that have one: {having})")
    if loss in RATIO_CAPS:
        if OmegaConf.select(cfg, key) is None:
            OmegaConf.update(cfg, key, RATIO_CAPS[loss])
        return
    schedule.follow(cfg, key, NO_DUAL_CLIP if value is None else value, "dual_clip")
