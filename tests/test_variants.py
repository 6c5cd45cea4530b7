"""What goes beyond the SAT paper: q of the freshest tokens, q as a number, and the cap of the ratio for A < 0."""

import contextlib
import copy
import itertools
import json
import math
import threading
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import ranks
import reference
import torch
from hypothesis import given, settings
from omegaconf import OmegaConf
from test_drift import MASKS, micro_batch, model_output
from test_lab import small  # noqa: F401  a fixture
from test_metrics_by_lag import with_lags
from test_policy_loss import AGG_MODES, BASE, actor_config, random_batch, run, same_bits
from test_quantile_scope import NAMES, accumulate
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from benchmarks import lab
from benchmarks.arms import ARMS, matched
from benchmarks.lag_sweep.matched import Radii, arm_of, base_of, matched_to, mean_radii
from benchmarks.lag_sweep.measures import measure
from benchmarks.report.studies import label
from recipes import variants
from recipes.compose import compose
from recipes.errors import ConfigError
from sat_verl import batch_quantile as scope
from sat_verl import fresh
from sat_verl.config import SATPolicyLossConfig
from sat_verl.drift import ppo_loss_with_drift
from sat_verl.fresh import NO_AGE, ROUNDING, KeptReference, ReferenceMemory
from sat_verl.lag import LagSchedule
from sat_verl.step_guard import StepGuard
from sat_verl.trainer import SATAsyncTrainer
from sat_verl.trust_region import effective_radius, negative_cap, trust_region

properties = settings(deadline=None, max_examples=25, derandomize=True)

METHODS = ["sat_grpo", "sat_gspo"]
ALPHAS = st.sampled_from([0.5, 0.9, 1.0])
KEPT = st.none() | st.builds(KeptReference, st.integers(0, 4), st.sampled_from([1e-4, 0.02, 0.1, 3.0]), st.just(7))
FRESH = {"quantile_scope": "batch", "reference": "fresh"}
AGES = st.lists(st.integers(0, 5), min_size=6, max_size=6)


def aged(batch, ages):
    return {**{name: batch[name] for name in NAMES}, "ages": torch.tensor(ages)}


# --- reference=fresh: q of a step -------------------------------------------------------------------------------------


def expected_reference(batch, ages, method, alpha, kept):
    """By the rule as it is written, token by token."""
    arrays = {name: batch[name].numpy() for name in NAMES}
    d = reference.scores({**arrays, "mask": arrays["response_mask"]}, method.removeprefix("sat_"))
    tokens = [(ages[i], abs(d[i, t])) for i, t in zip(*arrays["response_mask"].nonzero(), strict=True)]
    least = min((age for age, _ in tokens), default=None)
    own = reference.quantile([value for _, value in tokens], alpha)
    freshest = reference.quantile([value for age, value in tokens if age == least], alpha)
    usable = kept is not None and least is not None and kept.age < least
    candidate = kept.q if usable else freshest
    return min(candidate, own) if candidate >= ROUNDING else own, own, freshest, least


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=st.integers(0, 2**31), ages=AGES, alpha=ALPHAS, kept=KEPT, scale=st.sampled_from([1e-4, 0.1]))
def test_q_is_that_of_the_freshest_tokens(method, seed, ages, alpha, kept, scale):
    batch = random_batch(seed, (6, 8), scale, lengths=seed % 2 == 0)
    found = fresh.batch_fresh_reference([aged(batch, ages)], method, alpha, kept)
    q, own, freshest, least = expected_reference(batch, ages, method, alpha, kept)
    got = (found.q.item(), found.batch.item(), found.fresh.item())
    assert got == pytest.approx((q, own, freshest), rel=1e-12)
    assert found.age.item() == (NO_AGE if least is None else least)
    assert got[0] <= got[1]
    # So the interval lies within the paper's, which lies within the nominal one.
    d = batch["log_prob"] - batch["old_log_prob"]
    if method == "sat_grpo":
        ours, papers = (trust_region(d, batch["response_mask"], alpha, 2.0, q) for q in (found.q, found.batch))
        assert (ours.c_minus <= papers.c_minus).all()
        assert (ours.c_plus <= papers.c_plus).all()
        assert (ours.gate | ~papers.gate).all()


