"""The single-process laboratory: lag, losses, determinism, and the kept results."""

import copy
import dataclasses
import functools
import json
import math

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass

from benchmarks import cells, quantile_scope
from benchmarks.lab import LabConfig, cell_key, rollout, run
from benchmarks.lab.config import recipe
from benchmarks.lab.engine import LaggedWeights
from benchmarks.lab.forward import Dense, Library
from benchmarks.lab.update import Trainer
from benchmarks.statistics import Interval, paired
from recipes.errors import ConfigError
from recipes.tasks import draw, get_task

NOISE = 0.01  # of the stale weights: enough for clipping, not so much that q leaves the nominal interval
NARROW = [(f"actor_rollout_ref.actor.clip_ratio_{side}", 0.05) for side in ("low", "high")]
SCOPE = "actor_rollout_ref.actor.policy_loss.quantile_scope"


@pytest.fixture
def small(lab_cache):
    """Makes configs of small, short runs."""
    return functools.partial(
        LabConfig,
        task="chain",
        difficulty={"digits": 3},
        prompts_per_step=8,
        responses_per_prompt=4,
        steps=4,
        eval_every=2,
        eval_problems=16,
        cache_dir=lab_cache,
    )


def test_lagged_weights_are_those_of_the_version():
    policy = torch.nn.Linear(2, 2, bias=False)
    weights = LaggedWeights(policy)
    for version in (1, 2):
        with torch.no_grad():
            policy.weight.fill_(version)
        weights.record(version)
    assert weights.of_version(1).weight.unique().tolist() == [1]
    assert weights.of_version(2).weight.unique().tolist() == [2]
    assert policy.weight.unique().tolist() == [2]
    with pytest.raises(KeyError):  # dropped
        weights.of_version(1)


def test_without_lag_the_ratio_is_one_to_float_noise(small):
    rows = run(small(schedule="constant", lag=0)).rows
    assert max(row["max_log_ratio"] for row in rows) < 1e-4
    assert [row["age"] for row in rows] == [0] * 4


def test_with_lag_the_ratio_moves_and_the_warm_up_is_verls(small):
    rows = run(small(lag=4)).rows
    assert [row["age"] for row in rows] == [0, 1, 2, 3]
    # verl's warm-up begins at a learning rate of 0, so that step 2 still has the initial weights.
    assert [row["lr"] for row in rows] == pytest.approx([0, 5e-5, 1e-4, 1.5e-4])
    drift = [row["abs_log_ratio"] for row in rows]
    assert max(drift[:2]) < 1e-5 < 1e-4 < drift[2] < drift[3]


def test_same_seed_same_rows(small):
    first, again, other = (run(small(seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first.rows != other.rows


def test_arms_of_one_seed_share_start_prompts_and_noise(small):
    sat, base = run(small(steps=2)), run(small(steps=2, algorithm="gspo"))
    assert sat.evaluations[0] == base.evaluations[0]
    for name in ("success", "response_tokens", "entropy"):
        assert [row[name] for row in sat.rows] == [row[name] for row in base.rows]


@pytest.fixture
def stale(small):
    """A policy and a batch that a somewhat different one sampled."""
    config = small()
    folder = rollout.base_model(config)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    old = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=generator)
    task = get_task(config.task, config.difficulty)
    sampler = rollout.Sampler(AutoTokenizer.from_pretrained(folder), task, 12)
    batch = sampler(old, draw(task, "train", 16, 0), 4, generator)
    return policy, dataclasses.replace(batch, scores=torch.randint(0, 2, (64,), generator=generator).float())


def gradient(policy, batch, config, changes=()):
    """The gradient with some of the actor's settings changed (another composition of the config takes a second)."""
    cfg = copy.deepcopy(recipe(config))
    for name, value in changes:
        OmegaConf.update(cfg, name, value)
    trainer = Trainer(policy, omega_conf_to_dataclass(cfg.actor_rollout_ref.actor), config.micro_batches, True)
    policy.zero_grad()
    loss, metrics = trainer.loss(batch)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("grpo", ()), ("gspo", NARROW), ("sat_grpo", [(SCOPE, "batch")]), ("sat_gspo", [(SCOPE, "batch")])],
)
def test_gradient_does_not_depend_on_the_split(stale, small, algorithm, changes):
    whole, metrics = gradient(*stale, small(algorithm=algorithm), changes)
    assert 0 < metrics["actor/pg_clipfrac"] < 0.9
    assert metrics.get("actor/sat/intercepted", 1) > 0
    for parts in (4, 16):
        split, _ = gradient(*stale, small(algorithm=algorithm, micro_batches=parts), changes)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))


def test_a_micro_batch_quantile_depends_on_the_split_and_one_part_is_the_batch(stale, small):
    config = small(algorithm="sat_grpo")
    whole, _ = gradient(*stale, config, [(SCOPE, "batch")])
    one, _ = gradient(*stale, config, [(SCOPE, "microbatch")])
    split, metrics = gradient(*stale, dataclasses.replace(config, micro_batches=8), [(SCOPE, "microbatch")])
    assert torch.equal(one, whole)
    assert metrics["q_spread"] > 0
    assert float((split - whole).norm() / whole.norm()) > 1e-3


def test_shared_prompts_give_the_logits_of_a_plain_forward(stale):
    policy, batch = stale
    repeated = batch.prompts.repeat_interleave(4, dim=0)
    plain = policy(input_ids=torch.cat([repeated, batch.responses], dim=1)).logits[:, batch.prompts.shape[1] - 1 : -1]
    shared = rollout.response_logits(policy, batch.prompts, batch.responses)
    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)


