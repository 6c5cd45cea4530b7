"""ppo_loss_with_drift on micro-batches as verl's engines hand them over: nested, of any lengths."""

import functools
import math

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from sat_verl.drift import ppo_loss_with_drift
from sat_verl.tail import LogRatioTail, response_log_probs

PROMPTS, RESPONSES = [3, 1, 4], [5, 2, 4]
# A tool call in the middle of the first response, whose tokens do not count.
MASKS = [[1, 1, 0, 1, 1], [1, 1], [1, 0, 1, 1]]


def actor_config(loss_mode, **kwargs):
    return FSDPActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=loss_mode), **kwargs
    )


def nested(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(**changes):
    g = torch.Generator().manual_seed(0)
    rows = {
        "prompts": [torch.randint(9, (n,), generator=g) for n in PROMPTS],
        "responses": [torch.randint(9, (n,), generator=g) for n in RESPONSES],
        "response_mask": MASKS,
        "old_log_probs": [-torch.rand(n, generator=g) for n in RESPONSES],
        "ref_log_prob": [-torch.rand(n, generator=g) for n in RESPONSES],
        "advantages": [torch.randn(n, generator=g) for n in RESPONSES],
    }
    data = tu.get_tensordict({k: nested(v) for k, v in {**rows, **changes}.items()})
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=20, global_batch_size=3)
    return data


def model_output():
    """Log-probs and entropies of all prompt and response tokens, as the engine's forward returns them."""
    g = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *[p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]]).cumsum(0)
    leaf = (-torch.rand(int(offsets[-1]), generator=g)).requires_grad_()
    flat = {"log_probs": leaf, "entropy": torch.rand(int(offsets[-1]), generator=g)}
    jagged = {k: torch.nested.nested_tensor_from_jagged(v, offsets) for k, v in flat.items()}
    return leaf, jagged


def expected_drift(leaf, data):
    """By hand: the token at position k of the sequence is predicted at k - 1."""
    values, start = [], 0
    for prompt, response, mask, old in zip(PROMPTS, RESPONSES, MASKS, data["old_log_probs"].unbind(), strict=True):
        for t in range(response):
            if mask[t]:
                values.append(abs(leaf[start + prompt + t - 1].item() - old[t].item()))
        start += prompt + response
    return sum(values) / len(values)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "dppo_tv", "sat_grpo", "sat_gspo"])
def test_adds_the_drift_and_nothing_else(loss_mode):
    config = actor_config(loss_mode, entropy_coeff=0.01, use_kl_loss=True)
    results = []
    for loss_fn in (ppo_loss, ppo_loss_with_drift):
        leaf, output = model_output()
        data = micro_batch()
        before = data.clone()
        loss, metrics = functools.partial(loss_fn, config=config)(model_output=output, data=data, dp_group=None)
        loss.backward()
        results.append((loss.detach(), leaf.grad, {k: getattr(m, "values", m) for k, m in metrics.items()}))
        assert set(data.keys()) == set(before.keys())
        assert all(torch.equal(data[k].values(), before[k].values()) for k in ("old_log_probs", "advantages"))
    (loss, gradient, plain), (loss_with, gradient_with, metrics_with) = results
    assert torch.equal(loss, loss_with)
    assert torch.equal(gradient, gradient_with)
    assert plain == {k: v for k, v in metrics_with.items() if k in plain}
    assert set(metrics_with) - set(plain) == (set() if loss_mode.startswith("sat") else {"actor/abs_log_ratio"})
    assert isinstance(metrics["actor/abs_log_ratio"], Metric)
    assert metrics["actor/abs_log_ratio"].aggregation is AggregationType.MEAN
    assert metrics["actor/abs_log_ratio"].aggregate() == pytest.approx(expected_drift(leaf, data), rel=1e-6)


