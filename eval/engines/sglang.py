"""SGLang in this process. Written to its documented interface; not run where this was built (it needs a GPU)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.engines.base import Reply, Sampling
from eval.prompts import Request
from recipes.errors import ConfigError

# Only with this does SGLang draw each request from its own seed, whatever runs beside it.
_DETERMINISTIC = {"enable_deterministic_inference": True}


def identity(dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """This engine's part of a run's key.

    Raises:
        ConfigError: SGLang is not installed.
    """
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "engine", "sglang", "SGLang is not installed", "pip install sglang on a machine with a GPU, or engine=vllm"
        ) from error
    return {
        "name": "sglang",
        "version": found,
        "dtype": dtype,
        "options": dict(sorted((_DETERMINISTIC | options).items())),
    }


class SGLangEngine:
    """Hands every request to SGLang's engine, which batches them itself."""

    def __init__(
        self, model: Path, sampling: Sampling, *, context: int | None, dtype: str, options: dict[str, Any],
        concurrency: int, trust_remote_code: bool,
    ) -> None:  # fmt: skip
        """Load the model.

        Args:
            model: Hugging Face folder.
            sampling: how to draw.
            context: longest prompt plus response, in tokens.
            dtype: "auto" or a number format of SGLang.
            options: further arguments of ``sglang.Engine``.
            concurrency: requests handed over at once.
            trust_remote_code: whether code of the model's folder may run.

        Raises:
            ConfigError: as :func:`identity`.
        """
        self.identity = identity(dtype, options)
        import sglang

        self._sampling, self._concurrency = sampling, concurrency
        self._engine = sglang.Engine(
            model_path=str(model),
            dtype=dtype,
            context_length=context,
            trust_remote_code=trust_remote_code,
            **(_DETERMINISTIC | options),
        )

    def generate(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """See :class:`eval.engines.base.Engine`."""
        loop = asyncio.get_event_loop_policy().get_event_loop()
        replies = self._all(requests)
        while True:
            try:
                yield loop.run_until_complete(anext(replies))
            except StopAsyncIteration:
                return

    async def _all(self, requests: Sequence[Request]) -> AsyncIterator[Reply]:
        left = list(reversed(requests))
        running: set[asyncio.Future[Reply]] = set()
        while left or running:
            while left and len(running) < self._concurrency:
                running.add(asyncio.ensure_future(self._one(left.pop())))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()

    async def _one(self, request: Request) -> Reply:
        begin = time.monotonic()
        how = self._sampling
        parameters = {
            "temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k,
            "max_new_tokens": request.max_tokens, "sampling_seed": request.seed,
        }  # fmt: skip
        answer = await self._engine.async_generate(input_ids=list(request.token_ids), sampling_params=parameters)
        facts, seconds = answer["meta_info"], time.monotonic() - begin
        reason = (facts.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            return Reply(request, None, "error", f"SGLang ended it with {reason!r}", seconds=seconds)
        return Reply(
            request, answer["text"], reason,
            prompt_tokens=facts.get("prompt_tokens"), response_tokens=facts.get("completion_tokens"), seconds=seconds,
        )  # fmt: skip

    def close(self) -> None:
        """See :class:`eval.engines.base.Engine`."""
        self._engine.shutdown()
