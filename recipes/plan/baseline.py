"""The run beside its baseline arm: every resolved setting that differs between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.compose import TRAIN, choices, compose
from recipes.derive import derive
from recipes.errors import ConfigError
from recipes.plan.settings import SECTION

_NAMES = ("choices.", "overrides", "run_dir", "sat_verl.run_dir", "trainer.experiment_name",
          "trainer.default_local_dir", "actor_rollout_ref.rollout.trace.experiment_name", f"{SECTION}.", "dry_run",
          "cache_dir", "resume")  # fmt: skip
"""Beginnings of settings that only name a run, or this plan."""
_METHOD = (
    "actor_rollout_ref.actor.policy_loss.", "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.tau_", "algorithm.rollout_correction.",
    "algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam", "critic.", "clip_ratio", "dual_clip", "reference",
    "negative_cap", "routing_replay.", "sat_verl.recompute", "sat_verl.recomputed_denominator",
    "sat_verl.allow_wide_sequence_radii", "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    "actor_rollout_ref.actor.fsdp_config.router_replay.", "actor_rollout_ref.actor.megatron.router_replay.",
)  # fmt: skip
"""Beginnings of settings that are a method's own: a loss, its radii, a correction, replay."""
_ABSENT = "(not set)"


@dataclass(frozen=True)
class Difference:
    """One setting: its value in the run and in the baseline, and whether it belongs to a method."""

    setting: str
    run: Any
    baseline: Any
    method: bool


@dataclass(frozen=True)
class Comparison:
    """A run and its baseline.

    Attributes:
        baseline: the words that make the baseline of the run.
        arm: what the baseline is: ``gspo, correction none, routing_replay r3, lag 8``.
        differences: all of them, in the order of their names.
        left_out: overrides of the run that the baseline does not have, with its reason.
    """

    baseline: tuple[str, ...]
    arm: str
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[Difference, ...]:
        """Differences that no method explains."""
        return tuple(one for one in self.differences if not one.method)


def parent(algorithm: str) -> str | None:
    """The preset that a preset of ``algorithm`` builds on."""
    described = yaml.safe_load((TRAIN.folder / "algorithm" / f"{algorithm}.yaml").read_text())
    bases = [one for one in described.get("defaults", ()) if one in choices("algorithm")]
    return bases[0] if bases else None


def _words(cfg: DictConfig, wanted: str | None) -> tuple[str, ...] | None:
    """What turns the run into its baseline: another algorithm, or no correction, or no replay; None for a base."""
    base = wanted or parent(cfg.choices.algorithm)
    if base is not None and base != cfg.choices.algorithm:
        return (f"algorithm={base}",)
    if cfg.choices.correction != "none":
        return ("correction=none",)
    if cfg.routing_replay.mode != "none":
        return ("routing_replay.mode=none",)
    return None


def _arm(cfg: DictConfig) -> str:
    """Algorithm, correction, replay and lag of a config."""
    schedule = "" if cfg.lag.schedule == "broadcast" else f"{cfg.lag.schedule} "
    return (
        f"{cfg.choices.algorithm}, correction {cfg.choices.correction}, routing_replay {cfg.routing_replay.mode}, "
        f"lag {schedule}{cfg.lag.steps}"
    )


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _composed(overrides: list[str], words: tuple[str, ...], left_out: list[str]) -> DictConfig:
    """The baseline's config; overrides of the run that it has no use for are dropped, and named in ``left_out``."""
    while True:
        try:
            cfg = compose([*overrides, *words])
            return derive(cfg)
        except ConfigError as error:
            refused = [one for one in overrides if _name(one) == error.setting.lstrip("+")]
            if not refused:
                raise
            overrides = [one for one in overrides if one not in refused]
            left_out += [f"{one} ({error.problem})" for one in refused]


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Resolved leaves of a config by their dotted names; what cannot be resolved yet is shown as it is written."""
    if not isinstance(node, DictConfig) or node._is_none() or not node:
        value = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig | ListConfig) else node
        return {prefix.removesuffix("."): value}
    found: dict[str, Any] = {}
    for key in node:
        name = prefix + str(key)
        if OmegaConf.is_missing(node, key):
            found[name] = "???"
            continue
        try:
            found |= flat(node[key], f"{name}.")
        except OmegaConfBaseException:
            found[name] = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index, call-overload]
    return found


def differences(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[Difference, ...]:
    """All settings in which two flat configs differ, but for those that name a run."""
    found = []
    for key in sorted({*run, *baseline}):
        one, other = run.get(key, _ABSENT), baseline.get(key, _ABSENT)
        if one != other and not key.startswith(_NAMES):
            found.append(Difference(key, one, other, key.startswith(_METHOD)))
    return tuple(found)


def compare(cfg: DictConfig, wanted: str | None = None) -> Comparison | None:
    """Compose the run's baseline with the run's own overrides, and compare the two; None where it is a base itself.

    Args:
        cfg: the composed and derived config.
        wanted: preset of ``algorithm`` for the baseline; None for the one that the run's builds on.

    Raises:
        ConfigError: the baseline does not compose, or there is no such preset.
    """
    if wanted is not None and wanted not in choices("algorithm"):
        names = ", ".join(choices("algorithm"))
        raise ConfigError(
            f"{SECTION}.baseline", wanted, "there is no such preset of algorithm", f"choose one of {names}"
        )
    words = _words(cfg, wanted)
    if words is None:
        return None
    replaced = {_name(word) for word in words}
    overrides = [one for one in cfg.overrides if _name(one) not in replaced]
    left_out: list[str] = []
    other = _composed(overrides, words, left_out)
    run, baseline = flat(cfg), flat(other)
    # Paths that the launcher fills in once data and model are built.
    for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path"):
        if key in run and key in baseline and baseline[key] != run[key]:
            baseline[key] = run[key]
    return Comparison(words, _arm(other), differences(run, baseline), tuple(left_out))
