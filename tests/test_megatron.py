"""verl's Megatron engine on the CPU: the numbers of FSDP2, however its ranks are split, with and without replay."""

import functools
import itertools

import megatron_ranks
import pytest
import torch
from megatron_ranks import CASES, LAYOUTS
from omegaconf import OmegaConf

from recipes import guards, megatron, resume
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from sat_verl.cpu.megatron.config import CpuMcoreEngineConfig
from sat_verl.cpu.megatron.layers import causal_by_sequence, name_in_transformer_engine

ENGINE = "actor_rollout_ref.actor.megatron."
STRATEGY = "actor_rollout_ref.actor.strategy"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
VIRTUAL = ENGINE + "virtual_pipeline_model_parallel_size"
OPTIM = "actor_rollout_ref.actor.optim."
RUNS = [(layout, case) for layout, (_, _, _, cases) in LAYOUTS.items() for case in cases]
every_run = pytest.mark.parametrize(("layout", "case"), RUNS)
slow = [pytest.mark.slow, pytest.mark.timeout(600)]


def found(layout, case):
    results = megatron_ranks.results()
    return results[layout][case], results["fsdp"][case]


def test_the_worlds_are_those_of_the_readme():
    """One rank; and two that share the batch, the matrices (and the sequences), the experts, or the layers."""
    splits = {name: {k.split("_")[0]: v for k, v in engine.items()} for name, (_, engine, _, _) in LAYOUTS.items()}
    assert [name for name, (world, *_) in LAYOUTS.items() if world == 2] == ["data", "tensor", "expert", "pipeline"]
    assert splits["tensor"] == {"tensor": 2}
    assert splits["expert"] == {"expert": 2}
    assert splits["pipeline"] == {"pipeline": 2}


class TestSteps:
    pytestmark = slow

    @every_run
    def test_gradients_are_those_of_fsdp(self, layout, case):
        ours, fsdp = found(layout, case)
        gradient, expected = ours["gradient"], fsdp["gradient"]
        assert set(gradient) == set(expected)
        norm = torch.cat([value.flatten() for value in expected.values()]).norm()
        for name, value in expected.items():
            # What is lost in the difference of two weights of about 1, and in sums of another order.
            assert (gradient[name] - value).abs().max() < 1e-6, name
            assert value.norm() == 0 or (gradient[name] - value).norm() < 2e-4 * value.norm(), name
        total = torch.cat([(gradient[name] - value).flatten() for name, value in expected.items()]).norm()
        assert total < 3e-6 * norm
        assert norm > 0.5

    @every_run
    def test_weights_are_the_checkpoints_bit_for_bit(self, layout, case):
        results = megatron_ranks.results()
        held = results["samples"]["weights"][CASES[case][0]]
        assert set(held) == set(results[layout][case]["before"])
        for name, value in results[layout][case]["before"].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, held[name]), name

    @every_run
    def test_log_probs_are_those_of_fsdp(self, layout, case):
        ours, fsdp = found(layout, case)
        rows = list(itertools.chain.from_iterable(ours["all_log_probs"]))
        assert len(rows) == len(fsdp["log_probs"])
        for mine, theirs in zip(rows, fsdp["log_probs"], strict=True):
            torch.testing.assert_close(mine[:-1], theirs[:-1], atol=3e-6, rtol=0)  # the last row predicts nothing

    @every_run
    def test_metrics_are_those_of_fsdp(self, layout, case):
        ours, fsdp = found(layout, case)
        for metrics in ours["all_metrics"]:
            assert metrics["loss"] == pytest.approx(fsdp["metrics"]["loss"], abs=1e-6)
            assert metrics["grad_norm"] == pytest.approx(fsdp["metrics"]["grad_norm"], rel=1e-5)
            for name, value in fsdp["metrics"].items():
                if name.startswith("actor/log_ratio_tail"):
                    assert metrics[name][0][0] == pytest.approx(value[0][0], abs=3e-6), name
                elif name.startswith("actor/routing/") and not name.endswith("seconds"):
                    assert all(rank == value[0] for rank in metrics[name]), name
        if LAYOUTS[layout][0] == 1:
            for name in ("actor/sat/q", "actor/sat/gate_rate", "actor/sat/intercepted", "actor/pg_clipfrac"):
                got, expected = (list(itertools.chain(*one["metrics"][name])) for one in (ours, fsdp))
                assert len(got) == len(expected)
                assert sum(got) == pytest.approx(sum(expected), abs=1e-5), name

    @pytest.mark.parametrize("layout", ["one rank", "data", "tensor", "expert", "pipeline"])
    def test_replay_is_counted_over_all_ranks(self, layout):
        metrics = found(layout, "moe, replayed")[0]["all_metrics"][0]
        assert metrics["actor/routing/incomplete_tokens"][0] == [3.0]
        assert metrics["actor/routing/last_tokens"][0] == [7.0]
        # Routes drawn at random differ nearly everywhere; each token without a route lacks it in both layers.
        assert metrics["actor/routing/differing"][0][0] > 0.9
        assert 0.03 < metrics["actor/routing/native"][0][0] < 0.06

    def test_replay_changes_the_step(self):
        results = megatron_ranks.results()["one rank"]
        for name in ("gradient", "metrics"):
            assert str(results["moe"][name]) != str(results["moe, replayed"][name])

    @pytest.mark.parametrize("kind", ["dense", "moe"])
    def test_a_loaded_checkpoint_goes_on_bit_for_bit(self, kind):
        saved = megatron_ranks.results()["checkpoint"][kind]
        for name, value in saved["saved"].items():
            assert torch.equal(saved["loaded"][name], value), name
            assert torch.equal(saved["exported"][name], value), name
            assert torch.equal(saved["resumed"][name], saved["expected"][name]), name
        # Also by the first of two engines that replay in one process.
        assert ("actor/routing/differing" in saved["metrics"]) == (kind == "moe")
        assert any(not torch.equal(saved["saved"][name], value) for name, value in saved["expected"].items())
        assert set(saved["exported"]) == set(saved["saved"])

    def test_incomplete_routes_can_be_refused(self):
        refusal = dict(megatron_ranks.results()["refusal"])
        assert set(refusal) == {"update", "recompute", "layers"}
        assert "routes of 3 layers" in refusal.pop("layers")
        for text in refusal.values():
            assert "3 tokens of a batch have no complete route" in text

    def test_every_patch_is_needed(self):
        """A patch named here can go: without it all goes well."""
        assert megatron_ranks.results()["unneeded"] == []


