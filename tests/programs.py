"""Programs that several tests read the results of: each is run once, in a process of its own."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def results(script, names, **more):
    """What ``python SCRIPT FOLDER`` wrote to ``FOLDER/NAME.pt``, by name, on the CPU and outside of any world.

    ``more`` are further environment variables. A program that fails, fails once, not anew for every test.
    """
    found = _results(script, tuple(names), tuple(more.items()))
    assert not isinstance(found, str), found
    return found


@functools.cache
def _results(script, names, more):
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE")}
        env |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        env |= {"PYTHONPATH": str(ROOT), **dict(more)}
        done = subprocess.run(
            [sys.executable, script, folder], env=env, capture_output=True, text=True, check=False, timeout=500
        )
        if done.returncode != 0:
            return done.stdout[-2000:] + done.stderr[-6000:]
        return {name: torch.load(Path(folder) / f"{name}.pt", weights_only=False) for name in names}
