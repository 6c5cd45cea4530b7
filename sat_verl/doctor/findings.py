"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` says what to do about it, when something is not right."""

    subject: str
    status: Status
    detail: str
    fix: str = ""


def row(subject: str, good: bool, detail: str, fix: str, otherwise: Status = "fail") -> Finding:
    """``ok``, or what it is ``otherwise``, with the fix."""
    return Finding(subject, "ok", detail) if good else Finding(subject, otherwise, detail, fix)


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
