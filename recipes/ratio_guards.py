"""Guard rails on the policy ratio: settings with which it is not the one that the loss is named for.

All of these train without an error and give curves that look right. Each check takes the derived config and raises
:class:`~recipes.errors.ConfigError`.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes import routing
from recipes.errors import ConfigError
from recipes.values import is_number

RATIO_FREE_LOSSES = ("gpg",)
"""verl's only loss that reads no old log-probs; every other bounds, weights or penalises the ratio to them."""

ROLLOUT_RATIO_LOSSES = ("sat_grpo", "sat_gspo", "dppo_clip", "dppo_tv", "dppo_kl", "m2po", "bypass_mode")
"""Losses that measure how far the policy is from the one that sampled, by the ratio itself: never on a recompute."""

RECOMPUTE_AT = ("step", "window")
"""Whose weights recompute the log-probs: see ``sat_verl.recompute`` in the config."""

SEQUENCE_LOSSES = ("gspo", "sat_gspo")
"""Losses that clip a length-normalised sequence ratio. verl's geo_mean (GMPO) clips token ratios before it takes their
mean, and all its other losses work on token ratios, so radii of 0.2 are ordinary for them."""

WIDE_SEQUENCE_RADIUS = 0.05
"""A mean over a response moves far less than one token's log-ratio: GSPO's paper has 3e-4 and 4e-4."""

LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this without telling the trainer."""

_ROLLOUT = "actor_rollout_ref.rollout."
_CORRECTION = "algorithm.rollout_correction."
_BYPASS = _CORRECTION + "bypass_mode"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_DECLARED_RECOMPUTE = "sat_verl.recomputed_denominator"
_RECOMPUTE = "sat_verl.recompute"
_DECLARED_WIDE = "sat_verl.allow_wide_sequence_radii"


def _declared(cfg: DictConfig, key: str) -> bool:
    """A switch of ours with which a preset or a user says that it means what it does; false where it is absent."""
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, bool | None):
        raise ConfigError(key, value, "it must be true or false", f"set {key}=true")
    return bool(value)


def denominator(cfg: DictConfig) -> None:
    """A clip does nothing when the ratio's denominator is a recompute by the very weights being updated.

    A recompute is accepted of an arm that corrects for the rollout engine with truncated importance weights and says
    so (``correction=tis``). Not of the losses whose staleness is the ratio itself, among them verl's ``bypass_mode``,
    which takes whatever it is given for the rollout's log-probs and ignores the weights.
    """
    loss_mode = OmegaConf.select(cfg, _LOSS_MODE)
    if loss_mode in RATIO_FREE_LOSSES:
        return
    why = f"{loss_mode} needs the ratio to the rollout engine's log-probs, and they would"
    if not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        key = _ROLLOUT + "calculate_log_probs"
        raise ConfigError(key, False, f"{why} not be recorded", f"set {key}=true")
    if OmegaConf.select(cfg, _BYPASS):
        return
    may_recompute = loss_mode not in ROLLOUT_RATIO_LOSSES
    declared, weights = _declared(cfg, _DECLARED_RECOMPUTE), OmegaConf.select(cfg, _CORRECTION + "rollout_is")
    if may_recompute and declared and weights is not None:
        at = OmegaConf.select(cfg, _RECOMPUTE)
        if at not in RECOMPUTE_AT:
            raise ConfigError(_RECOMPUTE, at, f"it must be {' or '.join(RECOMPUTE_AT)}", f"set {_RECOMPUTE}=step")
        return
    if may_recompute and declared:
        raise ConfigError(
            _CORRECTION + "rollout_is",
            "null",
            f"{_DECLARED_RECOMPUTE}=true is for arms that correct the recompute, and this one has no weights",
            f"set {_CORRECTION}rollout_is=token, or {_BYPASS}=true",
        )
    fix = f"set {_BYPASS}=true (correction=none)"
    if may_recompute:
        fix += f", or {_CORRECTION}rollout_is=token and {_DECLARED_RECOMPUTE}=true (correction=tis)"
    raise ConfigError(
        _BYPASS,
        False,
        f"{why} be replaced by a recompute with the trainer's own weights "
        "(with one optimizer step per batch the ratio is about 1, and no clip acts)",
        fix,
    )


def correction(cfg: DictConfig) -> None:
    """Correction weights and rejection need the recompute: with a rollout denominator the ratio is the correction.

    verl's v1 trainer computes neither in bypass mode, so they would be named in the config and not happen; and if they
    did, ``pi/mu`` would multiply a loss of ``pi/mu``. What is sound on a rollout denominator is verl's ``bypass_mode``
    loss: it reads its own copy, ``policy_loss.rollout_correction``, there weighs plain REINFORCE with ``pi/mu`` once,
    or masks rejected tokens of a PPO clip without weights. That is not refused.
    """
    asked = [name for name in ("rollout_is", "rollout_rs") if OmegaConf.select(cfg, _CORRECTION + name) is not None]
    loss_type = OmegaConf.select(cfg, _CORRECTION + "loss_type")
    if loss_type not in (None, "ppo_clip"):
        key = _CORRECTION + "loss_type"
        raise ConfigError(
            key,
            loss_type,
            f"verl's v1 trainer does not read it, and would train {OmegaConf.select(cfg, _LOSS_MODE)}",
            f"leave it out; {_LOSS_MODE} names the loss",
        )
    if not asked:
        return
    key, value = _CORRECTION + asked[0], OmegaConf.select(cfg, _CORRECTION + asked[0])
    if OmegaConf.select(cfg, _BYPASS):
        raise ConfigError(
            key,
            value,
            f"with {_BYPASS}=true the loss's own ratio is the correction: verl leaves this one out, "
            "and with it the ratio to the rollout would be applied twice",
            f"set {key}=null, or {_BYPASS}=false and {_DECLARED_RECOMPUTE}=true",
        )
    if not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        needed = _ROLLOUT + "calculate_log_probs"
        raise ConfigError(key, value, "without the rollout's log-probs verl would leave it out", f"set {needed}=true")


def correction_values(cfg: DictConfig) -> None:
    """What verl's correction says of its settings, on one token: it reads them first after the first rollout."""
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    given = {name: OmegaConf.select(cfg, _CORRECTION + name) for name in names}
    token = torch.zeros(1, 1)
    try:
        compute_rollout_correction_and_rejection_mask(token, token, torch.ones(1, 1), **given)
    except (TypeError, ValueError) as error:
        text = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(_CORRECTION.rstrip("."), "", text, "change the setting that the message names") from error