def test_names_of_transformer_engines_layers():
    moe = {"decoder.layers.1"}
    for local, there in {
        "decoder.layers.0.input_layernorm.weight": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight": (
            "decoder.layers.1.mlp.experts.linear_fc2.weight7"
        ),
        "decoder.layers.1.mlp.router.weight": "decoder.layers.1.mlp.router.weight",
        "output_layer.weight": "output_layer.weight",
    }.items():
        assert name_in_transformer_engine(local, moe, first_expert=4) == there


def test_packed_attention_is_causal_within_each_sequence():
    generator = torch.Generator().manual_seed(0)
    bounds, heads, groups, size = [0, 3, 4, 9], 4, 2, 8
    query = torch.randn(11, heads, size, generator=generator)
    key, value = (torch.randn(11, groups, size, generator=generator) for _ in range(2))
    got = causal_by_sequence(query, key, value, bounds, 0.3)
    assert got.shape == query.shape
    assert not got[9:].any()
    for begin, end in itertools.pairwise(bounds):
        for row, head in itertools.product(range(begin, end), range(heads)):
            group = head * groups // heads
            weights = (0.3 * key[begin : row + 1, group] @ query[row, head]).softmax(0)
            torch.testing.assert_close(got[row, head], weights @ value[begin : row + 1, group])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_engines_config_keeps_its_dtype(dtype):
    assert CpuMcoreEngineConfig(dtype=dtype, vanilla_mbridge=False).dtype == dtype
    with pytest.raises(ValueError, match="float64"):
        CpuMcoreEngineConfig(dtype="float64")


@functools.cache  # a second each
def composed(*presets):
    return compose(["run_dir=/tmp/x", *presets])


def checked(settings, *presets):
    cfg = composed(*(presets or ["backend=cpu_megatron"])).copy()
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    derive(cfg)
    for check in (guards.support, megatron.check, guards.sizes):
        check(cfg)
    return cfg


