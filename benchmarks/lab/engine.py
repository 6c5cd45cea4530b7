"""The training loop: sample with old weights, one optimizer step, next batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import ActorConfig
from verl.workers.config.optimizer import build_optimizer

import sat_verl.policy_loss  # noqa: F401  registers the SAT losses
from benchmarks.lab.config import LabConfig, recipe
from benchmarks.lab.rollout import Rollout, Sampler, base_model, response_logits
from recipes.tasks import Problem, capacity, draw, get_task
from sat_verl.batch_quantile import batch_quantile, batch_tail_reference

ENGINE_VERSION = 1
"""Part of the key of kept results: raise it when a change to the code changes the numbers."""

Row = dict[str, float]


class Result(NamedTuple):
    """Metrics of every step, and the success on held-out problems by step (0: before the first)."""

    rows: list[Row]
    evaluations: list[Row]


def run(config: LabConfig, report: Callable[[Row], None] = lambda _: None) -> Result:
    """Train one tiny model.

    Args:
        config: the run. The same config gives the same numbers on the same kind of processor.
        report: called with the metrics of every step.

    Returns:
        One row a step (see :func:`_row` and :meth:`Trainer.update`) and the evaluations.
    """
    torch.set_num_threads(1)  # a second thread gains nothing at this size, and the sums keep one order everywhere
    disable_progress_bar()
    cfg = recipe(config)
    folder = base_model(config)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    task = get_task(config.task, config.difficulty)
    sampler = Sampler(AutoTokenizer.from_pretrained(folder), task, cfg.data.max_response_length)
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    trainer = Trainer(policy, actor, config.micro_batches, cfg.algorithm.norm_adv_by_std_in_grpo)
    weights = LaggedWeights(policy)
    pool = draw(task, "train", min(cfg.task.train_size, capacity(task, "train")), cfg.task.seed)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(config.seed)).tolist()
    held_out = draw(task, "test", config.eval_problems, cfg.task.seed)

    rows, evaluations = [], [_evaluate(sampler, policy, held_out, config.seed, 0)]
    for step in range(1, config.steps + 1):
        at = (step - 1) * config.prompts_per_step
        problems = [pool[order[(at + i) % len(order)]] for i in range(config.prompts_per_step)]
        age = config.lag_schedule.age(step)
        model = weights.of_version(step - 1 - age)
        # A generator for each step: runs that differ in the loss only keep drawing the same numbers.
        batch = sampler(model, problems, config.responses_per_prompt, _generator(config.seed, step))
        row = {"step": step, "age": age, **_row(batch), **trainer.update(batch)}
        weights.record(step)
        rows.append(row)
        report(row)
        if step % config.eval_every == 0 or step == config.steps:
            evaluations.append(_evaluate(sampler, policy, held_out, config.seed, step))
    return Result(rows, evaluations)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def _evaluate(sampler: Sampler, policy: PreTrainedModel, problems: Sequence[Problem], seed: int, step: int) -> Row:
    """Success with one sampled response to each problem; the noise is the same at every step of a seed."""
    scores = sampler(policy, problems, 1, _generator(seed, 0)).scores
    return {"step": step, "success": float(scores.mean())}


def _row(batch: Rollout) -> Row:
    """What is known of a batch before the update."""
    return {"success": float(batch.scores.mean()), "response_tokens": float(batch.mask.sum(-1).float().mean())}


class LaggedWeights:
    """The sampler's copy of the model, with the parameters of any version from the last one asked for on.

    Version v is the state after v optimizer steps. Versions have to be asked for in ascending order.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy
        self._copy = copy.deepcopy(policy).requires_grad_(False)
        self._past: dict[int, torch.Tensor] = {}
        self.record(0)

    def record(self, version: int) -> None:
        """Keep the policy's present parameters as ``version``."""
        self._past[version] = parameters_to_vector(self._policy.parameters()).detach()

    def of_version(self, version: int) -> PreTrainedModel:
        """The sampler's model with the parameters of ``version``; older ones are dropped."""
        vector_to_parameters(self._past[version], self._copy.parameters())
        self._past = {kept: past for kept, past in self._past.items() if kept >= version}
        return self._copy


