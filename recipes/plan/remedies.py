"""What would help a trainer that does not surely fit: changes of settings, each on top of the ones before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from recipes.plan.layout import Recompute, Trainer
from recipes.plan.quantities import Range

_OPTIM = "actor_rollout_ref.actor.optim.override_optimizer_config."
_RECOMPUTE = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_"


@dataclass(frozen=True)
class Remedy:
    """A change, with those before it.

    Attributes:
        settings: overrides that make it.
        price: what it costs.
        peak: bytes of a GPU that trains, then.
    """

    settings: str
    price: str
    peak: Range


def _changes(trainer: Trainer) -> Iterator[tuple[str, str, Trainer]]:
    """Overrides, price and layout of each change, each on top of the ones before it; the cheapest come first."""
    if trainer.reference and trainer.reference_on_gpu:
        trainer = replace(trainer, reference_on_gpu=False)
        yield "actor_rollout_ref.ref.megatron.param_offload=true", "moves its weights once per step", trainer
    if trainer.recompute.kind != "layers":
        trainer = replace(trainer, recompute=Recompute("layers"))
        words = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
        if trainer.engine == "megatron":
            words = f"{_RECOMPUTE}granularity=full {_RECOMPUTE}method=uniform {_RECOMPUTE}num_layers=1"
        yield words, "a third more arithmetic", trainer
    if not trainer.fused_logits:
        trainer = replace(trainer, fused_logits=True)
        yield "actor_rollout_ref.model.use_fused_kernels=true", "other kernels for the log-probs", trainer
    if trainer.optimizer.on_gpu:
        trainer = replace(trainer, optimizer=replace(trainer.optimizer, on_gpu=0.0))
        words = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
        if trainer.engine == "megatron":
            words = f"+{_OPTIM}optimizer_cpu_offload=true +{_OPTIM}optimizer_offload_fraction=1.0"
        yield words, "host memory, and seconds of every step", trainer


def remedies(trainer: Trainer, memory: float, peak_of: Callable[[Trainer], Range]) -> tuple[Remedy, ...]:
    """Changes up to the first with which even the high end fits; none if it does so already.

    Args:
        trainer: the layout.
        memory: bytes of the GPU.
        peak_of: bytes of a GPU that trains, with a layout.
    """
    if peak_of(trainer).high <= memory:
        return ()
    found = []
    for settings, price, changed in _changes(trainer):
        peak = peak_of(changed)
        found.append(Remedy(settings, price, peak))
        if peak.high <= memory:
            break
    return tuple(found)
