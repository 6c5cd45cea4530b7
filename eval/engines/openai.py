"""Any OpenAI-compatible endpoint: a vLLM or SGLang server on this machine or elsewhere."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eval.engines.base import Reply, Sampling
from eval.prompts import Request
from recipes.errors import ConfigError


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        base_url: up to and including ``/v1``.
        api: "chat" (the server renders the conversation) or "completions" (the rendered tokens are sent, as the
            in-process engines get them).
        served: the name under which the server knows the model.
        concurrency: requests in flight.
        timeout_s: limit of one attempt, in seconds.
        retries: further attempts after a failure that may pass (connection, time limit, 408, 409, 429, 5xx).
        api_key_env: environment variable that holds the key; the key itself is never a setting.
        extra_body: further fields of every request.
    """

    base_url: str
    api: str
    served: str
    concurrency: int
    timeout_s: float
    retries: int
    api_key_env: str
    extra_body: dict[str, Any]


class OpenAIEngine:
    """Keeps a bounded number of requests in flight on a thread of its own."""

    def __init__(self, endpoint: Endpoint, sampling: Sampling) -> None:
        """Look at the endpoint.

        Args:
            endpoint: where and how to ask.
            sampling: how the server is to draw.

        Raises:
            ConfigError: nobody answers there, or the server does not know the model.
        """
        self._endpoint, self._sampling = endpoint, sampling
        known = self._models()
        # vLLM and SGLang say so; a request without a limit then runs as far as the context goes.
        self._context = next((length for name, length in known.items() if name == endpoint.served), None)
        if known and endpoint.served not in known:
            raise ConfigError(
                "engine.served_model", endpoint.served, f"{endpoint.base_url} serves {', '.join(sorted(known))}",
                "name one of these",
            )  # fmt: skip
        self.identity = {
            "name": "openai",
            "api": endpoint.api,
            "served_model": endpoint.served,
            "extra_body": endpoint.extra_body,
        }

    def _options(self) -> dict[str, Any]:
        # A server of one's own asks for no key, and the client wants one.
        key = os.environ.get(self._endpoint.api_key_env) or "none"
        return {"base_url": self._endpoint.base_url, "api_key": key, "max_retries": self._endpoint.retries}

    def _models(self) -> dict[str, int | None]:
        """The models that the server has, with the tokens that each takes where it says so."""
        from openai import APIConnectionError, OpenAI, OpenAIError

        try:
            with OpenAI(**self._options(), timeout=min(30.0, self._endpoint.timeout_s)) as client:
                return {model.id: getattr(model, "max_model_len", None) for model in client.models.list()}
        except APIConnectionError as error:
            raise ConfigError(
                "engine.base_url", self._endpoint.base_url, f"nobody answers there ({error.__cause__ or error})",
                "start the server, or mend the address (it ends in /v1)",
            ) from error  # fmt: skip
        except OpenAIError:
            return {}  # some servers do not list their models

    def generate(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """See :class:`eval.engines.base.Engine`."""
        replies: queue.SimpleQueue[Reply | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._all(requests, replies, stop))
                replies.put(None)
            except BaseException as error:
                replies.put(error)

        thread = threading.Thread(target=work, daemon=True, name="requests")
        thread.start()
        try:
            while (reply := replies.get()) is not None:
                if isinstance(reply, BaseException):
                    raise reply
                yield reply
        finally:
            stop.set()
            thread.join(timeout=5.0)

    async def _all(self, requests: Sequence[Request], replies: queue.SimpleQueue, stop: threading.Event) -> None:
        from openai import AsyncOpenAI

        waiting = iter(requests)
        async with AsyncOpenAI(**self._options(), timeout=self._endpoint.timeout_s) as client:

            async def serve() -> None:
                for request in waiting:
                    if stop.is_set():
                        return
                    replies.put(await self._one(client, request))

            async def watch() -> None:
                while not stop.is_set():
                    await asyncio.sleep(0.2)

            workers = asyncio.gather(*(serve() for _ in range(min(self._endpoint.concurrency, len(requests)))))
            watcher = asyncio.ensure_future(watch())
            await asyncio.wait({workers, watcher}, return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
            if not workers.done():
                workers.cancel()
                await asyncio.gather(workers, return_exceptions=True)
                return
            workers.result()

    async def _one(self, client: Any, request: Request) -> Reply:
        from openai import OpenAIError

        begin = time.monotonic()
        how = self._sampling
        extra = dict(self._endpoint.extra_body)
        if how.top_k > 0:
            extra["top_k"] = how.top_k
        shared = {
            "model": self._endpoint.served, "temperature": how.temperature, "top_p": how.top_p,
            "max_tokens": self._limit(request), "seed": request.seed, "extra_body": extra or None,
        }  # fmt: skip
        try:
            if self._endpoint.api == "chat":
                answer = await client.chat.completions.create(messages=list(request.messages), **shared)
            else:
                answer = await client.completions.create(prompt=list(request.token_ids), **shared)
            return _reply(request, answer, time.monotonic() - begin)
        except OpenAIError as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return Reply(request, None, "error", what, seconds=time.monotonic() - begin)

    def _limit(self, request: Request) -> int | None:
        """The limit of a response; None leaves it to the server, if only that knows how long the prompt is."""
        beyond = self._context is not None and request.max_tokens >= self._context
        return None if beyond and not request.token_ids else request.max_tokens

    def close(self) -> None:
        """See :class:`eval.engines.base.Engine`."""


def _reply(request: Request, answer: Any, seconds: float) -> Reply:
    choice = answer.choices[0] if answer.choices else None
    if choice is None or choice.finish_reason not in ("stop", "length"):
        reason = choice.finish_reason if choice else "no choice"
        return Reply(request, None, "error", f"the server ended it with {reason!r}", seconds=seconds)
    usage = answer.usage
    return Reply(
        request, _text(choice), choice.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else None,
        response_tokens=usage.completion_tokens if usage else None, seconds=seconds,
    )  # fmt: skip


def _text(choice: Any) -> str:
    if not hasattr(choice, "message"):
        return choice.text
    content = choice.message.content or ""
    # A server with a reasoning parser hands the two parts over apart; they are put together as the model wrote them.
    reasoning = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
    if not reasoning:
        return content
    return f"<think>{reasoning}</think>{content}" if content else f"<think>{reasoning}"
