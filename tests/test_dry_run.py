"""A dry run refuses what the real run would, says in words what cannot be checked here, and leaves nothing behind."""

import functools
import json
from io import StringIO

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from recipes import dry_run, guards, launch, resume, routing, values
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from recipes.models.published import PUBLISHED, UnknownModelError, describe, read
from recipes.plan.find import find
from recipes.plan.settings import settings_of
from sat_verl.routes import router_of

SMALL, PAPER = "qwen2.5_1.5b_fsdp_vllm", "qwen3_30b_a3b_megatron_vllm"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref"))
OPTIM = ACTOR + "optim."
RECOMPUTE = ACTOR + "megatron.override_transformer_config.recompute_num_layers"
DENSE = dict(PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"])
EXPERTS = dict(PUBLISHED["Qwen/Qwen3-30B-A3B-Base"])


@functools.cache
def composed(recipe):
    return compose([f"recipe={recipe}"])


@functools.cache
def derived(recipe):
    return derive(composed(recipe).copy())


def changed(settings, recipe=SMALL):
    cfg = composed(recipe).copy()
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def checked(settings, recipe=SMALL):
    cfg = derive(changed(settings, recipe))
    guards.check_config(cfg)
    return cfg


def refused(settings, setting, recipe=SMALL):
    with pytest.raises(ConfigError) as caught:
        checked(settings, recipe)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "out"),
    [
        ("trainer.n_gpus_per_node", [0, 3, None]),
        ("trainer.nnodes", [-1, 0, 1.5, None, True]),
        (ROLLOUT + "nnodes", [-1, 0, 1.5, None]),
        (ROLLOUT + "gpu_memory_utilization", [0, -0.1, 1.01, "abc", None]),
        (ROLLOUT + "max_num_seqs", [0, -1, 1.5, "abc"]),
        (ROLLOUT + "max_num_batched_tokens", [0, 1, 255, "abc"]),
        (ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes", [0, "abc", None]),
        (ACTOR + "fsdp_config.fsdp_size", [0, -2, "abc", 1.5, None]),
        (REF + "fsdp_config.fsdp_size", [0]),
        (ACTOR + "fsdp_config.model_dtype", ["float64", 8]),
        (ACTOR + "ulysses_sequence_parallel_size", [0, -1, 1.5, "a", None]),
        (OPTIM + "betas", [None, [0.9], [0.9, 1.0], ["a", "b"], 0.9]),
        (REF + "log_prob_micro_batch_size_per_gpu", [0, "a", -8]),
    ],
)
def test_settings_out_of_range_are_refused(key, out):
    out_of_range(SMALL, key, out)


def out_of_range(recipe, key, out):
    cfg = derived(recipe).copy()
    for value in out:
        OmegaConf.update(cfg, key, value, force_add=True)
        with pytest.raises(ConfigError) as caught:
            values.check(cfg)
        assert caught.value.setting == key


@pytest.mark.parametrize(
    ("key", "out"),
    [
        (OPTIM + "override_optimizer_config.optimizer_offload_fraction", [-0.1, 5, "a"]),
        (OPTIM + "betas", [None, [0.9]]),
        (RECOMPUTE, [0, -1, "a"]),
        ("trainer.n_gpus_per_node", [3]),
    ],
)
def test_with_megatron_too(key, out):
    out_of_range(PAPER, key, out)


def test_groups_of_ranks_divide_them():
    four = {"trainer_ranks": 4}
    refused(four | {ACTOR + "fsdp_config.fsdp_size": 3}, ACTOR + "fsdp_config.fsdp_size")
    for size in (-1, 1, 2, 4, 8):  # verl makes one group of all ranks of one that is larger
        checked(four | {ACTOR + "fsdp_config.fsdp_size": size})


def test_settings_at_the_ends_of_their_ranges_pass():
    checked({ROLLOUT + "gpu_memory_utilization": 1, ROLLOUT + "max_num_seqs": 1, ROLLOUT + "max_num_batched_tokens": 1})
    # verl raises the tokens of a step to a whole sequence.
    checked({ROLLOUT + "enable_chunked_prefill": False, ROLLOUT + "max_num_batched_tokens": 1})
    checked({ACTOR + "fsdp_config.model_dtype": "bf16", REF + "log_prob_micro_batch_size_per_gpu": None})
    checked({"trainer.nnodes": 2, "trainer_ranks": 2, ROLLOUT + "nnodes": 2, "rollout_replicas": 2})
    fraction = OPTIM + "override_optimizer_config.optimizer_offload_fraction"
    for share in (0, 0.5, 1):
        checked({fraction: share}, PAPER)


