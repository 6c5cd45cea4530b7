"""The JSON file of a measurement, in which stands what it is of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import provenance


def save(out: Path, words: Sequence[str], found: Mapping[str, Any]) -> None:
    """Write what was found, with the command, versions, hardware and commit.

    Args:
        out: as of :func:`benchmarks.arguments.result_file`.
        words: the command after ``python -m benchmarks.speed``.
        found: JSON.
    """
    facts = provenance.collect(["python", "-m", "benchmarks.speed", *words])
    out.write_text(json.dumps({**found, **facts}, indent=1) + "\n")
