"""The registered losses: against the equations, against verl's own losses, and at the edges."""

import functools
import itertools
import math
import subprocess
import sys
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from sat_verl import moves
from sat_verl.config import SATPolicyLossConfig
from sat_verl.trust_region import trust_region

properties = settings(deadline=None, max_examples=100, derandomize=True)

AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
METHODS = ["grpo", "gspo"]
BASE = {"grpo": "vanilla", "gspo": "gspo"}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
GLOBAL = {"dp_size": 2, "batch_num_tokens": 64, "global_batch_size": 16, "loss_scale_factor": 100}


def actor_config(sat=None, eps=(0.2, 0.2), clip_ratio_c=3.0, global_batch_info=None):
    return FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=eps[0],
        clip_ratio_high=eps[1],
        clip_ratio_c=clip_ratio_c,
        policy_loss=PolicyLossConfig() if sat is None else SATPolicyLossConfig(**sat),
        global_batch_info=dict(global_batch_info or {}),
    )


def random_batch(seed, shape=(4, 16), scale=0.1, dtype=torch.float64, device="cpu", lengths=True):
    """A batch as verl gives it; scores are multiples of 2^-12, so that sums of them are exact in any order."""
    g = torch.Generator().manual_seed(seed)
    d = (torch.randn(shape, generator=g, dtype=torch.float64) * scale * 2**12).round() / 2**12
    old_log_prob = -(torch.rand(shape, generator=g, dtype=torch.float64) * 2**13).round() / 2**12
    if lengths:
        mask = torch.arange(shape[1]) < torch.randint(1, shape[1] + 1, (shape[0], 1), generator=g)
    else:
        mask = torch.rand(shape, generator=g) < 0.7
    batch = {
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob + d,
        "advantages": torch.randn(shape, generator=g, dtype=torch.float64),
        "rollout_is_weights": torch.rand(shape, generator=g, dtype=torch.float64) * 2,
    }
    return {**{k: v.to(device, dtype) for k, v in batch.items()}, "response_mask": mask.to(device)}


def run(loss_mode, batch, mode, config, weights=False):
    """Loss, gradient with respect to log_prob, metrics."""
    batch = {k: v for k, v in batch.items() if weights or k != "rollout_is_weights"}
    log_prob = batch.pop("log_prob").clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(loss_mode)(log_prob=log_prob, loss_agg_mode=mode, config=config, **batch)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def numpy_batch(batch, weights=False):
    out = {k: batch[k].numpy() for k in ("log_prob", "old_log_prob", "advantages")}
    weights = batch["rollout_is_weights"].numpy() if weights else None
    return {**out, "mask": batch["response_mask"].numpy(), "weights": weights}


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


# --- against the equations --------------------------------------------------------------------------------------------

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "scale": st.sampled_from([0.003, 0.03, 0.1, 0.3, 1.5]),
        "shape": st.sampled_from([(1, 1), (1, 7), (3, 5), (6, 12), (12, 3)]),
        "lengths": st.booleans(),
        "mode": st.sampled_from(AGG_MODES),
        "weights": st.booleans(),
        "info": st.sampled_from([{}, GLOBAL]),
        "eps": st.sampled_from([(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.05, 1.0)]),
        "alpha": st.sampled_from([0.3, 0.5, 0.8, 0.9, 1.0]),
        "p": st.sampled_from([1.0, 2.0, 4.0]),
        "clip_ratio_c": st.sampled_from([1.5, 3.0, 1e9]),
    }
)


