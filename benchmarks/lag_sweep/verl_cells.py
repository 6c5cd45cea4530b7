"""Cells of the real stack: one run folder each, started through ``python -m recipes.train``."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lag_sweep.lab_cells import Outcome, failure, rounded
from benchmarks.lag_sweep.measures import measure, no_signal, series
from benchmarks.lag_sweep.spec import Spec
from recipes.errors import ConfigError
from recipes.report import SUMMARY_FILE
from recipes.resume import CONFIG_FILE, begin_or_go_on
from sat_verl.records import LAG_FILE, METRICS_FILE, VALIDATION_FILE, read_rows

RUNS = "runs"
ROOT = Path(__file__).resolve().parent.parent.parent
TAIL = 2000
"""Characters of a failed run's output that its record keeps."""


def run_dir(out: Path, key: str) -> Path:
    return (out / RUNS / key).absolute()


def finished(folder: Path) -> bool:
    return (folder / SUMMARY_FILE).is_file()


def begun(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def command(spec: Spec, folder: Path) -> list[str]:
    """The command that starts a cell's run, or goes on with it."""
    words = begin_or_go_on(folder, [*spec.words, f"cache_dir={spec.settings.cache.absolute()}"])
    return [sys.executable, "-m", "recipes.train", *words]


def run_cell(spec: Spec, folder: Path) -> Outcome:
    """Run a cell to its end and read it; ctrl-C goes to the run, which cleans up."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with open(log, "ab") as file:
        process = subprocess.Popen(command(spec, folder), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code:
        text = log.read_bytes()[-TAIL:].decode(errors="replace")
        return failure(f"exit code {code}; see {log}\n{text}")
    return read(folder)


def read(folder: Path) -> Outcome:
    """The record of a finished run folder."""
    rows, summary = read_rows(folder / METRICS_FILE), json.loads((folder / SUMMARY_FILE).read_text())
    found = series(rows, "verl")
    evaluations = _evaluations(folder, rows)
    metrics = measure(found, evaluations)
    seconds = summary["wall_seconds"]["total"]
    lag = json.loads((folder / LAG_FILE).read_text())
    speed = _samples_per_s(rows, lag)
    digested = json.dumps([evaluations, found.get("grad_norm")])
    names = ("step", "success")
    return {
        "status": "done",
        "metrics": rounded(metrics | {"samples_per_s": speed, "seconds": seconds}),
        "ages": lag["realised"],
        "no_signal": no_signal(found, metrics),
        "digest": hashlib.blake2b(digested.encode(), digest_size=8).hexdigest(),
        "evaluations": {name: [row[name] for row in evaluations] for name in names},
        "series": found,
    }


def _evaluations(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Held-out success by optimizer step: of a benchmark avg@n, else of the task's own test problems."""
    last = {row["global_step"]: row["step"] for row in rows}
    found = []
    for row in read_rows(folder / VALIDATION_FILE):
        scores = [value for key, value in row.items() if key.startswith("val-core/") and "/mean@" in key]
        if scores:
            found.append({"step": last.get(row["global_step"], 0), "success": float(scores[0])})
    return found


def _samples_per_s(rows: Sequence[dict[str, Any]], lag: dict[str, Any]) -> float | None:
    """From the end of the first step to that of the last."""
    seconds = rows[-1]["time"] - rows[0]["time"] if len(rows) > 1 else 0.0
    return lag["responses"] / len(rows) * (len(rows) - 1) / seconds if seconds > 0 else None


def submit_ray(spec: Spec, folder: Path) -> str:
    """Hand a cell to a Ray cluster, whose nodes share this file system; returns the command.

    Raises:
        ConfigError: no cluster is named, there is no ``ray``, or it refuses.
    """
    if not os.environ.get("RAY_ADDRESS"):
        # ray would take whatever cluster it finds on this machine, be it the private one of somebody's run.
        raise ConfigError("submit", "ray", "RAY_ADDRESS names no cluster", "set it, e.g. RAY_ADDRESS=http://HOST:8265")
    words = ["ray", "job", "submit", "--no-wait", "--working-dir", str(ROOT), "--"]
    return _submit([*words, "python", *command(spec, folder)[1:]])


def _submit(words: list[str]) -> str:
    if shutil.which(words[0]) is None:
        raise ConfigError("submit", words[0], f"there is no command {words[0]}", "install it, or leave submit out")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        problem = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError("submit", words[0], problem[0], "see whether RAY_ADDRESS names a running cluster")
    return shlex.join(words)


def submit_slurm(spec: Spec, folder: Path) -> str:
    """Hand a cell to SLURM through submitit; returns what was submitted.

    Raises:
        ConfigError: submitit is not installed, or does not know a parameter.
    """
    try:
        import submitit
    except ModuleNotFoundError:
        raise ConfigError("submit", "slurm", "submitit is not installed", "pip install submitit") from None
    settings = spec.settings
    parameters = dict(word.partition("=")[::2] for word in settings.slurm)
    executor = submitit.AutoExecutor(folder=folder.parent / "slurm")
    try:
        executor.update_parameters(**{name: int(v) if v.isdecimal() else v for name, v in parameters.items()})
        job = executor.submit(submitit.helpers.CommandFunction(command(spec, folder), cwd=str(ROOT)))
    except (NameError, TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
        raise ConfigError("slurm", ",".join(settings.slurm), str(error), "see submitit's AutoExecutor") from None
    return f"SLURM job {job.job_id}"
