"""Routing replay in Hugging Face models and in verl's FSDP2 engine."""

import importlib
import math
from types import SimpleNamespace

import pytest
import ranks
import routing_ranks
import torch
from routing_ranks import EXPERTS, LAYERS, MOE_LAYERS, TOP_K, build_model, random_routes
from torch.nn.functional import linear, rms_norm, silu

from sat_verl.routes import IncompleteRoutesError
from sat_verl.routing import routers
from sat_verl.routing.batch import micro_batch_routes
from sat_verl.routing.replay import Routes, RoutingReplay
from sat_verl.routing.routers import FAMILIES, UnsupportedModelError, find_routers

LENGTHS = (7, 4, 9)


@pytest.fixture(scope="module")
def model():
    return build_model()


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 32, (length,), generator=generator) for length in LENGTHS]


def some_routes(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return random_routes(rows + 1, generator)[:rows]


def everywhere(experts):
    return Routes(experts, torch.ones(len(experts), dtype=torch.bool))


def own_routes(model, ids):
    """The experts that the model's routers choose, shape ``(B * T, LAYERS, TOP_K)``."""
    chosen = torch.zeros(ids.numel(), LAYERS, TOP_K, dtype=torch.int64)

    def watch(module, inputs, output):
        chosen[:, layers[module]] = output[2]

    layers = {router.module: router.layer for router in find_routers(model)}
    hooks = [module.register_forward_hook(watch) for module in layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return chosen


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def loss_of(logits):
    return logits.log_softmax(-1)[..., 3].sum()


def same_bits(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- the mechanism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["as chosen", "reversed"])
def test_replaying_its_own_routes_changes_no_bit(model, sequences, order, implementation):
    model.set_experts_implementation(implementation)
    ids = sequences[0][None]
    native = model(ids).logits
    expected = gradients(model, loss_of(native))
    with RoutingReplay(model).replay(everywhere(own_routes(model, ids)[..., order])) as counts:
        replayed = model(ids).logits
    assert torch.equal(replayed, native)
    assert same_bits(gradients(model, loss_of(replayed)), expected)
    assert counts.replayed == counts.wanted == ids.numel() * len(MOE_LAYERS)
    assert counts.differing == counts.incomplete == 0


def hand_written(model, ids, experts):
    """Logits of one sequence, shape ``(T, vocabulary)``: attention per head, experts per token, gates as R3 says."""
    w, config = dict(model.named_parameters()), model.config
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(len(ids))[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    causal = torch.full((len(ids), len(ids)), -math.inf).triu(1)

    def turn(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def norm(name, x):
        return rms_norm(x, x.shape[-1:], w[name], config.rms_norm_eps)

    def attention(at, x):
        query, key, value = (linear(x, w[f"{at}{name}_proj.weight"]) for name in "qkv")
        out = []
        for head in range(heads):
            shared = head * groups // heads
            one = slice(shared * size, (shared + 1) * size)
            q = turn(norm(f"{at}q_norm.weight", query[:, head * size : (head + 1) * size]))
            k = turn(norm(f"{at}k_norm.weight", key[:, one]))
            out.append((q @ k.T / size**0.5 + causal).softmax(-1) @ value[:, one])
        return linear(torch.cat(out, dim=-1), w[f"{at}o_proj.weight"])

    def mixture(at, layer, x):
        logits = linear(x, w[f"{at}gate.weight"])
        rows = []
        for token, state in enumerate(x):
            chosen = experts[token, layer].tolist()
            gates = torch.stack([logits[token, expert] for expert in chosen]).softmax(0)
            row = 0
            for gate, expert in zip(gates, chosen, strict=True):
                inner, up = linear(state, w[f"{at}experts.gate_up_proj"][expert]).chunk(2)
                row = row + gate * linear(silu(inner) * up, w[f"{at}experts.down_proj"][expert])
            rows.append(row)
        return torch.stack(rows)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        x = x + attention(f"{at}self_attn.", norm(f"{at}input_layernorm.weight", x))
        y = norm(f"{at}post_attention_layernorm.weight", x)
        if layer in MOE_LAYERS:
            x = x + mixture(f"{at}mlp.", layer, y)
        else:
            gate, up = (linear(y, w[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + linear(silu(gate) * up, w[f"{at}mlp.down_proj.weight"])
    return linear(norm("model.norm.weight", x), w["lm_head.weight"])


def test_replaying_others_is_the_hand_written_forward(model, sequences):
    ids = sequences[2]
    experts = some_routes(len(ids))
    expected = hand_written(model, ids, experts)
    with RoutingReplay(model).replay(everywhere(experts)) as counts:
        replayed = model(ids[None]).logits[0]
    assert (model(ids[None]).logits[0] - replayed).abs().max() > 0.1, "the routes must matter"
    torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = gradients(model, loss_of(replayed)), gradients(model, loss_of(expected))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=name)
    for layer in MOE_LAYERS:
        assert ours[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-3
    native = own_routes(model, ids[None])[:, list(MOE_LAYERS)].sort(-1).values
    # The native route of a second layer is that of its input, which the replay in the first has changed already.
    first = (native[:, 0] != experts[:, MOE_LAYERS[0]].sort(-1).values).any(-1).sum()
    assert first <= counts.differing <= first + len(ids)


def test_by_hand_the_native_routes_are_the_model(model, sequences):
    ids = sequences[0]
    expected = hand_written(model, ids, own_routes(model, ids[None]))
    torch.testing.assert_close(model(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_gates_are_normalised_as_the_model_does(model, sequences, norm_topk_prob):
    router = find_routers(model)[0].module
    router.norm_topk_prob, before = norm_topk_prob, router.norm_topk_prob
    gates = []
    hook = router.register_forward_hook(lambda module, inputs, output: gates.append(output))
    experts = some_routes(len(sequences[0]))
    try:
        replayer = RoutingReplay(model)
        hook.remove()
        with replayer.replay(everywhere(experts)):
            hook = router.register_forward_hook(lambda module, inputs, output: gates.append(output))
            model(sequences[0][None])
    finally:
        hook.remove()
        router.norm_topk_prob = before
    (logits, ours, chosen), chosen_experts = gates[-1], experts[:, 0].long()
    assert torch.equal(chosen, chosen_experts)
    expected = logits.softmax(-1).gather(-1, chosen_experts)
    if norm_topk_prob:
        expected = logits.gather(-1, chosen_experts).softmax(-1)
    torch.testing.assert_close(ours, expected)


def test_nothing_is_left_in_the_model(model, sequences):
    def state():
        return [
            {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()} for module in model.modules()
        ]

    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        ids = sequences[0][None]
        native = model(ids).logits
        before = state()
        with RoutingReplay(model).replay(everywhere(some_routes(ids.numel()))):
            model(ids)
        with pytest.raises(ZeroDivisionError), RoutingReplay(model).replay(everywhere(some_routes(ids.numel()))):
            _ = 1 / 0
        assert torch.equal(model(ids).logits, native)
        assert state() == before
    finally:
        model.gradient_checkpointing_disable()


@pytest.mark.parametrize("backward", ["inside", "after", "inside another"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_replays_the_same_routes(model, sequences, reentrant, backward):
    ids, replayer = sequences[0][None], RoutingReplay(model)
    routes, others = (everywhere(some_routes(ids.numel(), seed)) for seed in (0, 1))
    with replayer.replay(routes) as plain:
        expected = model(ids).logits
    expected_gradients = gradients(model, loss_of(expected))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    try:
        with replayer.replay(routes) as counts:
            logits = model(ids).logits
            if backward == "inside":
                ours = gradients(model, loss_of(logits))
        if backward == "after":
            ours = gradients(model, loss_of(logits))
        if backward == "inside another":
            with replayer.replay(others):
                model(ids)
                ours = gradients(model, loss_of(logits))
    finally:
        model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
        model.eval()
    assert torch.equal(logits, expected)
    assert same_bits(ours, expected_gradients)
    assert counts == plain, "a second forward must not be counted"


def test_packed_is_padded_is_one_by_one(model, sequences):
    routes = [some_routes(length, seed) for seed, length in enumerate(LENGTHS)]
    jagged = {"layout": torch.jagged}
    batch = {
        "input_ids": torch.nested.as_nested_tensor(sequences, **jagged),
        "routed_experts": torch.nested.as_nested_tensor(routes, **jagged),
    }
    from tensordict import TensorDict

    batch, replayer = TensorDict(batch, batch_size=[3]), RoutingReplay(model)
    single = []
    for ids, rows in zip(sequences, routes, strict=True):
        wanted = torch.arange(len(ids)) < len(ids) - 1
        with replayer.replay(Routes(rows, wanted)):
            single.append(model(ids[None]).logits[0])
    positions = torch.cat([torch.arange(length) for length in (*LENGTHS, 5)])
    packed = torch.cat([*sequences, torch.zeros(5, dtype=torch.int64)])
    with replayer.replay(micro_batch_routes(batch, packed=True, packed_padding=5)) as in_packed:
        together = model(packed[None], position_ids=positions[None], use_cache=False).logits[0]
    ids = torch.nested.to_padded_tensor(batch["input_ids"], 0)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    with replayer.replay(micro_batch_routes(batch, packed=False)) as in_padded:
        rows = model(ids, attention_mask=mask).logits
    padded = torch.cat([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])
    torch.testing.assert_close(together[: sum(LENGTHS)], torch.cat(single), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded, torch.cat(single), rtol=1e-4, atol=1e-5)
    assert in_packed == in_padded
    assert in_packed.wanted == (sum(LENGTHS) - 3) * len(MOE_LAYERS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_incomplete_routes_are_native_and_counted(model, sequences, dtype):
    ids = sequences[2][None]
    own, given = own_routes(model, ids), some_routes(ids.numel()).to(dtype)
    given[2] = 0
    given[3, 2] = torch.tensor([5, 5])
    given[4, 0] = torch.tensor([EXPERTS, 1])
    if dtype.is_signed:
        given[5] = -1
    chosen = {}
    with RoutingReplay(model).replay(everywhere(given)) as counts:
        hooks = [
            r.module.register_forward_hook(lambda m, i, o, layer=r.layer: chosen.__setitem__(layer, o[2]))
            for r in find_routers(model)
        ]
        model(ids)
        for hook in hooks:
            hook.remove()
    missing = [2, 5] if dtype.is_signed else [2]
    for token in range(ids.numel()):
        native = token in [*missing, 4]
        assert chosen[0][token].tolist() == (own if native else given)[token, 0].tolist()
    assert counts.incomplete == len(missing) + 2
    assert counts.wanted - counts.replayed == 2 * len(missing) + 2


def test_unwanted_rows_are_native_and_not_counted(model, sequences):
    ids = sequences[0][None]
    wanted = torch.zeros(ids.numel(), dtype=torch.bool)
    with RoutingReplay(model).replay(Routes(some_routes(ids.numel()), wanted)) as counts:
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert counts.wanted == counts.replayed == counts.differing == counts.incomplete == 0


def test_routes_of_the_routers_alone_are_taken_in_their_order(model, sequences):
    ids, replayer = sequences[0][None], RoutingReplay(model)
    experts = some_routes(ids.numel())
    with replayer.replay(everywhere(experts)):
        expected = model(ids).logits
    with replayer.replay(everywhere(experts[:, list(MOE_LAYERS)])):
        assert torch.equal(model(ids).logits, expected)


def test_routes_of_another_shape_are_refused(model, sequences):
    ids, replayer = sequences[0][None], RoutingReplay(model)
    rows = ids.numel()
    for experts, message in (
        (some_routes(rows)[:, :1], "1 layers"),
        (some_routes(rows)[..., :1], "same model"),
        (some_routes(rows - 1), f"{rows - 1} rows"),
    ):
        with pytest.raises(ValueError, match=message), replayer.replay(everywhere(experts)):
            model(ids)
    with pytest.raises(RuntimeError, match="did not run"), replayer.replay(everywhere(some_routes(rows))):
        pass


# --- models -----------------------------------------------------------------------------------------------------------


def router_module(name):
    """A router of transformers with random weights, by the name of its class."""
    import transformers.models as models

    modules = [f"{folder}.modeling_{folder}" for folder in (
        "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_omni_moe", "olmoe", "flex_olmo", "mellum",
        "qwen3_5_moe", "mixtral", "minimax",
    )]  # fmt: skip
    found = (getattr(importlib.import_module(f"{models.__name__}.{module}"), name, None) for module in modules)
    config = SimpleNamespace(
        num_experts_per_tok=TOP_K, num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=16, norm_topk_prob=False
    )
    module = next(one for one in found if one is not None)(config)
    with torch.no_grad():
        module.weight.normal_()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_transformers_routers_are_as_their_family_says(name, dtype):
    """A transformers that changes one of them fails here, and in a run at the first forward under replay."""
    holder = torch.nn.Module()
    holder.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"gate": router_module(name).to(dtype)})])
    holder.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))
    states = torch.randn(20, 16).to(dtype)
    replayer, gate = RoutingReplay(holder), holder.layers[0]["gate"]
    logits, gates, experts = gate(states)
    assert experts.tolist() == logits.float().softmax(-1).topk(TOP_K).indices.tolist()
    with replayer.replay(everywhere(experts[:, None])) as counts:
        again = gate(states)
    assert counts.differing == 0
    assert torch.equal(again[1], gates)
    with replayer.replay(everywhere(some_routes(20)[:, :1])) as counts:
        other = gate(states)[1]
    assert counts.differing > 0
    assert (other.dtype, other.shape) == (gates.dtype, gates.shape)


def test_a_router_that_changed_is_found_at_its_first_forward(model, sequences, monkeypatch):
    gate = find_routers(model)[0].module
    ids, forward = sequences[0][None], gate.forward

    def sharper(states):
        logits, gates, experts = forward(states)
        return logits, gates**2, experts

    monkeypatch.setattr(gate, "forward", sharper)
    with (
        pytest.raises(UnsupportedModelError, match="another way"),
        RoutingReplay(model).replay(everywhere(some_routes(ids.numel()))),
    ):
        model(ids)


def test_models_that_cannot_be_replayed_are_refused(monkeypatch):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    tiny = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    with pytest.raises(UnsupportedModelError, match="dense"):
        RoutingReplay(Qwen3ForCausalLM(Qwen3Config(**tiny, num_key_value_heads=1, head_dim=8)))
    moe = {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**tiny, **moe, num_key_value_heads=2, q_lora_rank=8))
    with pytest.raises(UnsupportedModelError, match="DeepseekV3TopkRouter"):
        RoutingReplay(deepseek)
    single = build_model()
    for router in find_routers(single):
        router.module.top_k = 1
    with pytest.raises(UnsupportedModelError, match="one expert"):
        RoutingReplay(single)
    monkeypatch.setattr(routers.transformers, "__version__", "4.57.3")
    with pytest.raises(UnsupportedModelError, match=r"4\.57\.3"):
        RoutingReplay(build_model())


def test_transformers_layers_checkpoint_with_the_function_that_replay_wraps(model):
    from transformers.modeling_layers import GradientCheckpointingLayer

    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in model.model.layers)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        assert all("_gradient_checkpointing_func" in vars(layer) for layer in model.model.layers)
    finally:
        model.gradient_checkpointing_disable()


# --- verl's batch and worker ------------------------------------------------------------------------------------------


def test_shorter_and_masked_samples():
    from tensordict import TensorDict

    jagged = {"layout": torch.jagged}
    rows = [some_routes(6), some_routes(3)[:0], some_routes(4)]
    batch = {
        "input_ids": torch.nested.as_nested_tensor([torch.arange(n) for n in LENGTHS], **jagged),
        "routed_experts": torch.nested.as_nested_tensor(rows, **jagged),
        "response_mask": torch.nested.as_nested_tensor(
            [torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([0, 0])], **jagged
        ),
    }
    batch = TensorDict(batch, batch_size=[3])
    routes = micro_batch_routes(batch, packed=True)
    assert routes.experts.shape == (sum(LENGTHS), LAYERS, TOP_K)
    assert torch.equal(routes.experts[:6], rows[0])
    assert not routes.experts[6:11].any(), "rows that were not recorded are zeros, which are no route"
    assert routes.wanted.tolist() == [True] * 6 + [False] + [True] * 3 + [False] + [False] * 9
    padded = micro_batch_routes(batch, packed=False)
    assert torch.equal(padded.experts[18:22], rows[2])
    assert int(padded.wanted.sum()) == 9
    with pytest.raises(IncompleteRoutesError, match="enable_rollout_routing_replay"):
        micro_batch_routes(batch.exclude("routed_experts"), packed=True)
    batch["routed_experts"] = torch.nested.as_nested_tensor([some_routes(n + 1) for n in LENGTHS], **jagged)
    with pytest.raises(ValueError, match="8 rows for a sequence of 7"):
        micro_batch_routes(batch, packed=True)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"strategy": "fsdp"}, "strategy=fsdp2"),
        ({"ulysses_sequence_parallel_size": 2}, "Ulysses"),
        ({"router_replay": SimpleNamespace(mode="R2")}, "records no routes"),
        ({"offload": True}, "activation offloading"),
    ],
)
def test_engines_that_cannot_replay_are_refused(change, part):
    from verl.workers.engine import FSDPEngine

    from sat_verl.routing.engine import FSDPRoutingReplay

    settings = {"strategy": "fsdp2", "router_replay": SimpleNamespace(mode="R3"), "ulysses_sequence_parallel_size": 1}
    engine = FSDPEngine.__new__(FSDPEngine)
    engine.model_config = SimpleNamespace(enable_activation_offload=change.pop("offload", False))
    engine.engine_config = SimpleNamespace(**settings | change)
    with pytest.raises(UnsupportedModelError, match=part):
        FSDPRoutingReplay(engine)


