"""The JSON file of a measurement: that it can be written is known before, and what it is of stands in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import provenance
from recipes.errors import ConfigError


def path_of(settings: Mapping[str, Any]) -> Path:
    """``out`` of a command's settings; its folder is made.

    Raises:
        ConfigError: no file can be written there.
    """
    out = Path(str(settings["out"]))
    if out.is_dir():
        raise ConfigError("out", out, "it is a folder", f"name a file, for instance out={out / 'speed.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", out, f"its folder cannot be made ({error.strerror})", "name another") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError("out", out, "it cannot be written", "name a file that you may write")
    return out


def save(out: Path, words: Sequence[str], found: Mapping[str, Any]) -> None:
    """Write what was found, with the command, versions, hardware and commit.

    Args:
        out: as of :func:`path_of`.
        words: the command after ``python -m benchmarks.speed``.
        found: JSON.
    """
    facts = provenance.collect(["python", "-m", "benchmarks.speed", *words])
    out.write_text(json.dumps({**found, **facts}, indent=1) + "\n")
