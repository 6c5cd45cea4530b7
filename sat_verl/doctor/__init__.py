"""The checks behind ``python -m sat_verl doctor``.

verl swallows the error of a broken plug-in, so that it shows only as an unknown loss mode, somewhere else, later. The
doctor loads the plug-ins where they must work: here, in a Ray worker, and in a process of vLLM. It also looks at
versions, and at what a node gives its processes: GPUs, driver, NCCL, memory, shared memory, limits. Nothing here needs
a GPU, and a check that cannot be made, because torch or verl does not import, is itself a finding.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict

from sat_verl.doctor.findings import Finding
from sat_verl.doctor.gpu import gpus
from sat_verl.doctor.host import limits, machine
from sat_verl.doctor.packages import entry_points, requirements, versions
from sat_verl.doctor.plugins import here, in_ray_worker, in_vllm_process, registered, vllm_state

__all__ = ["CHECKS", "Finding", "entry_points", "examine", "here", "registered", "show", "vllm_state"]

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions,
    requirements,
    entry_points,
    here,
    in_ray_worker,
    in_vllm_process,
    machine,
    limits,
    gpus,
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
            fix = "mend the import that fails; the pinned environment has what is needed"
            findings.append(Finding(name, "fail", detail, fix))
    return findings


def show(findings: list[Finding], as_json: bool = False) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.status:4}  {finding.subject:{width}}  {finding.detail}")
        if finding.fix:
            print(f"{'':4}  {'':{width}}  -> {finding.fix}")
    failed = sum(finding.status == "fail" for finding in findings)
    print(f"\n{failed} problem{'s' if failed != 1 else ''} found" if failed else "\nno problem found")