@pytest.mark.parametrize(
    ("options", "part"),
    [({"mode": "R2"}, "use R3"), ({"incomplete": "drop"}, "native"), ({"compare": "yes"}, "true or false")],
)
def test_options_out_of_range_are_refused(options, part):
    from sat_verl.routing.config import RouterReplayConfig

    with pytest.raises(ValueError, match=part):
        RouterReplayConfig(**options)


@pytest.mark.parametrize("mode", ["R3", "disabled"])
def test_the_actor_worker_flags_its_batches(mode, monkeypatch):
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine import FSDPEngine

    from sat_verl.routing.config import RouterReplayConfig
    from sat_verl.worker import ObservedActorWorker

    engine_config = FSDPEngineConfig(strategy="fsdp2", router_replay=RouterReplayConfig(mode=mode))
    worker = ObservedActorWorker.__new__(ObservedActorWorker)
    worker.role, worker.enable_routing_replay = "actor", False
    worker.actor = SimpleNamespace(engine=FSDPEngine.__new__(FSDPEngine), engine_config=engine_config)
    monkeypatch.setattr(DetachActorWorker, "init_model", lambda self: None)
    worker.init_model()
    assert worker.enable_routing_replay is (mode == "R3")


# --- verl's engine on 1 and 2 ranks -----------------------------------------------------------------------------------

