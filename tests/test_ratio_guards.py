"""A config whose policy ratio is not the one that its loss is named for is refused before anything starts."""

import copy
import functools
import json

import pytest
import torch
from omegaconf import OmegaConf

from recipes import ratio_guards
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout."
ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
BYPASS = CORRECTION + "bypass_mode"
LOG_PROBS = ROLLOUT + "calculate_log_probs"
LOSS_MODE = ACTOR + "policy_loss.loss_mode"
ROLLOUT_IS = CORRECTION + "rollout_is"
ROLLOUT_RS = CORRECTION + "rollout_rs"
DECLARED = "sat_verl.recomputed_denominator"
WIDE = "sat_verl.allow_wide_sequence_radii"
RECOMPUTE = {BYPASS: False, DECLARED: True}


@functools.cache
def _preset(algorithm):
    return derive(compose([f"algorithm={algorithm}", "run_dir=/tmp/x"]))  # a second or so, hence the cache


def config(algorithm, settings):
    cfg = copy.deepcopy(_preset(algorithm))
    OmegaConf.set_struct(cfg, False)
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def passes(algorithm, settings):
    cfg = config(algorithm, settings)
    for one in ratio_guards.CHECKS:
        one(cfg)
    return cfg


def refused(setting, algorithm, settings):
    """The message of the refusal, which must be about ``setting``."""
    with pytest.raises(ConfigError) as caught:
        passes(algorithm, settings)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The denominator.


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gspo_canonical", "sat_grpo", "sat_gspo"])
@pytest.mark.parametrize("setting", [BYPASS, LOG_PROBS])
def test_a_clip_needs_the_rollouts_log_probs(algorithm, setting):
    assert f"set {setting}=true" in refused(setting, algorithm, {setting: False})


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "geo_mean", "cispo", "sapo", "dro"])
def test_so_do_verls_other_ratio_losses(loss):
    passes("grpo", {LOSS_MODE: loss})
    assert loss in refused(BYPASS, "grpo", {LOSS_MODE: loss, BYPASS: False})


def test_a_loss_without_a_ratio_may_recompute_the_denominator():
    passes("grpo", {LOSS_MODE: "gpg", BYPASS: False})


def test_gpg_alone_of_verls_losses_reads_no_old_log_probs():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    options = PolicyLossConfig(dro_beta=1.0, kl_cov_ratio=0.5)
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=options)
    advantages, mask = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
    deaf = set()
    for name in POLICY_LOSS_REGISTRY:
        if not POLICY_LOSS_REGISTRY[name].__module__.startswith("verl."):
            continue
        gradients = []
        for drift in (0.0, 1.0):
            log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
            arguments = (log_prob.detach() - drift, log_prob, advantages, mask)
            loss, _ = POLICY_LOSS_REGISTRY[name](*arguments, config=actor)
            loss.backward()
            gradients.append(log_prob.grad)
        if torch.equal(*gradients):
            deaf.add(name)
    assert deaf == set(ratio_guards.RATIO_FREE_LOSSES)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_an_arm_may_correct_a_recompute_on_purpose(algorithm, level):
    ratio_guards.correction_values(passes(algorithm, RECOMPUTE | {ROLLOUT_IS: level}))


def test_a_corrected_recompute_must_be_declared_and_corrected():
    rejection = {ROLLOUT_RS: "token_k1", CORRECTION + "rollout_rs_threshold": "0.5_2.0"}
    assert f"{DECLARED}=true" in refused(BYPASS, "grpo", {BYPASS: False, ROLLOUT_IS: "token"})
    refused(ROLLOUT_IS, "grpo", RECOMPUTE)
    refused(ROLLOUT_IS, "grpo", RECOMPUTE | rejection)
    refused(DECLARED, "grpo", {BYPASS: False, ROLLOUT_IS: "token", DECLARED: "abc"})


def test_whose_weights_recompute_must_be_known():
    for at in ("step", "window"):
        passes("grpo", RECOMPUTE | {ROLLOUT_IS: "token", "sat_verl.recompute": at})
    refused("sat_verl.recompute", "grpo", RECOMPUTE | {ROLLOUT_IS: "token", "sat_verl.recompute": "batch"})


@pytest.mark.parametrize("loss", ["sat_grpo", "sat_gspo", "dppo_clip", "dppo_tv", "m2po", "bypass_mode"])
def test_losses_that_are_the_rollout_ratio_never_recompute(loss):
    text = refused(BYPASS, "sat_grpo", RECOMPUTE | {LOSS_MODE: loss, ROLLOUT_IS: "token"})
    assert DECLARED not in text, "it must not offer what it refuses"
    assert "correction=none" in text


