"""Sampling with recorded log-probs, grading, and the training forward pass that matches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from benchmarks.lab.config import LabConfig
from benchmarks.lab.forward import Cache, Forward, forward_of
from recipes.models import ensure_model
from recipes.models.sampling import encode_prompts
from recipes.tasks import Problem, TaskSpec
from sat_verl.reward import compute_score


@dataclass(frozen=True)
class Rollout:
    """Responses to P prompts, G to each, of at most T tokens; rows of one prompt stand together.

    Attributes:
        prompts: token ids, shape (P, prompt length).
        responses: token ids, shape (P * G, T); after the end-of-turn token they mean nothing.
        mask: tokens up to the end-of-turn token, which counts, shape (P * G, T), bool.
        log_probs: log mu of each token as the sampler records it, shape (P * G, T); 0 where masked.
        scores: reward of each response, shape (P * G,).
    """

    prompts: torch.Tensor
    responses: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    scores: torch.Tensor

    def advantages(self, normalise: bool) -> torch.Tensor:
        """verl's group-normalised advantage, shape (P * G, T)."""
        rewards = torch.zeros_like(self.log_probs)
        rewards[:, 0] = self.scores  # verl sums over the tokens, so that the place does not matter
        group = np.repeat(np.arange(len(self.prompts)), len(self.responses) // len(self.prompts))
        return compute_grpo_outcome_advantage(rewards, self.mask, group, norm_adv_by_std_in_grpo=normalise)[0]

    @property
    def groups_with_signal(self) -> float:
        """Share of the prompts whose responses do not all have the same reward."""
        groups = self.scores.view(len(self.prompts), -1)
        return float((groups != groups[:, :1]).any(dim=1).float().mean())

    def with_noise(self, scale: float, generator: torch.Generator) -> Rollout:
        """The same responses with log-probs as an engine that is off by normal noise of this scale would record them.

        Tokens are still sampled from the sampler's own weights; only what is written down of them differs, as between
        two engines that round differently.
        """
        if not scale:
            return self
        noise = scale * torch.randn(self.log_probs.shape, generator=generator)
        # A recorded log-prob is never above 0.
        return replace(self, log_probs=(self.log_probs + noise).clamp(max=0.0).masked_fill(~self.mask, 0.0))


def base_model(config: LabConfig) -> Path:
    """Folder of the warm-started model of a run, which is built if it is missing."""
    return ensure_model(config.model, config.task, config.difficulty, 0, Path(config.cache_dir) / "models")


def response_logits(model: PreTrainedModel, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Logits of the response tokens, with gradients: shape (P * G, T, vocabulary).

    Each prompt is computed once and its keys and values are shared by its responses, which saves a quarter of the time.
    The right padding needs no attention mask: no token looks at a later one.
    """
    forward = forward_of(model)
    first, cache = _prefill(forward, prompts, len(responses) // len(prompts))
    if responses.shape[1] == 1:
        return first
    rest, _ = forward(responses[:, :-1], cache)
    return torch.cat([first, rest], dim=1)


def _prefill(forward: Forward, prompts: torch.Tensor, group: int) -> tuple[torch.Tensor, Cache]:
    """Logits of the first response token, shape (P * G, 1, vocabulary), and the cache for what follows."""
    logits, cache = forward(prompts)
    repeated = [(k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)) for k, v in cache]
    return logits[:, -1:].repeat_interleave(group, dim=0), repeated


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompts: torch.Tensor, group: int, max_tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample ``group`` responses to each prompt at temperature 1.

    Returns:
        Token ids, mask and log-probs as in :class:`Rollout`.
    """
    eos = model.config.eos_token_id
    forward = forward_of(model)
    logits, cache = _prefill(forward, prompts, group)
    active = torch.ones(len(logits), dtype=torch.bool)
    tokens, masks, log_probs = [], [], []
    for _ in range(max_tokens):
        log_prob = logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log_prob.exp(), 1, generator=generator)
        tokens.append(token)
        masks.append(active)
        log_probs.append(log_prob.gather(-1, token)[:, 0].masked_fill(~active, 0.0))
        active = active & (token[:, 0] != eos)
        if not active.any() or len(tokens) == max_tokens:
            break
        logits, cache = forward(token, cache)
    return torch.cat(tokens, dim=1), torch.stack(masks, dim=1), torch.stack(log_probs, dim=1)


class Sampler:
    """Answers problems of one task and grades the answers by the recipes' reward function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: TaskSpec, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._max_tokens = max_tokens
        self._encoded: dict[int, torch.Tensor] = {}

    def _prompts(self, problems: Sequence[Problem]) -> torch.Tensor:
        """Token ids, shape (problems, prompt length); a problem is encoded once."""
        new = [problem for problem in problems if problem.number not in self._encoded]
        if new:
            self._encoded |= {
                one.number: ids for one, ids in zip(new, encode_prompts(self._tokenizer, new), strict=True)
            }
        return torch.stack([self._encoded[problem.number] for problem in problems])

    def __call__(
        self, model: PreTrainedModel, problems: Sequence[Problem], group: int, generator: torch.Generator
    ) -> Rollout:
        """Sample ``group`` responses to each problem, whose prompts have one length, and grade them."""
        prompts = self._prompts(problems)
        responses, mask, log_probs = generate(model, prompts, group, self._max_tokens, generator)
        ended = responses.masked_fill(~mask, self._tokenizer.eos_token_id)
        texts = self._tokenizer.batch_decode(ended, skip_special_tokens=True)
        golds = [problem.ground_truth for problem in problems for _ in range(group)]
        cut = mask.all(dim=1) & (responses[:, -1] != self._tokenizer.eos_token_id)
        reasons = ["length" if one else "stop" for one in cut.tolist()]
        scores = [
            compute_score(self._task.data_source, text, gold, {"finish_reason": reason})["score"]
            for text, gold, reason in zip(texts, golds, reasons, strict=True)
        ]
        return Rollout(prompts, responses, mask, log_probs, torch.tensor(scores))
