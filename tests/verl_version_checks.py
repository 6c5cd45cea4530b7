"""What must hold of the losses in any supported verl; run by ``test_verl_versions.py`` in that verl's environment.

Usage: ``python verl_version_checks.py VERSION external_lib|environment|entry_point``. Ends with the line ``checked``.
"""

import itertools
import math
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import reference

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
GLOBAL = {"dp_size": 2, "batch_num_tokens": 64, "global_batch_size": 16, "loss_scale_factor": 100}
LOSSES = {"sat_grpo", "sat_gspo", "dppo_clip", "m2po"}


def batch(seed, shape=(6, 24), scale=0.2, dtype=torch.float32):
    """Scores are multiples of 2^-12, so that sums of them are exact in any order."""
    g = torch.Generator().manual_seed(seed)
    d = (torch.randn(shape, generator=g) * scale * 2**12).round() / 2**12
    old = -(torch.rand(shape, generator=g) * 2**13).round() / 2**12
    return {
        "old_log_prob": old.to(dtype),
        "log_prob": (old + d).to(dtype),
        "advantages": torch.randn(shape, generator=g).to(dtype),
        "response_mask": torch.arange(shape[1]) < torch.randint(1, shape[1] + 1, (shape[0], 1), generator=g),
    }


def actor_config(options=None, info=None, **settings):
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    return FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=settings.pop("ppo_micro_batch_size_per_gpu", 1),
        policy_loss=options or PolicyLossConfig(),
        global_batch_info=dict(info or {}),
        **settings,
    )


def run(name, values, mode, config, weights=None):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    values = dict(values)
    log_prob = values.pop("log_prob").clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        log_prob=log_prob, loss_agg_mode=mode, config=config, rollout_is_weights=weights, **values
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def switched_on(version, switch):
    """The losses are there by the one documented line, and by nothing else."""
    assert metadata.version("verl") == version
    import verl
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert verl.__version__.startswith(version), verl.__version__
    if switch == "external_lib":
        assert not LOSSES & set(POLICY_LOSS_REGISTRY), "there without being switched on"
        from verl.workers.config import HFModelConfig

        # What a worker does first with its model section; this one has no model, and fails after the import.
        try:
            HFModelConfig(path="/nonexistent", external_lib="sat_verl.plugin")
        except Exception as error:
            print("as expected:", type(error).__name__)
    assert set(POLICY_LOSS_REGISTRY) >= LOSSES


def is_the_base_loss(version):
    """SAT switched off, and without a limit, is this verl's own loss: value, gradient and metrics.

    Before 0.9.1 verl's ``gspo`` aggregates by ``seq-mean-token-mean`` whatever it is told; ours does as it is told.
    """
    from sat_verl.config import DPPOPolicyLossConfig, SATPolicyLossConfig

    pairs = {"sat_grpo": "vanilla", "sat_gspo": "gspo", "dppo_clip": "vanilla"}
    off = {"dppo_clip": DPPOPolicyLossConfig(delta=1.0)}
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    compared = 0
    for name, mode, info, dtype, weighted in itertools.product(pairs, MODES, [{}, GLOBAL], dtypes, [False, True]):
        if name == "sat_gspo" and version != "0.9.1" and mode != "seq-mean-token-mean":
            continue
        values = batch(compared, dtype=dtype)
        weights = torch.rand(values["log_prob"].shape).to(dtype) if weighted else None
        own = actor_config(
            off.get(name, SATPolicyLossConfig(alpha=1.0)), info, clip_ratio_low=0.2, clip_ratio_high=0.28
        )
        base = actor_config(None, info, clip_ratio_low=0.2, clip_ratio_high=0.28)
        loss, gradient, metrics = run(name, values, mode, own, weights)
        base_loss, base_gradient, base_metrics = run(pairs[name], values, mode, base, weights)
        assert loss.dtype == base_loss.dtype
        assert torch.equal(loss, base_loss), (name, mode, dtype)
        assert torch.equal(gradient, base_gradient), (name, mode, dtype)
        assert {key: metrics[key] for key in base_metrics} == base_metrics, (name, mode)
        compared += 1
    # Without a limit to clip at there is nothing to contract: with the gate on, still the base loss.
    for name in ("sat_grpo", "sat_gspo"):
        values = batch(99)
        wide = {"clip_ratio_low": 1e6, "clip_ratio_high": 1e6, "clip_ratio_c": 1e9}
        half = SATPolicyLossConfig(alpha=0.5)
        loss, gradient, metrics = run(name, values, "seq-mean-token-mean", actor_config(half, **wide))
        base_loss, base_gradient, _ = run(pairs[name], values, "seq-mean-token-mean", actor_config(**wide))
        assert metrics["actor/sat/gate_rate"] > 0
        assert torch.equal(loss, base_loss)
        assert torch.equal(gradient, base_gradient)
    print(f"{compared + 2} comparisons with verl's own losses")


