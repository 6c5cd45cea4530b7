"""Every preset composes; arms differ only in what makes them different; mistakes get a helpful error."""

import itertools

import pytest
from omegaconf import OmegaConf

from recipes.compose import choices, compose, expand_short_forms
from recipes.derive import NO_DUAL_CLIP, derive
from recipes.errors import ConfigError

ALGORITHMS = ["grpo", "gspo", "gspo_canonical", "sat_grpo", "sat_gspo"]


def flat(config, prefix=""):
    values = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def resolved(*overrides):
    return flat(OmegaConf.to_container(derive(compose([*overrides, "run_dir=/tmp/x"])), resolve=True))


def difference(one, other):
    left, right = resolved(*one), resolved(*other)
    # The command lines differ, of course.
    return {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)} - {"overrides"}


def test_the_presets_are_the_documented_ones():
    assert choices("algorithm") == ALGORITHMS
    assert choices("model") == ["hf", "tiny", "tiny_moe"]
    assert choices("task") == ["arithmetic", "chain", "parquet", "sort"]


@pytest.mark.parametrize(
    ("algorithm", "backend", "model", "task"),
    [
        *((algorithm, "cpu", "tiny", "chain") for algorithm in ALGORITHMS),
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
    assert resolved(f"algorithm={algorithm}", "dual_clip=3")["actor_rollout_ref.actor.clip_ratio_c"] == 3


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