def test_returns_the_loss_of_ppo_loss_itself_and_keeps_a_drift_it_reports(monkeypatch):
    loss, calls, reported = torch.tensor(1.0), [], {}
    monkeypatch.setattr("sat_verl.drift.ppo_loss", lambda *args: calls.append(args) or (loss, dict(reported)))
    leaf, output = model_output()
    data, config, group = micro_batch(), actor_config("vanilla"), object()
    returned, metrics = ppo_loss_with_drift(config, output, data, group)
    assert returned is loss
    assert len(calls) == 1
    assert all(a is b for a, b in zip(calls[0], (config, output, data, group), strict=True))
    assert metrics["actor/abs_log_ratio"].aggregate() == pytest.approx(expected_drift(leaf, data), rel=1e-6)
    reported["actor/abs_log_ratio"] = Metric(value=0.5, aggregation=AggregationType.MEAN)
    assert ppo_loss_with_drift(config, output, data)[1] == reported


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_the_base_losses_report_the_same_bits_as_the_sat_losses(loss_mode):
    values = []
    for mode in (loss_mode, "sat_grpo" if loss_mode == "vanilla" else "sat_gspo"):
        metrics = ppo_loss_with_drift(actor_config(mode), model_output()[1], micro_batch())[1]
        values.append(metrics["actor/abs_log_ratio"].aggregate())
    assert values[0] == values[1]


def test_masked_tokens_may_hold_anything_and_none_active_gives_zero():
    old = micro_batch()["old_log_probs"].unbind()
    dirty = [torch.where(torch.tensor(m) == 1, x, math.nan) for m, x in zip(MASKS, old, strict=True)]
    clean, got = (
        ppo_loss_with_drift(actor_config("vanilla"), model_output()[1], data)[1]["actor/abs_log_ratio"].aggregate()
        for data in (micro_batch(), micro_batch(old_log_probs=dirty))
    )
    assert got == clean
    empty = micro_batch(response_mask=[[0] * n for n in RESPONSES])
    metrics = ppo_loss_with_drift(actor_config("vanilla"), model_output()[1], empty)[1]
    assert metrics["actor/abs_log_ratio"].aggregate() == 0.0


def test_the_drift_is_to_the_rollout_where_old_log_probs_are_recomputed():
    leaf, output = model_output()
    sampled = [row - 0.5 for row in micro_batch()["old_log_probs"].unbind()]
    metrics = ppo_loss_with_drift(actor_config("vanilla"), output, micro_batch(rollout_log_probs=sampled))[1]
    expected = expected_drift(leaf, micro_batch(old_log_probs=sampled))
    assert metrics["actor/abs_log_ratio"].aggregate() == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(expected_drift(leaf, micro_batch()), rel=0.01)
    tail = LogRatioTail()
    tail.collector.add(output, micro_batch(rollout_log_probs=sampled))
    distances, active = tail.collector.all(torch.device("cpu"))
    assert distances[active].mean().item() == pytest.approx(expected, rel=1e-6)


def test_left_right_padded_batches():
    # The driver's padded layout, as verl's trainers convert it before the engine.
    width_p, width_r = max(PROMPTS), max(RESPONSES)
    nested_data = micro_batch()

    def right(rows):
        return torch.stack([torch.nn.functional.pad(x, (0, width_r - len(x))) for x in rows.unbind()])

    prompts = torch.stack([torch.nn.functional.pad(x, (width_p - len(x), 0)) for x in nested_data["prompts"].unbind()])
    attention = torch.tensor(
        [[0] * (width_p - p) + [1] * (p + r) + [0] * (width_r - r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    )
    padded = {k: right(nested_data[k]) for k in ("responses", "response_mask", "old_log_probs", "advantages")}
    data = tu.get_tensordict(
        {
            **padded,
            "prompts": prompts,
            "input_ids": torch.cat([prompts, padded["responses"]], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        }
    )
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=20, global_batch_size=3)
    leaf, output = model_output()
    metrics = ppo_loss_with_drift(actor_config("vanilla"), output, data)[1]
    assert metrics["actor/abs_log_ratio"].aggregate() == pytest.approx(expected_drift(leaf, nested_data), rel=1e-6)


def test_response_log_probs_are_verls_up_to_the_padding():
    _, output = model_output()
    data = micro_batch()
    expected = no_padding_2_padding(output["log_probs"], data).detach()
    for log_probs in (output["log_probs"], output["log_probs"].values()):
        got = response_log_probs(log_probs, data, max(RESPONSES))
        assert not got.requires_grad
        for row, other, length in zip(got, expected, RESPONSES, strict=True):
            assert torch.equal(row[:length], other[:length])
