"""The baselines that verl lacks (``dppo_clip``, ``m2po``), and verl's own where a preset gives them a meaning."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from test_policy_loss import AGG_MODES, DEVICES, GLOBAL, numpy_batch, random_batch, run, same_bits
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from waits import waits

from sat_verl.config import DPPOPolicyLossConfig, M2POPolicyLossConfig

properties = settings(deadline=None, max_examples=60, derandomize=True)
LOSSES = ["dppo_clip", "m2po"]
OPTIONS = {"dppo_clip": DPPOPolicyLossConfig, "m2po": M2POPolicyLossConfig}
FIELD = {"dppo_clip": "delta", "m2po": "second_moment"}
NEVER = {"dppo_clip": 1e9, "m2po": 1e9}  # random log-probs may exceed 0, so a delta of 1 is not enough
"""A value with which no token is masked."""
UNCLIPPED = (0.999999999, 1e9)
"""Radii of the preset ``is``."""
D = torch.float64


def config(name=None, option=None, eps=(0.2, 0.2), clip_ratio_c=1e9, info=None):
    policy_loss = PolicyLossConfig() if option is None else OPTIONS[name](**{FIELD[name]: option})
    return FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=eps[0],
        clip_ratio_high=eps[1],
        clip_ratio_c=clip_ratio_c,
        policy_loss=policy_loss,
        global_batch_info=dict(info or {}),
    )


def one_row(prob, old_prob, advantages):
    prob, old_prob, advantages = (torch.tensor([x], dtype=D) for x in (prob, old_prob, advantages))
    mask = torch.ones_like(prob, dtype=torch.bool)
    return {"log_prob": prob.log(), "old_log_prob": old_prob.log(), "advantages": advantages, "response_mask": mask}


# --- by hand, and against the reference -------------------------------------------------------------------------------


def test_dppo_by_hand():
    batch = one_row(
        # outward and far; inward and far; outward within delta; clipped within delta (0.0012 / 0.0004 = 3);
        # outward down; inward up with A < 0 and a ratio of 4, which the dual clip caps at 3
        prob=[0.51, 0.49, 0.5005, 0.0012, 0.3, 0.8],
        old_prob=[0.50, 0.50, 0.5000, 0.0004, 0.5, 0.2],
        advantages=[1.0, 1.0, 2.0, 1.0, -1.0, -1.0],
    )
    loss, gradient, metrics = run("dppo_clip", batch, "token-sum", config("dppo_clip", 1e-3, clip_ratio_c=3.0))
    expected = [0.0, -0.98, -2.002, -1.2, 0.0, 3.0]
    assert loss.item() == pytest.approx(sum(expected))
    np.testing.assert_allclose(gradient[0], [0, -0.98, -2.002, 0, 0, 0], atol=1e-12)
    assert metrics["actor/dppo/masked"] == pytest.approx(2 / 6)
    assert metrics["actor/dppo/removed"] == pytest.approx(1 / 6)  # the fifth, at 0.6, was clipped already
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 6)


def test_m2po_by_hand():
    # Outward: .3 (A > 0), -.2 (A < 0), .1 (A > 0); squares .09, .04, .01. Inward tokens stay, however far.
    d = torch.tensor([[0.3, -0.2, 0.1, -2.0, 2.0]], dtype=D)
    a = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0]], dtype=D)
    batch = {"log_prob": d, "old_log_prob": torch.zeros_like(d), "advantages": a}
    batch["response_mask"] = torch.ones_like(d, dtype=torch.bool)
    # (.09 + .04 + .01) / 3 = .0467; (.04 + .01) / 2 = .025; .01
    for bound, kept in [(0.05, [1, 1, 1]), (0.04, [0, 1, 1]), (0.024, [0, 0, 1]), (0.009, [0, 0, 0])]:
        loss, gradient, metrics = run("m2po", batch, "token-mean", config("m2po", bound))
        terms = -a * d.exp() * torch.tensor([*kept, 1, 1])
        assert loss.item() == pytest.approx(terms.sum().item() / 5)  # the dropped ones count in the mean
        np.testing.assert_allclose(gradient, terms / 5)
        assert metrics["actor/pg_clipfrac"] == pytest.approx((3 - sum(kept)) / 5)
        assert metrics["actor/m2po/second_moment"] == pytest.approx(0.14 / 3)
        squares = [s for s, keep in zip([0.09, 0.04, 0.01], kept, strict=True) if keep]
        assert metrics["actor/m2po/second_moment_kept"] == pytest.approx(sum(squares) / max(len(squares), 1))


def test_m2po_drops_all_of_a_tie_or_none():
    # Exact in binary. Without the rule one of the two far tokens would stay: (4 + .25) / 2 is within 3, (8.25) / 3 too.
    d = torch.tensor([[2.0, -2.0, 0.5]], dtype=D)
    batch = {"log_prob": d, "old_log_prob": torch.zeros_like(d), "advantages": d.sign()}
    batch["response_mask"] = torch.ones_like(d, dtype=torch.bool)
    for bound, dropped in [(2.75, [False] * 3), (2.5, [True, True, False])]:
        gradient = run("m2po", batch, "token-sum", config("m2po", bound))[1]
        assert (gradient == 0).tolist() == [dropped]


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "scale": st.sampled_from([0.003, 0.03, 0.1, 0.3, 1.5]),
        "shape": st.sampled_from([(1, 1), (1, 7), (3, 5), (6, 12)]),
        "lengths": st.booleans(),
        "mode": st.sampled_from(AGG_MODES),
        "weights": st.booleans(),
        "info": st.sampled_from([{}, GLOBAL]),
        "eps": st.sampled_from([(0.2, 0.2), (0.1, 0.28)]),
        "option": st.sampled_from([1e-4, 1e-3, 0.01, 0.04, 0.2, 1.0]),
        "clip_ratio_c": st.sampled_from([1.5, 3.0, 1e9]),
    }
)


@pytest.mark.parametrize("name", LOSSES)
@properties
@given(case=CASES)
def test_matches_the_reference(name, case):
    batch = random_batch(case["seed"], case["shape"], case["scale"], lengths=case["lengths"])
    if not batch["response_mask"].any():
        return
    actor = config(name, case["option"], case["eps"], case["clip_ratio_c"], case["info"])
    loss, gradient, metrics = run(name, batch, case["mode"], actor, case["weights"])
    expected_loss, expected_gradient, expected_metrics = reference.baseline_loss(
        numpy_batch(batch, case["weights"]),
        name,
        case["mode"],
        eps=case["eps"],
        dual_clip=case["clip_ratio_c"],
        option=case["option"],
        **case["info"],
    )
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6, abs=1e-12)  # verl's seq modes divide by n + 1e-8
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-6, atol=1e-12)
    for metric, value in expected_metrics.items():
        assert metrics[metric] == pytest.approx(value, rel=1e-6, abs=1e-9), metric  # shares are float32 means


@pytest.mark.parametrize(("name", "option"), [("dppo_clip", 0.01), ("m2po", 0.01)])
def test_gradient_by_finite_differences(name, option):
    for seed in range(3):
        batch = random_batch(seed, (4, 5), scale=0.2)
        batch["response_mask"][:] = True
        del batch["rollout_is_weights"]
        log_prob = batch.pop("log_prob").requires_grad_()
        actor = config(name, option)
        metrics = run(name, {**batch, "log_prob": log_prob.detach()}, "token-mean", actor)[2]
        assert 0 < metrics["actor/dppo/masked" if name == "dppo_clip" else "actor/pg_clipfrac"] < 1
        loss_fn = run_fn(name)
        assert torch.autograd.gradcheck(lambda x: loss_fn(log_prob=x, config=actor, **batch)[0], log_prob)  # noqa: B023


def run_fn(name):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn(name)


# --- bit for bit verl's, where nothing is masked ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_without_a_masked_token_it_is_vanilla_bit_for_bit(name, dtype, device):
    for seed, (mode, weights, info) in enumerate(itertools.product(AGG_MODES, [True, False], [{}, GLOBAL])):
        batch = random_batch(seed, (4, 32), 0.5, dtype, device, lengths=seed % 2 == 0)
        # m2po without a bound is unclipped importance sampling, the preset `is`.
        eps, dual_clip = ((0.2, 0.28), 3.0) if name == "dppo_clip" else (UNCLIPPED, 1e9)
        loss, gradient, metrics = run(name, batch, mode, config(name, NEVER[name], eps, dual_clip, info), weights)
        base = run("vanilla", batch, mode, config(None, None, eps, dual_clip, info), weights)
        assert same_bits(loss, base[0])
        assert same_bits(gradient, base[1])
        assert {key: metrics[key] for key in base[2]} == base[2]


def test_the_is_preset_never_clips():
    d = torch.tensor([[-25.0, -19.9, -1.0, 1.0, 19.9, 25.0]], dtype=D)
    for sign in (1.0, -1.0):
        batch = {"log_prob": d, "old_log_prob": torch.zeros_like(d), "advantages": torch.full_like(d, sign)}
        batch["response_mask"] = torch.ones_like(d, dtype=torch.bool)
        loss, gradient, metrics = run("vanilla", batch, "token-sum", config(eps=UNCLIPPED))
        # Beyond 20 verl's bound of the log-ratio has no gradient.
        expected = -sign * d.exp() * (d.abs() < 20)
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
        assert loss.item() == pytest.approx((-sign * d.clamp(-20, 20).exp()).sum().item())
        assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_tis_is_policy_gradient_weighed_by_the_truncated_ratio_to_the_rollout(loss):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    batch = random_batch(0, (6, 12), scale=1.0)
    mask, mu, now = batch["response_mask"], batch["old_log_prob"], batch["log_prob"]
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        now, mu, mask.to(D), rollout_is="token", rollout_is_threshold=2.0
    )
    batch |= {"old_log_prob": now.clone(), "rollout_is_weights": weights.batch["rollout_is_weights"]}
    assert torch.equal(kept.bool(), mask)
    _, gradient, metrics = run(loss, batch, "token-sum", config(), weights=True)
    expected = -(now - mu).exp().clamp(max=2.0) * batch["advantages"] * mask
    assert 0 < ((now - mu).exp() > 2)[mask].float().mean() < 1
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    assert metrics["actor/pg_clipfrac"] == 0  # the ratio is 1


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_may_hold_anything(name):
    actor = config(name, 0.01)
    for seed, (bad, mode) in enumerate(itertools.product([math.nan, math.inf, -math.inf, 1e30], AGG_MODES)):
        batch = random_batch(seed, dtype=torch.float32, scale=0.3, lengths=seed % 2 == 0)
        mask = batch.pop("response_mask")
        clean, dirty = ({k: torch.where(mask, v, fill) for k, v in batch.items()} for fill in (0.0, bad))
        for mask_dtype in (torch.bool, torch.int64, torch.float32):
            expected = run(name, {**clean, "response_mask": mask.to(mask_dtype)}, mode, actor, weights=True)
            got = run(name, {**dirty, "response_mask": mask.to(mask_dtype)}, mode, actor, weights=True)
            assert same_bits(got[0], expected[0])
            assert same_bits(got[1], expected[1])
            assert got[2] == expected[2]
            assert (got[1][~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_order_and_padding_do_not_matter(name):
    for seed in range(5):
        batch = random_batch(seed, (6, 7), scale=0.3)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        other = {k: torch.nn.functional.pad(v[order], (0, 3), value=0) for k, v in batch.items()}
        actor = config(name, 0.01)
        loss, gradient, metrics = run(name, batch, "token-mean", actor)
        other_loss, other_gradient, other_metrics = run(name, other, "token-mean", actor)
        torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other_gradient[:, :7], gradient[order], rtol=1e-12, atol=1e-12)
        assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_empty_masks_and_zero_advantages(name):
    batch = random_batch(0)
    silent = run(name, {**batch, "advantages": torch.zeros(4, 16, dtype=D)}, "token-mean", config(name, 1e-4))
    assert silent[0] == 0
    assert (silent[1] == 0).all()
    assert silent[2]["actor/pg_clipfrac"] == silent[2].get("actor/dppo/masked", 0) == 0
    batch["response_mask"][:] = False
    for info in ({}, GLOBAL):
        loss, gradient, metrics = run(name, batch, "token-mean", config(name, 1e-4, info=info))
        assert same_bits(loss, run("vanilla", batch, "token-mean", config(info=info))[0])
        assert (gradient == 0).all()
        assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_floats_in_one_transfer(name, monkeypatch):
    metrics = run(name, random_batch(0, dtype=torch.bfloat16), "token-mean", config(name, 0.01))[2]
    assert set(run("vanilla", random_batch(0), "token-mean", config())[2]) < set(metrics)
    assert all(type(value) is float for value in metrics.values())
    assert not any("min" in key or "max" in key for key in metrics)
    with waits(monkeypatch) as found:
        run(name, random_batch(0), "token-mean", config(name, 0.01))
    assert found == ["tolist"]
    # On the meta device there are no values, so any other wait for the device raises.
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.1] * tensor.numel())
    loss, gradient, _ = run(name, random_batch(0, device="meta"), "token-mean", config(name, 0.01), weights=True)
    assert loss.device == gradient.device == torch.device("meta")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_options_are_typed_and_checked(name):
    for value in (0, -0.1, math.nan, math.inf, "0.1", None, True):
        with pytest.raises(ValueError, match=rf"policy_loss\.{FIELD[name]} must be .*got .*: use "):
            OPTIONS[name](**{FIELD[name]: value})
    plain = {"_target_": f"sat_verl.config.{OPTIONS[name].__name__}", "loss_mode": name, FIELD[name]: 0.5}
    loaded = omega_conf_to_dataclass(plain)
    assert isinstance(loaded, OPTIONS[name])
    assert (loaded.loss_mode, getattr(loaded, FIELD[name])) == (name, 0.5)
    batch = random_batch(1, scale=0.3)
    published = {"dppo_clip": 1e-3, "m2po": 0.04}[name]
    default = run(name, batch, "token-mean", config())[2]
    assert default == run(name, batch, "token-mean", config(name, published))[2]
    assert default != run(name, batch, "token-mean", config(name, published / 100))[2]
    with pytest.raises(ValueError, match="needs config"):
        run(name, batch, "token-mean", None)


def test_dppo_refuses_a_dual_clip_of_one():
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        run("dppo_clip", random_batch(0), "token-mean", config(clip_ratio_c=1.0))


# --- whose weights recompute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "bypass", "moves"),
    [("step", False, []), ("window", False, ["save", "restore", "restore", "clear"]), ("step", True, [])],
)
def test_a_recompute_is_by_the_weights_of_the_step_or_of_the_window(recompute, bypass, moves, monkeypatch):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from sat_verl.trainer import SATAsyncTrainer

    done = []

    class Workers:
        def __getattr__(self, name):
            return lambda version: done.append(name.partition("_")[0])

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", lambda self, batch, metrics: (batch, metrics))
    trainer = SATAsyncTrainer.__new__(SATAsyncTrainer)
    correction = {"algorithm": {"rollout_correction": {"bypass_mode": bypass}}}
    trainer.config = OmegaConf.create({**correction, "sat_verl": {"recompute": recompute}})
    trainer.local_trigger_step, trainer.actor_rollout_wg = 2, Workers()
    assert trainer._old_log_prob("batch", {}) == ("batch", {})
    assert done == moves