@properties
@given(seed=st.integers(0, 2**31), q=st.floats(1e-6, 1), factor=st.floats(1, 50), p=st.sampled_from([1.0, 2.0, 3.5]))
def test_a_smaller_q_only_contracts_more(seed, q, factor, p):
    d = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.2
    active = torch.ones_like(d, dtype=torch.bool)
    tight, wide = (trust_region(d, active, 0.9, p, torch.tensor(x, dtype=d.dtype)) for x in (q, q * factor))
    for name in ("c_minus", "c_plus"):
        assert (getattr(tight, name) >= 0).all()
        assert (getattr(tight, name) <= getattr(wide, name) * (1 + 1e-12)).all()
        assert (getattr(wide, name) <= 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_of_one_age_and_with_nothing_kept_it_is_the_batch_rule_bit_for_bit(method, dtype):
    own = ("actor/sat/q_batch", fresh.Q_METRIC, fresh.AGE_METRIC)
    for seed, age in itertools.product(range(3), (0, 3)):
        batch = random_batch(seed, (6, 8), dtype=dtype, lengths=seed % 2 == 0)
        with scope.one_micro_batch():
            expected = run(method, batch, "token-mean", actor_config({"quantile_scope": "batch", "alpha": 0.7}))
        with fresh.one_fresh_micro_batch(), fresh.sample_ages(torch.full((6,), age)):
            loss, gradient, metrics = run(method, batch, "token-mean", actor_config({**FRESH, "alpha": 0.7}))
        assert same_bits(loss, expected[0])
        assert same_bits(gradient, expected[1])
        assert [metrics.pop(name) for name in own] == [metrics["actor/sat/q"]] * 2 + [age]
        assert metrics == expected[2]


def test_the_named_defaults_are_the_paper_rule_bit_for_bit():
    named = {"reference": "batch", "negative_cap": False, "reference_steps": None}
    for method, seed in itertools.product(METHODS, range(5)):
        batch = random_batch(seed, dtype=torch.float32)
        plain, got = (run(method, batch, "token-mean", actor_config(sat)) for sat in ({}, named))
        assert same_bits(got[0], plain[0])
        assert same_bits(got[1], plain[1])
        assert got[2] == plain[2]


@pytest.mark.parametrize("method", METHODS)
@properties
@given(
    seed=st.integers(0, 2**31),
    ages=AGES,
    sizes=st.sampled_from([[6], [1] * 6, [2, 2, 2], [5, 1]]),
    mode=st.sampled_from(AGG_MODES),
    kept=KEPT,
)
def test_no_number_depends_on_split_order_and_padding(method, seed, ages, sizes, mode, kept):
    batch = random_batch(seed, (6, 8), lengths=seed % 2 == 0)
    info = {"dp_size": 1, "batch_num_tokens": 48, "global_batch_size": 6, "loss_scale_factor": 10}
    config = actor_config({**FRESH, "alpha": 0.5}, global_batch_info=info)
    with fresh.one_fresh_micro_batch(kept), fresh.sample_ages(torch.tensor(ages)):
        whole = run(method, batch, mode, config, weights=True)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    padded = {name: torch.nn.functional.pad(value[order], (0, 2)) for name, value in aged(batch, ages).items()
              if name != "ages"}  # fmt: skip
    padded = {**padded, "ages": torch.tensor(ages)[order]}
    parts = [
        dict(zip(padded, one, strict=True)) for one in zip(*(v.split(sizes) for v in padded.values()), strict=True)
    ]
    q = fresh.batch_fresh_reference(parts, method, 0.5, kept)
    loss, gradient, metrics = accumulate(method, batch, sizes, mode, config, scope.batch_quantile(q))
    torch.testing.assert_close(loss, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)
    for name in ("actor/sat/q", "actor/sat/q_batch", fresh.Q_METRIC, fresh.AGE_METRIC):
        assert {m[name] for m in metrics} == {whole[2][name]}


@properties
@given(seed=st.integers(0, 999), ages=AGES, kept=KEPT, cut=st.integers(0, 6))
def test_all_ranks_have_the_q_of_all_tokens(seed, ages, kept, cut):
    batch = random_batch(seed, (6, 8))
    expected = fresh.batch_fresh_reference([aged(batch, ages)], "sat_grpo", 0.5, kept)
    parts = [dict(zip((*NAMES, "ages"), one, strict=True))
             for one in zip(*(v.tensor_split([cut]) for v in aged(batch, ages).values()), strict=True)]  # fmt: skip
    barrier, slots, out = threading.Barrier(2, timeout=30), {}, {}

    def all_reduce(tensor, op, group):
        assert group == "ranks"
        slots[threading.get_ident()] = tensor.clone()
        barrier.wait()
        stacked = torch.stack(list(slots.values()))
        total = stacked.amin(0) if op is torch.distributed.ReduceOp.MIN else stacked.sum(0)
        barrier.wait()
        tensor.copy_(total)

    def rank(index):
        out[index] = fresh.batch_fresh_reference([parts[index]], "sat_grpo", 0.5, kept, "ranks")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        threads = [threading.Thread(target=rank, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in (0, 1):
        assert all(same_bits(got, value) for got, value in zip(out[index], expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sat", [FRESH, {"reference": 0.05}, {"negative_cap": True}], ids=str)
def test_masked_tokens_may_hold_anything(method, sat):
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        batch = random_batch(3, (6, 8), 0.3)
        batch = {k: torch.where(batch["response_mask"], v, junk) if v.is_floating_point() else v
                 for k, v in batch.items()}  # fmt: skip
        with fresh.one_fresh_micro_batch(), fresh.sample_ages(torch.tensor([1, 1, 1, 2, 2, 2])):
            results.append(run(method, batch, "token-mean", actor_config(sat)))
    for loss, gradient, metrics in results[1:]:
        assert same_bits(loss, results[0][0])
        assert same_bits(gradient, results[0][1])
        assert metrics == results[0][2]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_before_the_metrics_waits_for_the_device(method, monkeypatch):
    # On the meta device there are no values, so any wait for them raises.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.1] * tensor.numel())
    ages, kept = torch.ones(4, dtype=torch.long, device="meta"), KeptReference(0, 0.1, 1)
    for options in ({**FRESH, "negative_cap": True}, {"reference": 0.1, "negative_cap": True}):
        with fresh.one_fresh_micro_batch(kept), fresh.sample_ages(ages):
            loss, _, _ = run(method, random_batch(0, device="meta"), "token-mean", actor_config(options))
        assert loss.device == torch.device("meta")


def test_rounding_is_no_reference():
    d = torch.tensor([1e-6, 2e-6, 0.1, 0.2])
    ages, active = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    assert fresh.fresh_reference(d, ages, active, 1.0).q.item() == pytest.approx(0.2)  # the batch's
    assert fresh.fresh_reference(d.clamp(min=0.05), ages, active, 1.0).q.item() == pytest.approx(0.05)
    empty = fresh.fresh_reference(d, ages, ~active, 0.9, KeptReference(0, 0.1, 1))
    assert (empty.q.item(), empty.age.item()) == (0, NO_AGE)


# --- what is kept from step to step -----------------------------------------------------------------------------------


@properties
@given(
    steps=st.integers(1, 6),
    seen=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1e-6, 0.1, 0.5, math.nan]))),
)
def test_what_is_kept(steps, seen):
    memory = ReferenceMemory(steps)
    for step, (age, q) in enumerate(seen, start=1):
        kept = memory.before(step)
        if kept is not None:
            assert step - steps <= kept.step < step
            assert (kept.age, kept.q) == seen[kept.step - 1]
            # Since then nothing as fresh has come.
            assert all(other > kept.age or not value >= ROUNDING for other, value in seen[kept.step : step - 1])
        else:
            assert not any(value >= ROUNDING for _, value in seen[max(step - 1 - 1, 0) : step - 1])
        memory.after(step, age, q)


@pytest.mark.parametrize("lag", [1, 2, 8, 32])
def test_under_broadcast_the_reference_is_that_of_the_last_sync(lag):
    schedule, memory = LagSchedule("broadcast", lag), ReferenceMemory(lag)
    for step in range(1, 4 * lag + 2):
        age, kept = schedule.age(step), memory.before(step)
        if step > 2 and age > 1:
            assert kept.step == step - age + 1  # the step of age 1
            assert kept.age == 1
        memory.after(step, age, 1e-6 if step == 1 else 0.01 * step)


def test_it_is_forgotten_after_so_many_steps_and_survives_a_checkpoint():
    memory = ReferenceMemory(3)
    memory.after(10, 1.0, 0.25)
    resumed = ReferenceMemory(3, json.loads(json.dumps(memory.kept)))
    assert resumed.kept == memory.kept == (1, 0.25, 10)
    assert [memory.before(step) is not None for step in (10, 11, 13, 14)] == [False, True, True, False]
    memory.after(13, 2, 0.5)  # not for step 14, where there is nothing fresher any more
    assert memory.before(14) == (2, 0.5, 13)
    assert ReferenceMemory(3, None).before(1) is None


def test_the_memory_that_a_config_asks_for():
    assert ReferenceMemory.of(SATPolicyLossConfig(), 8) is None
    assert ReferenceMemory.of(SATPolicyLossConfig(reference=0.1), 8) is None
    assert ReferenceMemory.of(SATPolicyLossConfig(**FRESH), 8).steps == 8
    assert ReferenceMemory.of(SATPolicyLossConfig(**FRESH), 0).steps == 1
    assert ReferenceMemory.of(SATPolicyLossConfig(**FRESH, reference_steps=5), 8).steps == 5


# --- reference=NUMBER -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "gspo"])
@properties
@given(seed=st.integers(0, 2**31), q=st.sampled_from([1e-3, 0.01, 0.05, 0.3]), scale=st.sampled_from([0.03, 0.3]))
def test_a_number_is_one_fixed_radius_whatever_the_rest(method, seed, q, scale):
    batch = random_batch(seed, (6, 8), scale)
    config = actor_config({"reference": q})
    loss, gradient, metrics = run(f"sat_{method}", batch, "token-sum", config)
    radii = (metrics["actor/sat/eps_eff_low"], metrics["actor/sat/eps_eff_high"])
    _, ppo, _ = run(BASE[method], batch, "token-sum", actor_config(None, [side * (1 + 1e-9) for side in radii]))
    assert same_bits(gradient, ppo)
    assert metrics["actor/sat/q"] == q
    assert radii == tuple(effective_radius(q, 0.2, 2.0, upper=upper) for upper in (False, True))
    for others in ({"alpha": 0.3}, {"quantile_scope": "batch"}):  # with no context
        assert same_bits(run(f"sat_{method}", batch, "token-sum", actor_config({"reference": q, **others}))[0], loss)
    whole = run(f"sat_{method}", batch, "token-sum", config, weights=True)
    parts = accumulate(f"sat_{method}", batch, [2, 4], "token-sum", config, contextlib.nullcontext())
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-15)


