"""Batched sampling with a key-value cache, for prompts of one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from recipes.tasks import Problem, TaskSpec


def encode_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> torch.Tensor:
    """Encode problems as chat prompts, the way the rollout does.

    Args:
        tokenizer: with a chat template.
        problems: of one task at one difficulty, whose prompts all have the same length.

    Returns:
        Token ids of shape (problems, prompt length).
    """
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: torch.Tensor, max_tokens: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Sample one response per prompt at temperature 1, or take the most likely tokens.

    Args:
        model: a causal language model.
        prompts: token ids (batch, prompt length), no padding.
        max_tokens: length limit of a response.
        generator: source of randomness; None decodes greedily.

    Returns:
        Token ids (batch, up to ``max_tokens``); everything after the end-of-turn token repeats that token.
    """
    eos = model.config.eos_token_id
    cache, inputs, columns = DynamicCache(), prompts, []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(max_tokens):
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if generator is None:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        token = token.masked_fill(ended, eos)
        columns.append(token)
        ended = ended | (token == eos)
        if bool(ended.all()):
            break
        inputs = token[:, None]
    return torch.stack(columns, dim=1)


def success_rate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSpec,
    problems: Sequence[Problem],
    generator: torch.Generator | None,
) -> float:
    """Measure how many problems the model gets right with one response each.

    Args:
        model: the model; it is put into evaluation mode and back.
        tokenizer: its tokenizer.
        task: where the problems come from.
        problems: what to answer.
        generator: source of randomness; None measures greedy decoding.

    Returns:
        The share of right responses. A response that does not end within the limit counts like any other text.

    Raises:
        ValueError: if there are no problems.
    """
    if not problems:
        raise ValueError("success_rate needs at least one problem")
    training = model.training
    model.eval()
    responses = sample(model, encode_prompts(tokenizer, problems), task.max_response_chars + 1, generator)
    model.train(training)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = sum(task.is_correct(text, problem.ground_truth) for text, problem in zip(texts, problems, strict=True))
    return right / len(problems)
