"""GPUs, their driver, and NCCL, as ``nvidia-smi`` and torch see them."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sat_verl.doctor.findings import Finding, row

FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
DRIVER = {12: (525, 60), 13: (580, 65)}
"""First numbers of the oldest Linux driver for a CUDA major version, by the release notes of the CUDA Toolkit."""
LEAST_GIB = 22
"""The smallest recipe is planned for a card of 24 GB."""
NCCL_SWITCHES = {
    "NCCL_P2P_DISABLE": "GPUs then exchange data through the host",
    "NCCL_SHM_DISABLE": "GPUs without direct access then use the network",
    "NCCL_IB_DISABLE": "nodes then talk over plain sockets",
}


@dataclass(frozen=True)
class GPU:
    """One line of ``nvidia-smi``; memory in MiB."""

    index: int
    name: str
    total: int
    used: int
    driver: str
    capability: tuple[int, ...]


def parse(text: str) -> list[GPU]:
    """The GPUs in the output of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    return [
        GPU(int(index), name, _number(total), _number(used), driver, _numbers(capability))
        for index, name, total, used, driver, capability in filter(
            None, csv.reader(io.StringIO(text), skipinitialspace=True)
        )
    ]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0  # "[N/A]", where memory is the host's


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def gpus() -> Iterator[Finding]:
    """Every check of this module; without a GPU, that there is none."""
    found = _query()
    if isinstance(found, Finding):
        yield found
        return
    yield from memory(found)
    import torch

    cuda = torch.version.cuda
    yield driver(found[0].driver, cuda)
    if not torch.cuda.is_available():
        fix = "python -c 'import torch; torch.cuda.init()' says why; is it a CPU build, or CUDA_VISIBLE_DEVICES empty?"
        yield Finding("torch and GPU", "fail", f"torch {torch.__version__} sees no GPU", fix)
        return
    yield Finding("torch and GPU", "ok", f"torch {torch.__version__}, {torch.cuda.device_count()} GPU(s) visible")
    yield from nccl(torch, os.environ)


def _query() -> list[GPU] | Finding:
    """What ``nvidia-smi`` says, or the finding that it says nothing."""
    none = "none: train with backend=cpu (tiny models)"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding(
            "GPU", "warn", none, "on a GPU node: is the driver there, and the container run with --gpus all?"
        )
    command = [tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            "GPU", "fail", f"nvidia-smi: {error}", "the driver hangs or is broken: see dmesg, reboot the node"
        )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        return Finding(
            "GPU", "fail", f"nvidia-smi: {said}", "mend the driver (its module and library must be of one version)"
        )
    return parse(done.stdout) or Finding("GPU", "warn", none)


def memory(found: list[GPU]) -> Iterator[Finding]:
    """Models, memory, and who else is on them."""
    kinds = sorted({gpu.name for gpu in found})
    yield row("GPU", len(kinds) == 1, f"{len(found)} x {', '.join(kinds)}", "a run wants GPUs of one kind", "warn")
    least = min(gpu.total for gpu in found) / 1024
    fix = f"the smallest recipe is planned for {LEAST_GIB + 2} GB"
    yield row("GPU memory", least >= LEAST_GIB, f"{least:.0f} GiB each", fix, "warn")
    busy = [f"GPU {gpu.index}: {gpu.used / 1024:.1f} GiB" for gpu in found if gpu.total and gpu.used > gpu.total * 0.05]
    yield row(
        "GPU memory in use",
        not busy,
        "; ".join(busy) or "none",
        "end what holds it (nvidia-smi), or hide that GPU",
        "warn",
    )
    old = [gpu.name for gpu in found if gpu.capability and gpu.capability < (8, 0)]
    if old:
        yield Finding(
            "bfloat16", "fail", f"{old[0]} has none", "take a GPU of compute capability 8.0 or more (A100, RTX 30)"
        )


def driver(installed: str, cuda: str | None) -> Finding:
    """Whether the driver is new enough for the CUDA that torch was built with.

    Args:
        installed: version of the driver.
        cuda: version of CUDA; None for a build of torch without it.
    """
    if cuda is None:
        return Finding("driver", "fail", f"{installed}; torch is built without CUDA", "install torch's CUDA build")
    least = DRIVER.get(int(cuda.partition(".")[0]))
    if least is None:
        return Finding("driver", "ok", f"{installed}; torch is built for CUDA {cuda}")
    wanted = ".".join(map(str, least))
    detail = f"{installed}; torch is built for CUDA {cuda}, which wants {wanted} or newer"
    return row(
        "driver", _numbers(installed)[:2] >= least, detail, f"update the driver to {wanted}, or take another torch"
    )


def nccl(torch: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    """NCCL's version, whether GPUs reach each other directly, and what the environment switches off."""
    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    shown = ".".join(map(str, version)) if version else "not in this torch"
    yield row("NCCL", bool(version), shown, "install torch's CUDA build: ranks and weight sync need NCCL")
    count = torch.cuda.device_count()
    if count > 1:
        apart = [
            f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)
        ]
        detail = f"not between {', '.join(apart[:6])}" if apart else f"all {count} GPUs"
        fix = "NCCL goes through /dev/shm there, which is slower: see nvidia-smi topo -m (ACS or a virtual machine?)"
        yield row("direct access between GPUs", not apart, detail, fix, "warn")
    for name, meaning in NCCL_SWITCHES.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding(name, "warn", f"{environment[name]}: {meaning}", "unset it, unless it is meant")
