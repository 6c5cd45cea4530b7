"""The tail of the log-ratio over a whole optimizer step, exact over micro-batches and ranks.

The mean of ``|log pi - log mu|`` hides what routing replay acts on: few tokens, far out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine import BaseEngine
from verl.workers.utils.padding import no_padding_2_padding

from sat_verl.batch_quantile import active_distances, distributed_tail_reference
from sat_verl.fresh import of_tokens, require_ages

__all__ = ["LogRatioTail", "forward_distances", "sampling_log_probs"]

LEVELS = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "largest": 1.0}
"""By the last part of the metric's name ("max" in a name would change how verl reduces it)."""


def sampling_log_probs(data: TensorDict) -> str:
    """The field with log mu: the rollout's, which ``old_log_probs`` are only in bypass mode."""
    return "rollout_log_probs" if "rollout_log_probs" in data else "old_log_probs"


def response_log_probs(log_probs: torch.Tensor, data: TensorDict, width: int) -> torch.Tensor:
    """verl's ``no_padding_2_padding`` of log-probs, which does not wait for the device: theirs does for every response.

    Args:
        log_probs: the engine's, nested, one row of ``prompt + response`` tokens a sample; or these rows end to end.
        data: micro-batch with ``prompts`` and ``responses``.
        width: length of the longest response.

    Returns:
        Detached, shape ``(B, width)``; anything beyond the end of a response, where theirs has 0.
    """
    if not data["prompts"].is_nested:
        return no_padding_2_padding(log_probs, data).detach()
    prompt, response = (data[name].offsets().diff() for name in ("prompts", "responses"))
    values = (log_probs.values() if log_probs.is_nested else log_probs).detach()
    # The token at position k of a sequence is predicted at k - 1.
    first = (prompt + response).cumsum(0) - response - 1
    at = first.unsqueeze(-1) + torch.arange(width, device=first.device)
    return values[at.clamp(max=len(values) - 1)]


class _Collector:
    """Keeps the distances that the micro-batches of one pass have, and on request the tokens' ages."""

    def __init__(self, loss_mode: str, with_ages: bool = False) -> None:
        self.loss_mode, self.with_ages = loss_mode, with_ages
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ages: list[torch.Tensor] = []

    def add(self, model_output: dict[str, Any], data: TensorDict) -> torch.Tensor:
        """Of one micro-batch; returns its log-probs, shape ``(B, T)``, detached."""
        sampled = sampling_log_probs(data)
        padded = data.select("response_mask", sampled).to_padded_tensor()
        response_mask = padded["response_mask"].to(bool)  # as in ppo_loss
        log_prob = response_log_probs(model_output["log_probs"], data, response_mask.shape[1])
        self.parts.append(active_distances(self.loss_mode, log_prob, padded[sampled], response_mask))
        if self.with_ages:
            self.ages.append(of_tokens(require_ages(tu.get(data, "version_lag")), response_mask))
        return log_prob

    def all(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.parts:
            return torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device)
        distances, actives = zip(*self.parts, strict=True)
        return torch.cat(distances), torch.cat(actives)

    def all_ages(self, device: torch.device) -> torch.Tensor:
        return torch.cat(self.ages) if self.ages else torch.zeros(0, dtype=torch.int64, device=device)


def forward_distances(
    engine: BaseEngine, data: TensorDict, loss_mode: str, *, with_ages: bool = False, **flags: Any
) -> _Collector:
    """What :func:`~sat_verl.batch_quantile.active_distances` gives, of a forward-only pass over the micro-batches.

    Args:
        engine: in train mode.
        data: this rank's share of an optimizer step; not changed.
        loss_mode: ``sat_grpo`` for the distance of the token, ``sat_gspo`` for its response's.
        with_ages: also keep the ages of the tokens' samples.
        flags: non-tensor settings of the pass.

    Raises:
        MissingAgesError: the samples have no ages.
    """
    collector = _Collector(loss_mode, with_ages)

    def collect(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
        return collector.add(model_output, data).new_zeros(()), {}

    # A shallow copy: the pass leaves settings in it. Entropy has no part in the distances.
    data = data.copy()
    tu.assign_non_tensor(data, calculate_entropy=False, **flags)
    engine.infer_batch(data, collect)
    return collector


class LogRatioTail:
    """Quantiles of ``|log pi - log mu|`` of the tokens of one optimizer step."""

    def __init__(self, collector: _Collector | None = None) -> None:
        self.collector = collector or _Collector("sat_grpo")

    def observed(self, loss_function: Any) -> Any:
        """The same loss, whose calls are measured too. Detached, and the tensors that it returns are the loss's own."""

        def loss(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
            self.collector.add(model_output, data)
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        return partial(loss)

    def metrics(self, prefix: str, engine: BaseEngine, device: torch.device) -> dict[str, float]:
        """``prefix`` + ``q50``, ``q90``, ``q99``, ``largest``, over all ranks, every one of which calls this."""
        distances, actives = self.collector.all(device)
        group = engine.get_data_parallel_group()
        values = [distributed_tail_reference(distances, actives, alpha, group) for alpha in LEVELS.values()]
        return {prefix + name: value for name, value in zip(LEVELS, torch.stack(values).tolist(), strict=True)}
