"""From a problem to the tokens that the model is given."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.schema import Benchmark
from recipes.errors import ConfigError

PLACE = "{statement}"


@dataclass(frozen=True)
class Request:
    """One sample to be drawn.

    Attributes:
        problem: id of the problem.
        sample: 0 .. n-1.
        seed: of this sample alone.
        messages: the conversation, for engines that render it themselves.
        token_ids: the rendered conversation; empty without a tokenizer.
        max_tokens: limit of the response.
    """

    problem: str
    sample: int
    seed: int
    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]
    max_tokens: int


def sample_seed(seed: int, problem: str, sample: int) -> int:
    """The seed of one sample: it depends on nothing else, so neither order nor interruption matters. 31 bits."""
    return random.Random(hashlib.sha256(f"{seed}\n{problem}\n{sample}".encode()).digest()).getrandbits(31)


def check_template(template: str) -> None:
    """Refuse a prompt that would not hold the problem.

    Raises:
        ConfigError: ``{statement}`` is not in it exactly once.
    """
    if template.count(PLACE) != 1:
        raise ConfigError(
            "prompt.template", template, f"it must contain {PLACE} exactly once", f"put {PLACE} where the problem goes"
        )


def conversation(statement: str, template: str, system: str | None) -> list[dict[str, str]]:
    """The messages for one problem. Braces in the statement stay what they are."""
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": template.replace(PLACE, statement)}]


class Renderer:
    """Renders conversations with a model's own chat template, or as plain text where it has none.

    Attributes:
        tokenizer: of transformers.
        chat: whether the chat template is used.
        lacks_template: whether there is none, and nobody said that there need be none.
    """

    def __init__(self, tokenizer: Any, chat: bool | None, template_options: dict[str, Any]) -> None:
        """Take the tokenizer.

        Args:
            tokenizer: of transformers.
            chat: whether to use the chat template; None: if there is one.
            template_options: variables for the chat template, e.g. ``enable_thinking``.

        Raises:
            ConfigError: a chat template is asked for and there is none.
        """
        self.tokenizer, self.options = tokenizer, template_options
        self.template = tokenizer.chat_template
        if chat and not self.template:
            raise ConfigError(
                "prompt.chat", chat, "the tokenizer has no chat template", "prompt.chat=false, for a base model"
            )
        self.chat = bool(self.template) if chat is None else chat
        self.lacks_template = chat is None and not self.template

    def text(self, messages: list[dict[str, str]]) -> str:
        """The prompt as text.

        Raises:
            ConfigError: the chat template does not take these messages or options.
        """
        if not self.chat:
            return "\n\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError

        options = {"add_generation_prompt": True, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, **options, **self.options)
        except (TemplateError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                "prompt.chat_template_options", self.options or "", f"the chat template fails: {reason}",
                "mend the template, the options or prompt.system; prompt.chat=false does without a template",
            ) from error  # fmt: skip

    def token_ids(self, text: str) -> list[int]:
        """The prompt as tokens; a chat template has written its special tokens itself."""
        return list(self.tokenizer(text, add_special_tokens=not self.chat)["input_ids"])

    def identity(self) -> dict[str, Any]:
        """What the rendering depends on, beside the tokenizer."""
        digest = hashlib.sha256(str(self.template).encode()).hexdigest() if self.chat else None
        return {"chat": self.chat, "chat_template_sha256": digest, "chat_template_options": self.options}


def requests(
    benchmark: Benchmark,
    *,
    template: str,
    system: str | None,
    n: int,
    seed: int,
    max_tokens: int,
    context: int | None,
    renderer: Renderer | None,
) -> list[Request]:
    """All samples of a run, the samples of a problem side by side.

    Args:
        benchmark: the problems.
        template: of the user turn.
        system: the system turn, or None.
        n: samples per problem.
        seed: of the run.
        max_tokens: limit of a response; what the context leaves, where that is less.
        context: tokens that the engine can take in all; None if unknown.
        renderer: None if the engine renders.

    Raises:
        ConfigError: a prompt leaves no room for a response.
    """
    check_template(template)
    found: list[Request] = []
    for problem in benchmark.problems:
        messages = conversation(problem.statement, template, system)
        tokens = renderer.token_ids(renderer.text(messages)) if renderer else []
        limit = max_tokens if context is None else min(max_tokens, context - len(tokens))
        if limit < 1:
            raise ConfigError(
                "benchmark", benchmark.name,
                f"the prompt of {problem.id} has {len(tokens)} tokens and the model's context {context}",
                "choose a model with a longer context, or give benchmark= a file of the other problems",
            )  # fmt: skip
        for sample in range(n):
            one = sample_seed(seed, problem.id, sample)
            found.append(Request(problem.id, sample, one, tuple(messages), tuple(tokens), limit))
    return found


def thinks(rendered: Sequence[str]) -> bool:
    """Whether the prompts end inside ``<think>``, so that responses begin in the reasoning."""
    return bool(rendered) and all(text.rstrip().endswith("<think>") for text in rendered)