STEPS = [(world, name) for world, cases in routing_ranks.CASES.items() for name in cases]
REFERENCE = (1, "whole")


def by_hand(samples):
    """Log-probs of each sample's response with its routes, by the model alone, one sample at a time."""
    model = build_model()
    replayer, out = RoutingReplay(model), []
    for sample in samples:
        ids = sample["input_ids"]
        wanted = torch.arange(len(ids)) < len(ids) - 1
        wanted &= sample["response_mask"].any()
        with replayer.replay(Routes(sample["routed_experts"], wanted)), torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        out.append(log_probs[:-1].gather(-1, ids[1:, None]).squeeze(-1)[len(sample["prompts"]) - 1 :])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), STEPS, ids=lambda value: str(value))
def test_fsdp2_gives_the_same_step_for_any_split_padding_and_checkpointing(world, name):
    results = routing_ranks.results()
    for key in (name, ("native", name)):
        ours = results[world][key]
        reference = results[REFERENCE[0]][REFERENCE[1] if key == name else ("native", REFERENCE[1])]
        torch.testing.assert_close(ours["gradient"], reference["gradient"], rtol=1e-4, atol=1e-6)
    numbers, expected = results[world][name]["numbers"], results[1]["whole"]["numbers"]
    for metric in expected:
        if metric.startswith(("actor/routing/", "actor/log_ratio_tail")) and not metric.endswith("_seconds"):
            assert numbers[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-6), metric


