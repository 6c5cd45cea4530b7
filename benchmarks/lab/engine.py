"""The training loop: sample with old weights, one optimizer step, next batch."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar
from verl.utils.config import omega_conf_to_dataclass

from benchmarks.lab.config import LabConfig, recipe
from benchmarks.lab.rollout import Rollout, Sampler, base_model
from benchmarks.lab.update import Row, Trainer
from recipes.tasks import Problem, capacity, draw, get_task

ENGINE_VERSION = 2
"""Part of the key of kept results: raise it when a change to the code changes the numbers."""

NOISE_STREAM, EVALUATION_STREAM = 500_009, 800_011
"""Apart from the steps' own generators: runs with and without engine noise train on the same tokens."""


class Result(NamedTuple):
    """Metrics of every step, the success on held-out problems by step (0: before the first), and a digest of the
    trained weights: runs that share it did the same thing."""

    rows: list[Row]
    evaluations: list[Row]
    digest: str = ""


def run(config: LabConfig, report: Callable[[Row], None] = lambda _: None) -> Result:
    """Train one tiny model.

    Args:
        config: the run. The same config gives the same numbers on the same kind of processor.
        report: called with the metrics of every step.

    Returns:
        One row a step (see :func:`_row` and :meth:`Trainer.update`), the evaluations, and a digest of the weights.
    """
    torch.set_num_threads(1)  # a second thread gains nothing at this size, and the sums keep one order everywhere
    disable_progress_bar()
    cfg = recipe(config)
    folder = base_model(config)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    task = get_task(config.task, config.difficulty)
    sampler = Sampler(AutoTokenizer.from_pretrained(folder), task, cfg.data.max_response_length)
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    correction: Any = OmegaConf.to_container(cfg.algorithm.rollout_correction, resolve=True)
    normalise = cfg.algorithm.norm_adv_by_std_in_grpo
    trainer = Trainer(policy, actor, config.micro_batches, normalise, correction, config.lag)
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
        batch = batch.with_noise(config.noise, _generator(config.seed, NOISE_STREAM + step))
        row = {"step": step, "age": age, **_row(batch), **trainer.update(batch, age)}
        weights.record(step)
        rows.append(row)
        report(row)
        if step % config.eval_every == 0 or step == config.steps:
            evaluations.append(_evaluate(sampler, policy, held_out, config.seed, step))
    return Result(rows, evaluations, _digest(policy))


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def _digest(policy: PreTrainedModel) -> str:
    weights = parameters_to_vector(policy.parameters()).detach().numpy()
    return hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()


def _evaluate(sampler: Sampler, policy: PreTrainedModel, problems: Sequence[Problem], seed: int, step: int) -> Row:
    """Success with one sampled response to each problem; the noise is that of the seed and the step, whatever the arm.

    For a given number of responses, as many different problems as possible give the smallest standard error: avg@8
    of an eighth of the problems costs the same and adds the differences between the problems. With 256 problems it is
    at most .031, and .018 for the mean of three evaluations, where seeds of one arm differ by about .05.
    """
    scores = sampler(policy, problems, 1, _generator(seed, EVALUATION_STREAM + step)).scores
    return {"step": step, "success": float(scores.mean())}


def _row(batch: Rollout) -> Row:
    """What is known of a batch before the update."""
    return {
        "success": float(batch.scores.mean()),
        "groups_with_signal": batch.groups_with_signal,
        "response_tokens": float(batch.mask.sum(-1).float().mean()),
    }


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