def follows_the_equations():
    from sat_verl.config import SATPolicyLossConfig

    for seed, method, mode, info in itertools.product(range(3), ["grpo", "gspo"], MODES, [{}, GLOBAL]):
        values = batch(seed, dtype=torch.float64)
        config = actor_config(SATPolicyLossConfig(alpha=0.8), info, clip_ratio_low=0.1, clip_ratio_high=0.2)
        loss, gradient, metrics = run(f"sat_{method}", values, mode, config)
        arrays = {key: values[key].numpy() for key in ("log_prob", "old_log_prob", "advantages")}
        expected, expected_gradient, _, expected_metrics = reference.policy_loss(
            {**arrays, "mask": values["response_mask"].numpy(), "weights": None},
            method, mode, eps_low=0.1, eps_high=0.2, alpha=0.8, p=2.0,
            dual_clip=3.0 if method == "grpo" else math.inf, **info,
        )  # fmt: skip
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-6, atol=1e-12)
        assert metrics["actor/sat/intercepted"] == expected_metrics["actor/sat/intercepted"]


def command_line_options():
    """The lines of the documentation compose in this verl, and become the typed options."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    loss = "actor_rollout_ref.actor.policy_loss"
    with initialize_config_module("verl.trainer.config", version_base=None):
        cfg = compose(
            "ppo_trainer",
            [
                f"{loss}.loss_mode=sat_gspo",
                "actor_rollout_ref.rollout.calculate_log_probs=True",
                "algorithm.rollout_correction.bypass_mode=True",
                "actor_rollout_ref.model.external_lib=sat_verl.plugin",
                f"{loss}._target_=sat_verl.config.SATPolicyLossConfig",
                f"+{loss}.alpha=0.8",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            ],
        )
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    assert (actor.policy_loss.loss_mode, actor.policy_loss.alpha) == ("sat_gspo", 0.8)
    _, _, metrics = run("sat_gspo", batch(1), "seq-mean-token-mean", actor)
    _, _, narrower = run("sat_gspo", batch(1), "seq-mean-token-mean", actor_config())
    assert metrics["actor/sat/q"] < narrower["actor/sat/q"], "alpha=0.8 did not arrive in the loss"


def through_ppo_loss(version):
    """verl's own call of a policy loss, from the model's output to the metrics."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    from sat_verl.config import SATPolicyLossConfig

    values = batch(5)
    values["response_mask"] = torch.ones_like(values["response_mask"])
    rows, length = values["log_prob"].shape
    nested = version >= "0.8"

    def pack(tensor):
        return torch.nested.as_nested_tensor(list(tensor), layout=torch.jagged) if nested else tensor

    prompt = torch.ones(rows, 2, dtype=torch.long)
    responses = torch.ones(rows, length, dtype=torch.long)
    fields = {
        "prompts": pack(prompt),
        "responses": pack(responses),
        "attention_mask": pack(torch.ones(rows, 2 + length, dtype=torch.long)),
        "response_mask": pack(values["response_mask"].long()),
        "old_log_probs": pack(values["old_log_prob"]),
        "advantages": pack(values["advantages"]),
    }
    data = TensorDict(fields, batch_size=[rows])
    sizes = {"dp_size": 1, "batch_num_tokens": rows * length, "global_batch_size": rows}
    for key, value in sizes.items():
        tu.assign_non_tensor_data(data, key, value)
    found = {}
    for name, options in {
        "vanilla": None,
        "sat_grpo": SATPolicyLossConfig(loss_mode="sat_grpo", alpha=1.0),
        "on": SATPolicyLossConfig(loss_mode="sat_grpo", alpha=0.5),
    }.items():
        # The response's log-probs stand one place before its tokens.
        whole = torch.cat([torch.zeros(rows, 1), values["log_prob"], torch.zeros(rows, 1)], dim=1)
        packed = torch.nested.as_nested_tensor(list(whole), layout=torch.jagged)
        loss, metrics = ppo_loss(actor_config(options), {"log_probs": packed}, data.clone())
        found[name] = loss, metrics
    assert torch.equal(found["vanilla"][0], found["sat_grpo"][0])
    assert not torch.equal(found["vanilla"][0], found["on"][0])
    assert "actor/sat/q" in found["on"][1]


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(11, 11, generator=g))

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.weight[input_ids])