@pytest.mark.parametrize("method", METHODS)
@properties
@given(case=CASES)
def test_matches_the_equations(method, case):
    batch = random_batch(case["seed"], case["shape"], case["scale"], lengths=case["lengths"])
    config = actor_config(
        {"alpha": case["alpha"], "kernel_exponent": case["p"]}, case["eps"], case["clip_ratio_c"], case["info"]
    )
    loss, gradient, metrics = run(f"sat_{method}", batch, case["mode"], config, case["weights"])
    if not batch["response_mask"].any():
        return
    expected_loss, expected_gradient, _, expected_metrics = reference.policy_loss(
        numpy_batch(batch, case["weights"]),
        method,
        case["mode"],
        eps_low=case["eps"][0],
        eps_high=case["eps"][1],
        alpha=case["alpha"],
        p=case["p"],
        dual_clip=case["clip_ratio_c"] if method == "grpo" else math.inf,
        **case["info"],
    )
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6, abs=1e-12)  # verl's seq modes divide by n + 1e-8
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-6, atol=1e-12)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("method", METHODS)
@properties
@given(case=CASES)
def test_gradient_differs_from_the_base_only_in_the_intercepted_band(method, case):
    batch = random_batch(case["seed"], case["shape"], case["scale"], lengths=case["lengths"])
    config = actor_config({"alpha": case["alpha"], "kernel_exponent": case["p"]}, case["eps"], case["clip_ratio_c"])
    _, gradient, metrics = run(f"sat_{method}", batch, "token-sum", config)
    _, base, _ = run(BASE[method], batch, "token-sum", config)
    arrays = numpy_batch(batch)
    d = reference.scores(arrays, method)
    q = metrics["actor/sat/q"]
    band = np.zeros(d.shape, bool)
    for i, t in np.argwhere(arrays["mask"]):
        r, a = math.exp(d[i, t]), arrays["advantages"][i, t]
        low, high = reference.interval(d[i, t], q, *case["eps"], case["p"])
        band[i, t] = (a > 0 and high < r < 1 + case["eps"][1]) or (a < 0 and 1 - case["eps"][0] < r < low)
    assert (gradient.numpy()[band] == 0).all()
    assert (base.numpy()[band] != 0).all()
    assert np.array_equal(gradient.numpy()[~band], base.numpy()[~band])
    assert metrics["actor/sat/intercepted"] == band.sum() / max(arrays["mask"].sum(), 1)


@pytest.mark.parametrize("method", METHODS)
@properties
@given(case=CASES)
def test_gradient_is_that_of_ppo_at_the_effective_radius(method, case):
    batch = random_batch(case["seed"], case["shape"], case["scale"], lengths=case["lengths"])
    config = actor_config({"alpha": case["alpha"], "kernel_exponent": case["p"]}, case["eps"], case["clip_ratio_c"])
    _, gradient, metrics = run(f"sat_{method}", batch, case["mode"], config)
    low, high = metrics["actor/sat/eps_eff_low"], metrics["actor/sat/eps_eff_high"]
    # Wider by 1e-9: where max(q, u*) = q, a token stands exactly on the bound, and log and exp round.
    widened = actor_config(None, (low * (1 + 1e-9), high * (1 + 1e-9)), case["clip_ratio_c"])
    _, ppo, _ = run(BASE[method], batch, case["mode"], widened)
    assert same_bits(gradient, ppo)
    if metrics["actor/sat/gate_rate"] == 0:
        assert (low, high) == case["eps"]


def test_the_cases_reach_every_branch():
    # The properties above are empty unless tokens are intercepted on both sides, in both methods.
    for method in METHODS:
        config = actor_config({"alpha": 0.5}, eps=(0.2, 0.2))
        seen = [run(f"sat_{method}", random_batch(s, (12, 3)), "token-sum", config)[2] for s in range(10)]
        for name in ("intercepted_pos", "intercepted_neg", "gate_rate"):
            assert sum(m[f"actor/sat/{name}"] > 0 for m in seen) >= 5, (method, name)
        assert any(m["actor/sat/eps_eff_high"] < 0.15 for m in seen)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_gradient_by_finite_differences(method, seed, monkeypatch):
    # In a fixed region, as q and c are detached. Whole-sequence advantages, under which the token-wise gradient of
    # sat_gspo is also the derivative of its value.
    batch = random_batch(seed, (6, 5), scale=0.2, lengths=False)
    batch["response_mask"][:] = True
    batch["advantages"] = batch["advantages"][:, :1].expand(6, 5)
    del batch["rollout_is_weights"]
    log_prob = batch.pop("log_prob").requires_grad_()
    d = torch.from_numpy(reference.scores(numpy_batch({**batch, "log_prob": log_prob.detach()}), method))
    if method == "gspo":
        d = d[:, :1]
    region = trust_region(d, batch["response_mask"][:, : d.shape[1]], 0.5, 2.0)
    monkeypatch.setattr(moves, "trust_region", lambda *args: region)
    loss_fn = get_policy_loss_fn(f"sat_{method}")
    assert torch.autograd.gradcheck(lambda x: loss_fn(log_prob=x, config=actor_config(), **batch)[0], log_prob)


