"""Sums by version lag: what a micro-batch reports, and what arrives on the driver from verl's training worker."""

import functools

import numpy as np
import pytest
import ranks
import reference
import torch
from test_drift import MASKS, expected_drift, micro_batch, model_output, nested
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from waits import waits

from sat_verl.config import SATPolicyLossConfig
from sat_verl.drift import ppo_loss_with_drift
from sat_verl.lag import LAG_SUMS
from sat_verl.tail import LogRatioTail

LAGS, AGES = [3, 0, 3], [0, 3, 7]
EPS = {"sat_grpo": 0.5, "sat_gspo": 0.03}  # such that SAT removes gradients


def actor_config(loss_mode, alpha=0.3):
    policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    if loss_mode.startswith("sat"):
        policy_loss = SATPolicyLossConfig(loss_mode=loss_mode, alpha=alpha)
    radii = dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), EPS.get(loss_mode, 0.2))
    return FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **radii)


def outward(data):
    """Advantages that push every token further away, which is what SAT acts on."""
    log_prob = no_padding_2_padding(model_output()[1]["log_probs"], data).detach()
    rows = zip(log_prob, data["old_log_probs"].unbind(), strict=True)
    data["advantages"] = nested([row[: len(old)] - old for row, old in rows])
    return data


def with_lags(data, lags=LAGS, ages=AGES):
    """The two fields as verl's TransferQueue bridge hands them over: per-sample scalars packed, extra_info assigned."""
    data["version_lag"] = AsyncSimpleStorageManager._pack_field_values([torch.tensor(lag) for lag in lags])
    tu.assign_non_tensor_data(data, "version_lags", ages)
    return data


def lag_sums(metrics):
    return {name.removeprefix(LAG_SUMS): m for name, m in metrics.items() if name.startswith(LAG_SUMS)}


def expected_sums(output, data, method=None, config=None):
    """By hand, token by token; the intercepted ones from the reference implementation's two gradients."""
    log_prob = no_padding_2_padding(output["log_probs"], data).detach().double().numpy()
    padded = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
    old, mask = padded["old_log_probs"].double().numpy(), padded["response_mask"].bool().numpy()
    batch = {"log_prob": log_prob, "old_log_prob": old, "mask": mask, "weights": None}
    batch["advantages"] = padded["advantages"].double().numpy()
    removed = np.zeros(mask.shape, bool)
    if method:
        options = {"eps_low": config.clip_ratio_low, "eps_high": config.clip_ratio_high, "p": 2.0}
        _, gradient, base, _ = reference.policy_loss(
            batch, method, "token-sum", alpha=config.policy_loss.alpha, **options
        )
        removed = (gradient == 0) & (base != 0)
    sums = {}
    for age in AGES:
        rows = [i for i, lag in enumerate(LAGS) if lag == age]
        sums[f"{age}/tokens"] = mask[rows].sum()
        sums[f"{age}/abs_log_ratio"] = np.abs(np.where(mask, log_prob - old, 0))[rows].sum()
        if method:
            sums[f"{age}/intercepted"] = removed[rows].sum()
    return sums


@pytest.mark.parametrize("dp_size", [1, 4])
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "dppo_tv", "sat_grpo", "sat_gspo"])
def test_sums_by_age_are_those_of_the_tokens(loss_mode, dp_size):
    config, data, (_, output) = actor_config(loss_mode), with_lags(outward(micro_batch())), model_output()
    tu.assign_non_tensor(data, dp_size=dp_size)
    _, metrics = ppo_loss_with_drift(config, output, data)
    method = loss_mode.removeprefix("sat_") if loss_mode.startswith("sat") else None
    expected = expected_sums(output, data, method, config)
    got = lag_sums(metrics)
    assert list(got) == list(expected)
    for name, metric in got.items():
        assert metric.aggregation is AggregationType.SUM
        assert metric.aggregate() == pytest.approx(dp_size * expected[name], rel=1e-6), name
        # verl averages over the ranks: together with three ranks that report 0, the true sum.
        others = [Metric(value=0.0, aggregation=AggregationType.SUM)] * (dp_size - 1)
        assert Metric.aggregate_dp([metric, *others]) == pytest.approx(expected[name], rel=1e-6)
    assert got["7/tokens"].aggregate() == 0  # of the batch, but not of this micro-batch
    assert sum(expected[f"{age}/tokens"] for age in AGES) == sum(map(sum, MASKS))


def test_the_cases_intercept_something():
    for method in ("grpo", "gspo"):
        config, data = actor_config(f"sat_{method}"), with_lags(outward(micro_batch()))
        sums = expected_sums(model_output()[1], data, method, config)
        assert sum(sums[f"{age}/intercepted"] for age in AGES) > 0


