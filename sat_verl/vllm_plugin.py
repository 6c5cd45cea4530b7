"""The ``vllm.general_plugins`` entry point: vLLM calls :func:`register` in each of its processes."""

import ctypes
import os
import signal
import sys

from sat_verl import cpu

OWNER_ENV = "SAT_VERL_VLLM_OWNER"
"""Process id of a program that runs vLLM in process and wants nothing of it to outlive itself."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Tie the process to its owner if it has one, and install the CPU bridges of a CPU run."""
    die_with_parent()
    if not cpu.enabled():
        return
    from sat_verl.cpu import bridges, placement

    bridges.install()
    placement.apply_to_vllm()


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (Linux).

    A vLLM engine whose owner was killed with SIGKILL waits for it for ever, and holds its memory, also a GPU's.
    """
    owner = os.environ.get(OWNER_ENV)
    if owner is None or owner == str(os.getpid()) or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:  # it died before the kernel was asked
        os._exit(1)