# --- against verl's own losses: bit for bit ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("method", METHODS)
def test_off_is_the_base_loss_bit_for_bit(method, mode, dtype, device):
    cases = itertools.product([True, False], [{}, GLOBAL], ["bool", "int64", "float32"], ["alpha=1", "d=0", "q=0"])
    for seed, (weights, info, mask_dtype, off) in enumerate(cases):
        batch = random_batch(seed, (4, 32), 0.3, dtype, device, lengths=seed % 2 == 0)
        batch["response_mask"] = batch["response_mask"].to(getattr(torch, mask_dtype))
        if off != "alpha=1":
            batch["log_prob"] = batch["old_log_prob"].clone()
        if off == "q=0":  # under 10 % of the tokens (grpo) or of each row's weight (gspo) have d != 0
            batch["response_mask"][:] = 1
            batch["log_prob"][0, :2] += 0.5 if method == "grpo" else torch.tensor([0.5, -0.5], device=device)
        config = actor_config({"alpha": 1.0 if off == "alpha=1" else 0.9}, (0.2, 0.28), global_batch_info=info)
        loss, gradient, metrics = run(f"sat_{method}", batch, mode, config, weights)
        base_loss, base_gradient, base_metrics = run(BASE[method], batch, mode, config, weights)
        assert same_bits(loss, base_loss)
        assert same_bits(gradient, base_gradient)
        assert {k: metrics[k] for k in base_metrics} == base_metrics
        assert metrics["actor/sat/gate_rate"] == metrics["actor/sat/intercepted"] == 0
        assert (metrics["actor/sat/radius_low"], metrics["actor/sat/radius_high"]) == (0.2, 0.28)
        assert (metrics["actor/sat/eps_eff_low"], metrics["actor/sat/eps_eff_high"]) == (0.2, 0.28)


