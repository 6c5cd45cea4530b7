"""The weights of a model: whole, finite, and known by a digest of what they hold."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.storage import write_atomically
from recipes.errors import ConfigError

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 22
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Formats whose numbers may be infinite or none: safetensors' names, torch's names."""


def damaged(path: Path, why: object) -> ConfigError:
    """The error for a file of a model that cannot be read."""
    reason = (str(why).strip() or type(why).__name__).splitlines()[0]
    return ConfigError("model", path, f"the file is damaged ({reason})", "copy or download it again")


def stamp(paths: Iterable[Path]) -> str:
    """A short name for files as they are now, from everything that a change of their content moves.

    A copy that keeps size and time (``cp -p``, ``rsync -t``) is another inode or has another time of change (ctime),
    which no program can set.
    """
    found = hashlib.sha256()
    for path in sorted(path.absolute() for path in paths):
        try:
            facts = path.stat()
        except OSError as error:
            raise damaged(path, error) from error
        numbers = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        found.update(f"{path} {path.resolve()} {numbers}\n".encode())
    return found.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


@dataclass(frozen=True)
class _Tensor:
    """A tensor's place in a file of safetensors: its bytes from ``begin`` to ``end``."""

    path: Path
    name: str
    dtype: str
    shape: str
    begin: int
    end: int

    def digest(self) -> str:
        """SHA-256 of the content; every number of it is looked at on the way.

        Raises:
            ConfigError: a number is infinite or none.
        """
        import torch

        found, left = hashlib.sha256(), self.end - self.begin
        buffer = bytearray(min(_CHUNK, left))
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            while left > 0:
                view = memoryview(buffer)[: min(_CHUNK, left)]
                if file.readinto(view) != len(view):
                    raise damaged(self.path, f"it ends within {self.name}")
                found.update(view)
                left -= len(view)
                if self.dtype in _DTYPES:
                    _check_finite(
                        torch.frombuffer(view, dtype=getattr(torch, _DTYPES[self.dtype])), self.path, self.name
                    )
        return found.hexdigest()


def _check_finite(numbers: torch.Tensor, path: Path, name: str) -> None:
    if numbers.is_floating_point() and not bool(numbers.isfinite().all()):
        raise ConfigError(
            "model", path, f"{name} holds numbers that are infinite or none (NaN)",
            "take a checkpoint from before the training diverged, or copy the file again",
        )  # fmt: skip


def _tensors(path: Path) -> list[_Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # checks that the header is one and fits the file
            pass
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return [
        _Tensor(path, name, entry["dtype"], str(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    ]


def _check_index(folder: Path, found: Iterable[str]) -> None:
    """Refuse a model of several files of which one is not there."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        lost = sorted(set(named) - set(found))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error
    if lost:
        raise ConfigError(
            "model", folder, f"{len(lost)} tensors are missing, the first {lost[0]} of {named[lost[0]]}",
            "copy or download that file again",
        )  # fmt: skip


def _pickled(path: Path) -> str:
    """Digest of a file of torch.save, all of whose tensors are finite."""
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    except Exception as error:
        # Whatever unpickling damaged bytes may lead to.
        raise damaged(path, error) from error
    for name, tensor in tensors.items():
        _check_finite(tensor, path, name)
    return file_digest(path)


def digest(folder: Path) -> str:
    """SHA-256 over the tensors of a model by name, dtype, shape and content, however they are spread over files.

    Raises:
        ConfigError: a file is damaged or missing, a tensor is there twice, or a number is infinite or none.
    """
    tensors: dict[str, _Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for one in _tensors(path):
            other = tensors.setdefault(one.name, one)
            if other is not one:
                raise ConfigError(
                    "model", folder, f"{one.name} is both in {other.path.name} and in {path.name}",
                    "remove the file that is not the model's: engines differ in which they load",
                )  # fmt: skip
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        if tensors:
            _check_index(folder, tensors)
            parts = {
                f"{name} {one.dtype} {one.shape}": pool.submit(one.digest) for name, one in sorted(tensors.items())
            }
        else:
            files = sorted(folder.glob("pytorch_model*.bin"))
            parts = {path.name: pool.submit(_pickled, path) for path in files}
        lines = [f"{name} {part.result()}\n" for name, part in sorted(parts.items())]
    if not lines:
        raise ConfigError("model", folder, "it holds no weights", "name a folder with *.safetensors")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def remembered_digest(folder: Path, cache_dir: Path) -> str:
    """:func:`digest`, computed again only if a file of the folder has changed (60 GB take a minute).

    Only weights that were found whole and finite are remembered.
    """
    kinds = ("*.safetensors", "pytorch_model*.bin", "model.safetensors.index.json")
    memory = cache_dir / "digests" / stamp(path for kind in kinds for path in folder.glob(kind))
    if memory.is_file() and len(known := memory.read_text().strip()) == 64:
        return known
    memory.parent.mkdir(parents=True, exist_ok=True)
    found = digest(folder)
    write_atomically(memory, found + "\n")
    return found