def through_the_legacy_actor():
    """verl 0.7's own FSDP actor: one update with SAT off is that with ``vanilla``; and when it hides the lag."""
    import torch.distributed as dist
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    from sat_verl.config import SATPolicyLossConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def update(options, **settings):
        g = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 11, (4, 8), generator=g)
        old = Tiny()(tokens[:, 1:-1]).logits.log_softmax(-1).gather(-1, tokens[:, 2:, None])[..., 0].detach()
        data = DataProto.from_dict(
            {
                "responses": tokens[:, 2:],
                "response_mask": torch.ones(4, 6, dtype=torch.long),
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "position_ids": torch.arange(8).expand(4, 8).contiguous(),
                "old_log_probs": old + 0.2 * torch.randn(4, 6, generator=g),
                "advantages": torch.randn(4, 6, generator=g),
            },
            meta_info={"temperature": 1.0},
        )
        sizes = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "use_torch_compile": False}
        config = actor_config(options, **(sizes | settings))
        model = Tiny()
        actor = DataParallelPPOActor(config, model, torch.optim.SGD(model.parameters(), lr=0.1))
        metrics = actor.update_policy(data)
        return model.weight.detach().clone(), metrics

    recorded = {"use_rollout_log_probs": True}
    plain, _ = update(None, **recorded)
    off, _ = update(SATPolicyLossConfig(loss_mode="sat_grpo", alpha=1.0), **recorded)
    on, metrics = update(SATPolicyLossConfig(loss_mode="sat_grpo", alpha=0.5), **recorded)
    assert torch.equal(plain, off)
    assert not torch.equal(plain, on)
    assert np.mean(metrics["actor/abs_log_ratio"]) > 0.05
    # With one mini-batch a step this actor takes its own log-probs for the old ones, unless it is told not to.
    _, hidden = update(SATPolicyLossConfig(loss_mode="sat_grpo", alpha=0.5))
    assert np.mean(hidden["actor/abs_log_ratio"]) == 0
    _, two = update(
        SATPolicyLossConfig(loss_mode="sat_grpo", alpha=0.5), ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2
    )
    assert np.mean(two["actor/abs_log_ratio"]) > 0.05
    dist.destroy_process_group()


def asynchronous_mode(version):
    """It is there in 0.9.1; elsewhere it says in which versions it is."""
    from sat_verl.versions import UnsupportedVerlError, require_asynchronous

    if version == "0.9.1":
        require_asynchronous()
        return
    with pytest.raises(UnsupportedVerlError, match=rf"0\.9\.1.*verl {version}"):
        require_asynchronous()
    if version.startswith("0.9"):
        v1 = import_module("verl.trainer.ppo.v1")
        with pytest.raises(UnsupportedVerlError):
            v1.get_trainer_cls("sat_async")(config=None)
        return
    repository = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "recipes.train"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"verl={version}" in done.stderr
    assert "0.9.1" in done.stderr


def main(version, switch):
    switched_on(version, switch)
    is_the_base_loss(version)
    follows_the_equations()
    command_line_options()
    through_ppo_loss(version)
    if version.startswith("0.7"):
        through_the_legacy_actor()
    asynchronous_mode(version)
    print("checked")


if __name__ == "__main__":
    main(*sys.argv[1:])