@pytest.mark.parametrize("eps", [(0.2, 0.2), (0.3, 0.1), (0.1, 0.7), (3e-4, 4e-4), (0.0318, 0.0406), (0.0264, 0.0528)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_off_is_the_base_loss_on_and_beside_the_bounds(dtype, eps):
    # Ratios on the bounds and one step to each side: where clamp's gradient turns. The last two pairs of radii are
    # such that 1 -+ eps * 1 in float32 lies outside, or inside, the scalar bound.
    bounds = torch.tensor([1 - eps[0], 1 + eps[1], 3.0], dtype=dtype)
    ratios = torch.cat([bounds, torch.nextafter(bounds, bounds * 2), torch.nextafter(bounds, bounds * 0)])
    log_prob = torch.cat([ratios.log(), torch.nextafter(ratios.log(), ratios), torch.nextafter(ratios.log(), -ratios)])
    for sign, method in itertools.product([1.0, -1.0], METHODS):
        batch = {
            "old_log_prob": torch.zeros_like(log_prob)[:, None],
            "log_prob": log_prob[:, None],
            "advantages": torch.full_like(log_prob, sign)[:, None],
            "response_mask": torch.ones(len(log_prob), 1, dtype=torch.bool),
        }
        config = actor_config({"alpha": 1.0}, eps)
        sat, base = (run(name, batch, "token-mean", config) for name in (f"sat_{method}", BASE[method]))
        assert same_bits(sat[0], base[0])
        assert same_bits(sat[1], base[1])


@pytest.mark.parametrize("method", METHODS)
def test_off_is_the_base_loss_under_autocast(method):
    batch = random_batch(0, dtype=torch.float32)
    config = actor_config({"alpha": 1.0})
    with torch.autocast("cpu", torch.bfloat16):
        sat, base = (run(name, batch, "token-mean", config) for name in (f"sat_{method}", BASE[method]))
        on = run(f"sat_{method}", batch, "token-mean", actor_config({"alpha": 0.5}))
    assert same_bits(sat[0], base[0])
    assert same_bits(sat[1], base[1])
    assert on[2] == run(f"sat_{method}", batch, "token-mean", actor_config({"alpha": 0.5}))[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_are_close_to_float64(method, dtype):
    batch = random_batch(3, (6, 40), 0.2, dtype)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    config = actor_config({"alpha": 0.8})
    loss, gradient, metrics = run(f"sat_{method}", batch, "token-mean", config)
    exact_loss, _, exact_metrics = run(f"sat_{method}", wide, "token-mean", config)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert loss.dtype == gradient.dtype == dtype
    assert loss.item() == pytest.approx(exact_loss.item(), abs=tolerance)
    for name, value in exact_metrics.items():
        assert metrics[name] == pytest.approx(value, abs=tolerance), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_advantage_that_is_not_finite_shows_as_in_the_base_loss(method, bad):
    batch = random_batch(0, lengths=False)
    batch["response_mask"][0, 0] = True
    batch["advantages"][0, 0] = bad
    results = [run(mode, batch, "token-mean", actor_config({"alpha": 1.0})) for mode in (f"sat_{method}", BASE[method])]
    (sat, gradient, _), (base, base_gradient, _) = results
    assert not sat.isfinite()
    assert same_bits(sat, base)
    assert torch.equal(gradient[1:], base_gradient[1:])


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_is_refused(method):
    batch = random_batch(0)
    log_prob = batch.pop("log_prob").requires_grad_()
    loss, _ = get_policy_loss_fn(f"sat_{method}")(log_prob=log_prob, config=actor_config(), **batch)
    (gradient,) = torch.autograd.grad(loss, log_prob, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


# --- invariances and edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", AGG_MODES)
def test_masked_positions_may_hold_anything(method, mode):
    for bad, seed in itertools.product([math.nan, math.inf, -math.inf, 1e30], range(3)):
        batch = random_batch(seed, dtype=torch.float32, lengths=seed != 1)
        clean = {k: torch.where(batch["response_mask"], v, 0.0) for k, v in batch.items() if v.is_floating_point()}
        dirty = {k: torch.where(batch["response_mask"], v, bad) for k, v in batch.items() if v.is_floating_point()}
        config = actor_config({"alpha": 0.7})
        for mask_dtype in (torch.bool, torch.int64, torch.float32):
            mask = {"response_mask": batch["response_mask"].to(mask_dtype)}
            expected = run(f"sat_{method}", {**clean, **mask}, mode, config, weights=True)
            got = run(f"sat_{method}", {**dirty, **mask}, mode, config, weights=True)
            assert same_bits(got[0], expected[0])
            assert same_bits(got[1], expected[1])
            assert got[2] == expected[2]
            assert (got[1][~batch["response_mask"]] == 0).all()


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=st.integers(0, 2**31), pad=st.integers(0, 9), mode=st.sampled_from(AGG_MODES[:4]))
def test_padding_and_order_change_nothing(method, seed, pad, mode):
    batch = random_batch(seed, lengths=seed % 2 == 0)
    config = actor_config({"alpha": 0.7})
    loss, gradient, metrics = run(f"sat_{method}", batch, mode, config, weights=True)
    order = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(seed))
    padded = {k: torch.nn.functional.pad(v[order], (0, pad), value=0) for k, v in batch.items()}
    other_loss, other_gradient, other_metrics = run(f"sat_{method}", padded, mode, config, weights=True)
    torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other_gradient[:, : gradient.shape[1]], gradient[order], rtol=1e-12, atol=1e-12)
    assert (other_gradient[:, gradient.shape[1] :] == 0).all()
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-12)  # verl's pg metrics are float32 means
    for name in ("q", "gate_rate", "strongest_contraction", "intercepted_pos", "intercepted_neg", "eps_eff_high"):
        assert other_metrics[f"actor/sat/{name}"] == metrics[f"actor/sat/{name}"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["local", "global"])
