"""``routing_replay``: both sides of it or none, refused where there is nothing to replay, its cost said beforehand."""

import json

import pytest
from omegaconf import OmegaConf

from recipes import guards, ratio_guards, routing
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from sat_verl.routes import Router

FSDP = "actor_rollout_ref.actor.fsdp_config.router_replay"
MEGATRON = "actor_rollout_ref.actor.megatron.router_replay"
VEOMNI = "actor_rollout_ref.actor.veomni.router_replay"
MOE = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "model_type": "qwen3_moe"}


def checked(*overrides):
    cfg = derive(compose(["run_dir=/tmp/x", *overrides]))
    routing.check(cfg)
    return cfg


def refused(setting, *overrides):
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_among_the_guard_rails():
    assert routing.check in guards.CHECKS
    assert routing.check in ratio_guards.CHECKS


def test_none_is_the_default_and_leaves_verl_alone():
    cfg = checked("model=tiny_moe")
    assert cfg.routing_replay == {"mode": "none", "incomplete": "native", "compare": False}
    assert not cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert OmegaConf.select(cfg, FSDP) is None


@pytest.mark.parametrize("words", ["routing_replay=null", "routing_replay=none", "routing_replay.mode=null"])
def test_null_and_none_are_off(words):
    cfg = checked("model=tiny", words)
    assert cfg.routing_replay.mode == "none"
    assert not cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert routing.plan(cfg) is None


@pytest.mark.parametrize("words", ["routing_replay=r3", "routing_replay.mode=r3", "routing_replay={mode:r3}"])
def test_short_and_long_form_are_the_same(words):
    assert checked("model=tiny_moe", words).routing_replay == {"mode": "r3", "incomplete": "native", "compare": False}


def test_r3_turns_on_rollout_and_trainer():
    cfg = checked("model=tiny_moe", "routing_replay=r3")
    assert cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    expected = {"_target_": routing.TARGETS["fsdp_config"], "mode": "R3", "incomplete": "native", "compare": False}
    assert OmegaConf.select(cfg, FSDP) == expected


def test_what_is_set_by_hand_must_agree():
    options = ["routing_replay=r3", "routing_replay.compare=true", f"+{FSDP}.compare=true", f"+{FSDP}.mode=R3"]
    assert OmegaConf.select(checked("model=tiny_moe", *options), FSDP).compare is True
    assert "routing_replay.compare" in refused(FSDP + ".compare", "model=tiny_moe", options[0], options[2])


def test_another_engines_mode_is_its_own():
    cfg = checked("model=tiny_moe", "routing_replay=r3", "actor_rollout_ref.actor.strategy=veomni")
    assert OmegaConf.select(cfg, VEOMNI) == {"_target_": routing.VERL_TARGET, "mode": "R3"}
    assert OmegaConf.select(cfg, FSDP) is None
    moe = ("model=tiny_moe", "routing_replay=r3")
    assert "torchtitan" in refused("routing_replay", *moe, "actor_rollout_ref.actor.strategy=torchtitan")


def test_megatrons_replay_is_watched():
    options = ["routing_replay=r3", "routing_replay.compare=true", "routing_replay.incomplete=fail"]
    found = OmegaConf.select(checked("backend=cpu_megatron", "model=tiny_moe", *options), MEGATRON)
    assert found._target_ == "sat_verl.routing.config.RouterReplayConfig"
    assert (found.mode, found.compare, found.incomplete) == ("R3", True, "fail")


@pytest.mark.parametrize("option", ["compare=true", "incomplete=fail"])
def test_options_that_verls_own_engines_lack_are_refused(option):
    name = "routing_replay." + option.partition("=")[0]
    moe = ("model=tiny_moe", "routing_replay=r3", "actor_rollout_ref.actor.strategy=veomni")
    assert "does not have it" in refused(name, *moe, f"routing_replay.{option}")


@pytest.mark.parametrize("value", ["R3", "r2", "true"])
def test_an_unknown_value_is_refused(value):
    assert "choose none or r3" in refused("routing_replay.mode", "model=tiny_moe", f"routing_replay={value}")


def test_the_group_stays_a_group():
    assert "a group" in refused("routing_replay", "model=tiny_moe", "++routing_replay=r3")


def test_half_a_replay_is_refused():
    assert "would not replay" in refused(routing.ROLLOUT_SWITCH, "model=tiny_moe", f"{routing.ROLLOUT_SWITCH}=true")
    assert "no routes to replay" in refused(FSDP + ".mode", "model=tiny_moe", f"+{FSDP}.mode=R3")
    assert "makes it R3" in refused(FSDP + ".mode", "model=tiny_moe", "routing_replay=r3", f"+{FSDP}.mode=R2")


def test_a_dense_model_is_refused(tmp_path):
    assert "dense" in refused("model", "model=tiny", "routing_replay=r3")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert "dense" in refused("model", f"model={tmp_path}", "routing_replay=r3")
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    checked(f"model={tmp_path}", "routing_replay=r3")


def test_an_engine_without_routes_is_refused():
    moe = ("model=tiny_moe", "routing_replay=r3")
    assert "hf" in refused("actor_rollout_ref.rollout.name", *moe, "actor_rollout_ref.rollout.name=hf")
    key = "actor_rollout_ref.rollout.pipeline_model_parallel_size"
    assert "pipeline" in refused(key, *moe, f"{key}=2")


# --- what it costs


def test_the_payload_in_words():
    found = routing.payload(Router(layers=48, experts=128, top_k=8), tokens=32768, responses=256 * 16)
    assert found == (
        "48 layers x top 8 in uint8: at most 12.6 MB per response of 32768 tokens, 51.5 GB per optimizer step"
    )


def test_a_run_says_it_before_it_starts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    words = [f"model={tmp_path}", "data.max_prompt_length=24", "data.max_response_length=8"]
    assert routing.plan(checked(*words)) is None
    found = routing.plan(checked(*words, "routing_replay=r3"))
    assert found == "48 layers x top 8 in uint8: at most 12.3 kB per response of 32 tokens, 1.57 MB per optimizer step"


def test_a_dense_model_from_the_hub_is_refused_before_anything_starts(tmp_path):
    cfg = checked("model=org/name", "routing_replay=r3")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    cfg.actor_rollout_ref.model.path = str(tmp_path)  # as if it were there now
    with pytest.raises(ConfigError, match="dense"):
        routing.plan(cfg)
