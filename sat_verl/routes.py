"""The routes of a response: which experts each of its tokens went to, in every layer, as the rollout engine chose.

They travel as verl's batch field :data:`ROUTES`, one row per token of prompt and response, shape
``(tokens, layers, top_k)``. Row ``t`` is the route of token ``t`` when it was fed to the engine. The last token never
was: its row is zero, and no log-prob of the response depends on it. Layers without experts have zeros, too.

verl stores ``int16``; here the field has the smallest type that holds the experts, :func:`route_dtype`, so it is half
the size for up to 256 experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUTES = "routed_experts"
"""verl's key of the batch field."""

ROUTES_BYTES = "routes_bytes"
"""Key in ``extra_fields``: size of the response's routes, in bytes."""

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Names of the number of experts of a layer, and of a token, in the configs of Hugging Face's models."""


class IncompleteRoutesError(RuntimeError):
    """Tokens have no route that need one: in a response as the engine returned it, or in a batch to be replayed."""


@dataclass(frozen=True)
class Router:
    """What decides the size of routes: layers of the model, experts of a layer, experts of a token."""

    layers: int
    experts: int
    top_k: int

    def nbytes(self, tokens: int) -> int:
        """Bytes of the routes of so many tokens."""
        return tokens * self.layers * self.top_k * route_dtype(self.experts).itemsize


def expert_layers(config: Mapping[str, Any]) -> int:
    """Number of layers with experts of a model config that has experts, by the rule of transformers' Qwen models."""
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(int(config["num_hidden_layers"])))


def router_of(config: Mapping[str, Any]) -> Router | None:
    """Read it from a Hugging Face model config (the text part of a multi-modal one); None for a dense model.

    Dense is also a model of a family with experts, all of whose layers are set to be dense.
    """
    config = config.get("text_config") or config
    experts = next((config[name] for name in EXPERTS if config.get(name)), None)
    top_k = next((config[name] for name in PER_TOKEN if config.get(name)), None)
    if experts is None or top_k is None or not expert_layers(config):
        return None
    return Router(int(config["num_hidden_layers"]), int(experts), int(top_k))


def route_dtype(experts: int) -> np.dtype:
    """``uint8`` for up to 256 experts, else ``int16`` (verl's; torch computes little with ``uint16``)."""
    return np.dtype(np.uint8 if experts <= 256 else np.int16)


def check_rows(routes: np.ndarray, prompt: int, response: int) -> None:
    """Refuse routes of another length than the engine's: all tokens but the last.

    Args:
        routes: shape ``(rows, layers, top_k)``, of all requests of a response that was aborted and resumed.
        prompt: tokens of the prompt.
        response: tokens of the response.

    Raises:
        IncompleteRoutesError: rows are missing, or there are too many: they would be replayed at wrong places.
    """
    if len(routes) != prompt + response - 1:
        raise IncompleteRoutesError(
            f"the engine returned routes of {len(routes)} tokens for a prompt of {prompt} and a response of {response}"
        )


def pack(routes: np.ndarray | None, experts: int, prompt: int, response_mask: list[int]) -> np.ndarray:
    """The routes of a whole trajectory as they are stored.

    Args:
        routes: shape ``(rows, layers, top_k)``, any integer type.
        experts: of a layer.
        prompt: tokens of the prompt.
        response_mask: 1 for each token of the response that the model generated, 0 for those of tools.

    Returns:
        Shape ``(prompt + response, layers, top_k)``, of type :func:`route_dtype`; zero after the last known row.

    Raises:
        IncompleteRoutesError: a generated token depends on a row that is missing.
    """
    generated = [place for place, mask in enumerate(response_mask) if mask]
    needed = prompt + generated[-1] if generated else 0  # a token's log-prob is computed at the one before it
    if routes is None or len(routes) < needed:
        known = "none" if routes is None else len(routes)
        raise IncompleteRoutesError(
            f"the log-probs of a response depend on the routes of {needed} tokens, and the engine returned {known}"
        )
    tokens = prompt + len(response_mask)
    packed = np.zeros((tokens, *routes.shape[1:]), route_dtype(experts))
    packed[: len(routes)] = routes[:tokens]
    return packed