@pytest.mark.slow
def test_fsdp2_replays_as_the_model_alone():
    results = routing_ranks.results()
    samples, numbers = results["samples"], results[1]["whole"]["numbers"]
    log_probs = by_hand(samples)
    rows = zip(samples, log_probs, strict=True)
    distance = torch.cat([(p - s["old_log_probs"]).abs()[s["response_mask"].bool()] for s, p in rows]).sort().values
    for name, alpha in {"q50": 0.5, "q90": 0.9, "q99": 0.99, "largest": 1.0}.items():
        expected = distance[math.ceil(alpha * len(distance)) - 1].item()
        assert numbers[f"actor/log_ratio_tail/{name}"] == pytest.approx(expected, abs=1e-5)
    for sample, ours, row in zip(samples, log_probs, results[1]["recompute"], strict=True):
        response = row[len(sample["prompts"]) - 1 : -1]
        torch.testing.assert_close(response, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fsdp2_counts_what_it_does_not_replay():
    results = routing_ranks.results()
    samples, numbers = results["samples"], results[1]["whole"]["numbers"]
    tokens = sum(len(s["input_ids"]) - 1 for s in samples if s["response_mask"].any())
    missing = sum(map(len, routing_ranks.INCOMPLETE.values()))
    assert numbers["actor/routing/incomplete_tokens"] == missing
    assert numbers["actor/routing/native"] == pytest.approx(missing / tokens)
    assert numbers["actor/routing/last_tokens"] == sum(bool(s["response_mask"].any()) for s in samples)
    assert 0.5 < numbers["actor/routing/differing"] < 1
    assert "tokens of a batch have no complete route" in results[1]["error", "incomplete"]
    assert "enable_rollout_routing_replay" in results[1]["error", "absent"]


@pytest.mark.slow
def test_the_tail_without_replay_is_that_of_the_native_step():
    for world, name in STEPS:
        of_world = routing_ranks.results()[world]
        replayed, native = of_world[name]["numbers"], of_world["native", name]["numbers"]
        for level in ("q50", "q90", "q99", "largest"):
            expected = native[f"actor/log_ratio_tail/{level}"]
            assert replayed[f"actor/log_ratio_tail_native/{level}"] == pytest.approx(expected, abs=1e-6)
        assert replayed["actor/routing/compare_seconds"] > 0
        assert not [metric for metric in native if "routing" in metric or "native" in metric]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_driver_gets_the_numbers_of_an_update(world):
    update = routing_ranks.results()[world]["update"]
    names = [f"actor/log_ratio_tail{kind}/{q}" for kind in ("", "_native") for q in ("q50", "q90", "q99", "largest")]
    names += [f"actor/routing/{name}" for name in ("differing", "native", "incomplete_tokens", "last_tokens")]
    assert all(isinstance(update[name], float) for name in names), set(names) - set(update)
    assert ranks.SAMPLES == routing_ranks.SAMPLES