def test_a_group_of_equal_scores_has_no_advantage(stale):
    _, batch = stale
    batch.scores[:4] = 1.0
    advantages = batch.advantages(True)
    assert advantages[:4].abs().max() == 0
    assert advantages[~batch.mask].abs().max() == 0
    assert advantages.abs().max() > 0


@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "random"}, {"lag": -1}, {"schedule": "constant", "lag": -1}, {"micro_batches": 5}, {"steps": 0}],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        LabConfig(**wrong)


def test_the_key_depends_on_resolved_settings(small):
    config = small()
    assert cell_key(config) == cell_key(small(overrides=("actor_rollout_ref.actor.policy_loss.alpha=0.9",)))
    assert cell_key(config) != cell_key(small(overrides=(f"{SCOPE}=microbatch",)))
    assert cell_key(config) != cell_key(small(seed=1))


def test_kept_runs_are_not_done_again(small, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(cells, "run", lambda config, report: done.append(config.seed) or run(config, report))
    out = tmp_path / "results" / "file.json"
    cells.run_cells(out, {"arm": [small(steps=1)]})
    wanted, kept = cells.run_cells(out, {"arm": [small(steps=1), small(steps=1, seed=1)]})
    assert done == [0, 1]
    assert [(arm, seed) for arm, _, seed in wanted] == [("arm", 0), ("arm", 1)]
    document = json.loads(out.read_text())
    assert document["cells"] == kept
    assert [cell["provenance"] for cell in kept.values()] == [0, 1]
    assert document["provenance"][0]["versions"]["verl"]


def test_a_file_of_something_else_is_left_alone(small, tmp_path):
    out = tmp_path / "notes.json"
    out.write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="not one of this benchmark's"):
        cells.run_cells(out, {"arm": [small()]})
    assert out.read_text() == '{"mine": 1}'


def test_paired_interval():
    # Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 4.303 at two degrees of freedom.
    assert paired([2, 4, 6], [1, 2, 3]) == pytest.approx((2, 4.302653 / math.sqrt(3)))
    assert paired([1.0], [0.5]) == Interval(0.5, math.inf)


def test_unknown_setting_of_the_script(capsys):
    assert quantile_scope.main(["seed=3"]) == 2
    assert "seed=3: there is no such setting" in capsys.readouterr().err


# --- forward pass, engine noise, recomputed denominator ---------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 4])
def test_the_dense_forward_is_the_librarys_with_its_gradient(stale, group):
    policy, batch = stale
    rows = slice(0, len(batch.prompts) * group)
    own, library = [], []
    for forward, found in ((Dense(policy), own), (Library(policy), library)):
        policy.zero_grad()
        _, cache = forward(batch.prompts)
        cache = [(k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)) for k, v in cache]
        logits, _ = forward(batch.responses[rows], cache)
        logits.log_softmax(-1)[..., 3].sum().backward()
        found += [logits.detach(), *(parameter.grad.clone() for parameter in policy.parameters())]
    for mine, theirs in zip(own, library, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_engine_noise_is_in_the_record_alone(small):
    quiet, noisy = run(small(steps=1)), run(small(steps=1, noise=0.05))
    for name in ("success", "response_tokens", "entropy"):
        assert quiet.rows[0][name] == noisy.rows[0][name]
    # Normal noise has a mean absolute value of .8 standard deviations; some of it is cut off at a log-prob of 0.
    assert quiet.rows[0]["abs_log_ratio"] < 1e-5 < 0.015 < noisy.rows[0]["abs_log_ratio"] < 0.05
    assert quiet.rows[0]["ess"] == pytest.approx(1) != noisy.rows[0]["ess"]
    with pytest.raises(ConfigError, match="noise=-1"):
        small(noise=-1)


def test_a_recomputed_denominator_leaves_the_weight_alone(stale, small):
    """Then the ratio is 1, and the gradient that of REINFORCE with weights min(pi/mu, C)."""
    policy, batch = stale
    config = small(algorithm="grpo", overrides=("correction=tis",))
    cfg = recipe(config)
    correction = OmegaConf.to_container(cfg.algorithm.rollout_correction) | {"rollout_is_threshold": 1.1}
    trainer = Trainer(policy, omega_conf_to_dataclass(cfg.actor_rollout_ref.actor), 2, True, correction)
    policy.zero_grad()
    loss, metrics = trainer.loss(batch)
    loss.backward()
    got = [parameter.grad.clone() for parameter in policy.parameters()]
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["abs_log_ratio"] > 0.01  # to the sampler, whatever the loss's ratio is to

    policy.zero_grad()
    logits = rollout.response_logits(policy, batch.prompts, batch.responses)
    log_prob = logits.log_softmax(-1).gather(-1, batch.responses[..., None])[..., 0]
    weight = (log_prob.detach() - batch.log_probs).exp().clamp(max=1.1)
    assert 0 < (weight[batch.mask] == 1.1).float().mean() < 0.5
    (-(weight * batch.advantages(True) * log_prob)[batch.mask].sum() / batch.mask.sum()).backward()
    for mine, parameter in zip(got, policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": "ppo"}, "no critic"),
        ({"algorithm": "grpo", "overrides": ("correction=tis", "sat_verl.recompute=window")}, "weights of the step"),
    ],
)
def test_arms_that_the_laboratory_cannot_run_are_refused(small, changes, text):
    with pytest.raises(ConfigError, match=text):
        recipe(small(**changes))
