"""The forward pass of the dense tiny model on its own parameters, for short sequences without padding.

The arithmetic of transformers' ``Qwen3ForCausalLM`` (the same to float rounding, which a test holds), without what a
library needs for every other case: at this size most of its time goes there. A mixture of experts takes transformers'
own forward pass (:class:`Library`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, shape (B, key-value heads, tokens, head size)."""


class Forward(Protocol):
    """Logits of the next tokens, with a cache of the tokens before them."""

    def __call__(self, tokens: torch.Tensor, past: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Logits, shape (B, T, vocabulary), of tokens of shape (B, T) that follow those in ``past``; and all so far."""


def forward_of(model: PreTrainedModel) -> Forward:
    """The forward pass for this model; parameters are read at every call, and gradients flow to them."""
    return Dense(model) if model.config.model_type == "qwen3" else Library(model)


class Library:
    """transformers' own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, tokens: torch.Tensor, past: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        cache: Any = DynamicCache(past or None)
        logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        return logits, [(layer.keys, layer.values) for layer in cache.layers]


class Dense:
    """A Qwen3 decoder: pre-norm, rotary positions, normalised queries and keys, grouped heads, gated MLP."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._model = model
        self._size: int = config.head_dim
        self._groups: int = config.num_key_value_heads
        self._per_group: int = config.num_attention_heads // config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._base: float = config.rope_parameters["rope_theta"]
        self._cos, self._sin = self._rotation(64)

    def _rotation(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the rotary angles, shape (positions, head size), float32."""
        exponent = torch.arange(0, self._size, 2, dtype=torch.float32) / self._size
        angle = torch.outer(torch.arange(positions, dtype=torch.float32), self._base**-exponent).repeat(1, 2)
        # The sign of the half that is turned into the other one.
        return angle.cos(), angle.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(self._size // 2)

    def __call__(self, tokens: torch.Tensor, past: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        start = past[0][0].shape[2] if past else 0
        end = start + tokens.shape[1]
        while end > len(self._cos):
            self._cos, self._sin = self._rotation(2 * len(self._cos))
        cos, sin = self._cos[start:end], self._sin[start:end]
        mask = torch.full((end - start, end), -torch.inf).triu(start + 1) if end - start > 1 else None
        body = self._model.model
        x = body.embed_tokens(tokens)
        cache: Cache = []
        for index, layer in enumerate(body.layers):
            heads, kept = self._attention(
                layer.self_attn, self._norm(x, layer.input_layernorm), cos, sin, mask, past[index] if past else None
            )
            cache.append(kept)
            x = x + heads
            inner = self._norm(x, layer.post_attention_layernorm)
            mlp = layer.mlp
            gated = functional.silu(functional.linear(inner, mlp.gate_proj.weight))
            x = x + functional.linear(gated * functional.linear(inner, mlp.up_proj.weight), mlp.down_proj.weight)
        return functional.linear(self._norm(x, body.norm), self._model.lm_head.weight), cache

    def _norm(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], norm.weight, self._eps)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + x.roll(self._size // 2, -1) * sin

    def _attention(
        self,
        layer: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Of x, shape (B, T, hidden): the same shape, and keys and values so far."""
        batch, length, _ = x.shape

        def heads(projection: Any) -> torch.Tensor:
            return functional.linear(x, projection.weight).view(batch, length, -1, self._size)

        query = self._turn(self._norm(heads(layer.q_proj), layer.q_norm).transpose(1, 2), cos, sin)
        key = self._turn(self._norm(heads(layer.k_proj), layer.k_norm).transpose(1, 2), cos, sin)
        value = heads(layer.v_proj).transpose(1, 2)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        # The query heads of one key-value head stand together, as more queries of it.
        query = query.reshape(batch, self._groups, self._per_group * length, self._size)
        score = query @ key.transpose(2, 3) * self._size**-0.5
        if mask is not None:
            score = score + mask.repeat(self._per_group, 1)
        out = score.softmax(-1) @ value
        out = out.view(batch, -1, length, self._size).transpose(1, 2).reshape(batch, length, -1)
        return functional.linear(out, layer.o_proj.weight), (key, value)
