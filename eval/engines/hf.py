"""transformers' own ``generate``: slow, needs nothing else, for small models and as a second opinion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.logging import disable_progress_bar

from eval.engines.base import Reply, Sampling
from eval.models import stop_ids
from eval.prompts import Request
from recipes.errors import ConfigError


def identity(dtype: str) -> dict[str, Any]:
    """This engine's part of a run's key."""
    return {"name": "hf", "version": metadata.version("transformers"), "dtype": dtype}


def device_of(name: str | None) -> str:
    """The device to compute on; None: a GPU if there is one.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError("engine.device", name, f"there is no such device here ({reason})", "leave it out") from error
    return name


def _load(folder: Path, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model, every tensor of which is in the folder."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            "model", folder, f"transformers cannot load it ({reason})", "mend its files, or try engine=vllm"
        ) from error
    model, report = loaded
    # transformers draws these at random.
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            "model", folder, f"{len(missing)} tensors are missing, the first {missing[0]}",
            "copy or download the weights again",
        )  # fmt: skip
    return model


class SeededNoise(LogitsProcessor):
    """Adds Gumbel noise to each row from a generator of its own.

    The largest of the noisy log-probs is an exact draw from the distribution (the Gumbel-max trick), so a greedy
    ``generate`` samples, every row with its own seed, whatever else is in the batch.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return noisy scores, (batch, vocabulary) float64."""
        drawn = torch.stack(
            [torch.empty(scores.shape[-1], dtype=torch.float64).exponential_(generator=one) for one in self._generators]
        )
        # Minus the logarithm of an exponential variable is a Gumbel variable.
        return scores.double() - drawn.log().to(scores.device)


class HFEngine:
    """Batches of requests, the longest prompts first."""

    def __init__(
        self, model: Path, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, dtype: str, device: str | None,
        batch_size: int, trust_remote_code: bool,
    ) -> None:  # fmt: skip
        """Load the model.

        Args:
            model: Hugging Face folder.
            tokenizer: its tokenizer.
            sampling: how to draw.
            dtype: "auto" or the name of a torch dtype.
            device: as for :func:`device_of`.
            batch_size: requests at once.
            trust_remote_code: whether code of the model's folder may run.

        Raises:
            ConfigError: it cannot be loaded, a tensor is missing, or there is no such device.
        """
        disable_progress_bar()
        self._device = device_of(device)
        self._model: Any = _load(model, dtype, trust_remote_code).eval()
        self._model.to(self._device)
        self._tokenizer, self._sampling, self._batch_size = tokenizer, sampling, batch_size
        self.identity = identity(dtype)
        # As vLLM does it: the tokenizer's token and those of the model.
        own = tokenizer.eos_token_id
        self._ends = sorted({*stop_ids(model), *([] if own is None else [own])})
        pad = tokenizer.pad_token_id
        self._pad = pad if pad is not None else (self._ends or [0])[0]
        # generate() takes whatever it is not told from here: penalties, beams, bans. The run's settings say it all.
        self._model.generation_config = GenerationConfig()

    def generate(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """See :class:`eval.engines.base.Engine`."""
        ordered = sorted(requests, key=lambda request: -len(request.token_ids))
        for first in range(0, len(ordered), self._batch_size):
            yield from self._batch(ordered[first : first + self._batch_size])

    def _processors(self, batch: Sequence[Request]) -> LogitsProcessorList:
        how, found = self._sampling, LogitsProcessorList()
        if how.temperature > 0:
            if how.temperature != 1.0:
                found.append(TemperatureLogitsWarper(how.temperature))
            if how.top_k > 0:
                found.append(TopKLogitsWarper(how.top_k))
            if how.top_p < 1.0:
                found.append(TopPLogitsWarper(how.top_p))
            found.append(SeededNoise([request.seed for request in batch]))
        return found

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Request]) -> Iterator[Reply]:
        begin, width = time.monotonic(), max(len(request.token_ids) for request in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        limit = max(request.max_tokens for request in batch)
        output = self._model.generate(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device),
            logits_processor=self._processors(batch),
            generation_config=GenerationConfig(
                max_new_tokens=limit, do_sample=False, eos_token_id=self._ends or None, pad_token_id=self._pad
            ),
        )  # fmt: skip
        seconds = time.monotonic() - begin
        for request, row in zip(batch, output[:, width:].tolist(), strict=True):
            tokens = row[: request.max_tokens]
            end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
            length = len(tokens) if end is None else end + 1
            text = str(self._tokenizer.decode(tokens[:length], skip_special_tokens=True))
            yield Reply(
                request, text, "length" if end is None else "stop",
                prompt_tokens=len(request.token_ids), response_tokens=length, seconds=seconds,
            )  # fmt: skip

    def close(self) -> None:
        """See :class:`eval.engines.base.Engine`."""
        del self._model
