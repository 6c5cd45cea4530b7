"""Any OpenAI-compatible endpoint: a vLLM or SGLang server on this machine or elsewhere."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.engines.base import Reply, Sampling
from eval.engines.openai_replies import Api, BadReplyError, read_answer, read_models
from eval.prompts import Request
from recipes.errors import ConfigError

_RESPONSE = "every response is one text that ends where the model ends it or at sampling.max_tokens: leave it out"
_PROMPT = "prompt.template and prompt.system say what is asked"
OWNED: dict[str, str] = {
    "temperature": "set sampling.temperature",
    "top_p": "set sampling.top_p",
    "top_k": "set sampling.top_k",
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "set sampling.max_tokens"),
    "seed": "set seed; every sample has one of its own that follows from it",
    "n": "set n; every sample is a request of its own",
    "best_of": "set n; every sample is a request of its own",
    "model": "set engine.served_model",
    **dict.fromkeys(("messages", "prompt", "suffix", "input"), _PROMPT),
    "chat_template_kwargs": "set prompt.chat_template_options",
    **dict.fromkeys(
        ("stop", "stop_token_ids", "stop_regex", "ignore_eos", "stream", "stream_options", "echo"), _RESPONSE
    ),
}
"""Fields of a request that belong to a setting or to the harness, with what to do instead."""


def check_extra_body(extra: Mapping[Any, Any]) -> None:
    """Refuse further fields that would override what the settings say, or how a sample is drawn.

    Raises:
        ConfigError: such a field; the message names its setting.
    """
    for name, value in extra.items():
        if str(name) in OWNED:
            raise ConfigError(f"engine.extra_body.{name}", value, "it is not a further field", OWNED[str(name)])


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
        extra_body: further fields of every request, none of them one of :data:`OWNED`.
        template_options: variables for the server's chat template (``chat_template_kwargs``: vLLM and SGLang).
    """

    base_url: str
    api: Api
    served: str
    concurrency: int
    timeout_s: float
    retries: int
    api_key_env: str
    extra_body: dict[str, Any]
    template_options: dict[str, Any]


class OpenAIEngine:
    """Keeps a bounded number of requests in flight on a thread of its own."""

    def __init__(self, endpoint: Endpoint, sampling: Sampling) -> None:
        """Look at the endpoint.

        Args:
            endpoint: where and how to ask.
            sampling: how the server is to draw.

        Raises:
            ConfigError: nobody answers there, the server does not know the model, or ``extra_body`` has a field that
                is not its own.
        """
        check_extra_body(endpoint.extra_body)
        self._endpoint, self._sampling = endpoint, sampling
        known = self._models()
        self._context = known.get(endpoint.served)
        if known and endpoint.served not in known:
            raise ConfigError(
                "engine.served_model", endpoint.served, f"{endpoint.base_url} serves {', '.join(sorted(known))}",
                "name one of these",
            )  # fmt: skip
        self.identity = {
            "name": "openai",
            "api": endpoint.api,
            "served_model": endpoint.served,
            "context": self._context,
        }

    def _options(self) -> dict[str, Any]:
        # A server of one's own asks for no key, and the client wants one.
        key = os.environ.get(self._endpoint.api_key_env) or "none"
        return {"base_url": self._endpoint.base_url, "api_key": key, "max_retries": self._endpoint.retries}

    def _models(self) -> dict[str, int | None]:
        from openai import APIConnectionError, OpenAI, OpenAIError

        try:
            with OpenAI(**self._options(), timeout=min(30.0, self._endpoint.timeout_s)) as client:
                return read_models(client.models.with_raw_response.list().content)
        except APIConnectionError as error:
            raise ConfigError(
                "engine.base_url", self._endpoint.base_url, f"nobody answers there ({error.__cause__ or error})",
                "start the server, or mend the address (it ends in /v1)",
            ) from error  # fmt: skip
        except BadReplyError as error:
            raise ConfigError(
                "engine.base_url", self._endpoint.base_url, f"its /models is no list of models ({error})",
                "give the address of an OpenAI-compatible interface (it ends in /v1)",
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
            first: set[asyncio.Future[Any]] = {workers, watcher}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
            if not workers.done():
                workers.cancel()
                await asyncio.gather(workers, return_exceptions=True)
                return
            workers.result()

    async def _one(self, client: Any, request: Request) -> Reply:
        from openai import OpenAIError

        begin, api = time.monotonic(), self._endpoint.api
        fields = self._fields(request)
        try:
            # Raw: the client builds its objects from whatever a server sends, and fails on the way or later.
            if api == "chat":
                chat = client.chat.completions.with_raw_response
                raw = await chat.create(messages=list(request.messages), **fields)
            else:
                raw = await client.completions.with_raw_response.create(prompt=list(request.token_ids), **fields)
            answer = read_answer(api, raw.content, self._endpoint.served)
        except (OpenAIError, BadReplyError) as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return Reply(request, None, "error", what, seconds=time.monotonic() - begin)
        return Reply(
            request, answer.text, answer.finish_reason, prompt_tokens=answer.prompt_tokens,
            response_tokens=answer.response_tokens, seconds=time.monotonic() - begin,
        )  # fmt: skip

    def _fields(self, request: Request) -> dict[str, Any]:
        how, endpoint = self._sampling, self._endpoint
        extra: dict[str, Any] = {"top_k": how.top_k} if how.top_k > 0 else {}
        if self._context is not None:
            # vLLM or SGLang, by what its list of models says: what a request leaves open they take from the model's
            # generation_config.json. (OpenAI's own servers refuse these fields.)
            extra = {"top_k": how.top_k, "min_p": 0.0, "repetition_penalty": 1.0}
        extra |= endpoint.extra_body
        if endpoint.template_options and endpoint.api == "chat":
            extra["chat_template_kwargs"] = endpoint.template_options
        return {
            "model": endpoint.served, "temperature": how.temperature, "top_p": how.top_p,
            "max_tokens": self._limit(request), "seed": request.seed, "extra_body": extra or None,
        }  # fmt: skip

    def _limit(self, request: Request) -> int | None:
        """The limit of a response.

        A server refuses a limit that its context does not leave room for: where the length of the prompt is known, the
        limit is what is left. Where only the server knows it and no prompt would leave that much room, the limit is
        None: the server's default then decides, which with vLLM is what the context leaves.
        """
        if self._context is None:
            return request.max_tokens
        if request.token_ids:
            return max(1, min(request.max_tokens, self._context - len(request.token_ids)))
        return None if request.max_tokens >= self._context else request.max_tokens

    def close(self) -> None:
        """See :class:`eval.engines.base.Engine`."""