class Trainer:
    """Optimizer steps with verl's loss, optimizer and learning-rate schedule, as its FSDP engine takes them.

    Args:
        policy: trained in place.
        actor: verl's actor config.
        micro_batches: parts of a batch that the loss is called on.
        normalise: divide the advantage by the standard deviation of its group.
    """

    def __init__(self, policy: PreTrainedModel, actor: ActorConfig, micro_batches: int, normalise: bool) -> None:
        self.policy = policy
        self.actor = actor
        self.micro_batches = micro_batches
        self.normalise = normalise
        self.optimizer = build_optimizer(policy.parameters(), actor.optim)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, actor.optim.lr_warmup_steps)

    def update(self, batch: Rollout) -> Row:
        """Take one optimizer step and return its metrics.

        The keys with a slash are those of the loss, averaged over the micro-batches as verl does. ``q_spread`` is the
        standard deviation of q among the micro-batches over its mean; ``empty_gates`` the share of the micro-batches in
        which SAT gates no token.
        """
        loss, metrics = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = clip_grad_norm_(self.policy.parameters(), self.actor.optim.clip_grad)
        lr = self.scheduler.get_last_lr()[0]
        if torch.isfinite(grad_norm):  # verl skips the others too
            self.optimizer.step()
        self.scheduler.step()
        return {**metrics, "loss": float(loss.detach()), "grad_norm": float(grad_norm), "lr": lr}

    def loss(self, batch: Rollout) -> tuple[torch.Tensor, Row]:
        """The sum of the micro-batches' losses, and metrics.

        One forward pass serves all micro-batches: the gradient is that of separate passes, since only the loss couples
        the responses of a micro-batch, and the split costs next to nothing.
        """
        distribution = response_logits(self.policy, batch.prompts, batch.responses).log_softmax(-1)
        log_prob = distribution.gather(-1, batch.responses[..., None])[..., 0]
        tensors = {
            "old_log_prob": batch.log_probs,
            "log_prob": log_prob,
            "advantages": batch.advantages(self.normalise),
            "response_mask": batch.mask,
        }
        losses, metrics = self._policy_losses(tensors)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)[batch.mask].mean()
            drift = (log_prob - batch.log_probs)[batch.mask].abs()
        own = {"entropy": float(entropy), "abs_log_ratio": float(drift.mean()), "max_log_ratio": float(drift.max())}
        return torch.stack(losses).sum(), {**own, **_average(metrics)}

    def _policy_losses(self, tensors: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
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
        with self._step_quantile(parts):
            results = [
                policy_loss(**part, loss_agg_mode=self.actor.loss_agg_mode, config=self.actor, rollout_is_weights=None)
                for part in parts
            ]
        return [loss for loss, _ in results], [metrics for _, metrics in results]

    def _step_quantile(self, parts: Sequence[dict[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """The context of a SAT loss with ``quantile_scope=batch``: one q for all micro-batches of the step."""
        options = self.actor.policy_loss
        if options.get("quantile_scope", "microbatch") != "batch":
            return nullcontext()
        return batch_quantile(batch_tail_reference(parts, options.loss_mode, options.alpha))


def _average(metrics: list[dict[str, Any]]) -> Row:
    """Means over the micro-batches, and what differs among them."""
    row = {name: sum(float(one[name]) for one in metrics) / len(metrics) for name in metrics[0]}
    if "actor/sat/q" in row:
        q = torch.tensor([one["actor/sat/q"] for one in metrics])
        row["q_spread"] = float(q.std(correction=0) / q.mean().clamp(min=1e-12))
        row["empty_gates"] = sum(one["actor/sat/gate_rate"] == 0 for one in metrics) / len(metrics)
    return row
