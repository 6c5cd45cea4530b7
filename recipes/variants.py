"""The options of the SAT losses that go beyond the paper, in one word each; another loss refuses them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.values import is_number
from sat_verl.batch_quantile import SAT_MODES

WORDS = ("reference", "negative_cap")
"""Settings of ours that are written into ``policy_loss``; null leaves what the preset says."""

_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss."


def derive(cfg: DictConfig) -> None:
    """Write ``reference`` and ``negative_cap`` into verl's policy-loss config, and check what it then has of them.

    Raises:
        ConfigError: a value out of range, a loss that has no such thing, or a q per micro-batch beside
            ``reference=fresh``.
    """
    loss = OmegaConf.select(cfg, _POLICY_LOSS + "loss_mode")
    for name in WORDS:
        value = OmegaConf.select(cfg, name)
        if value is None:
            continue
        if loss not in SAT_MODES:
            problem = f"the loss {loss} has no such option (losses that have it: {', '.join(SAT_MODES)})"
            raise ConfigError(name, value, problem, "leave it out, or use algorithm=sat_grpo")
        OmegaConf.update(cfg, _POLICY_LOSS + name, value, force_add=True)
    if loss in SAT_MODES:
        _check(cfg)


def _check(cfg: DictConfig) -> None:
    """What :class:`sat_verl.config.SATPolicyLossConfig` refuses in the workers, for the settings of this module."""
    policy_loss = cfg.actor_rollout_ref.actor.policy_loss
    reference, cap = policy_loss.get("reference", "batch"), policy_loss.get("negative_cap", False)
    if reference not in ("batch", "fresh") and not (is_number(reference) and reference > 0):
        good = "it must be batch, fresh or a number above 0"
        raise ConfigError("reference", reference, good, "set reference=batch, the paper's")
    if not isinstance(cap, bool):
        raise ConfigError("negative_cap", cap, "it must be true or false", "set negative_cap=true, or leave it out")
    scope = policy_loss.get("quantile_scope", "microbatch")
    if reference == "fresh" and scope != "batch":
        problem = "reference=fresh is one q for the whole optimizer step"
        raise ConfigError(_POLICY_LOSS + "quantile_scope", scope, problem, "set it to batch")
    steps = policy_loss.get("reference_steps", None)
    if steps is None:
        return
    key = _POLICY_LOSS + "reference_steps"
    if reference != "fresh":
        raise ConfigError(key, steps, f"it is for reference=fresh, and this is {reference}", "leave it out")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(key, steps, "it must be a whole number of at least 1, or null", "leave it out: it is the lag")
