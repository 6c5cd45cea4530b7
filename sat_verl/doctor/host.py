"""What the machine gives its processes: cores, memory, shared memory, limits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sat_verl.cpu.placement import usable_cores
from sat_verl.doctor.findings import Finding, row

GIB = 2**30
SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
OPEN_FILES, OPEN_FILES_LEAST = 65_536, 4_096
"""What Ray asks for, and what a run of some dozen processes hardly gets by with."""


def machine() -> Iterator[Finding]:
    """Cores, free memory and shared memory."""
    cores = len(usable_cores())
    yield row("cores", cores > 1, str(cores), "trainer and rollout share one core", "warn")
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield row("free memory", free >= 6 * GIB, f"{free / GIB:.1f} GiB", "a CPU run needs 6 GiB")
    except (ValueError, OSError):
        yield Finding("free memory", "warn", "unknown on this system")
    if SHM.is_dir():
        yield shared_memory(shutil.disk_usage(SHM).free, gpu=has_gpu())


def has_gpu() -> bool:
    """Whether the kernel's driver shows an NVIDIA or AMD GPU, without asking it."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd"))


def shared_memory(free: int, gpu: bool) -> Finding:
    """Whether shared memory suffices: it carries weights, NCCL's buffers and Ray's objects.

    Args:
        free: bytes.
        gpu: on a machine with a GPU.
    """
    least, wanted = (1.0, 10.0) if gpu else (0.25, 0.25)
    size = f"{free / GIB:.1f} GiB free" if free >= GIB else f"{free / 2**20:.0f} MiB free"
    fix = "start the container with --ipc=host or --shm-size=10g (Kubernetes: an emptyDir of medium Memory there)"
    return row("/dev/shm", free >= wanted * GIB, size, fix, "fail" if free < least * GIB else "warn")


def limits() -> Iterator[Finding]:
    """Open files and locked memory."""
    import resource

    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), gpu=has_gpu())
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], adapters)


def open_files(soft: int, hard: int, gpu: bool) -> Finding:
    """The limit of open files of one process; a negative number is none. Ray raises the soft limit to the hard one."""
    shown = f"{_amount(soft)} (hard limit {_amount(hard)})"
    enough = soft < 0 or soft >= (OPEN_FILES if gpu else OPEN_FILES_LEAST)
    fix = f"ulimit -n {OPEN_FILES} in the shell that starts Ray; docker: --ulimit nofile={OPEN_FILES}:{OPEN_FILES}"
    bare = 0 <= hard < OPEN_FILES_LEAST
    return row("open files (ulimit -n)", enough, shown, fix, "fail" if bare else "warn")


def locked_memory(soft: int, adapters: list[str]) -> Finding:
    """The limit of locked memory: RDMA, which NCCL uses over InfiniBand, pins its buffers.

    Args:
        soft: bytes; a negative number is no limit.
        adapters: InfiniBand and RoCE adapters of the machine.
    """
    shown = "unlimited" if soft < 0 else f"{soft / 1024:.0f} KiB"
    if not adapters:
        return Finding("locked memory (ulimit -l)", "ok", f"{shown}; no InfiniBand that would need it")
    fix = "ulimit -l unlimited; docker: --ulimit memlock=-1; or NCCL_IB_DISABLE=1, which is slower between nodes"
    return row("locked memory (ulimit -l)", soft < 0, f"{shown}; {', '.join(adapters)}", fix, "warn")


def _amount(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
