"""The plan of a run: its formulas against real models, optimizers, caches and verl's own counts; nothing on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.compose import choices, compose
from recipes.derive import derive
from recipes.errors import ConfigError
from recipes.models.published import PUBLISHED
from recipes.plan import PLAN_FILE, build, report
from recipes.plan import activations as acts
from recipes.plan.baseline import compare, parent
from recipes.plan.build import Plan
from recipes.plan.find import find, shipped
from recipes.plan.gpus import GPUS
from recipes.plan.layout import Recompute, trainer_of
from recipes.plan.model import Model, built, model_of
from recipes.plan.paper import compared, node
from recipes.plan.quantities import Range, Row, total
from recipes.plan.render import show
from recipes.plan.rollout_layout import rollout_of
from recipes.plan.rollout_memory import cache_bytes, fits
from recipes.plan.settings import settings_of
from recipes.plan.storage import queued
from recipes.plan.trainer_memory import held, state_rows
from recipes.plan.trainer_memory import plan as plan_trainer
from recipes.plan.work import forward_flops
from sat_verl.lag import LagSchedule

ROOT = Path(__file__).parents[1]
KNOWN = {**PUBLISHED, **{entry["names"][0]: entry["config"] for _, entry in shipped().values()}}
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 192, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen2": {
        "model_type": "qwen2",
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", **SMALL},
    "qwen3 with biases": {"model_type": "qwen3", **SMALL, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    "qwen3_moe, some dense": {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "mlp_only_layers": [0]},
    "qwen3_moe, every second": {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "decoder_sparse_step": 2},
}


@lru_cache
def derived(*overrides: str):
    """A derived config, which nothing here changes."""
    return derive(compose(overrides))


def changed(cfg: DictConfig, **values: object) -> DictConfig:
    """A copy with some settings changed; dots are written as two underscores."""
    copy = OmegaConf.merge(cfg, {})
    for name, value in values.items():
        OmegaConf.update(copy, name.replace("__", "."), value, force_add=True)
    return copy


def planned(*overrides: str) -> Plan:
    return build(derived(*overrides), baseline=False)


def small(name: str = "qwen3", **changes: object) -> Model:
    return model_of({**FAMILIES[name], **changes}, name, "this test")


def real(config: dict, dtype: torch.dtype = torch.bfloat16):
    values = {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **values)
    return AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa").train()


@pytest.fixture(scope="module")
def paper() -> tuple:
    return node()


# Parameters


@pytest.mark.parametrize("config", [*KNOWN.values(), *FAMILIES.values()], ids=[*KNOWN, *FAMILIES])
def test_parameters_are_those_of_the_real_model_by_kind(config):
    assert model_of(config, "", "").parameters == built(config)


@pytest.mark.parametrize(
    ("name", "billions", "without_embedding", "active"),
    [
        ("Qwen/Qwen3-30B-A3B-Base", 30.5, 29.9, 3.3),
        ("Qwen/Qwen3-4B-Base", 4.0, 3.6, 4.0),
        ("Qwen2.5-1.5B", 1.54, 1.31, 1.54),
        ("Qwen2.5-0.5B", 0.49, 0.36, 0.49),
    ],
)
def test_parameters_are_those_of_the_model_cards(name, billions, without_embedding, active):
    model = model_of(KNOWN[name], name, "")
    parts = model.parameters
    assert parts.total / 1e9 == pytest.approx(billions, abs=0.05 if billions > 2 else 0.006)
    assert (parts.total - parts.embedding - parts.lm_head) / 1e9 == pytest.approx(without_embedding, abs=0.06)
    assert model.active / 1e9 == pytest.approx(active, abs=0.06)


def test_another_family_is_counted_in_the_modules_of_transformers():
    config = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = model_of(config, "", "")
    assert not model.exact
    assert model.parameters == built(config)
    assert model.parameters.experts == 3 * 4 * 3 * 64 * 192
    assert model.active == model.parameters.total - model.parameters.experts // 2


# Activations and logits


def saved_bytes(config: dict, tokens: int, *, checkpointed: bool) -> int:
    """Bytes of the tensors that torch saves for the backward pass of a model without its head."""
    model = real(config)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_a_layer_saves_what_the_formula_says(name):
    tokens = 64
    one, two = (saved_bytes({**FAMILIES[name], "num_hidden_layers": n}, tokens, checkpointed=False) for n in (1, 2))
    expected = acts.transformers_layer(small(name), 2, experts="moe" in name)
    # Beyond the formula: the experts' token counts, a number per expert and layer.
    assert 0 <= (two - one) - tokens * expected <= 4 * 8


def test_a_checkpointed_layer_saves_its_input():
    tokens = 64
    one, two = (saved_bytes({**FAMILIES["qwen3"], "num_hidden_layers": n}, tokens, checkpointed=True) for n in (1, 2))
    assert two - one == tokens * 2 * 64


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_peak_of_a_step_is_within_the_range(checkpointed):
    """torch's own tracker of a whole forward and backward pass, on tensors without storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    config = {**KNOWN["Qwen2.5-0.5B"], "num_hidden_layers": 2, "vocab_size": 2048}
    tokens = 2048
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = real(config)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros(1, tokens, dtype=torch.long)

        def step() -> None:
            logits = model(input_ids=ids, use_cache=False).logits.squeeze(0)
            torch.log_softmax(logits, dim=-1).gather(-1, ids[0][:, None]).sum().backward()

        step()  # the gradients are there, as FSDP's and Megatron's are
        tracker = MemTracker()
        tracker.track_external(model, ids)
        with tracker:
            step()
        peak = max(tracker.get_tracker_snapshot("peak").values(), key=lambda part: part["Total"])["Total"]
    described = model_of(config, "", "")
    recompute = Recompute("layers") if checkpointed else Recompute()
    trainer = replace(fsdp_trainer(), tokens=tokens, recompute=recompute)
    standing = 2 * 2 * described.parameters.total
    rows = (*acts.rows(described, trainer), acts.logits(described, trainer))
    expected = total(rows)
    # Gradients of one layer and of the head, before they are added.
    high = expected.high + 2 * (described.layer_parameters + 2 * described.head_parameters)
    assert expected.low <= peak - standing <= high