# --- the cap for A < 0 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "gspo"])
@properties
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 0.5, 1.5]), alpha=st.sampled_from([0.3, 0.9]),
       dual=st.sampled_from([1.5, 1e9]))  # fmt: skip
def test_the_cap_acts_where_it_should_and_nowhere_else(method, seed, scale, alpha, dual):
    batch = random_batch(seed, (6, 8), scale)
    loss, gradient, metrics = run(f"sat_{method}", batch, "token-sum", actor_config(
        {"alpha": alpha, "negative_cap": True}, clip_ratio_c=dual))  # fmt: skip
    free_loss, free, free_metrics = run(
        f"sat_{method}", batch, "token-sum", actor_config({"alpha": alpha}, clip_ratio_c=dual)
    )
    q, cap = metrics["actor/sat/q"], metrics.pop("actor/sat/cap")
    bound = dual if method == "grpo" else 1e9
    assert cap == pytest.approx(min(1.2 * math.exp(q), bound), rel=1e-12)
    arrays = {name: value.numpy() for name, value in batch.items()}
    ratio = torch.from_numpy(reference.scores({**arrays, "mask": arrays["response_mask"]}, method)).exp()
    capped = batch["response_mask"] & (batch["advantages"] < 0) & (ratio > cap)
    assert (gradient[capped] == 0).all()
    assert same_bits(gradient[~capped], free[~capped])
    # The objective rises there from min(r, dual) A to C A: what the cap gives up, and all of it.
    given_up = ((ratio.clamp(max=bound) - cap) * -batch["advantages"])[capped].sum()
    assert free_loss - loss == pytest.approx(given_up.item(), rel=1e-9, abs=1e-9)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(
        capped.sum().item() / batch["response_mask"].sum().item()
    )
    same = [name for name in metrics if name != "actor/pg_clipfrac_lower"]
    assert {name: metrics[name] for name in same} == {name: free_metrics[name] for name in same}


