"""Which checkpoints of a run are whole: a folder counts once its marker is there, and the marker is written last.

verl writes a checkpoint in place, file by file, and then the number of the newest one into a tracker file. A process
that is killed meanwhile leaves half a folder, or an empty tracker; neither is ever used here.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

MARKER_FILE = "complete.json"
_SPARE = 1.1
"""Free space asked for a checkpoint, as a multiple of the size of the last one."""
_OF_WEIGHTS = 4
"""What a checkpoint takes at least, as a multiple of the weights: they, two moments of Adam, the Hugging Face copy."""


class NoSpaceError(RuntimeError):
    """The next checkpoint would not fit on the disk."""


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _all(root: Path) -> list[Path]:
    """Checkpoint folders, whole or not, oldest first."""
    folders = (folder for folder in root.glob("global_step_*") if folder.is_dir() and not folder.is_symlink())
    return sorted((folder for folder in folders if folder.name.removeprefix("global_step_").isdecimal()), key=_step)


def complete(root: Path) -> list[Path]:
    """Whole checkpoints below ``root``, oldest first."""
    return [folder for folder in _all(root) if _is_whole(folder)]


def _is_whole(folder: Path) -> bool:
    try:
        return read_marker(folder)["global_step"] == _step(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest(root: Path) -> Path | None:
    """The last whole checkpoint, or None."""
    return next(reversed(complete(root)), None)


def read_marker(folder: Path) -> dict[str, Any]:
    """What the trainer wrote when the checkpoint was whole.

    Raises:
        FileNotFoundError: the checkpoint is not whole, or not of this trainer.
    """
    return json.loads((folder / MARKER_FILE).read_text())


def mark(folder: Path, facts: dict[str, Any]) -> None:
    """Declare a checkpoint whole, in one step, once all of its files are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    partial = folder / (MARKER_FILE + ".partial")
    with open(partial, "w") as file:
        json.dump(facts, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / MARKER_FILE)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that it is never taken for a whole one, whenever this stops."""
    (folder / MARKER_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def prune(root: Path, keep: int) -> None:
    """Keep the last ``keep`` whole checkpoints."""
    for folder in complete(root)[:-keep]:
        remove(folder)


def remove_broken(root: Path) -> list[Path]:
    """Delete what an interrupted save left; returns the folders."""
    broken = [folder for folder in _all(root) if not _is_whole(folder)]
    for folder in broken:
        remove(folder)
    return broken


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_space(root: Path, model: Path) -> None:
    """Refuse to begin a save that cannot end.

    Args:
        root: folder of the checkpoints.
        model: folder of the model that training began with, from which the first one's size is guessed; of a model
            that is not a local folder nothing is known.

    Raises:
        NoSpaceError: there is less room than the last checkpoint took, or than the first must take.
    """
    last = newest(root)
    guess = _OF_WEIGHTS * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed, free = int(size(last) * _SPARE if last else guess), shutil.disk_usage(root).free
    if free < needed:
        raise NoSpaceError(
            f"a checkpoint takes {needed >> 20} MiB and {root} has {free >> 20} MiB free; the last whole one is "
            f"{last.name if last else 'none'}. Make room and resume the run, or keep fewer with checkpoint.keep"
        )