def sampling(cfg: DictConfig) -> None:
    """The recorded log-probs must be those of the trainer's policy: its whole support, at its temperature.

    A temperature other than 1 is exact: vLLM divides the logits by it before it records (``processed_logprobs``), and
    verl's engines divide the trainer's logits by the same setting.
    """
    temperature = OmegaConf.select(cfg, _ROLLOUT + "temperature")
    if not is_number(temperature) or temperature < LOWEST_TEMPERATURE:
        raise ConfigError(
            _ROLLOUT + "temperature",
            temperature,
            f"below {LOWEST_TEMPERATURE} the engine samples greedily, or at another temperature than the trainer's",
            f"set {_ROLLOUT}temperature=1.0",
        )
    # top_k: vLLM takes -1 and 0 for no limit. verl's agent loop sends no repetition penalty and no min_p at present.
    off: dict[str, tuple[Any, ...]] = {
        "top_p": (1,),
        "top_k": (-1, 0, None),
        "min_p": (0, None),
        "repetition_penalty": (1, None),
    }
    for name, neutral in off.items():
        value = OmegaConf.select(cfg, _ROLLOUT + name)
        if value not in neutral:
            key = _ROLLOUT + name
            raise ConfigError(
                key,
                value,
                "the engine would sample from another distribution than the trainer's policy, "
                "and record log-probs (or a support) that the trainer does not have",
                f"set {key}={neutral[0]}",
            )
    _logprobs_mode(cfg, temperature)


def _logprobs_mode(cfg: DictConfig, temperature: float) -> None:
    """Log-probs must be recorded after the temperature; verl's default does."""
    own = _ROLLOUT + "engine_kwargs.vllm.logprobs_mode"  # verl lets it win over its own setting
    key = own if OmegaConf.select(cfg, own) else _ROLLOUT + "logprobs_mode"
    mode = OmegaConf.select(cfg, key) or "processed_logprobs"
    if mode == "processed_logprobs" or (mode == "raw_logprobs" and temperature == 1):
        return
    what = f"log-probs before the temperature {temperature}" if mode == "raw_logprobs" else "logits, not log-probs"
    raise ConfigError(key, mode, f"the engine would record {what}", f"set {key}=processed_logprobs")


def sequence_radii(cfg: DictConfig) -> None:
    """A token loss's radii on a sequence ratio hardly ever clip: the arm is then unclipped, whatever its name."""
    loss_mode = OmegaConf.select(cfg, _LOSS_MODE)
    if loss_mode not in SEQUENCE_LOSSES or _declared(cfg, _DECLARED_WIDE):
        return
    for name in ("clip_ratio_low", "clip_ratio_high"):
        value = cfg.actor_rollout_ref.actor[name]
        if value >= WIDE_SEQUENCE_RADIUS:
            raise ConfigError(
                f"actor_rollout_ref.actor.{name}",
                value,
                f"{loss_mode} clips the length-normalised sequence ratio, which hardly ever leaves so wide an interval",
                f"set it below {WIDE_SEQUENCE_RADIUS} (algorithm=gspo_canonical has 3e-4 and 4e-4), "
                f"or {_DECLARED_WIDE}=true",
            )


CHECKS = (correction, denominator, routing.check, sampling, sequence_radii)
