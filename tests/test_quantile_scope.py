"""quantile_scope=batch: one q per optimizer step, whatever the micro-batches, their order, padding and the ranks."""

import threading

import hypothesis.strategies as st
import pytest
import ranks
import torch
from hypothesis import given, settings
from test_policy_loss import AGG_MODES, actor_config, no_wait_for_a_gpu, random_batch, run, same_bits

from sat_verl import batch_quantile as scope
from sat_verl.config import SATPolicyLossConfig
from sat_verl.trust_region import tail_reference

properties = settings(deadline=None, max_examples=25, derandomize=True)

METHODS = ["sat_grpo", "sat_gspo"]
DTYPES = [torch.float32, torch.float64]
NAMES = ("log_prob", "old_log_prob", "response_mask")
ALPHAS = st.sampled_from([0.07, 0.5, 0.9, 1.0]) | st.floats(0.01, 1.0)


# --- the selection ----------------------------------------------------------------------------------------------------


def alone(distance, active, alpha):
    """The selection over ranks, of which there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: None)
        return scope.distributed_tail_reference(distance, active, alpha, group="one rank")


@st.composite
def distances(draw, dtype, size=40):
    """Non-negative values with ties, zeros, subnormal and infinite ones, and which of them are active; shape (N,)."""
    width = 32 if dtype == torch.float32 else 64
    anything = st.floats(0, None, allow_nan=False, allow_infinity=True, width=width)
    element = draw(st.sampled_from([anything, st.integers(0, 3).map(float), st.floats(0, 1, width=width)]))
    values = draw(st.lists(st.tuples(element, st.booleans()), max_size=size))
    return torch.tensor([v for v, _ in values], dtype=dtype), torch.tensor([a for _, a in values], dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@properties
@given(data=st.data(), alpha=ALPHAS)
def test_selection_is_the_tail_reference_bit_for_bit(dtype, data, alpha):
    distance, active = data.draw(distances(dtype))
    expected = tail_reference(distance, active, alpha) if len(distance) else torch.zeros((), dtype=dtype)
    for got in (scope.distributed_tail_reference(distance, active, alpha), alone(distance, active, alpha)):
        assert got.shape == ()
        assert same_bits(got, expected)


class Ranks:
    """all_reduce among threads, each of which is a rank."""

    def __init__(self, world):
        self.barrier, self.slots = threading.Barrier(world, timeout=30), {}

    def all_reduce(self, tensor, op, group):
        assert group is self
        assert op is torch.distributed.ReduceOp.SUM
        assert not tensor.is_floating_point()
        self.slots[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        total = sum(self.slots.values())
        self.barrier.wait()
        tensor.copy_(total)

    def run(self, function, arguments):
        out = [None] * len(arguments)

        def rank(index):
            out[index] = function(*arguments[index])

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(arguments))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data(), alpha=ALPHAS, world=st.integers(1, 3), seed=st.integers(0, 99))
@settings(properties, max_examples=20)
def test_selection_over_ranks_is_that_of_all_values(dtype, data, alpha, world, seed):
    distance, active = data.draw(distances(dtype))
    group, g = Ranks(world), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(distance), generator=g)
    cuts = torch.randint(0, len(distance) + 1, (world - 1,), generator=g).sort().values.tolist()  # some ranks are empty
    parts = zip(distance[order].tensor_split(cuts), active[order].tensor_split(cuts), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", group.all_reduce)
        got = group.run(scope.distributed_tail_reference, [(d, a, alpha, group) for d, a in parts])
    expected = scope.distributed_tail_reference(distance, active, alpha)
    assert all(same_bits(q, expected) for q in got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selection_at_the_edges(dtype):
    def q(values, alpha=0.5, active=True):
        values = torch.tensor(values, dtype=dtype)
        return alone(values, torch.full(values.shape, active), alpha).item()

    info = torch.finfo(dtype)
    assert q([]) == q([1.0, 2.0], active=False) == q([0.0, 0.0, 1.0]) == 0
    assert q([3.0]) == q([3.0] * 7) == q([[1.0, 3.0], [3.0, 9.0]]) == 3
    assert q([float("inf"), 1.0], 1.0) == float("inf")
    assert q([info.max, float("inf")]) == info.max
    assert q([info.smallest_normal / 2, 1.0]) == info.smallest_normal / 2


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=st.integers(0, 2**31), alpha=ALPHAS, cuts=st.lists(st.integers(0, 6), max_size=3), pad=st.integers(0, 3))
def test_batch_tail_reference_is_the_q_of_the_whole_batch(method, seed, alpha, cuts, pad):
    batch = random_batch(seed, (6, 8), lengths=seed % 2 == 0)  # scores whose sums are exact, so in any width
    _, _, metrics = run(method, batch, "token-mean", actor_config({"alpha": alpha}))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    padded = {k: torch.nn.functional.pad(batch[k][order], (0, pad), value=0) for k in NAMES}
    padded["old_log_prob"] = torch.where(padded["response_mask"], padded["old_log_prob"], float("nan"))
    chunks = [v.tensor_split(sorted(cuts)) for v in padded.values()]
    micro_batches = [dict(zip(NAMES, parts, strict=True)) for parts in zip(*chunks, strict=True)]
    q = scope.batch_tail_reference(micro_batches, method, alpha)
    assert q.item() == metrics["actor/sat/q"]


def test_batch_tail_reference_refuses_what_has_no_q():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="loss_mode must be one of sat_grpo, sat_gspo, got 'gspo'"):
        scope.batch_tail_reference([batch], "gspo", 0.9)
    with pytest.raises(ValueError, match="at least one micro-batch, got none"):
        scope.batch_tail_reference([], "sat_grpo", 0.9)


# --- the losses in a loop without verl's worker -----------------------------------------------------------------------


def accumulate(method, batch, sizes, mode, config, context):
    """Loss, gradient and metrics of gradient accumulation over micro-batches of these numbers of sequences."""
    out = []
    with context:
        for parts in zip(*(v.split(sizes) for v in batch.values()), strict=True):
            out.append(run(method, dict(zip(batch, parts, strict=True)), mode, config, weights=True))
    return sum(loss for loss, _, _ in out), torch.cat([g for _, g, _ in out]), [m for _, _, m in out]


@pytest.mark.parametrize("method", METHODS)
@properties
@given(
    seed=st.integers(0, 2**31),
    sizes=st.sampled_from([[6], [1] * 6, [2, 2, 2], [5, 1], [3, 3]]),
    mode=st.sampled_from(AGG_MODES),
    alpha=st.sampled_from([0.3, 0.5, 0.9, 1.0]),
)
def test_no_number_depends_on_the_split(method, seed, sizes, mode, alpha):
    batch = random_batch(seed, (6, 8), lengths=seed % 2 == 0)
    info = {"dp_size": 1, "batch_num_tokens": 48, "global_batch_size": 6, "loss_scale_factor": 10}
    whole = run(method, batch, mode, actor_config({"alpha": alpha}, global_batch_info=info), weights=True)
    q = scope.batch_tail_reference([batch], method, alpha)
    config = actor_config({"alpha": alpha, "quantile_scope": "batch"}, global_batch_info=info)
    loss, gradient, metrics = accumulate(method, batch, sizes, mode, config, scope.batch_quantile(q))
    torch.testing.assert_close(loss, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)
    assert {m["actor/sat/q"] for m in metrics} == {whole[2]["actor/sat/q"]}


@pytest.mark.parametrize(("method", "scale"), [("sat_grpo", 0.1), ("sat_gspo", 0.3)])
def test_the_micro_batch_scope_depends_on_the_split(method, scale):
    config = actor_config({"alpha": 0.5}, global_batch_info={"batch_num_tokens": 48})
    unused = torch.tensor(1.0)  # the scope is microbatch: not looked at
    differences = []
    for seed in range(5):
        batch = random_batch(seed, (6, 8), scale)
        loss, gradient, _ = run(method, batch, "token-mean", config, weights=True)
        split = accumulate(method, batch, [3, 3], "token-mean", config, scope.batch_quantile(unused))
        differences.append((abs(split[0] - loss).item(), (split[1] - gradient).abs().max().item()))
    assert max(loss for loss, _ in differences) > 1e-4
    assert max(gradient for _, gradient in differences) > 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_micro_batch_is_the_micro_batch_scope_bit_for_bit(method, dtype):
    for seed in range(5):
        batch = random_batch(seed, dtype=dtype, lengths=seed % 2 == 0)
        own = run(method, batch, "token-mean", actor_config({"alpha": 0.7}), weights=True)
        batch_config = actor_config({"alpha": 0.7, "quantile_scope": "batch"})
        with scope.one_micro_batch():
            lazy = run(method, batch, "token-mean", batch_config, weights=True)
        with scope.batch_quantile(scope.batch_tail_reference([batch], method, 0.7)):
            eager = run(method, batch, "token-mean", batch_config, weights=True)
        for got in (lazy, eager):
            assert same_bits(got[0], own[0])
            assert same_bits(got[1], own[1])
            assert got[2] == own[2]


@pytest.mark.parametrize("method", METHODS)
def test_without_the_steps_q_the_loss_refuses(method):
    batch, config = random_batch(0), actor_config({"quantile_scope": "batch"})
    with pytest.raises(
        scope.MissingBatchQuantileError, match=r"quantile_scope='batch', but nobody .*: train with .* or"
    ):
        run(method, batch, "token-mean", config)
    with scope.one_micro_batch():
        run(method, batch, "token-mean", config)
        with pytest.raises(scope.MissingBatchQuantileError, match="called twice"):
            run(method, batch, "token-mean", config)
    # A context ends where it ends, also by an error.
    with pytest.raises(KeyError), scope.batch_quantile(torch.tensor(0.1)):
        raise KeyError
    with pytest.raises(scope.MissingBatchQuantileError):
        run(method, batch, "token-mean", config)
    run("vanilla", batch, "token-mean", config)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_before_the_metrics_waits_for_the_device(method, monkeypatch):
    # On the meta device there are no values, so any wait for them raises.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.1] * tensor.numel())
    config = actor_config({"quantile_scope": "batch"})
    for context in (scope.one_micro_batch(), scope.batch_quantile(torch.zeros((), device="meta"))):
        with context:
            loss, _, _ = run(method, random_batch(0, device="meta"), "token-mean", config)
        assert loss.device == torch.device("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_no_synchronisation_on_a_gpu(method, monkeypatch):
    batch = random_batch(0, device="cuda")
    with no_wait_for_a_gpu(monkeypatch):
        q = scope.batch_tail_reference([batch], method, 0.9)
        for context in (scope.one_micro_batch(), scope.batch_quantile(q)):
            with context:
                run(method, batch, "token-mean", actor_config({"quantile_scope": "batch"}))


def test_config_takes_the_scope_by_name():
    assert SATPolicyLossConfig(quantile_scope="batch").quantile_scope == "batch"
    with pytest.raises(ValueError, match="must be 'microbatch' or 'batch', got 'rank': use 'microbatch'"):
        SATPolicyLossConfig(quantile_scope="rank")


# --- verl's training worker and FSDP2 engine --------------------------------------------------------------------------

slow = pytest.mark.slow
BATCH_CASES = [(world, layout) for world, scopes in ranks.WORLDS.items() for layout in scopes["batch"]]


def distance(result, other):
    """Relative distance of two steps' gradients."""
    return float((result["gradient"] - other["gradient"]).norm() / other["gradient"].norm())