# Correction weights and rejection.


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "sat_grpo", "sat_gspo"])
@pytest.mark.parametrize(
    ("setting", "value"), [(ROLLOUT_IS, "token"), (ROLLOUT_IS, "sequence"), (ROLLOUT_RS, "seq_mean_k1")]
)
def test_no_correction_on_top_of_a_rollout_denominator(algorithm, setting, value):
    assert "twice" in refused(setting, algorithm, {setting: value})


def test_verls_own_bypass_loss_has_its_own_correction():
    own = ACTOR + "policy_loss.rollout_correction"
    loss_type = CORRECTION + "loss_type"
    loss = {LOSS_MODE: "bypass_mode"}
    passes("grpo", loss | {own: {"rollout_is": "token", "loss_type": "reinforce"}})
    refused(ROLLOUT_IS, "grpo", loss | {ROLLOUT_IS: "token"})
    assert "does not read it" in refused(loss_type, "grpo", loss | {loss_type: "reinforce"})


def test_a_correction_needs_the_rollouts_log_probs():
    corrected = {LOSS_MODE: "gpg", BYPASS: False, ROLLOUT_IS: "token"}
    passes("grpo", corrected)
    assert f"set {LOG_PROBS}=true" in refused(ROLLOUT_IS, "grpo", corrected | {LOG_PROBS: False})


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({ROLLOUT_IS: "tokens"}, "rollout_is: tokens"),
        ({ROLLOUT_IS: "token", CORRECTION + "rollout_is_threshold": -1}, "rollout_is_threshold"),
        ({ROLLOUT_IS: "token", ROLLOUT_RS: "token_k1"}, "rollout_rs_threshold must be"),
    ],
)
def test_a_correction_that_verl_would_refuse_later_is_refused_now(settings, part):
    with pytest.raises(ConfigError, match=part):
        ratio_guards.correction_values(config("grpo", RECOMPUTE | settings))


# Router replay.

FSDP_MODE = ACTOR + "fsdp_config.router_replay.mode"
RETURNED = ROLLOUT + "enable_rollout_routing_replay"
R3 = {FSDP_MODE: "R3", RETURNED: True, "model.name": "tiny_moe"}
TOP_2 = {"num_experts_per_tok": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize("engine", ["megatron", "fsdp_config", "veomni"])
def test_r2_needs_the_recompute_that_bypass_leaves_out(engine):
    setting = f"{ACTOR}{engine}.router_replay.mode"
    assert BYPASS in refused(setting, "grpo", {setting: "R2"})
    passes("grpo", {setting: "disabled"})


def test_fsdp2_replays_the_rollouts_routes_and_no_others():
    passes("grpo", R3)
    assert "records no routes" in refused(FSDP_MODE, "grpo", R3 | {FSDP_MODE: "R2", LOSS_MODE: "gpg", BYPASS: False})


def test_verls_own_fsdp_engine_replays_no_routes():
    from verl.workers.engine.fsdp import transformer_impl

    with open(transformer_impl.__file__) as source:
        assert "router_replay" not in source.read(), "verl's FSDP engine replays routes now: sat_verl.routing may go"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (RETURNED, False),
        (ACTOR + "strategy", "fsdp"),
        (ACTOR + "fsdp_config.ulysses_sequence_parallel_size", 2),
        ("actor_rollout_ref.model.enable_activation_offload", True),
    ],
)
def test_r3_is_refused_where_it_cannot_work(setting, value):
    assert "routing_replay=none" in refused(setting, "grpo", R3 | {setting: value})


def test_r3_of_an_engine_that_does_not_run_is_refused():
    setting = ACTOR + "megatron.router_replay.mode"
    assert "does not read it" in refused(setting, "grpo", {setting: "R3", RETURNED: True})


@pytest.mark.parametrize(
    ("described", "dense"),
    [
        ({}, True),
        ({"num_experts": 8} | TOP_2, False),
        ({"num_local_experts": 8} | TOP_2, False),
        ({"text_config": {"num_experts": 8} | TOP_2}, False),
        ({"text_config": {}, "n_routed_experts": None}, True),
    ],
)
def test_r3_needs_a_model_with_experts(described, dense, tmp_path):
    assert "tiny" in refused("model", "grpo", R3 | {"model.name": "tiny"})
    (tmp_path / "config.json").write_text(json.dumps(described))
    settings = R3 | {"model.name": "hf", "model.path": str(tmp_path)}
    if dense:
        assert "dense" in refused("model", "grpo", settings)
    else:
        passes("grpo", settings)


