"""The folder that a command writes: whether it can, found before anything is read, and one command at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from recipes.errors import ConfigError
from recipes.lock import LOCK_FILE, locked
from recipes.tasks.artifacts import MANIFEST, check_replaceable

# What is put around a folder's name while it is built: ".NAME.tmp-" and eight characters.
_AROUND = 18


def resolve(out: Path) -> Path:
    """Where ``out`` is, links followed, so that the folder is replaced and not a link to it.

    Raises:
        ConfigError: it cannot be written, or it holds files of others.
    """
    try:
        return _checked(out)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL byte
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError("out", repr(str(out)), f"it cannot be used ({problem})", "name another folder") from None


def _checked(out: Path) -> Path:
    if out.is_symlink() and not out.exists():
        out.resolve()  # says so of a loop
        raise ConfigError("out", out, f"it is a link to {os.readlink(out)}, which is not there", "make that folder")
    folder = out.resolve()
    if folder == Path.cwd() or os.path.ismount(folder):
        raise ConfigError("out", out, "the folder is replaced as a whole, and this one is in use", "name one below it")
    above = next(one for one in folder.parents if one.exists())
    if not above.is_dir():
        raise ConfigError("out", out, f"{above} is a file", "name a folder that is not below a file")
    most = os.pathconf(above, "PC_NAME_MAX") - _AROUND
    if len(os.fsencode(folder.name)) > most:
        raise ConfigError("out", out, f"its name has more than {most} bytes", "give it a shorter name")
    check_replaceable(folder)
    # One that was built before may be read where nothing can be written.
    if not (folder / MANIFEST).is_file():
        _check_writable(folder, above)
    return folder


def _check_writable(folder: Path, above: Path) -> None:
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError("out", folder, f"{above} cannot be written to", "name another folder")


def clear(work: Path) -> None:
    """Remove what :func:`alone`'s folder holds, but its lock."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """Hold a folder of :func:`resolve` while it is built; yields the folder for what is kept until it is whole.

    Raises:
        ConfigError: it cannot be written, or another command is writing it.
    """
    _check_writable(folder, next(one for one in folder.parents if one.exists()))
    work = folder.parent / f".{folder.name}.work"
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(work, Console(stderr=True), -1.0, "out", folder))
            held = os.path.samestat(os.fstat(lock), (work / LOCK_FILE).stat())
        except FileNotFoundError:
            held = False
        if not held:  # the other command has removed the lock between opening and taking it
            raise ConfigError("out", folder, "another command has just written it", "give this one again")
        try:
            yield work
        finally:
            (work / LOCK_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # what an interrupted command has read stays
                work.rmdir()
