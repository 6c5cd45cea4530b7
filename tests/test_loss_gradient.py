"""The losses' written-out gradient against plain autograd of the same formula, and host waits of every option."""

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from test_policy_loss import AGG_MODES, BASE, GLOBAL, METHODS, actor_config, random_batch, run, same_bits
from verl.trainer.ppo.core_algos import agg_loss
from waits import waits

from sat_verl import batch_quantile
from sat_verl.fresh import one_fresh_micro_batch, sample_ages

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
EPS, DUAL = (0.2, 0.28), 2.0


def by_autograd(method, batch, mode, info, *, alpha, p, cap, weights):
    """Loss and gradient, with a graph of every operation: as one writes the formula down."""
    active, log_prob = batch["response_mask"].bool(), batch["log_prob"].clone().requires_grad_()
    new, old, advantages = (torch.where(active, x, 0.0) for x in (log_prob, batch["old_log_prob"], batch["advantages"]))
    d = new - old
    score, ratio = d.detach(), d.clamp(-20, 20).exp()
    if method == "gspo":
        mask = batch["response_mask"]
        score = ((score * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(d)
        ratio = (new - new.detach() + score).clamp(max=10.0).exp()
    score = score.to(torch.promote_types(score.dtype, F32))
    values = sorted(score.abs()[active].tolist())
    q = next((x for k, x in enumerate(values, 1) if Fraction(k, len(values)) >= Fraction(str(alpha))), 0.0)
    gate = active & (score.abs() > q) & (q > 0)
    c = torch.where(gate, 1 / (1 + (score.abs() / (q or 1.0)) ** p), 1.0)
    low = torch.where(gate & (score < 0), 1 - EPS[0] * c, -math.inf).to(ratio.dtype)
    high = torch.where(gate & (score > 0), 1 + EPS[1] * c, math.inf).to(ratio.dtype)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - EPS[0], 1 + EPS[1]).clamp(low, high))
    bound = DUAL if method == "grpo" else math.inf
    bound = min((1 + EPS[1]) * math.exp(q), bound) if cap and q else bound
    if bound < math.inf:
        loss = torch.where(advantages < 0, torch.minimum(-advantages * bound, loss), loss)
    loss = loss * torch.where(active, batch["rollout_is_weights"], 0.0) if weights else loss
    loss = agg_loss(loss, batch["response_mask"], mode, **info)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0], q


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_plain_autograd(method, mode):
    types = [(F64, F64, F64), (F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, F32), (F32, BF16, F32), (F32, F32, BF16)]
    cases = itertools.product(types, [{}, GLOBAL], [False, True])
    gated = 0
    for seed, ((new, old, advantage), info, cap) in enumerate(cases):
        batch = random_batch(seed, (6, 10), [0.05, 0.3, 2.0][seed % 3], lengths=seed % 2 == 0)
        batch["response_mask"][seed % 6] = False  # a response without a token
        batch["advantages"][(seed + 1) % 6] = 0
        junk = [0.0, math.nan, math.inf][seed % 3]
        for name, dtype in (("log_prob", new), ("old_log_prob", old), ("advantages", advantage)):
            batch[name] = torch.where(batch["response_mask"], batch[name], junk).to(dtype)
        batch["rollout_is_weights"] = batch["rollout_is_weights"].to(advantage)
        batch["response_mask"] = batch["response_mask"].to([torch.bool, torch.int64, F32][seed // 2 % 3])
        sat = {"alpha": 0.7, "kernel_exponent": 2.0, "negative_cap": cap}
        config, weights = actor_config(sat, EPS, DUAL, info), seed % 2 == 1
        loss, gradient, metrics = run(f"sat_{method}", batch, mode, config, weights)
        plain = by_autograd(method, batch, mode, info, alpha=0.7, p=2.0, cap=cap, weights=weights)
        gated += metrics["actor/sat/gate_rate"] > 0
        assert metrics["actor/sat/q"] == plain[2]
        assert loss.dtype == plain[0].dtype
        tolerance = {F64: 1e-12, F32: 1e-5, BF16: 0.02}[min((new, old, advantage), key=lambda x: torch.finfo(x).bits)]
        torch.testing.assert_close(loss, plain[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient, plain[1], rtol=tolerance, atol=0)
        assert torch.equal(gradient == 0, plain[1] == 0)
    assert gated > 10


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_log_prob_that_is_not_finite_is_treated_as_in_the_base_loss(method, mode):
    places = itertools.product(("log_prob", "old_log_prob"), (math.nan, math.inf, -math.inf), (0.5, 1.0), (1.0, -1.0))
    for seed, (name, bad, alpha, sign) in enumerate(places):
        batch = random_batch(seed, (5, 8), dtype=F32, lengths=False)
        batch["response_mask"][0] = True
        batch["advantages"][0, 0] = sign
        batch[name][0, 0] = bad
        (loss, gradient, _), (base, base_gradient, _) = (
            run(loss_mode, batch, mode, actor_config({"alpha": alpha})) for loss_mode in (f"sat_{method}", BASE[method])
        )
        # An infinite log mu, in either loss, and an infinite log pi of a token ratio are ratios that a bound holds.
        assert (
            bool(loss.isfinite())
            == bool(base.isfinite())
            == (math.isinf(bad) and (method, name) != ("gspo", "log_prob"))
        )
        assert gradient.isfinite().all()
        if alpha == 1.0:
            assert same_bits(loss, base)
            assert same_bits(gradient, base_gradient)
        assert (gradient[0, 0] if method == "grpo" else gradient[0]).count_nonzero() == 0
        assert gradient[1:].count_nonzero() > 0


# --- host and device --------------------------------------------------------------------------------------------------


SAT_OPTIONS = {
    "default": ({}, lambda device: nullcontext()),
    "negative cap": ({"negative_cap": True}, lambda device: nullcontext()),
    "number": ({"reference": 0.05}, lambda device: nullcontext()),
    "one micro-batch": ({"quantile_scope": "batch"}, lambda device: batch_quantile.one_micro_batch()),
    "q of the step": (
        {"quantile_scope": "batch"},
        lambda device: batch_quantile.batch_quantile(torch.zeros((), device=device)),
    ),
    "fresh": ({"quantile_scope": "batch", "reference": "fresh"}, lambda device: one_fresh_micro_batch()),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("option", SAT_OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_forward_and_backward_wait_for_the_device_once(method, option, device, monkeypatch):
    sat, context = SAT_OPTIONS[option]
    batch, config = random_batch(0, device=device), actor_config(sat)
    ages = torch.arange(4, device=device)
    for mode in AGG_MODES:
        with context(device), sample_ages(ages), waits(monkeypatch, meta=device == "meta") as found:
            run(f"sat_{method}", batch, mode, config, weights=True)
        assert found == ["tolist"], mode


@pytest.mark.parametrize("base", BASE.values())
def test_verls_own_losses_wait_three_times(base, monkeypatch):
    with waits(monkeypatch) as found:
        run(base, random_batch(0), "token-mean", actor_config())
    assert found == ["_local_scalar_dense"] * 3


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.long)),
        lambda x: float(x[0]),
    ],
)
def test_the_counter_sees_what_waits(wait, monkeypatch):
    with waits(monkeypatch) as found:
        wait(torch.tensor([1.0, -1.0, 2.0]))
    assert found
