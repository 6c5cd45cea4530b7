"""A short supervised warm start, after which a tiny model solves part of a task's problems."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.errors import ConfigError
from recipes.models.sampling import encode_prompts, success_rate
from recipes.tasks import Problem, TaskSpec, capacity, draw

IGNORED = -100  # label of a token that is not trained on
_POOL = 8192  # problems encoded once; slips are drawn anew each time one is used


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start.

    The base imitates responses with slips, at a rate that lets a perfect imitator succeed about ``ceiling`` of the
    time at any difficulty. Training stops as soon as the measured success reaches ``target``, or after
    ``max_steps``.
    """

    target: float = 0.38
    ceiling: float = 0.45
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    batch_size: int = 64
    max_steps: int = 800
    eval_every: int = 10
    eval_samples: int = 512

    def __post_init__(self) -> None:
        if not 0.0 < self.target < self.ceiling <= 1.0:
            problem = f"it is not between 0 and the ceiling of {self.ceiling}, itself at most 1"
            raise ConfigError("target", self.target, problem, "try target=0.38 and ceiling=0.45")
        for setting in ("batch_size", "max_steps", "eval_every", "eval_samples"):
            if getattr(self, setting) < 1:
                raise ConfigError(setting, getattr(self, setting), "it is below 1", "raise it")


# Sort starts closer to its ceiling: RL was less steady on a base that still confuses digits.
# Arithmetic has six times longer prompts, so it is measured less often, and only two steps to a response: with the
# slips of a low ceiling most of what it imitates would be wrong, and it would take minutes to learn.
_BY_TASK: dict[str, dict[str, Any]] = {
    "sort": {"target": 0.36, "ceiling": 0.4, "max_steps": 1200},
    "arithmetic": {"target": 0.4, "ceiling": 0.7, "eval_every": 25},
}


def default_warm_start(task: str) -> WarmStart:
    """Return the settings for a task.

    Args:
        task: its name.

    Returns:
        The settings whose base model is right now and then, but far from always.
    """
    return WarmStart(**_BY_TASK.get(task, {}))


@dataclass(frozen=True)
class Progress:
    """What is known at one evaluation."""

    step: int
    max_steps: int
    loss: float
    success: float
    target: float
    seconds: float


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSpec,
    settings: WarmStart,
    seed: int,
    report: Callable[[Progress], None],
) -> dict[str, Any]:
    """Train a model in place until it solves the target share of held-out problems.

    Only problems of the train split are trained on; success is measured on problems of the test split by sampling
    at temperature 1.

    Args:
        model: freshly initialised.
        tokenizer: its tokenizer.
        task: what to learn.
        settings: how.
        seed: fixes the problems, the slips and the samples.
        report: called at every evaluation.

    Returns:
        Measurements: steps, loss, success_sampled, success_greedy, measured_problems, reached_target, seconds.
    """
    started = time.monotonic()
    held_out = _held_out(task, settings.eval_samples, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = _batches(tokenizer, task, settings, seed)
    loss, success, step = math.nan, 0.0, 0
    with _one_thread():
        model.train()
        for step in range(1, settings.max_steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * min(1.0, step / max(1, settings.warmup_steps))
            loss = _update(model, optimizer, *next(batches))
            if step % settings.eval_every and step < settings.max_steps:
                continue
            # The same noise every time: the measured curve then moves with the model and not with the samples.
            generator = torch.Generator().manual_seed(seed)
            success = success_rate(model, tokenizer, task, held_out, generator)
            report(Progress(step, settings.max_steps, loss, success, settings.target, time.monotonic() - started))
            if success >= settings.target:
                break
        final = _measure(model, tokenizer, task, settings, seed)
    model.eval()
    return {
        "steps": step,
        "loss": round(loss, 4),
        **final,
        "reached_target": success >= settings.target,
        "seconds": round(time.monotonic() - started, 1),
    }


def _held_out(task: TaskSpec, size: int, seed: int) -> list[Problem]:
    """Draw test problems, all of them if there are fewer than ``size``."""
    return draw(task, "test", min(size, capacity(task, "test")), seed)


def _measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskSpec, settings: WarmStart, seed: int
) -> dict[str, Any]:
    """Measure success again with other problems and other noise: the stopping rule picked a lucky moment."""
    problems = _held_out(task, 2 * settings.eval_samples, seed + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        "success_sampled": round(success_rate(model, tokenizer, task, problems, generator), 4),
        "success_greedy": round(success_rate(model, tokenizer, task, problems, None), 4),
        "measured_problems": len(problems),
    }


def _update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor
) -> float:
    loss = model(input_ids=inputs, labels=labels).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: TaskSpec, settings: WarmStart, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (input ids, labels) without end: prompt, worked response with fresh slips, end of turn, right padding."""
    problems = draw(task, "train", min(_POOL, capacity(task, "train")), seed)
    prompts = encode_prompts(tokenizer, problems)
    rng = random.Random(seed)
    ids = tokenizer.get_vocab()
    width = task.max_response_chars + 1
    slip_rate = task.slip_rate_for(settings.ceiling)
    at = 0
    while True:
        chosen = [(at + offset) % len(problems) for offset in range(settings.batch_size)]
        at += settings.batch_size
        answers = torch.full((settings.batch_size, width), IGNORED)
        for row, index in enumerate(chosen):
            text = task.worked_response(problems[index], rng, slip_rate)
            tokens = [ids[character] for character in text] + [tokenizer.eos_token_id]
            answers[row, : len(tokens)] = torch.tensor(tokens)
        inputs = torch.cat([prompts[chosen], answers.masked_fill(answers == IGNORED, tokenizer.pad_token_id)], dim=1)
        labels = torch.cat([torch.full_like(prompts[chosen], IGNORED), answers], dim=1)
        yield inputs, labels


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: a second one gains nothing at this size, and the sums keep one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
