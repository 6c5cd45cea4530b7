"""The optimizer step: verl's loss, optimizer and learning-rate schedule on one sampled batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_rejection_mask,
)
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import ActorConfig
from verl.workers.config.optimizer import build_optimizer

import sat_verl.baselines
import sat_verl.policy_loss  # noqa: F401  both register losses
from benchmarks.lab.rollout import Rollout, response_logits
from sat_verl.batch_quantile import StepReference, batch_quantile, batch_tail_reference
from sat_verl.fresh import ReferenceMemory, batch_fresh_reference

Row = dict[str, float]

WEIGHTS = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
"""Settings of verl's rollout correction that its weights are computed from."""


class Trainer:
    """Optimizer steps with verl's loss, optimizer and learning-rate schedule, as its FSDP engine takes them.

    Args:
        policy: trained in place.
        actor: verl's actor config.
        micro_batches: parts of a batch that the loss is called on.
        normalise: divide the advantage by the standard deviation of its group.
        correction: verl's ``algorithm.rollout_correction``. With ``bypass_mode=false`` the ratio is to the trainer's
            own log-probs at the start of the step, and the weights and the rejection of the correction apply.
        lag: of the schedule, for losses that remember for that long.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        actor: ActorConfig,
        micro_batches: int,
        normalise: bool,
        correction: Mapping[str, Any] | None = None,
        lag: int = 0,
    ) -> None:
        self.policy = policy
        self.actor = actor
        self.micro_batches = micro_batches
        self.normalise = normalise
        self.correction = dict(correction or {"bypass_mode": True})
        self.optimizer = build_optimizer(policy.parameters(), actor.optim)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, actor.optim.lr_warmup_steps)
        self.reference = ReferenceMemory.of(actor.policy_loss, lag)
        self.step = 0

    def update(self, batch: Rollout, age: int = 0) -> Row:
        """Take one optimizer step on tokens of this age and return its metrics.

        The keys with a slash are those of the loss, averaged over the micro-batches as verl does. ``q_spread`` is the
        standard deviation of q among the micro-batches over its mean; ``empty_gates`` the share of the micro-batches in
        which SAT gates no token.
        """
        self.step += 1
        loss, metrics = self.loss(batch, age)
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = clip_grad_norm_(self.policy.parameters(), self.actor.optim.clip_grad)
        lr = self.scheduler.get_last_lr()[0]
        if torch.isfinite(grad_norm):  # verl skips the others too
            self.optimizer.step()
        self.scheduler.step()
        return {**metrics, "loss": float(loss.detach()), "grad_norm": float(grad_norm), "lr": lr}

    def loss(self, batch: Rollout, age: int = 0) -> tuple[torch.Tensor, Row]:
        """The sum of the micro-batches' losses, and metrics.

        One forward pass serves all micro-batches: the gradient is that of separate passes, since only the loss couples
        the responses of a micro-batch, and the split costs next to nothing.
        """
        distribution = response_logits(self.policy, batch.prompts, batch.responses).log_softmax(-1)
        log_prob = distribution.gather(-1, batch.responses[..., None])[..., 0]
        tensors = {"log_prob": log_prob, "advantages": batch.advantages(self.normalise)}
        reference, metrics = self._reference(log_prob.detach(), batch)
        losses, of_loss = self._policy_losses({**tensors, **reference}, age)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)[batch.mask].mean()
        own = {"entropy": float(entropy), **metrics, **divergence(log_prob.detach(), batch)}
        return torch.stack(losses).sum(), {**own, **_average(of_loss)}

    def _reference(self, log_prob: torch.Tensor, batch: Rollout) -> tuple[dict[str, torch.Tensor], Row]:
        """The ratio's denominator, the mask, and the weights of verl's rollout correction where it has any.

        Without bypass, verl's trainer recomputes the denominator with the weights of the start of the step, which are
        those of the one update of it: ``log_prob`` itself.
        """
        if self.correction["bypass_mode"]:
            return {"old_log_prob": batch.log_probs, "response_mask": batch.mask}, {}
        # A mask of numbers, as verl hands it over: rejection multiplies it.
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            log_prob, batch.log_probs, batch.mask.long(), **{name: self.correction.get(name) for name in WEIGHTS}
        )
        found = {"old_log_prob": log_prob, "response_mask": mask.bool()}
        if weights is not None:
            found["rollout_is_weights"] = weights.batch["rollout_is_weights"]
        kept = ("rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size")
        return found, {name: metrics[name] for name in kept if name in metrics}

    def _policy_losses(
        self, tensors: dict[str, torch.Tensor], age: int
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """verl's registered loss on each micro-batch, normalised over the whole batch as in verl's ``ppo_loss``."""
        mask = tensors["response_mask"]
        self.actor.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=len(mask),
            loss_scale_factor=self.actor.loss_scale_factor,
        )
        policy_loss = get_policy_loss_fn(self.actor.policy_loss.loss_mode)
        chunks = zip(*(tensor.chunk(self.micro_batches) for tensor in tensors.values()), strict=True)
        parts = [dict(zip(tensors, chunk, strict=True)) for chunk in chunks]
        with self._step_quantile(parts, age):
            results = [
                policy_loss(
                    **{"rollout_is_weights": None, **part}, loss_agg_mode=self.actor.loss_agg_mode, config=self.actor
                )
                for part in parts
            ]
        return [loss for loss, _ in results], [metrics for _, metrics in results]

    def _step_quantile(self, parts: Sequence[dict[str, torch.Tensor]], age: int) -> AbstractContextManager[None]:
        """The context of a SAT loss with one q for all micro-batches of the step."""
        options = self.actor.policy_loss
        numeric = not isinstance(options.get("reference", "batch"), str)
        if options.get("quantile_scope", "microbatch") != "batch" or numeric:
            return nullcontext()
        if self.reference is None:
            return batch_quantile(batch_tail_reference(parts, options.loss_mode, options.alpha))
        return batch_quantile(self._fresh_reference(self.reference, parts, age))

    def _fresh_reference(
        self, memory: ReferenceMemory, parts: Sequence[dict[str, torch.Tensor]], age: int
    ) -> StepReference:
        """q by ``reference=fresh``, which the memory takes note of."""
        options = self.actor.policy_loss
        aged = [{**part, "ages": torch.full(part["log_prob"].shape[:1], age)} for part in parts]
        found = batch_fresh_reference(aged, options.loss_mode, options.alpha, memory.before(self.step))
        assert found.fresh is not None
        memory.after(self.step, age, float(found.fresh))
        return found


def _average(metrics: list[dict[str, Any]]) -> Row:
    """Means over the micro-batches, and what differs among them."""
    row = {name: sum(float(one[name]) for one in metrics) / len(metrics) for name in metrics[0]}
    if "actor/sat/q" in row:
        q = torch.tensor([one["actor/sat/q"] for one in metrics])
        row["q_spread"] = float(q.std(correction=0) / q.mean().clamp(min=1e-12))
        row["empty_gates"] = sum(one["actor/sat/gate_rate"] == 0 for one in metrics) / len(metrics)
    return row


@torch.no_grad()
def divergence(log_prob: torch.Tensor, batch: Rollout) -> Row:
    """How far the policy is from the sampler's record, over the active tokens, whatever the loss's denominator.

    ``abs_log_ratio`` (the paper's d-bar) and ``max_log_ratio``; ``ess``, the effective sample size of the token ratios
    as a share of the tokens, ``(sum r)^2 / (n sum r^2)``; and of verl's ``rollout_corr`` metrics the two estimators of
    the divergence KL(mu || pi), ``kl`` (mean of log mu - log pi) and ``k3_kl``.

    Args:
        log_prob: log pi, shape (P * G, T).
        batch: the tokens and log mu.
    """
    log_ratio = (log_prob - batch.log_probs)[batch.mask]
    ratio = log_ratio.clamp(-20, 20).exp()
    metrics = compute_rollout_corr_metrics_from_logprobs(log_prob, batch.log_probs, batch.mask)
    return {
        "abs_log_ratio": float(log_ratio.abs().mean()),
        "max_log_ratio": float(log_ratio.abs().max()),
        "ess": float(ratio.mean() ** 2 / ratio.square().mean()),
        **{name: metrics[f"rollout_corr/{name}"] for name in ("kl", "k3_kl")},
    }