@pytest.mark.parametrize(
    ("setting", "settings", "presets"),
    [
        ("trainer_ranks", {ENGINE + "tensor_model_parallel_size": 2}, []),
        (ENGINE + "tensor_model_parallel_size", {ENGINE + "tensor_model_parallel_size": 0}, []),
        (ENGINE + "expert_model_parallel_size", {ENGINE + "expert_model_parallel_size": 2}, []),
        (ENGINE + "context_parallel_size", {ENGINE + "context_parallel_size": 2, "trainer_ranks": 2}, []),
        (ENGINE + "vanilla_mbridge", {ENGINE + "vanilla_mbridge": False}, []),
        (ENGINE + "use_remove_padding", {ENGINE + "use_remove_padding": False}, []),
        # What the worker reads.
        ("actor_rollout_ref.model.use_remove_padding", {"actor_rollout_ref.model.use_remove_padding": False}, []),
        ("actor_rollout_ref.model.use_fused_kernels", {"actor_rollout_ref.model.use_fused_kernels": True}, []),
        (
            ENGINE + "expert_tensor_parallel_size",
            {
                ENGINE + "expert_tensor_parallel_size": 1,
                ENGINE + "tensor_model_parallel_size": 2,
                ENGINE + "expert_model_parallel_size": 2,
                "trainer_ranks": 2,
            },
            [],
        ),
        (VIRTUAL, {VIRTUAL: 2}, []),
        (MICRO, {VIRTUAL: 2, ENGINE + "pipeline_model_parallel_size": 2, "trainer_ranks": 2}, []),
        (MICRO, {MICRO: 48}, []),
        ("algorithm", {}, ["backend=cpu_megatron", "algorithm=ppo"]),
        (STRATEGY, {STRATEGY: "megatron"}, ["backend=cpu"]),
    ],
)
def test_what_cannot_work_is_refused(setting, settings, presets):
    with pytest.raises(ConfigError) as caught:
        checked(settings, *presets)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)


def test_an_interleaved_pipeline_is_accepted():
    checked({VIRTUAL: 2, ENGINE + "pipeline_model_parallel_size": 2, "trainer_ranks": 2, MICRO: 64})


@pytest.mark.parametrize(
    ("settings", "decay"),
    [
        ({}, 10**9),
        ({"lr_warmup_steps": -1}, 10**9),
        ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}, 40),
        ({"lr_decay_style": "cosine"}, 40),
        ({"lr_decay_style": "cosine", "lr_decay_steps": 30}, 30),
    ],
)
def test_the_learning_rate_ends_with_the_run(settings, decay):
    """verl takes the warm-up as a share of the decay steps, and decays over them."""
    cfg = checked({OPTIM + name: value for name, value in settings.items()})
    assert OmegaConf.select(cfg, OPTIM + "lr_decay_steps") == decay


@pytest.mark.parametrize(("style", "may"), [("constant", True), ("cosine", False)])
def test_a_run_can_be_resumed_and_made_longer(style, may):
    cfg = composed("backend=cpu_megatron").copy()
    OmegaConf.update(cfg, OPTIM + "lr_decay_style", style)
    earlier, cfg.steps = cfg.copy(), 2 * cfg.steps
    resume._check_steps(earlier, earlier)
    if may:
        resume._check_steps(cfg, earlier)
    else:
        with pytest.raises(ConfigError, match="learning-rate schedule"):
            resume._check_steps(cfg, earlier)


def test_ranks_of_one_model_share_its_samples():
    split = {ENGINE + "tensor_model_parallel_size": 2, "trainer_ranks": 2}
    assert OmegaConf.select(checked(split), MICRO) == 16 * 8
    assert OmegaConf.select(checked({"trainer_ranks": 2}), MICRO) == 8 * 8


@pytest.mark.parametrize(
    ("part", "changes", "settings"),
    [
        ("norm_topk_prob", {"norm_topk_prob": False}, {}),
        ("mlp_only_layers", {"mlp_only_layers": [0]}, {}),
        ("8 experts", {}, {ENGINE + "expert_model_parallel_size": 3}),
        ("2 key-value heads", {}, {ENGINE + "tensor_model_parallel_size": 4}),
        ("2 layers", {}, {ENGINE + "pipeline_model_parallel_size": 3}),
        ("1 layers of a stage", {}, {ENGINE + "pipeline_model_parallel_size": 2, VIRTUAL: 2}),
        (None, {}, {ENGINE + "expert_model_parallel_size": 4}),
    ],
)
def test_models_that_would_be_read_as_others_are_refused(tmp_path, part, changes, settings):
    from transformers import Qwen3MoeConfig

    from recipes.models.architectures import ARCHITECTURES

    Qwen3MoeConfig(**{**ARCHITECTURES["tiny_moe"], **changes}).save_pretrained(tmp_path)
    cfg = composed("backend=cpu_megatron").copy()
    for key, value in {**settings, "actor_rollout_ref.model.path": str(tmp_path)}.items():
        OmegaConf.update(cfg, key, value)
    if part is None:
        megatron.check_model(cfg)
        return
    with pytest.raises(ConfigError, match=part):
        megatron.check_model(cfg)
