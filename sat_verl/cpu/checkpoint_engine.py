"""Trainer-to-rollout weight sync through shared memory, registered in verl as ``shm``.

verl's engines for separate trainer and rollout processes need NCCL, NIXL or RDMA. This one writes the gathered
weights, bucket by bucket, as safetensors files into a private folder of a memory file system; every rollout replica
reads them as they appear. Any number of trainer ranks (all gather, rank 0 writes) and replicas, on one node.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sat_verl.cpu.paths import shm_parent

_POLL_SECONDS = 0.002
_FILE_BYTES = 2**25
"""A file holds at least so much of a model, if the bucket allows: the rollout reads it while the next is written."""


def _boot_id() -> str:
    """Identifies the running kernel: processes that share it can share memory (containers on one host included)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@CheckpointEngineRegistry.register("shm")
class ShmCheckpointEngine(CheckpointEngine):
    """Weights through files in shared memory; one node.

    Args:
        bucket_size: most bytes gathered before a file is written, unless one tensor has more; 32 MiB are enough.
        is_master: True on the trainer rank that writes (verl sets it on rank 0).
        timeout_s: how long a replica waits for the next bucket before it gives up, in seconds.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        self.bucket_size = min(bucket_size, _FILE_BYTES)
        self.is_master = is_master
        self.timeout_s = timeout_s
        self.folder: Path | None = None

    def prepare(self) -> dict[str, Any]:
        """Make this sync's folder (master only) and tell the others where it is."""
        folder = None
        if self.is_master:
            folder = tempfile.mkdtemp(prefix="sat-verl-weights-", dir=shm_parent())
        return {"node": _boot_id(), "folder": folder}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every worker the folder.

        Raises:
            RuntimeError: the workers are not on one node.
        """
        nodes = {entry["node"] for entry in metadata}
        if len(nodes) > 1:
            raise RuntimeError(
                f"checkpoint_engine.backend=shm works on one node, but the workers are on {len(nodes)}: set "
                "trainer.nnodes=1 and rollout.nnodes=1, or use an engine that crosses nodes (nccl, nixl, mooncake)"
            )
        folder = next(entry["folder"] for entry in metadata if entry["folder"])
        return {"folder": [folder] * actor_wg_world_size}, {"folder": [folder] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        self.folder = Path(folder)

    def finalize(self) -> None:
        """Remove the files; verl calls it when every replica has loaded them."""
        if self.is_master and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Write the weights; every trainer rank must run the generator, since it gathers shards."""
        bucket: dict[str, torch.Tensor] = {}
        size = index = 0
        for name, weight in weights:
            if not self.is_master:
                continue
            if bucket and size + weight.nbytes > self.bucket_size:
                self._write(index, bucket, last=False)
                bucket, size, index = {}, 0, index + 1
            # A copy: FSDP may reuse the gathered buffer, and tied weights must not share storage in the file.
            bucket[name] = weight.detach().to("cpu", copy=True).contiguous()
            size += weight.nbytes
        if self.is_master:
            self._write(index, bucket, last=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights bucket by bucket, in the order in which they were written.

        Raises:
            TimeoutError: the trainer has not written the next bucket in ``timeout_s`` seconds.
        """
        index, last = 0, False
        while not last:
            path, last = await self._next_bucket(index)
            for name, weight in load_file(path).items():
                yield name, weight
            index += 1

    def _path(self, index: int, last: bool) -> Path:
        assert self.folder is not None, "init_process_group has not been called"
        return self.folder / f"{index:05d}{'-last' if last else ''}.safetensors"

    def _write(self, index: int, bucket: dict[str, torch.Tensor], last: bool) -> None:
        path = self._path(index, last)
        partial = path.with_suffix(".partial")
        save_file(bucket, partial)
        os.replace(partial, path)

    async def _next_bucket(self, index: int) -> tuple[Path, bool]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            for last in (False, True):
                path = self._path(index, last)
                if path.exists():
                    return path, last
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no weights from the trainer in {self.timeout_s:.0f} s (bucket {index} in {self.folder}); "
                    "raise rollout.checkpoint_engine.engine_kwargs.shm.timeout_s if the model is that large"
                )
            await asyncio.sleep(_POLL_SECONDS)
