"""Every preset composes; arms differ only in what makes them different; mistakes get a helpful error."""

import copy
import functools
import itertools

import pytest
from omegaconf import OmegaConf

from recipes.clip import NO_DUAL_CLIP
from recipes.compose import choices, compose, expand_short_forms
from recipes.derive import derive
from recipes.errors import ConfigError

ALGORITHMS = [
    "cispo", "dppo", "dppo_tv", "grpo", "gspo", "gspo_canonical", "is", "m2po", "ppo", "sapo", "sat_grpo",
    "sat_grpo_capped", "sat_grpo_fresh", "sat_gspo", "sat_gspo_canonical", "sat_gspo_fresh",
]  # fmt: skip


def flat(config, prefix=""):
    values = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


@functools.cache  # half a second each
def resolved(*overrides):
    return flat(OmegaConf.to_container(derive(compose([*overrides, "run_dir=/tmp/x"])), resolve=True))


def difference(one, other):
    left, right = resolved(*one), resolved(*other)
    # The command lines differ, of course.
    return {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)} - {"overrides"}


def test_the_presets_are_the_documented_ones():
    assert choices("algorithm") == ALGORITHMS
    assert choices("correction") == ["none", "tis"]
    assert choices("model") == ["hf", "tiny", "tiny_moe"]
    assert choices("task") == ["arithmetic", "chain", "parquet", "sort"]


@pytest.mark.parametrize(
    ("algorithm", "backend", "model", "task"),
    [
        # On the CPU all of them: test_arms.
        ("ppo", "cuda", "tiny", "chain"),
        *itertools.product(["sat_gspo"], ["cpu", "cuda"], ["tiny", "tiny_moe"], ["chain", "sort", "arithmetic"]),
    ],
)
def test_preset_composes_and_passes_verls_own_validation(algorithm, backend, model, task):
    from recipes.guards import upstream

    cfg = derive(compose([f"algorithm={algorithm}", f"backend={backend}", f"model={model}", f"task={task}"]))
    upstream(cfg)
    assert cfg.choices.algorithm == algorithm
    assert cfg.trainer.v1.trainer_mode == "sat_async"
    assert cfg.data.train_batch_size == cfg.prompts_per_step


POLICY_LOSS = "actor_rollout_ref.actor.policy_loss."
SAT_OPTIONS = {POLICY_LOSS + name for name in ("_target_", "loss_mode", "alpha", "kernel_exponent", "quantile_scope")}
NAME = {"choices.algorithm"}


@pytest.mark.parametrize("base", ["grpo", "gspo"])
def test_a_sat_arm_differs_from_its_base_only_in_the_policy_loss(base):
    assert difference([f"algorithm={base}"], [f"algorithm=sat_{base}"]) == SAT_OPTIONS | NAME


def test_grpo_and_gspo_differ_only_in_loss_and_aggregation():
    found = difference(["algorithm=grpo"], ["algorithm=gspo"])
    unused_copy = {"critic.loss_agg_mode"}  # verl's critic, which these arms do not have, copies the actor's
    guard_rail = {"sat_verl.allow_wide_sequence_radii"}
    loss = {POLICY_LOSS + "loss_mode", "actor_rollout_ref.actor.loss_agg_mode"}
    assert found == loss | NAME | guard_rail | unused_copy


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "sat_grpo", "sat_gspo"])
def test_all_arms_share_radii_and_dual_clip(algorithm):
    values = resolved(f"algorithm={algorithm}")
    assert (values["actor_rollout_ref.actor.clip_ratio_low"], values["actor_rollout_ref.actor.clip_ratio_high"]) == (
        0.2,
        0.2,
    )
    assert values["actor_rollout_ref.actor.clip_ratio_c"] == NO_DUAL_CLIP