@pytest.mark.parametrize("loss_mode", ["vanilla", "sat_grpo", "sat_gspo"])
def test_the_loss_and_the_other_metrics_stay_as_they_are(loss_mode):
    results = []
    for data in (micro_batch(), with_lags(micro_batch())):
        leaf, output = model_output()
        loss, metrics = functools.partial(ppo_loss_with_drift, actor_config(loss_mode))(output, data)
        loss.backward()
        results.append((loss.detach(), leaf.grad, {k: m.values for k, m in metrics.items() if LAG_SUMS not in k}))
    (loss, gradient, metrics), (loss_with, gradient_with, metrics_with) = results
    assert torch.equal(loss, loss_with)
    assert torch.equal(gradient, gradient_with)
    assert metrics == metrics_with
    assert not any(LAG_SUMS in name for name in metrics)
    assert metrics["actor/abs_log_ratio"] == [pytest.approx(expected_drift(leaf, micro_batch()), rel=1e-6)]


def test_masked_tokens_may_hold_anything_and_an_infinite_one_stays_with_its_age():
    old = micro_batch()["old_log_probs"].unbind()
    dirty = [torch.where(torch.tensor(m) == 1, x, float("nan")) for m, x in zip(MASKS, old, strict=True)]
    clean, got = (
        {k: m.aggregate() for k, m in lag_sums(ppo_loss_with_drift(actor_config("vanilla"), output, data)[1]).items()}
        for output, data in (
            (model_output()[1], with_lags(micro_batch())),
            (model_output()[1], with_lags(micro_batch(old_log_probs=dirty))),
        )
    )
    assert got == clean
    dirty[1][0] = float("-inf")
    sums = lag_sums(
        ppo_loss_with_drift(actor_config("vanilla"), model_output()[1], with_lags(micro_batch(old_log_probs=dirty)))[1]
    )
    assert sums["0/abs_log_ratio"].aggregate() == float("inf")
    assert sums["3/abs_log_ratio"].aggregate() == clean["3/abs_log_ratio"]


def test_all_micro_batches_report_the_same_names_however_verl_cuts_the_batch():
    data = with_lags(micro_batch())
    parts = [*tu.chunk_tensordict(data, 3), tu.index_select_tensor_dict(data, torch.tensor([2, 0]))]
    for part in parts:
        assert tu.get(part, "version_lags") == AGES
    assert [part["version_lag"].tolist() for part in parts] == [[3], [0], [3], [3, 3]]


@pytest.mark.parametrize("missing", ["version_lag", "version_lags"])
def test_one_field_alone_is_refused(missing):
    data = with_lags(micro_batch())
    tu.pop(data, missing)
    with pytest.raises(ValueError, match=rf"need both fields .*: {missing} is missing"):
        ppo_loss_with_drift(actor_config("vanilla"), model_output()[1], data)


MORE = [("vanilla", False, 1), ("vanilla", True, 1), ("sat_grpo", False, 0), ("sat_gspo", True, 1)]


@pytest.mark.parametrize(("loss_mode", "ages", "more"), MORE)
def test_the_worker_waits_for_the_device_at_most_once_more_than_verls_loss(loss_mode, ages, more, monkeypatch):
    found = {}
    verls, ours = (functools.partial(loss, config=actor_config(loss_mode)) for loss in (ppo_loss, ppo_loss_with_drift))
    for function in (verls, LogRatioTail().observed(ours)):
        data, output = micro_batch(), model_output()[1]
        data = with_lags(data) if ages else data
        data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()  # keeps the lengths, as ppo_loss
        with waits(monkeypatch) as found[function]:
            function(model_output=output, data=data, dp_group=None)
    verls, ours = found.values()
    assert ours.count("tolist") == verls.count("tolist") + more
    assert len(ours) == len(verls) + more


# --- on the driver, from verl's training worker -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", list(ranks.WORLDS))
@pytest.mark.parametrize("loss_mode", ["vanilla", "sat_grpo"])
def test_true_sums_arrive_on_the_driver(world, loss_mode):
    # Two mini-batches, each of several micro-batches and ranks.
    metrics = ranks.results()[world]["update", loss_mode]
    sums = {name: value for name, value in metrics.items() if name.startswith(LAG_SUMS)}
    tokens = dict.fromkeys(ranks.LAGS, 0)
    for age, sample in zip(ranks.LAGS, ranks.results()["samples"], strict=True):
        tokens[age] += int(sample["response_mask"].sum())
    assert {age: sums[f"{LAG_SUMS}{age}/tokens"] for age in tokens} == tokens
    other = ranks.results()[1]["update", loss_mode]
    assert sums == pytest.approx({name: other[name] for name in sums}, rel=1e-5)
    drift = sum(sums[f"{LAG_SUMS}{age}/abs_log_ratio"] for age in tokens)
    whole = ranks.results()[1]["sat_grpo", "microbatch", "whole"]["metrics"]["actor/abs_log_ratio"][0][0]
    assert drift == pytest.approx(whole * sum(tokens.values()), rel=1e-5)
    assert (f"{LAG_SUMS}0/intercepted" in sums) == (loss_mode == "sat_grpo")
    if loss_mode == "sat_grpo":
        assert sum(sums[f"{LAG_SUMS}{age}/intercepted"] for age in tokens) > 0