def fsdp_trainer():
    return trainer_of(derived("recipe=qwen3_4b_fsdp_vllm"))


def test_logits_in_bfloat16_take_what_torch_keeps_of_them():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from verl.utils.torch_functional import logprobs_from_logits_v2

    tokens, vocab, hidden = 32, 8192, 8
    with FakeTensorMode():
        head = torch.nn.Linear(hidden, vocab, bias=False, dtype=torch.bfloat16)
        states, labels = (
            torch.zeros(tokens, hidden, dtype=torch.bfloat16, requires_grad=True),
            torch.zeros(tokens).long(),
        )
        tracker = MemTracker()
        tracker.track_external(head, states, labels)
        with tracker:
            logprobs_from_logits_v2(head(states), labels).sum().backward()
        peak = max(part["Total"] for part in tracker.get_tracker_snapshot("peak").values())
    rest = 2 * 2 * hidden * vocab + 2 * 2 * tokens * hidden
    model = replace(small(), vocab=vocab)
    expected = acts.logits(model, replace(fsdp_trainer(), tokens=tokens, fused_logits=False)).size
    assert expected.low <= peak - rest <= expected.high * 1.35  # the tracker rounds every row's tensors up


# Optimizer, shards


def test_weights_gradients_and_adam_take_what_a_real_optimizer_has():
    config = FAMILIES["qwen3"]
    model = real(config, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    trainer = replace(fsdp_trainer(), shards=1, expert_shards=1)
    assert total(state_rows(small(), trainer)).low == sum(tensor.nbytes for tensor in tensors)


def test_fsdp_ranks_hold_their_shards():
    """Rank 0 of 4 in a process group without peers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = real(FAMILIES["qwen3_moe"], torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        own = sum(parameter.to_local().nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    trainer = replace(fsdp_trainer(), shards=4, expert_shards=4)
    assert state_rows(small("qwen3_moe"), trainer)[0].size == Range.exactly(own)


def test_megatron_splits_matrices_and_experts_and_copies_the_rest(paper):
    """The paper's node: TP 4, EP 4, ETP 1, on 4 ranks."""
    _, plan = paper
    parts, rank = plan.model.parameters, held(plan.model, plan.trainer)
    matrices = parts.attention + parts.embedding + parts.lm_head
    assert rank.dense == matrices / 4 + parts.router + parts.norm
    assert rank.experts == parts.experts / 4
    rows = by_name(plan.trainer_memory.standing)
    assert rows["weights"].size.low == 2 * rank.total
    assert rows["gradients"].size.low == 4 * rank.total
    assert rows["optimizer"].size.low == 0  # on the host, where it takes 12 bytes a parameter, and 4 for its gradient
    assert {row.name: row.size.low for row in plan.host}["optimizer on the host"] == 4 * 16 * rank.total


MEGATRON = {
    "dense": ("qwen3", (4, 1, 1, 4)),
    "the paper's split": ("qwen3_moe", (4, 1, 4, 1)),
    "experts over two": ("qwen3_moe", (2, 1, 2, 1)),
    "experts' matrices": ("qwen3_moe", (2, 1, 2, 2)),
    "pipeline": ("qwen3", (2, 2, 1, 2)),
}
"""Family, and tensor, pipeline, expert and expert-tensor sizes on 4 ranks."""


@pytest.mark.slow
def test_a_rank_of_megatron_holds_what_the_plan_says():
    """megatron-core's own models; in a program of its own, for its state is global."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    configs = {name: FAMILIES[family] | sizes for name, (family, _) in MEGATRON.items()}
    question = {name: [configs[name], split] for name, (_, split) in MEGATRON.items()}
    command = [sys.executable, str(ROOT / "tests/megatron_parameters.py"), json.dumps(question)]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    for name, found in json.loads(answer.splitlines()[-1]).items():
        tensor, pipeline, expert, expert_tensor = MEGATRON[name][1]
        split = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
        rank = held(model_of(configs[name], "", ""), replace(fsdp_trainer(), **split))
        # The last norm stands on the last stage alone.
        assert rank.dense == pytest.approx(found["dense"], abs=SMALL["hidden_size"] if pipeline > 1 else 0)
        assert rank.experts == found["experts"]


def test_megatron_adds_6_and_12_by_the_data_parallel_ranks():
    """Megatron Core's table for bfloat16 weights with float32 gradients: 6 + 12 / d bytes a parameter."""
    words = ["recipe=qwen3_4b_fsdp_vllm", "backend=cuda_megatron", "~actor_rollout_ref.ref.fsdp_config"]
    cfg = derived(*words, "actor_rollout_ref.rollout.name=vllm")
    model, trainer = small(), trainer_of(cfg)
    assert (trainer.data, trainer.shards) == (4, 4)
    assert total(state_rows(model, trainer)).low == pytest.approx((6 + 12 / 4) * model.parameters.total)
    optim = dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
    optim["use_precision_aware_optimizer"] = True
    aware = trainer_of(changed(cfg, actor_rollout_ref__actor__optim=optim))
    assert total(state_rows(model, aware)).low == pytest.approx((4 + 8 / 4) * model.parameters.total)


# KV cache


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_kv_cache_is_vllms(tensor):
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    model = model_of(KNOWN["Qwen/Qwen3-30B-A3B-Base"], "", "")
    spec = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=max(1, model.kv_heads // tensor), head_size=model.head_dim, dtype=torch.bfloat16
    )
    rollout = replace(rollout_of(derived("recipe=qwen3_4b_fsdp_vllm")), tensor=tensor)
    assert cache_bytes(model, rollout) == model.layers * spec.page_size_bytes // 16


# Arithmetic


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-4B-Base", "Qwen2.5-0.5B"])
def test_arithmetic_is_verls_without_the_embedding(name, monkeypatch):
    from verl.utils import flops_counter

    monkeypatch.setattr(flops_counter, "get_device_flops", lambda: 1.0)  # asks CUDA for the peak of its device
    config, lengths = KNOWN[name], [100, 100, 100]
    values = {key: value for key, value in config.items() if key != "model_type"}
    theirs, _ = flops_counter.FlopsCounter(AutoConfig.for_model(config["model_type"], **values)).estimate_flops(
        lengths, 1.0
    )
    model = model_of(config, "", "")
    ours = 3 * forward_flops(model, sum(lengths), 100) + 6 * model.head_parameters * sum(lengths)
    assert ours / 1e12 == pytest.approx(theirs, rel=1e-9)


# Whole plans


def _fast_first(names: list[str], *fast: str) -> list:
    """All names, those that are not ``fast`` marked as slow: each composes one or two whole configs."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in names]


@pytest.mark.parametrize("recipe", _fast_first(choices("recipe"), "qwen2.5_0.5b_fsdp_vllm_1gpu"))
def test_every_recipe_has_a_plan(recipe, tmp_path):
    out = StringIO()
    plan = report(
        derived(f"recipe={recipe}", f"run_dir={tmp_path}/run"), Console(file=out, width=200), tmp_path / "run"
    )
    found = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    assert found["trainer_memory"]["peak"]["low"] == plan.trainer_memory.peak.low > 0
    assert found["time"]["run"]["low"] > 0
    assert list(tmp_path.glob("run/*.partial")) == []
    text = out.getvalue()
    for words in ("formula", "KV cache", "GPU types", "cost", "no GPU run stands behind them"):
        assert words in text
    assert {one.gpu for one in plan.verdicts} == set(GPUS)
    # The recipes are written for these machines, and each trainer has to have a chance there.
    gpu = "rtx4090" if "1gpu" in recipe else "h100"
    assert next(one for one in plan.verdicts if one.gpu == gpu).trainer != "does not fit"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model=tiny_moe", "routing_replay=r3", "algorithm=sat_grpo"),
        ("backend=cpu_megatron", "model=tiny_moe", "trainer_ranks=2",
         "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"),
    ],
)  # fmt: skip
def test_cpu_runs_have_a_plan_without_time(words):
    plan = planned(*words)
    assert plan.time is None
    assert plan.trainer_memory.peak.high < GPUS["rtx3090"].memory
    assert (plan.routes is not None) == ("routing_replay=r3" in words)
    assert any("CPU" in note for note in plan.notes)


def test_the_optimizer_on_the_gpu_and_no_recompute_do_not_fit_and_the_plan_says_what_would(paper):
    cfg, planned = paper
    actor = "actor_rollout_ref__actor__"
    plan = build(
        changed(
            cfg,
            **{
                f"{actor}megatron__override_transformer_config__recompute_granularity": None,
                f"{actor}optim__override_optimizer_config__optimizer_cpu_offload": False,
            },
        ),
        baseline=False,
    )
    assert next(one for one in plan.verdicts if one.gpu == "h100").trainer == "does not fit"
    peaks = [plan.trainer_memory.peak.high, *(one.peak.high for one in plan.remedies)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] <= GPUS["h100"].memory
    assert any("recompute_granularity" in note for note in plan.notes)
    assert any("optimizer_cpu_offload" in one.settings for one in plan.remedies)
    assert planned.remedies == ()


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_a_weight_sync_takes_its_buffers_on_both_sides(paper):
    """As verl's own constructor documents, and as the sender by CUDA IPC allocates."""
    cfg, plan = paper
    bucket = cfg.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    assert by_name(plan.trainer_memory.phases["weight sync"])["weight-sync buckets"].size == Range.exactly(2 * bucket)
    memory = plan.rollout_memory
    worker = by_name(memory.worker)
    assert worker["weight-sync buckets"].size == Range.exactly(2 * bucket)
    assert worker["weight-sync bucket, by CUDA IPC"].size == Range(bucket, 2 * bucket)
    in_use = total(memory.worker) + by_name(memory.rows)["activations, logits"].size
    assert memory.outside == in_use + by_name(memory.rows)["CUDA graphs"].size


def test_what_is_outside_the_rollouts_share_must_fit_there(paper):
    _, plan = paper
    outside = plan.rollout_memory.outside

    def verdict_with(room: float) -> str:
        return fits(plan.rollout_memory, plan.gpu.memory, 1 - room / plan.gpu.memory)

    found = [verdict_with(room) for room in (outside.high + 1, (outside.low + outside.high) / 2, outside.low - 1)]
    assert found == ["fits", "tight", "does not fit"]
    fewer = build(
        changed(paper[0], actor_rollout_ref__rollout__checkpoint_engine__update_weights_bucket_megabytes=512),
        baseline=False,
    )
    side = {one.gpu: one.rollout for one in fewer.verdicts}
    assert (side["h100"], {one.gpu: one.rollout for one in plan.verdicts}["h100"]) == ("fits", "tight")
    assert any("update_weights_bucket_megabytes" in note for note in plan.notes)
    assert not any("update_weights_bucket_megabytes" in note for note in fewer.notes)


def test_on_one_card_the_trainer_leaves_room_for_the_rollouts_second_process():
    plan = planned("recipe=qwen2.5_0.5b_fsdp_vllm_1gpu")
    beside = by_name(plan.trainer_memory.standing)["rollout, outside its share"].size
    assert beside.high == plan.rollout_memory.outside.high > beside.low > 0
    # Weights go through the host's shared memory, and from there in one bucket to the engine.
    assert "weight-sync buckets" not in by_name(plan.rollout_memory.worker)
    assert by_name(plan.trainer_memory.phases["weight sync"])["weight-sync buckets"].size.high == 0


@pytest.mark.parametrize(
    ("lag", "batches"), [(("broadcast", 8), 9), (("broadcast", 0), 1), (("constant", 4), 5), (("bounded", 4), 5)]
)
def test_transfer_queue_holds_a_window_and_what_is_ahead(paper, lag, batches):
    _, plan = paper
    with_routes, without = (
        queued(plan.model, plan.work, LagSchedule(*lag), replay=replay).size for replay in (True, False)
    )
    assert plan.routes is not None
    limit = with_routes.high - without.high
    assert limit == batches * plan.routes[1] * (1024 + 31743) / (plan.work.cases["limit"].lengths.whole)
    assert 0 < with_routes.low - without.low < limit
    assert without.high > without.low > 8 * batches * plan.work.cases["expected"].trained  # token ids alone


def test_the_host_holds_the_queue_of_the_papers_window(paper):
    _, plan = paper
    assert plan.host[-1] == queued(plan.model, plan.work, LagSchedule("broadcast", 8), replay=True)
    assert (
        total(plan.host).high > 0.9 * 2**40
    )  # more than the trainer's 0.5 TiB: nine batches of up to 48 GiB of routes


def test_a_checkpoint_has_weights_and_adams_state(paper):
    _, plan = paper
    assert plan.checkpoint.size == Range.exactly((2 + 12) * plan.model.parameters.total)


def test_a_dense_plan_without_lag_speaks_neither_of_experts_nor_of_overlap():
    cfg = changed(derived("recipe=qwen2.5_0.5b_fsdp_vllm_1gpu"), lag__steps=0)
    plan, out = build(cfg, baseline=False), StringIO()
    show(plan, Console(file=out, width=240))
    text = out.getvalue()
    for word in ("expert", "router", "overlap", "share one GPU", "bottleneck"):
        assert word not in text
    assert "in turn" in text


def peak_of(plan: Plan, **changes: object) -> Range:
    return plan_trainer(plan.model, replace(plan.trainer, **changes), 0, replay=False).peak


def test_memory_moves_the_way_it_must(paper):
    _, plan = paper
    peak = peak_of(plan).high
    assert peak_of(plan, tokens=2 * plan.trainer.tokens).high > peak
    assert peak_of(plan, tensor=2, expert=2).low > peak
    assert peak_of(plan, sequence_parallel=False).high > peak
    assert peak_of(plan, fused_logits=True).high < peak
    assert peak_of(plan, recompute=Recompute()).low > peak


def test_time_moves_the_way_it_must():
    cfg = derived("recipe=qwen3_4b_fsdp_vllm")
    plan = build(cfg, baseline=False)
    at_once = plan.time
    in_turn = build(changed(cfg, lag__steps=0), baseline=False).time
    free = build(changed(cfg, lag__schedule="bounded"), baseline=False).time
    dear = build(changed(cfg, plan__price_per_gpu_hour=100, plan__gpu="h200"), baseline=False).time
    assert at_once is not None
    assert in_turn is not None
    assert free is not None
    assert dear is not None
    assert in_turn.step.low > at_once.step.low
    assert in_turn.hidden.high == 0 < at_once.hidden.high <= 0.5
    assert free.generate.high < at_once.generate.high  # no window's longest response is waited for
    assert dear.cost == dear.gpu_hours * 100
    # No server samples faster than its weights can be read once a step.
    once = 2 * plan.model.parameters.total / (plan.gpu.bandwidth * 1e9)
    assert at_once.tokens_per_s.high <= plan.rollout.replicas * at_once.running.high / once


def test_passes_are_those_of_the_arm():
    cfg = derived("recipe=qwen3_4b_fsdp_vllm")

    def names(**values: object) -> set[str]:
        return {one.name for one in build(changed(cfg, **values), baseline=False).work.passes}

    loss = "actor_rollout_ref__actor__policy_loss__"
    assert names() == {"update", "recomputed activations", "reference log-probs", "quantile of the batch"}
    assert "quantile of the batch" not in names(**{loss + "loss_mode": "gspo"})
    assert "quantile of the batch" not in names(**{loss + "quantile_scope": "microbatch"})
    assert "old log-probs" in names(algorithm__rollout_correction__bypass_mode=False)
    assert "reference log-probs" not in names(actor_rollout_ref__actor__use_kl_loss=False)


# Baseline


@pytest.mark.parametrize("algorithm", _fast_first([one for one in choices("algorithm") if parent(one)], "sat_gspo"))
def test_an_arm_differs_from_its_baseline_in_its_method_alone(algorithm):
    found = compare(derived(f"algorithm={algorithm}", "steps=12", "seed=3"))
    assert found is not None
    assert found.baseline == (f"algorithm={parent(algorithm)}",)
    assert found.arm == f"{parent(algorithm)}, correction none, routing_replay none, lag 1"
    assert found.differences
    assert found.others == ()


def test_other_differences_would_be_seen():
    from recipes.plan.baseline import differences

    run, baseline = {"actor_rollout_ref.actor.optim.lr": 1e-6, "run_dir": "a"}, {"run_dir": "b", "seed": 1}
    found = differences(run, baseline)
    assert [(one.setting, one.method) for one in found] == [
        ("actor_rollout_ref.actor.optim.lr", False),
        ("seed", False),
    ]


@pytest.mark.slow
def test_corrections_and_replay_are_compared_with_the_arm_without():
    tis = compare(derived("algorithm=gspo", "correction=tis"))
    assert tis is not None
    assert tis.baseline == ("correction=none",)
    assert tis.others == ()
    replay = compare(derived("algorithm=gspo", "model=tiny_moe", "routing_replay=r3"))
    assert replay is not None
    assert replay.baseline == ("routing_replay.mode=none",)
    assert replay.others == ()
    assert compare(derived("algorithm=gspo")) is None


@pytest.mark.slow
def test_a_baseline_goes_without_what_it_has_no_use_for():
    alpha = "actor_rollout_ref.actor.policy_loss.alpha=0.8"
    found = compare(derived("algorithm=sat_grpo", "reference=fresh", alpha))
    assert found is not None
    assert len(found.left_out) == 2
    assert found.others == ()
    assert {one.setting for one in found.differences} >= {"actor_rollout_ref.actor.policy_loss.alpha", "reference"}


# Assumptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu", "v100"),
        ("nothing", 1),
        ("train_mfu", [0.5, 0.2]),
        ("price_per_gpu_hour", -1),
        ("mean_response_tokens", 100000),
        ("mean_prompt_tokens", "many"),
    ],
)
def test_bad_assumptions_are_refused(name, value):
    cfg = changed(derived(), **{f"plan__{name}": value})
    with pytest.raises(ConfigError) as error:
        settings_of(cfg, small())
    assert error.value.setting == f"plan.{name}"


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ConfigError, match=r"plan\.baseline"):
        compare(derived(), "nothing")


