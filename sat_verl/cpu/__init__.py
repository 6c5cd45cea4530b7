"""The CPU backend: what verl and vLLM lack to run on a machine without an accelerator.

Everything here is inert unless the environment says ``VERL_PLATFORM=cpu`` (the recipes' ``backend=cpu`` sets it).
``platform`` and ``checkpoint_engine`` plug into verl's registries; ``bridges`` are the patches
for which there is no registry, each with its reason and the versions that it is for; ``placement`` divides the
machine's cores; ``forkserver`` starts a run's processes without importing everything anew.
"""

import os
import sys

ENGINE_ENV = "SAT_VERL_CPU_ENGINE"
"""The training engine of a CPU run, ``actor.strategy``."""


def enabled() -> bool:
    """Whether this process belongs to a CPU run (``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def leave_out_megatron() -> None:
    """Let this process do without megatron-core if the run trains with another engine.

    verl imports every engine that is installed, in every process; this one takes more than a second.
    """
    if os.environ.get(ENGINE_ENV, "megatron") != "megatron":
        # Its import now fails, as if it were not there.
        sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
