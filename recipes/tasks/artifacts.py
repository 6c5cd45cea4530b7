"""Folders that are built once: keyed by what they were built from, published whole, checked before reuse."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError

MANIFEST = "manifest.json"
_STALE_SECONDS = 3600.0


def key_digest(key: dict[str, Any]) -> str:
    """Return a short name for a key.

    Args:
        key: everything the content depends on, as JSON values.

    Returns:
        Twelve hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: the file.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_intact(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a folder that can be used as it is.

    Args:
        folder: where the files should be.
        key: what they should have been built from.

    Returns:
        The manifest, or None if the folder is missing, was built from something else, or has a file that is
        missing or differs from when it was written.
    """
    manifest = _read_manifest(folder)
    if manifest is None or manifest.get("key") != json.loads(json.dumps(key)):
        return None
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file() or file_digest(path) != digest:
            return None
    return manifest


def publish(
    folder: Path, key: dict[str, Any], write: Callable[[Path], dict[str, Any]], owned: bool = False
) -> dict[str, Any]:
    """Build a folder's content aside and put it in place in one step.

    A process that is killed on the way leaves ``folder`` as it was.

    Args:
        folder: where the content goes.
        key: what it is built from.
        write: writes the files into the folder it is given and returns more entries for the manifest.
        owned: whether ``folder`` belongs to a cache, so that whatever is there may be replaced. Otherwise only an
            empty folder or one with nothing but files of an earlier manifest is replaced.

    Returns:
        The manifest.

    Raises:
        ConfigError: if ``folder`` holds files that were not written here.
    """
    if not owned:
        check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        extra = write(staged)
        files = {path.name: file_digest(path) for path in sorted(staged.iterdir())}
        manifest = {"key": key, **extra, "files": files}
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        staged.chmod(0o755)  # mkdtemp makes it private, safetensors its file
        for path in staged.iterdir():
            path.chmod(0o644)
        _swap_in(staged, folder, key)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return manifest


def check_replaceable(folder: Path) -> None:
    """Refuse to build over files that were not written by :func:`publish`.

    Args:
        folder: the target.

    Raises:
        ConfigError: if it is a file, or a folder with other files in it.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("out", folder, "it is a file", "name a folder")
    known = {MANIFEST, *(_read_manifest(folder) or {"files": {}})["files"]}
    strange = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if strange or (any(folder.iterdir()) and _read_manifest(folder) is None):
        raise ConfigError(
            "out",
            folder,
            f"it holds files that were not built here ({', '.join(strange) or MANIFEST})",
            "name another folder or empty this one",
        )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _swap_in(staged: Path, folder: Path, key: dict[str, Any]) -> None:
    """Rename ``staged`` to ``folder``, moving an old one aside (a rename cannot replace a folder with files)."""
    if folder.exists():
        if read_intact(folder, key) is not None:
            return  # another process was faster; both built the same
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        os.replace(folder, aside / "old")
        shutil.rmtree(aside, ignore_errors=True)
    os.replace(staged, folder)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left; younger leftovers may belong to a process that is still writing."""
    for path in folder.parent.glob(f".{folder.name}.tmp-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