def test_empty_mask(method, mode, info):
    batch = random_batch(0)
    batch["response_mask"][:] = False
    config = actor_config({"alpha": 0.5}, (0.2, 0.28), global_batch_info=info)
    loss, gradient, metrics = run(f"sat_{method}", batch, mode, config)
    base_loss, _, base_metrics = run(BASE[method], batch, mode, config)
    assert same_bits(loss, base_loss)  # 0, or 0/0 = NaN where verl's own normalisation is local
    assert (gradient == 0).all()
    assert all(math.isfinite(v) for v in metrics.values())
    assert {k: metrics[k] for k in base_metrics} == base_metrics
    assert metrics["actor/sat/q"] == metrics["actor/abs_log_ratio"] == 0
    assert (metrics["actor/sat/radius_low"], metrics["actor/sat/radius_high"]) == (0.2, 0.28)
    assert (metrics["actor/sat/eps_eff_low"], metrics["actor/sat/eps_eff_high"]) == (0.2, 0.28)
    assert metrics["actor/sat/strongest_contraction"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_one_token_and_one_sequence_are_never_gated_by_their_own_quantile(method):
    one_token = random_batch(0, (1, 1), scale=1.0)
    assert run(f"sat_{method}", one_token, "token-mean", actor_config())[2]["actor/sat/gate_rate"] == 0
    one_sequence = random_batch(0, (1, 50), scale=1.0, lengths=False)
    gate_rate = run(f"sat_{method}", one_sequence, "token-mean", actor_config())[2]["actor/sat/gate_rate"]
    assert gate_rate == 0 if method == "gspo" else 0 < gate_rate <= 0.1


def test_gspo_quantile_is_taken_after_the_length_mean_and_weighs_by_length():
    # Means .01 (16 tokens), -.02 (2 tokens), .04 (2 tokens), from token log-ratios that are far larger.
    lengths, means = [16, 2, 2], [0.01, -0.02, 0.04]
    mask = torch.arange(16) < torch.tensor(lengths)[:, None]
    wiggle = torch.tensor([0.5, -0.5] * 8, dtype=torch.float64)
    log_prob = torch.tensor(means, dtype=torch.float64)[:, None] + wiggle
    batch = {
        "log_prob": log_prob,
        "old_log_prob": torch.zeros_like(log_prob),
        "advantages": torch.ones_like(log_prob),
        "response_mask": mask,
    }
    for alpha, q, gate_rate in [(0.8, 0.01, 0.2), (0.81, 0.02, 0.1), (0.9, 0.02, 0.1), (0.91, 0.04, 0.0)]:
        metrics = run("sat_gspo", batch, "token-mean", actor_config({"alpha": alpha}))[2]
        assert metrics["actor/sat/q"] == pytest.approx(q)
        assert metrics["actor/sat/gate_rate"] == pytest.approx(gate_rate)
    assert metrics["actor/abs_log_ratio"] == pytest.approx(0.5, abs=0.01)


# --- metrics, synchronisation, config, registration -------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_metrics_are_floats_that_verls_reducer_averages(method):
    metrics = run(f"sat_{method}", random_batch(0, dtype=torch.bfloat16), "token-mean", actor_config())[2]
    base = run(BASE[method], random_batch(0), "token-mean", actor_config())[2]
    assert set(base) < set(metrics)
    assert all(type(value) is float for value in metrics.values())
    assert not any("min" in name or "max" in name for name in metrics)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_before_the_transfer_needs_a_value(method, monkeypatch):
    # On the meta device there are no values, so any other wait for the device raises.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.1] * tensor.numel())
    loss, gradient, _ = run(f"sat_{method}", random_batch(0, device="meta"), "token-mean", actor_config(), weights=True)
    assert loss.device == gradient.device == torch.device("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(BASE[method], random_batch(0, device="meta"), "token-mean", actor_config())


@contextmanager
def no_wait_for_a_gpu(monkeypatch):
    """An error for whatever waits for the device, but the transfer of the metrics."""
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.1] * tensor.numel())
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_no_other_synchronisation_on_a_gpu(method, monkeypatch):
    batch = random_batch(0, device="cuda")
    with no_wait_for_a_gpu(monkeypatch):
        run(f"sat_{method}", batch, "token-mean", actor_config(), weights=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_plain_policy_loss_config_gives_the_papers_values(method):
    batch = random_batch(1)
    plain, typed = (run(f"sat_{method}", batch, "token-mean", actor_config(sat)) for sat in (None, {"alpha": 0.9}))
    assert plain[2] == typed[2]
    assert typed[2] != run(f"sat_{method}", batch, "token-mean", actor_config({"alpha": 0.5}))[2]
    assert (SATPolicyLossConfig().kernel_exponent, SATPolicyLossConfig().quantile_scope) == (2.0, "microbatch")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("alpha", v) for v in (0, -0.1, 1.1, math.nan, math.inf, "0.9", None, True)]
    + [("kernel_exponent", v) for v in (0, -2.0, math.nan, math.inf, "2", None)]
    + [("quantile_scope", v) for v in ("global", None)],
)
def test_config_refuses_values_out_of_range(setting, value):
    with pytest.raises(ValueError, match=rf"policy_loss\.{setting} must be .*got .*: use ") as error:
        SATPolicyLossConfig(**{setting: value})
    assert repr(value) in str(error.value)