def test_the_range_of_a_steps_tokens_is_vllms():
    from vllm.config import SchedulerConfig

    limits = {"max_model_len": 2048, "is_encoder_decoder": False, "enable_chunked_prefill": True}
    SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=256, **limits)
    with pytest.raises(ValueError, match="greater than or equal to max_num_seqs"):
        SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=255, **limits)


# Data, trackers, folders


def findings(cfg, number):
    """The first findings of a dry run, before verl is imported."""
    return {one.name: one for one, _ in zip(dry_run.findings(cfg), range(number), strict=False)}


def test_a_train_file_of_null_is_refused():
    for settings in ({"task.train_file": None}, {"task.train_file": None, "task.test_file": "/absent.parquet"}):
        with pytest.raises(ConfigError, match=r"task\.train_file=null"):
            list(dry_run._data(derive(changed(settings))))


def test_a_missing_model_folder_is_named_beside_a_missing_train_file(tmp_path):
    cfg = derive(changed({"model.path": str(tmp_path / "absent"), "task.train_file": str(tmp_path / "a.parquet")}))
    with pytest.raises(ConfigError, match="absent: there is no such folder"):
        findings(cfg, 4)


def test_trackers_are_checked(monkeypatch):
    for value in (["console", "nothing"], None):
        with pytest.raises(ConfigError) as caught:
            findings(derive(changed({"trainer.logger": value})), 6)
        assert caught.value.setting == "trainer.logger"
    assert findings(derive(changed({})), 5)["trackers"].state == "ok"
    monkeypatch.setattr("recipes.trackers.importlib.util.find_spec", lambda name: None)
    found = findings(derive(changed({"trainer.logger": ["console", "swanlab"]})), 5)["trackers"]
    assert (found.state, found.text) == ("note", "swanlab: its package swanlab is not installed")


@pytest.fixture
def earlier(tmp_path):
    """A run that has begun."""
    run = derive(changed({"run_dir": str(tmp_path / "run")}))
    (tmp_path / "run").mkdir()
    OmegaConf.save(run, tmp_path / "run" / resume.CONFIG_FILE, resolve=True)
    return tmp_path / "run"


def test_a_resumed_run_must_be_the_same(earlier):
    words = {"run_dir": str(earlier), "resume": str(earlier)}
    assert findings(derive(changed(words)), 6)["resume"].state == "ok"
    for key, value in (("steps", 3), ("seed", 7), (OPTIM + "lr", 1e-3)):
        with pytest.raises(ConfigError) as caught:
            findings(derive(changed(words | {key: value})), 6)
        assert caught.value.setting == key


def test_only_a_new_run_that_is_named_gets_a_plan_file(earlier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "findings", lambda cfg: ())  # checked elsewhere; here only what is written

    def left(**settings):
        launch.run(changed({"dry_run": True, **settings}), console=Console(file=StringIO()))
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    before = left()
    assert before == ["run/config.yaml"]
    assert left(run_dir=str(earlier), resume=str(earlier)) == before
    assert left(run_dir="new") == ["new/plan.json", *before]


# Models


