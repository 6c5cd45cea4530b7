"""Where a CPU run keeps what its processes share; told to them by two environment variables."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHM_DIR_ENV = "SAT_VERL_SHM_DIR"
"""Parent folder of the weight files, on a memory file system; the recipes make one per run and remove it."""

SOCKET_DIR_ENV = "SAT_VERL_SOCKET_DIR"
"""Private folder (mode 0700) of the sockets that carry weights from a Ray worker to its vLLM process."""


def shm_root() -> Path:
    """The machine's memory file system, or the temporary folder where it has none."""
    return Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


def shm_parent() -> Path:
    """Folder in which this process makes weight folders."""
    configured = os.environ.get(SHM_DIR_ENV)
    return Path(configured) if configured else shm_root()