@slow
@pytest.mark.parametrize(("world", "layout"), BATCH_CASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_real_step_depends_on_neither_split_nor_ranks(method, world, layout):
    whole = ranks.results()[1][method, "microbatch", "whole"]
    result = ranks.results()[world][method, "batch", layout]
    assert result["loss"] == pytest.approx(whole["loss"], abs=2e-6)
    assert distance(result, whole) < 5e-6
    q = {value for values in result["metrics"]["actor/sat/q"] for value in values}
    assert len(q) == 1  # to the last bit, on all micro-batches and ranks
    assert q.pop() == pytest.approx(whole["metrics"]["actor/sat/q"][0][0], abs=1e-6)


@slow
@pytest.mark.parametrize("method", METHODS)
def test_a_real_step_with_the_micro_batch_scope_depends_on_both(method):
    whole = ranks.results()[1][method, "microbatch", "whole"]
    split = ranks.results()[1][method, "microbatch", "by tokens"]
    assert abs(split["loss"] - whole["loss"]) > 1e-4
    assert distance(split, whole) > 5e-3
    for result in (split, ranks.results()[2][method, "microbatch", "whole"]):
        assert len({value for values in result["metrics"]["actor/sat/q"] for value in values}) > 1
    # The case has a meaning: SAT removes gradients.
    assert whole["metrics"]["actor/sat/intercepted"][0][0] > 0


@slow
@pytest.mark.parametrize(("world", "layout"), BATCH_CASES)
def test_the_second_forward_is_made_only_where_it_is_needed(world, layout):
    result = ranks.results()[world]["sat_grpo", "batch", layout]
    micro_batches = len(result["metrics"]["actor/sat/q"][0])
    assert result["forwards"] == (1 if micro_batches == 1 else 2 * micro_batches)
    assert (micro_batches == 1) == (layout in ("whole", "all tokens"))
    other = ranks.results()[world]["gspo"]  # no SAT loss, two or more micro-batches
    assert other["forwards"] == len(other["metrics"]["actor/abs_log_ratio"][0]) > 1