@pytest.mark.parametrize("method", ["grpo", "gspo"])
def test_switched_off_the_cap_leaves_the_base_loss_bit_for_bit(method):
    for seed, dtype in itertools.product(range(5), (torch.float32, torch.bfloat16, torch.float64)):
        batch = random_batch(seed, (6, 8), 0.5, dtype)
        got = run(f"sat_{method}", batch, "token-mean", actor_config({"alpha": 1.0, "negative_cap": True}))
        base = run(BASE[method], batch, "token-mean", actor_config())
        assert same_bits(got[0], base[0])
        assert same_bits(got[1], base[1])
    assert negative_cap(torch.zeros(()), 0.2, 7.0) == 7
    assert negative_cap(torch.tensor(1e-8), 0.2, 7.0) == pytest.approx(1.2)
    assert negative_cap(torch.tensor(math.inf), 0.2, 7.0) == 7


def test_the_cases_of_the_cap_have_a_meaning():
    for method in METHODS:
        config = actor_config({"alpha": 0.5, "negative_cap": True}, clip_ratio_c=1e9)
        shares = [run(method, random_batch(seed, (6, 8), 0.8), "token-sum", config)[2] for seed in range(10)]
        assert sum(metrics["actor/pg_clipfrac_lower"] > 0 for metrics in shares) >= 3


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "stale"}, "reference must be 'batch', 'fresh' or a finite number above 0, got 'stale'"),
        ({"reference": 0.0}, "finite number above 0"),
        ({"reference": math.inf}, "finite number above 0"),
        ({"reference": True}, "finite number above 0"),
        ({"reference": None}, "finite number above 0"),
        ({"reference": "fresh"}, "got quantile_scope='microbatch': use quantile_scope='batch'"),
        ({**FRESH, "reference_steps": 0}, "whole number of at least 1"),
        ({**FRESH, "reference_steps": 2.0}, "whole number of at least 1"),
        ({"reference_steps": 4}, "is for reference='fresh', got 'batch'"),
        ({"negative_cap": 1}, "must be true or false, got 1"),
    ],
)
def test_the_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        SATPolicyLossConfig(**options)