def test_the_default_file_holds_the_defaults():
    defaults = OmegaConf.load(ROOT / "recipes/config/plan/default.yaml")["plan"]
    cfg = derived()
    assert settings_of(changed(cfg, plan=defaults), small()) == settings_of(changed(cfg, plan={}), small())


def test_a_model_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr("recipes.plan.find._from_hub", _no_hub)
    with pytest.raises(ConfigError, match="somebody/something"):
        find(changed(derived("recipe=qwen3_4b_fsdp_vllm"), model__path="somebody/something"))


def _no_hub(name: str) -> dict:
    raise ConfigError("model", name, "no config.json of it is here", "give one")


def test_a_folder_with_a_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    model = find(changed(derived("recipe=qwen3_4b_fsdp_vllm"), model__path=str(tmp_path)))
    assert model.source == str(tmp_path / "config.json")
    assert model.parameters == built(FAMILIES["llama"])


# The paper's node


def test_the_papers_page_is_up_to_date(paper, monkeypatch):
    from recipes.plan import paper as module

    monkeypatch.setattr(module, "node", lambda: paper)
    assert (ROOT / "recipes/plan/PAPER.md").read_text() == module.document()


def test_the_papers_setting_is_ours_but_for_what_is_known(paper):
    differing = {row.setting for row in compared(*paper) if row.same is False}
    # verl instead of slime; prompt and response share 32k positions; verl validates at weight syncs.
    assert differing == {"framework", "response limit", "iterations between evaluations"}
