"""Tiny warm-started language models for trying out RL on a CPU.

>>> from recipes.models import ensure_model
>>> folder = ensure_model("tiny", "chain", {}, seed=0, cache_dir=".cache/models")  # doctest: +SKIP

The weights are float32. vLLM's ``dtype=auto`` would load them as a 16-bit type: set the rollout's dtype to float32
too, so that trainer and rollout agree on log-probabilities. The same seed gives the same weights, byte for byte, with
the same torch build on the same kind of CPU; the number of cores does not matter, because the build uses one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.models.store import build_model_at, ensure_model, read_manifest

__all__ = ["build_model_at", "ensure_model", "read_manifest"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: `python -m recipes.models` then checks its arguments before it loads torch.
    if name in __all__:
        from recipes.models import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