def folder(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return {"model.path": str(tmp_path)}


@pytest.mark.parametrize(
    "content",
    [
        b'{"hidden_size": 6',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        [1],
        None,
        "text",
        DENSE | {"text_config": "abc"},
        *(DENSE | change for change in ({"num_attention_heads": 0}, {"num_attention_heads": "12"})),
        *(DENSE | change for change in ({"num_hidden_layers": -2}, {"hidden_size": 1536.0}, {"vocab_size": True})),
        {"text_config": DENSE | {"num_key_value_heads": "2"}},
        EXPERTS | {"num_experts": "many"},
        EXPERTS | {"mlp_only_layers": 3},
        {"num_experts": 8, "num_experts_per_tok": 2},
    ],
)
def test_a_broken_config_of_a_model_is_named(tmp_path, content):
    refused(folder(tmp_path, content), "model")


def test_transformers_takes_no_byte_order_mark_either(tmp_path):
    from transformers import PretrainedConfig

    folder(tmp_path, b"\xef\xbb\xbf" + json.dumps(DENSE).encode())
    with pytest.raises(OSError, match="valid JSON"):
        PretrainedConfig.get_config_dict(str(tmp_path))


def test_the_text_part_of_a_model_is_read(tmp_path):
    nested = {"model_type": "gemma3", "text_config": {**DENSE, "max_position_embeddings": 1024}}
    settings = folder(tmp_path, nested)
    refused(settings, "data.max_response_length")
    found = describe(changed(settings)).numbers
    assert (found["num_hidden_layers"], found["model_type"]) == (28, "qwen2")
    assert "text_config" not in found
    settings = folder(tmp_path, DENSE | {"text_config": None})
    assert find(checked(settings)).layers == 28


def test_sizes_that_differ_by_layer_are_no_error(tmp_path):
    folder(tmp_path, DENSE | {"intermediate_size": [8960] * 28, "head_dim": None})
    assert "intermediate_size" not in read(tmp_path / "config.json")


@pytest.mark.parametrize(
    "change",
    [{"model_type": "no_such_family"}, {"model_type": None}, {"model_type": "t5"}, {"num_hidden_layers": None},
     {"model_type": "phi3", "head_dim": None, "rope_scaling": 3}, {"model_type": ["qwen2"]}],
)  # fmt: skip
def test_a_model_that_cannot_be_counted_is_said_to_be_so(tmp_path, change):
    cfg = checked(folder(tmp_path, DENSE | change))
    with pytest.raises(UnknownModelError) as caught:
        find(cfg)
    assert "\n" not in str(caught.value)


def test_a_head_size_of_null_is_the_usual_one(tmp_path):
    assert find(checked(folder(tmp_path, DENSE | {"head_dim": None}))).head_dim == 128


def test_a_dry_run_of_an_unknown_model_asks_no_hub_and_ends_well(tmp_path, monkeypatch):
    import socket

    def connect(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.chdir(tmp_path)
    out = StringIO()
    launch.run(changed({"model.path": "somebody/something", "dry_run": True}), console=Console(file=out, width=200))
    assert "not checked plan: not made: somebody/something" in out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_layers_are_all_dense_replays_no_routes(tmp_path):
    some = EXPERTS | {"mlp_only_layers": [0, 1]}
    assert router_of(some).layers == 48
    for dense in ({"mlp_only_layers": list(range(48))}, {"decoder_sparse_step": 49}):
        assert router_of(EXPERTS | dense) is None
        cfg = changed(folder(tmp_path, EXPERTS | dense) | {"routing_replay.mode": "r3"})
        with pytest.raises(ConfigError, match="mixture-of-experts"):
            routing.check(derive(cfg))
    # mbridge reads no mlp_only_layers, whether some layers are dense or all.
    changes = {ACTOR + "megatron.vanilla_mbridge": True, "routing_replay.mode": "none"}
    refused(folder(tmp_path, EXPERTS | {"mlp_only_layers": list(range(48))}) | changes, "model", PAPER)


# The plan's assumptions


@pytest.mark.parametrize(
    ("key", "out"),
    [
        ("train_mfu", [0, [], 5, float("inf"), float("nan")]),
        ("decode_efficiency", [1.5, [0.5, 1.5], 0]),
        ("step_floor_ms", [1e308]),
        ("sync_gb_per_s", [1e-320]),
        ("gpu", [["h100"], 3, ""]),
    ],
)
def test_assumptions_out_of_range_are_refused(key, out):
    cfg, model = changed({}), find(changed({}))
    for value in out:
        OmegaConf.update(cfg, f"plan.{key}", value)
        with pytest.raises(ConfigError) as caught:
            settings_of(cfg, model)
        assert caught.value.setting == f"plan.{key}"


@pytest.mark.parametrize("value", [3, [1], "abc"])
def test_a_plan_is_a_group_of_settings(value):
    cfg = changed({})
    model = find(cfg)
    cfg.plan = value
    with pytest.raises(ConfigError, match="group of settings"):
        settings_of(cfg, model)