@pytest.mark.parametrize("method", METHODS)
def test_without_ages_or_with_a_q_of_the_other_rule_the_loss_refuses(method):
    batch = random_batch(0)
    with fresh.one_fresh_micro_batch(), pytest.raises(fresh.MissingAgesError, match="how old its samples are"):
        run(method, batch, "token-mean", actor_config(FRESH))
    with pytest.raises(scope.MissingBatchQuantileError, match="nobody computed"):
        run(method, batch, "token-mean", actor_config(FRESH))
    with scope.one_micro_batch(), pytest.raises(scope.MissingBatchQuantileError, match=r"'fresh', but .* the other"):
        run(method, batch, "token-mean", actor_config(FRESH))
    q = fresh.batch_fresh_reference([aged(batch, [1, 1, 2, 2])], method, 0.9)
    with scope.batch_quantile(q), pytest.raises(scope.MissingBatchQuantileError, match=r"'batch', but .* the other"):
        run(method, batch, "token-mean", actor_config({"quantile_scope": "batch"}))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        fresh.batch_fresh_reference([], method, 0.9)


# --- verl's worker ----------------------------------------------------------------------------------------------------


def test_the_ages_reach_the_loss_where_the_metrics_by_lag_have_them():
    config, data = actor_config({**FRESH, "loss_mode": "sat_grpo", "alpha": 0.5}), with_lags(micro_batch())
    plain = actor_config({"loss_mode": "sat_grpo", "alpha": 0.5})
    with fresh.one_fresh_micro_batch():
        _, metrics = ppo_loss_with_drift(config, model_output()[1], data)
    # Of ages 3, 0, 3: the second response alone.
    alone = micro_batch()
    alone["response_mask"] = torch.nested.as_nested_tensor(
        [torch.tensor(mask) * (i == 1) for i, mask in enumerate(MASKS)], layout=torch.jagged
    )
    _, of_second = ppo_loss_with_drift(plain, model_output()[1], alone)
    assert metrics[fresh.Q_METRIC].values == of_second["actor/sat/q"].values
    assert metrics[fresh.AGE_METRIC].values == [0]
    tu.pop(data, "version_lag")
    tu.pop(data, "version_lags")
    with fresh.one_fresh_micro_batch(), pytest.raises(fresh.MissingAgesError):
        ppo_loss_with_drift(config, model_output()[1], data)