ACTOR = "actor_rollout_ref.actor."
BASE_ARMS = {
    "dppo": SAT_OPTIONS - {POLICY_LOSS + name for name in ("alpha", "kernel_exponent", "quantile_scope")}
    | {POLICY_LOSS + "delta"},
    "m2po": {POLICY_LOSS + name for name in ("_target_", "loss_mode", "second_moment")},
    "is": {ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"},
    "dppo_tv": {ACTOR + "clip_ratio_" + name for name in ("low", "high", "c")} | {POLICY_LOSS + "loss_mode"},
    "cispo": {ACTOR + "clip_ratio_low", POLICY_LOSS + "loss_mode"},
}


@pytest.mark.parametrize("algorithm", BASE_ARMS)
def test_a_baseline_differs_from_grpo_only_in_its_loss(algorithm):
    assert difference(["algorithm=grpo"], [f"algorithm={algorithm}"]) == BASE_ARMS[algorithm] | NAME


def test_tis_differs_only_in_the_denominator_and_the_weights():
    correction = {"algorithm.rollout_correction." + name for name in ("bypass_mode", "rollout_is")}
    own = {"sat_verl.recomputed_denominator", "sat_verl.recompute", "choices.correction"}
    assert difference(["algorithm=grpo"], ["algorithm=grpo", "correction=tis"]) == correction | own
    values = resolved("algorithm=grpo", "correction=tis")
    assert values["algorithm.rollout_correction.rollout_is"] == "token"
    assert values["algorithm.rollout_correction.rollout_is_threshold"] == 2.0


def test_ppo_has_a_critic_that_is_set_up_like_the_actor():
    values = resolved("algorithm=ppo")
    assert (values["algorithm.adv_estimator"], values["critic.enable"]) == ("gae", True)
    for name in ("strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "optim.lr", "grad_clip"):
        assert values[f"critic.{name}"] == values[ACTOR + name], name
    assert values["critic.fsdp.mixed_precision.param_dtype"] == "fp32"
    assert values["critic.model.override_config.attn_implementation"] == "sdpa"


@functools.cache
def _grpo():
    return compose(["algorithm=grpo", "run_dir=/tmp/x"])


def clip_of(loss_mode, **settings):
    """Radii and ``clip_ratio_c`` of a derived config with this loss; composing each would take half a second."""
    cfg = copy.deepcopy(_grpo())
    for key, value in {POLICY_LOSS + "loss_mode": loss_mode, **settings}.items():
        OmegaConf.update(cfg, key, value)
    actor = derive(cfg).actor_rollout_ref.actor
    return actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c


def test_radii_in_one_word():
    assert clip_of("vanilla", clip_ratio=0.1) == (0.1, 0.1, NO_DUAL_CLIP)
    assert clip_of("sat_gspo", clip_ratio_low=0.03, clip_ratio_high=0.04) == (0.03, 0.04, NO_DUAL_CLIP)
    assert clip_of("dppo_clip", clip_ratio=0.1, clip_ratio_high=0.3, dual_clip=3) == (0.1, 0.3, 3)
    assert clip_of("gspo", clip_ratio_low=2e-4) == (2e-4, 0.2, NO_DUAL_CLIP)
    assert clip_of("cispo", clip_ratio_low=10) == (10, 0.2, NO_DUAL_CLIP)


def test_verls_dppo_has_a_cap_where_others_have_the_dual_clip():
    assert resolved("algorithm=dppo_tv")[ACTOR + "clip_ratio_c"] == 1e4
    assert clip_of("dppo_kl")[2] == 1e4
    assert clip_of("dppo_tv", **{ACTOR + "clip_ratio_c": 20.0})[2] == 20.0


@pytest.mark.parametrize("loss_mode", ["vanilla", "sat_grpo", "dppo_clip"])
def test_the_dual_clip_is_on_or_off_for_all_token_clips(loss_mode):
    assert clip_of(loss_mode)[2] == NO_DUAL_CLIP
    assert clip_of(loss_mode, dual_clip=3)[2] == 3


@pytest.mark.parametrize(
    ("loss_mode", "settings", "setting"),
    [
        *((loss, {"dual_clip": 3}, "dual_clip") for loss in ("gspo", "sat_gspo", "cispo", "sapo", "m2po", "dppo_tv")),
        ("vanilla", {"dual_clip": 1}, "dual_clip"),
        ("vanilla", {"dual_clip": True}, "dual_clip"),
        ("m2po", {"clip_ratio": 0.1}, "clip_ratio"),
        ("sapo", {"clip_ratio_low": 0.1}, "clip_ratio_low"),
        ("vanilla", {"clip_ratio": -1}, "clip_ratio"),
        ("vanilla", {"clip_ratio_high": "abc"}, "clip_ratio_high"),
        ("vanilla", {"clip_ratio_low": 1.0}, ACTOR + "clip_ratio_low"),
        ("vanilla", {"clip_ratio": 0.1, "overrides": [ACTOR + "clip_ratio_high=0.3"]}, ACTOR + "clip_ratio_high"),
        ("vanilla", {"clip_ratio_low": 0.1, "overrides": [ACTOR + "clip_ratio_low=0.3"]}, ACTOR + "clip_ratio_low"),
    ],
)
def test_radii_and_dual_clip_that_a_loss_does_not_have_are_refused(loss_mode, settings, setting):
    with pytest.raises(ConfigError) as caught:
        clip_of(loss_mode, **settings)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)


def test_canonical_gspo_has_the_radii_of_its_paper():
    values = resolved("algorithm=gspo_canonical")
    assert values["actor_rollout_ref.actor.clip_ratio_low"] == 3e-4
    assert values["actor_rollout_ref.actor.clip_ratio_high"] == 4e-4


def test_verl_overrides_and_derived_sizes():
    values = resolved("prompts_per_step=4", "lag=3", "steps=39", "trainer_ranks=2")
    assert values["data.train_batch_size"] == 12
    assert values["trainer.v1.sat_async.parameter_sync_step"] == 3
    assert values["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == 16
    assert values["ray_kwargs.ray_init.num_gpus"] == 3


def test_short_forms(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert expand_short_forms([f"model={tmp_path}"]) == ["model=hf", f"model.path={tmp_path}"]
    assert expand_short_forms(["model=Qwen/Qwen3-0.6B"]) == ["model=hf", "model.path=Qwen/Qwen3-0.6B"]
    assert expand_short_forms(["task=a.parquet", "model=tiny"]) == [
        "task=parquet",
        "task.train_file=a.parquet",
        "model=tiny",
    ]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algoritm=gspo", ["algoritm", "did you mean algorithm"]),
        ("algorithm=sat", ["algorithm=sat", "no such preset", "sat_gspo"]),
        ("actor_rollout_ref.actor.clip_ratio_hig=0.3", ["clip_ratio_hig", "actor_rollout_ref.actor.clip_ratio_high"]),
        ("step=3", ["step=3", "did you mean steps"]),
        ("steps=[1", ["command line"]),
        ("actor_rollout_ref.actor.policy_loss.alpha=0.9 algorithm=grpo", ["algorithm=grpo has no such setting"]),
    ],
)
def test_a_mistake_is_explained_in_one_line(override, parts):
    with pytest.raises(ConfigError) as caught:
        compose(override.split())
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
