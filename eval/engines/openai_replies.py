"""What an OpenAI-compatible server sends, read without trust: a reply that is none is an error with a reason."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Api = Literal["chat", "completions"]


class BadReplyError(ValueError):
    """An answer that cannot be used."""


def _whole(text: Any) -> Any:
    # A server may hand over half of a surrogate pair, which no UTF-8 file can hold.
    return text.encode("utf-8", "replace").decode("utf-8") if isinstance(text, str) else text


_Text = Annotated[str, BeforeValidator(_whole)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Usage(_Part):
    prompt_tokens: int | None = Field(default=None, ge=0)
    completion_tokens: int | None = Field(default=None, ge=0)


class _Message(_Part):
    content: _Text | None = None
    reasoning_content: _Text | None = None
    reasoning: _Text | None = None

    def text(self) -> str:
        """The two parts that a reasoning parser hands over apart, put together as the model wrote them."""
        content, reasoning = self.content or "", self.reasoning_content or self.reasoning
        if not reasoning:
            return content
        return f"<think>{reasoning}</think>{content}" if content else f"<think>{reasoning}"


class _ChatChoice(_Part):
    finish_reason: str | None = None
    message: _Message


class _TextChoice(_Part):
    finish_reason: str | None = None
    text: _Text


class _Answer(_Part):
    model: str | None = None
    usage: _Usage | None = None


class _Chat(_Answer):
    choices: list[_ChatChoice] = Field(min_length=1)


class _Completion(_Answer):
    choices: list[_TextChoice] = Field(min_length=1)


class _Model(_Part):
    id: str
    max_model_len: int | None = None


class _Models(_Part):
    data: list[_Model]


_Kind = TypeVar("_Kind", bound=_Part)


class Answer(BaseModel):
    """What is used of a reply."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int | None
    response_tokens: int | None


def _read(kind: type[_Kind], body: bytes) -> _Kind:
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadReplyError(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise BadReplyError(f"not JSON: {body[:80].decode('utf-8', 'replace')!r}") from None


def read_answer(api: Api, body: bytes, served: str) -> Answer:
    """The response in a server's answer.

    Args:
        api: which interface it answers.
        body: what it sent with status 200.
        served: the model that was asked for.

    Raises:
        BadReplyError: it is no answer of that interface, of another model, or did not end as a response ends.
    """
    found: _Chat | _Completion
    found = _read(_Chat, body) if api == "chat" else _read(_Completion, body)
    if found.model and found.model != served:
        raise BadReplyError(
            f"{found.model!r} answered, not {served!r} (if both are one model, set engine.served_model={found.model})"
        )
    choice = found.choices[0]
    if choice.finish_reason not in ("stop", "length"):
        raise BadReplyError(f"the server ended it with {choice.finish_reason!r}")
    usage = found.usage or _Usage()
    return Answer(
        text=choice.message.text() if isinstance(choice, _ChatChoice) else choice.text,
        finish_reason=choice.finish_reason,  # type: ignore[arg-type]
        prompt_tokens=usage.prompt_tokens,
        response_tokens=usage.completion_tokens,
    )


def read_models(body: bytes) -> dict[str, int | None]:
    """The models that a server has, with the tokens that each takes where it says so (vLLM and SGLang do).

    Raises:
        BadReplyError: it is no list of models.
    """
    return {model.id: model.max_model_len for model in _read(_Models, body).data}