def routing(*overrides):
    return derive(compose(["model=tiny_moe", "run_dir=/tmp/x", *overrides]))


def test_one_setting_switches_replay_on():
    from verl.utils.config import omega_conf_to_dataclass

    from sat_verl.routing.config import RouterReplayConfig

    cfg = routing("routing_replay=r3", "routing_replay.compare=true", "routing_replay.incomplete=fail")
    for one in ratio_guards.CHECKS:
        one(cfg)
    assert cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    options = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor.fsdp_config).router_replay
    assert isinstance(options, RouterReplayConfig)
    assert (options.mode, options.compare, options.incomplete) == ("R3", True, "fail")
    off = routing()
    assert OmegaConf.select(off, FSDP_MODE) is None
    assert off.actor_rollout_ref.rollout.enable_rollout_routing_replay is False


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["routing_replay=r2"], "routing_replay.mode"),
        (["routing_replay=true"], "routing_replay.mode"),
        (["routing_replay=r3", "routing_replay.compare=1"], "routing_replay.compare"),
        (["routing_replay=r3", "routing_replay.incomplete=drop"], "routing_replay.incomplete"),
        (["routing_replay=r3", f"+{FSDP_MODE}=R2"], FSDP_MODE),
    ],
)
def test_settings_of_replay_out_of_range_are_refused(overrides, setting):
    with pytest.raises(ConfigError) as caught:
        routing(*overrides)
    assert caught.value.setting == setting


# Sampling.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.95),
        ("top_p", "abc"),
        ("top_k", 50),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("temperature", 0),
        ("temperature", -1),
        ("temperature", 0.005),
        ("temperature", "abc"),
        ("temperature", float("nan")),
        ("temperature", None),
        ("logprobs_mode", "raw_logits"),
        ("engine_kwargs.vllm.logprobs_mode", "processed_logits"),
    ],
)
def test_the_rollout_samples_from_the_trainers_policy(name, value):
    refused(ROLLOUT + name, "grpo", {ROLLOUT + name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0},
        {"top_k": None},
        {"top_p": 1},
        {"min_p": 0, "repetition_penalty": 1.0},
        {"temperature": 0.7},
        {"logprobs_mode": "raw_logprobs"},
        {"val_kwargs.top_p": 0.7, "val_kwargs.temperature": 0},
    ],
)
def test_neutral_sampling_and_any_validation_pass(settings):
    passes("grpo", {ROLLOUT + name: value for name, value in settings.items()})


def test_a_temperature_needs_log_probs_recorded_after_it():
    raw = ROLLOUT + "logprobs_mode"
    refused(raw, "grpo", {raw: "raw_logprobs", ROLLOUT + "temperature": 0.7})


def test_verls_trainer_divides_the_logits_by_the_temperature():
    """What makes a temperature other than 1 exact; a verl that no longer does would make it silently wrong."""
    from verl.workers.engine.fsdp import transformer_impl

    logits, temperature = torch.tensor([[2.0, 4.0]]), torch.tensor([[0.5]])
    scaled = transformer_impl._scale_logits_by_temperature(logits, temperature, is_unit_temperature=False)
    assert torch.equal(scaled, torch.tensor([[4.0, 8.0]]))


# Sequence radii.


@pytest.mark.parametrize("name", [ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"])
@pytest.mark.parametrize("algorithm", ["gspo_canonical", "gspo", "sat_gspo"])
def test_wide_radii_on_a_sequence_ratio_must_be_asked_for(algorithm, name):
    narrow = {ACTOR + "clip_ratio_low": 0.04, ACTOR + "clip_ratio_high": 0.04}
    wide = narrow | {name: 0.05}
    passes(algorithm, narrow | {WIDE: False})
    assert f"{WIDE}=true" in refused(name, algorithm, wide | {WIDE: False})
    passes(algorithm, wide | {WIDE: True})


def test_canonical_gspo_keeps_narrow_radii():
    refused(ACTOR + "clip_ratio_high", "gspo_canonical", {ACTOR + "clip_ratio_high": 0.2})


def test_a_sequence_loss_named_by_hand_has_the_same_rule():
    refused(ACTOR + "clip_ratio_low", "grpo", {LOSS_MODE: "gspo"})
    passes("grpo", {LOSS_MODE: "geo_mean"})