def test_config_loads_through_verl():
    plain = {"_target_": "sat_verl.config.SATPolicyLossConfig", "loss_mode": "sat_gspo", "alpha": 0.8}
    for loaded in (omega_conf_to_dataclass(plain), omega_conf_to_dataclass(plain, SATPolicyLossConfig)):
        assert isinstance(loaded, SATPolicyLossConfig)
        assert (loaded.loss_mode, loaded.alpha, loaded.kernel_exponent) == ("sat_gspo", 0.8, 2.0)
    with pytest.raises(Exception, match=r"policy_loss\.alpha must be"):
        omega_conf_to_dataclass({**plain, "alpha": 2.0})


def test_config_loads_as_part_of_verls_own_trainer_config():
    from hydra import compose, initialize_config_module

    overrides = ["_target_=sat_verl.config.SATPolicyLossConfig", "loss_mode=sat_grpo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose(
            "ppo_trainer",
            [f"actor_rollout_ref.actor.policy_loss.{x}" for x in overrides]
            + ["+actor_rollout_ref.actor.policy_loss.alpha=0.75"]
            + ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.n=2"],
        )
    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, SATPolicyLossConfig)
    assert (actor.policy_loss.loss_mode, actor.policy_loss.alpha) == ("sat_grpo", 0.75)
    _, _, metrics = run("sat_grpo", random_batch(0), actor.loss_agg_mode, actor)
    assert metrics == run("sat_grpo", random_batch(0), "token-mean", actor_config({"alpha": 0.75}))[2]


@pytest.mark.parametrize("method", METHODS)
def test_radii_left_out_are_clip_ratio_as_in_verl(method):
    batch, info = random_batch(2, scale=0.3), {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    left_out = FSDPActorConfig(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None, **info)
    got = run(f"sat_{method}", batch, "token-mean", left_out)
    assert got[2] == run(f"sat_{method}", batch, "token-mean", actor_config(eps=(0.1, 0.1)))[2]


@pytest.mark.parametrize("method", METHODS)
def test_bad_calls_are_refused(method):
    with pytest.raises(ValueError, match="need config"):
        run(f"sat_{method}", random_batch(0), "token-mean", None)
    if method == "grpo":
        with pytest.raises(ValueError, match=r"clip_ratio_c must be above 1, got 1\.0"):
            run("sat_grpo", random_batch(0), "token-mean", actor_config(clip_ratio_c=1.0))


python = functools.partial(subprocess.run, check=True, capture_output=True, text=True)


def test_registered_by_importing_verl_alone():
    code = """if True:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        for name in ("sat_grpo", "sat_gspo"):
            assert get_policy_loss_fn(name).__module__ == "sat_verl.policy_loss"
    """
    python([sys.executable, "-c", code])


def test_importing_the_package_alone_loads_neither_torch_nor_verl():
    python([sys.executable, "-c", "import sys, sat_verl; assert not {'torch', 'verl'} & set(sys.modules)"])
