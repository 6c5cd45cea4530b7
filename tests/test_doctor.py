"""The doctor says what is wrong and exits with 1, with a GPU or without, and also where verl does not import."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sat_verl import __main__, doctor
from sat_verl.doctor import gpu, host, packages, plugins

ROOT = Path(__file__).parent.parent


def only(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "CHECKS", checks)


def test_a_missing_loss_is_found(monkeypatch, capsys):
    def check():
        yield plugins._verdict("plug-in, Ray worker", {"losses": ["sat_grpo"], "by_itself": ["sat_grpo"], "pid": 1})

    only(monkeypatch, check)
    assert __main__.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail" in out
    assert "->" in out, "a problem comes with what to do about it"


def test_a_check_that_fails_itself_is_a_finding(monkeypatch, capsys):
    def in_ray_worker():
        raise ImportError("no module named nothing")
        yield

    only(monkeypatch, in_ray_worker, doctor.entry_points)
    assert __main__.main(["doctor", "--json"]) == 1
    findings = {entry["subject"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert "no module named nothing" in findings["in ray worker"]["detail"]
    assert findings["entry point verl.plugins"]["status"] == "ok", "the other checks still run"


def test_disabled_plugins_are_named(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    failed = [finding for finding in doctor.entry_points() if finding.status == "fail"]
    assert [finding.subject for finding in failed] == ["VERL_USE_EXTERNAL_PLUGINS"]


def test_a_healthy_environment_exits_with_0(monkeypatch, capsys):
    only(monkeypatch, doctor.entry_points)
    assert __main__.main(["doctor"]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_every_loss_is_registered_here():
    pytest.importorskip("verl")
    assert [finding.status for finding in doctor.here()] == ["ok"]


# --- versions


def test_the_tested_versions_are_those_of_the_pinned_environment():
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements-cpu.txt").read_text().splitlines()
        if re.fullmatch(r"[\w.-]+==[\w.+]+", line)
    )
    assert {name: pins[name] for name in packages.TESTED} == packages.TESTED


@pytest.mark.parametrize(
    ("verl", "losses", "asynchronous"),
    [
        ("0.9.1", "ok", "ok"),
        ("0.9.4", "warn", "ok"),
        ("0.8.0", "ok", "warn"),
        ("0.7.1", "ok", "warn"),
        ("0.6.1", "warn", "warn"),
    ],
)
def test_what_works_in_a_verl_is_said(verl, losses, asynchronous):
    found = list(packages.verl_support(verl))
    assert [finding.status for finding in found] == [losses, asynchronous]
    assert all(finding.fix for finding in found if finding.status != "ok")


def test_what_verl_wants_is_compared_with_what_is_there(monkeypatch):
    assert [finding.status for finding in packages.requirements()] == ["ok"]
    wanted = ["numpy<1", "nothing==1", "torch<1; extra == 'vllm'", "pandas<1; extra == 'sglang'"]
    monkeypatch.setattr(packages.metadata, "requires", lambda name: wanted)
    (finding,) = packages.requirements()
    assert finding.status == "warn"
    assert "numpy" in finding.detail
    assert "torch" not in finding.detail
    monkeypatch.setattr(packages, "ENGINES", {"numpy": "vllm"})
    (finding,) = packages.requirements()
    assert "torch" in finding.detail
    assert "pandas" not in finding.detail


def test_losses_that_need_a_switch_are_no_failure():
    found = {"losses": list(plugins.LOSSES), "by_itself": [], "pid": 1}
    finding = plugins._verdict("plug-in, Ray worker", found)
    assert finding.status == "warn"
    assert "external_lib=sat_verl.plugin" in finding.fix


# --- GPUs: the output of nvidia-smi, from a program that prints it

TWO = "0, NVIDIA H100 80GB HBM3, 81559, 4, 580.95.05, 9.0\n1, NVIDIA H100 80GB HBM3, 81559, 40000, 580.95.05, 9.0\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def make(output, code=0):
        tool = tmp_path / "nvidia-smi"
        stream = ">&2" if code else ""
        tool.write_text(f"#!/bin/sh\ncat <<'END' {stream}\n{output}\nEND\nexit {code}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def by_subject(findings):
    return {finding.subject: finding for finding in findings}


def test_without_a_gpu_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = gpu.gpus()
    assert (finding.status, finding.detail[:4]) == ("warn", "none")


def test_gpus_are_read_and_a_torch_without_them_is_named(nvidia_smi):
    nvidia_smi(TWO)
    found = by_subject(gpu.gpus())
    assert found["GPU"].detail == "2 x NVIDIA H100 80GB HBM3"
    assert found["GPU memory"].detail == "80 GiB each"
    assert found["GPU memory in use"].status == "warn"
    assert found["GPU memory in use"].detail == "GPU 1: 39.1 GiB"
    # The torch of these tests is the CPU's.
    assert found["driver"].status == found["torch and GPU"].status == "fail"


def test_a_broken_driver_is_a_failure_with_its_message(nvidia_smi):
    nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", code=18)
    (finding,) = gpu.gpus()
    assert finding.status == "fail"
    assert "version mismatch" in finding.detail


def test_small_old_and_mixed_gpus_are_named(nvidia_smi):
    nvidia_smi("0, Tesla V100-SXM2-16GB, 16384, 0, 535.1.1, 7.0\n1, NVIDIA GB10, [N/A], [N/A], 535.1.1, 12.1")
    found = by_subject(gpu.memory(gpu._query()))
    assert [found[name].status for name in ("GPU", "GPU memory", "bfloat16")] == ["warn", "warn", "fail"]
    assert found["GPU memory in use"].status == "ok"


@pytest.mark.parametrize(
    ("version", "cuda", "status"),
    [
        ("580.95.05", "13.0", "ok"),
        ("575.57.08", "13.0", "fail"),
        ("535.183.01", "12.8", "ok"),
        ("470.1", "12.1", "fail"),
        ("400.1", "99.0", "ok"),
        ("580.95.05", None, "fail"),
    ],
)
def test_the_driver_is_compared_with_torchs_cuda(version, cuda, status):
    assert gpu.driver(version, cuda).status == status


def test_nccl_and_the_ways_between_gpus():
    def torch(version, peers):
        cuda = SimpleNamespace(
            nccl=SimpleNamespace(version=lambda: version),
            device_count=lambda: 3,
            can_device_access_peer=lambda a, b: (a, b) in peers,
        )
        return SimpleNamespace(cuda=cuda, distributed=SimpleNamespace(is_nccl_available=lambda: version is not None))

    found = by_subject(gpu.nccl(torch((2, 27, 3), {(0, 1), (0, 2), (1, 2)}), {}))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["NCCL"].detail == "2.27.3"
    found = by_subject(gpu.nccl(torch(None, {(0, 1)}), {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"}))
    assert found["NCCL"].status == "fail"
    assert found["direct access between GPUs"].detail == "not between 0-2, 1-2"
    assert found["NCCL_P2P_DISABLE"].status == "warn"
    assert "NCCL_IB_DISABLE" not in found


# --- the machine


@pytest.mark.parametrize(
    ("free", "on_gpu", "status"),
    [
        (64 << 20, True, "fail"),
        (2 << 30, True, "warn"),
        (16 << 30, True, "ok"),
        (64 << 20, False, "fail"),
        (1 << 30, False, "ok"),
    ],
)
def test_shared_memory(free, on_gpu, status):
    assert host.shared_memory(free, on_gpu).status == status


@pytest.mark.parametrize(
    ("soft", "hard", "on_gpu", "status"),
    [
        (1024, 1024, True, "fail"),
        (1024, 1 << 20, True, "warn"),
        (20_000, 20_000, True, "warn"),
        (20_000, 20_000, False, "ok"),
        (-1, -1, True, "ok"),
        (1 << 20, 1 << 20, True, "ok"),
    ],
)
def test_open_files(soft, hard, on_gpu, status):
    assert host.open_files(soft, hard, on_gpu).status == status


def test_locked_memory_matters_where_there_is_infiniband():
    assert host.locked_memory(8192 * 1024, []).status == "ok"
    assert host.locked_memory(8192 * 1024, ["mlx5_0"]).status == "warn"
    assert host.locked_memory(-1, ["mlx5_0"]).status == "ok"


def test_the_checks_of_this_machine_run():
    found = by_subject([*host.machine(), *host.limits()])
    assert {"cores", "free memory", "open files (ulimit -n)", "locked memory (ulimit -l)"} <= set(found)


def test_it_reports_where_neither_torch_nor_verl_imports():
    """As ``python -m sat_verl doctor`` in an environment that lacks them; the slow checks are left out."""
    code = """
        import sys
        for name in ("torch", "verl", "ray", "vllm"):
            sys.modules[name] = None
        from sat_verl import __main__, doctor
        doctor.CHECKS = tuple(check for check in doctor.CHECKS if check.__name__ != "in_vllm_process")
        sys.exit(__main__.main(["doctor", "--json"]))
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {entry["subject"]: entry for entry in json.loads(done.stdout)}
    assert "verl" in found["here"]["detail"]
    assert found["here"]["status"] == found["in ray worker"]["status"] == "fail"
    assert found["cores"]["status"] in ("ok", "warn")
