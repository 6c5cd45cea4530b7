"""The CPU backend: what verl and vLLM lack to run on a machine without an accelerator.

Everything here is inert unless the environment says ``VERL_PLATFORM=cpu`` (the recipes' ``backend=cpu`` sets it).
``platform`` and ``checkpoint_engine`` plug into verl's registries; ``bridges`` are the patches
for which there is no registry, each with its reason and the versions that it is for; ``placement`` divides the
machine's cores.
"""

import os


def enabled() -> bool:
    """Whether this process belongs to a CPU run (``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
