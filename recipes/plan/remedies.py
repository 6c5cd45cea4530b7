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
    if trainer.tokens > trainer.longest:
        trainer = replace(trainer, tokens=trainer.longest, tokens_formula="one whole sequence")
        cap = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={trainer.longest}"
        yield f"actor_rollout_ref.actor.use_dynamic_bsz=true {cap}", "more and smaller micro-batches", trainer
    order = (_on_host, _fused) if trainer.engine == "megatron" else (_fused, _on_host)
    for change in order:
        found = change(trainer)
        if found is not None:
            trainer = found[2]
            yield found


def _fused(trainer: Trainer) -> tuple[str, str, Trainer] | None:
    if trainer.fused_logits:
        return None
    words = "actor_rollout_ref.model.use_fused_kernels=true"
    return words, "other kernels for the log-probs", replace(trainer, fused_logits=True)


def _on_host(trainer: Trainer) -> tuple[str, str, Trainer] | None:
    if not trainer.optimizer.on_gpu:
        return None
    words = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    if trainer.engine == "megatron":
        names = ("optimizer_cpu_offload=true", "optimizer_offload_fraction=1.0", "use_precision_aware_optimizer=true")
        words = " ".join(f"+{_OPTIM}{name}" for name in names)
    changed = replace(trainer, optimizer=replace(trainer.optimizer, on_gpu=0.0))
    return words, "host memory, and seconds of every step", changed


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
