"""What an engine is: it takes requests and yields replies in whatever order they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from eval.prompts import Request


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; ``top_p`` 1 and ``top_k`` -1 leave the distribution whole."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class Reply:
    """What came of one request.

    Attributes:
        request: the request.
        response: the text, or None if the request failed for good.
        finish_reason: "stop", "length" (cut at the limit), or "error".
        error: why it failed.
        prompt_tokens: length of the prompt, if known.
        response_tokens: length of the response, if known.
        seconds: from handing the request over to its end.
    """

    request: Request
    response: str | None
    finish_reason: Literal["stop", "length", "error"]
    error: str = ""
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    seconds: float = 0.0


class Engine(Protocol):
    """A source of samples."""

    @property
    def identity(self) -> dict[str, Any]:
        """What the samples depend on here: name, version, number format."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Draw all samples; each reply is yielded as soon as it is whole."""

    def close(self) -> None:
        """Free the device; leave no process behind."""
