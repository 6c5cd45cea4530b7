"""verl's Megatron engine on a CPU: what megatron-core and mbridge take for granted of a machine with CUDA.

megatron-core names ``torch.cuda`` all over, and without TransformerEngine it neither packs sequences nor is read by
mbridge. One function per patch; :data:`PATCHES` says why each is needed. :mod:`sat_verl.cpu.bridges` has them applied
when verl's Megatron engine is imported, where ``VERL_PLATFORM=cpu`` and nowhere else. torch itself stays as it is: the
modules of the two packages see a stand-in under the name ``torch`` (patching torch's own factories breaks others:
transformers, for one, then leaves buffers uninitialised).

Made for megatron-core 0.16.1, mbridge 0.15.1 and verl 0.9.1 without TransformerEngine, Apex and flash-attn, with
``vanilla_mbridge=true`` and packed sequences (``use_remove_padding=true``), without a context-parallel split.
``tests/test_megatron.py`` fails when one of them is no longer needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from sat_verl.cpu.megatron import device, layers


@dataclass(frozen=True)
class Patch:
    """One patch: what it does, and why it is needed."""

    name: str
    apply: Callable[[], None]
    reason: str


PATCHES = (
    Patch(
        "stand_in_for_torch",
        device.stand_in_for_torch,
        "both packages name torch.cuda's device, streams and generators",
    ),
    Patch("allow_cpu_tensors", device.allow_cpu_tensors, "Megatron's optimizer asks tensors whether they are CUDA's"),
    Patch("cpu_random_states", device.cpu_random_states, "Megatron forks and restores the generators of CUDA devices"),
    Patch(
        "split_sizes_as_numbers",
        device.split_sizes_as_numbers,
        "experts on several ranks: only CUDA's are made numbers",
    ),
    Patch(
        "load_float32_state", device.load_float32_state, "without master weights the state is loaded into the weights"
    ),
    Patch("own_step_counters", device.own_step_counters, "the number of steps of a loaded torch Adam is wrong"),
    Patch(
        "plain_router_gemm", layers.plain_router_gemm, "a NameError in the router where TransformerEngine is missing"
    ),
    Patch("local_layers", layers.local_layers, "mbridge builds its layers with TransformerEngine"),
    Patch(
        "name_as_transformer_engine", layers.name_as_transformer_engine, "mbridge reads and writes only those layers"
    ),
    Patch(
        "norm_of_split_sequences", layers.norm_of_split_sequences, "Megatron's torch norm refuses sequence parallelism"
    ),
    Patch("packed_attention", layers.packed_attention, "Megatron's own attention refuses packed sequences"),
)


@functools.cache
def apply() -> None:
    """Apply every patch, once; mbridge is imported."""
    for patch in PATCHES:
        patch.apply()