def test_the_driver_hands_the_reference_on_and_takes_note(monkeypatch, tmp_path):
    trainer = SATAsyncTrainer.__new__(SATAsyncTrainer)
    trainer.reference, trainer.guard = ReferenceMemory(2), StepGuard(tmp_path, "stop")
    trainer.parameter_sync_step, trainer.global_steps = 2, 1
    sent = []

    def update(self, batch, metrics):
        sent.append(batch.extra_info.get(fresh.KEPT))
        age = batch.extra_info["version_lags"][0]
        metrics |= {fresh.AGE_METRIC: float(age), fresh.Q_METRIC: 0.5**age}
        return batch

    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor", update)
    for step, age in enumerate((1, 2, 2, 3), start=1):
        trainer.local_trigger_step = step - 1  # step 1 of the run is the first
        trainer._record = SimpleNamespace(keys=["a"], ages=np.array([[age, age]]))
        batch = KVBatchMeta(keys=["a"], partition_id="train", tags=[{}])
        monkeypatch.setattr("sat_verl.trainer.tq.kv_batch_put", lambda batch=batch, **_: batch)
        trainer._update_actor(batch, {})
    # That of step 1 for steps 2 and 3; then that of step 3.
    assert sent == [None, [1, 0.5, 1], [1, 0.5, 1], [2, 0.25, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("world", list(ranks.WORLDS))
def test_a_real_step_has_one_fresh_q_on_any_split_and_ranks(world):
    results = ranks.results()
    whole = results[1]["fresh", "whole", False]
    for layout, kept in itertools.product(ranks.FRESH[world], (False, True)):
        metrics = results[world]["fresh", layout, kept]["metrics"]
        values = {name: {value for rank in metrics[f"actor/sat/{name}"] for value in rank}
                  for name in ("q", "q_batch", "q_fresh", "fresh_age")}  # fmt: skip
        assert all(len(found) == 1 for found in values.values())
        q, q_batch, q_fresh, age = (found.pop() for found in values.values())
        assert age == 1
        assert q == (pytest.approx(min(ranks.KEPT_Q, q_batch)) if kept else min(q_fresh, q_batch))
        assert q_fresh == pytest.approx(whole["metrics"]["actor/sat/q_fresh"][0][0], abs=1e-6)
    assert q_fresh != q_batch
    other = results[world]["fresh", ranks.FRESH[world][1], False]
    assert float((other["gradient"] - whole["gradient"]).norm() / whole["gradient"].norm()) < 5e-6


# --- recipes, arms, laboratory ----------------------------------------------------------------------------------------


def test_the_words_of_the_recipes():
    composed = compose(["algorithm=sat_grpo"])
    key = "actor_rollout_ref.actor.policy_loss"

    def policy_loss(of_preset=None, **words):
        cfg = copy.deepcopy(composed)
        for name, value in (of_preset or {}).items():
            OmegaConf.update(cfg, f"{key}.{name}", value, force_add=True)
        for name, value in words.items():
            OmegaConf.update(cfg, name, value)
        variants.derive(cfg)
        return cfg.actor_rollout_ref.actor.policy_loss

    assert "reference" not in policy_loss()  # and so its runs keep their keys
    assert policy_loss(reference=0.02).reference == 0.02
    found = policy_loss({"reference": "fresh", "loss_mode": "sat_gspo"}, reference="batch", negative_cap=True)
    assert (found.reference, found.negative_cap) == ("batch", True)
    steps = {"reference_steps": 3}
    assert policy_loss(steps, reference="fresh").reference_steps == 3
    for of_preset, words, message in [
        ({"loss_mode": "vanilla"}, {"reference": "fresh"}, "reference=fresh: the loss vanilla has no such option"),
        ({}, {"reference": "new"}, "it must be batch, fresh or a number above 0"),
        ({}, {"reference": 0}, "it must be batch, fresh or a number above 0"),
        ({}, {"negative_cap": 2}, "it must be true or false"),
        ({"quantile_scope": "microbatch"}, {"reference": "fresh"}, "one q for the whole optimizer step"),
        (steps, {}, "it is for reference=fresh"),
        ({"reference_steps": 0}, {"reference": "fresh"}, "a whole number of at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            policy_loss(of_preset, **words)


def test_the_variants_have_matched_controls():
    for name, cap in [("grpo_fresh_matched", None), ("grpo_absolute_matched", None), ("grpo_capped_matched", 1.5)]:
        source = matched_to(name)
        assert ARMS[source].base == "sat_grpo"
        assert base_of(source).name == "grpo"
        words = ["algorithm=grpo", "clip_ratio_low=0.02", "clip_ratio_high=0.03"] + [f"dual_clip={cap}"] * (
            cap is not None
        )
        assert list(arm_of(name, Radii(0.02, 0.03, cap)).words) == words
    assert label("grpo_fresh_matched") == "GRPO, fixed as SAT-GRPO, fresh q"
    assert label("grpo_matched") == "GRPO, fixed at SAT's radius"
    assert mean_radii([Radii(0.1, 0.1, 1.2), Radii(0.3, 0.3, 1.4)]) == (0.2, 0.2, 1.3)
    with pytest.raises(ValueError, match="a matched cap must be a number above 1"):
        matched(ARMS["grpo"], 0.1, 0.1, 1.0)
    rows = [{"step": 0, "success": 0.5}]
    assert measure({"cap": [1.2, 1e9, 1.4]}, rows)["cap"] == pytest.approx(1.3)  # a step without a cap has no part


def test_the_laboratory_keeps_the_reference_of_the_last_sync(small):  # noqa: F811
    rows = lab.run(small(algorithm="sat_grpo_fresh", lag=2, steps=5, micro_batches=2)).rows
    q = [row["actor/sat/q"] for row in rows]
    assert [row["age"] for row in rows] == [0, 1, 2, 1, 2]
    freshest, own = rows[3][fresh.Q_METRIC], rows[4]["actor/sat/q_batch"]
    assert ROUNDING < freshest < own
    assert q[4] == freshest  # at age 2 that of the step before, of age 1
    for step in (1, 2, 3, 4):  # nothing had moved before, or none was fresher
        assert q[step - 1] == rows[step - 1]["actor/sat/q_batch"]


def test_the_laboratory_runs_the_other_variants(small):  # noqa: F811
    rows = lab.run(small(algorithm="sat_grpo", overrides=("reference=0.01",), steps=2, micro_batches=2)).rows
    assert [row["actor/sat/q"] for row in rows] == pytest.approx([0.01] * 2)
    rows = lab.run(small(algorithm="sat_grpo_capped", steps=3, lag=2)).rows
    assert [row["actor/sat/cap"] for row in rows] == pytest.approx([1.2 * math.exp(row["actor/sat/q"]) for row in rows])
