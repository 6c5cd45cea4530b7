"""Cells of the real stack: one run folder each, started through ``python -m recipes.train``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.lag_sweep.lab_cells import ROOT, Outcome, failure, rounded
from benchmarks.lag_sweep.measures import measure, no_signal, series
from benchmarks.lag_sweep.spec import Spec
from benchmarks.lag_sweep.workers import end_with_parent
from recipes import report
from recipes.errors import ConfigError
from recipes.launch import LOG_FILE
from recipes.lock import LOCK_FILE, locked
from recipes.report import SUMMARY_FILE
from recipes.resume import CONFIG_FILE, begin_or_go_on, last_step
from recipes.schedule import schedule_of
from sat_verl.records import LAG_FILE, METRICS_FILE, PHASES_FILE, VALIDATION_FILE, RunRecorder, read_rows

RUNS = "runs"
TAIL_LINES = 20
"""Last lines of a failed run's output, and of its training processes' log, that its record keeps."""
INTERRUPTED = 130
"""Exit status of ``recipes.train`` after ctrl-C or SIGTERM."""
_CAUSE = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b|^error ")
_BEFORE = {LOCK_FILE, METRICS_FILE, f"{CONFIG_FILE}.partial"}


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
    """Run a cell to its end and read it. On ctrl-C, or if this process is killed, the run is ended, and cleans up."""
    if begun(folder) and last_step(folder) >= spec.settings.steps:
        return _close(folder)
    _clear(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    start = log.stat().st_size if log.is_file() else 0
    with open(log, "ab") as file:
        # A session of its own: a terminal's ctrl-C would reach it twice, and the second one would end its cleaning up.
        process = subprocess.Popen(
            command(spec, folder), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # not SIGINT: started in the background of a script, the run ignores it
            process.wait()
            raise
    if code:
        return failed(folder, log, code, start)
    return read_or_fail(folder)


def _clear(folder: Path) -> None:
    """Remove what a run leaves that was killed before it had begun: the recipe refuses a folder that holds anything."""
    if folder.is_dir() and not begun(folder) and {path.name for path in folder.iterdir()} <= _BEFORE:
        with locked(folder, Console(quiet=True)):
            shutil.rmtree(folder)


def failed(folder: Path, log: Path, code: int, start: int = 0) -> Outcome:
    """The record of a run that ended with an error: its last lines, those of its processes, and the cause last.

    Args:
        folder: the run folder, which may not exist.
        log: output of ``recipes.train``; what this call wrote begins at byte ``start``.
        code: exit status, negative for a signal.
    """
    said = log.read_bytes()[start:].decode(errors="replace").splitlines()
    rest = folder / LOG_FILE
    parts = [f"output of recipes.train ({log}):", *said[-TAIL_LINES:]]
    if rest.is_file() and not any("First error in" in line for line in said):
        # It did not come to say it itself: it was killed, or its processes never failed.
        lines = rest.read_bytes()[-100_000:].decode(errors="replace").splitlines()
        parts += [f"last lines of {rest}:", *lines[-TAIL_LINES:]]
    lines = [line.strip() for line in parts[1:] if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line)] or lines or ["it said nothing"]
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    outcome = failure("\n".join([*parts, f"{how}: {causes[-1]}"]), folder.parent.parent)
    # Ended by a signal that it could handle, it has cleaned up and can go on.
    return outcome | ({"status": "interrupted"} if code == INTERRUPTED else {})


def _close(folder: Path) -> Outcome:
    """Write the summary of a run that was cut short when all its steps were done, from its records.

    ``recipes.train resume=`` would refuse it, since nothing is left to train.
    """
    cfg = OmegaConf.load(folder / CONFIG_FILE)
    assert isinstance(cfg, DictConfig)
    lag = RunRecorder(folder).finish_lag(schedule_of(cfg))
    if not lag["ok"] or lag["optimizer_steps"] != cfg.steps:
        return failure(f"the record of the run is not whole: lag not kept in steps {lag['broken_steps']}")
    seconds = sum(report.phase_seconds(read_rows(folder / PHASES_FILE)).values())
    report.write(folder, cfg, seconds, Console(quiet=True))
    return read_or_fail(folder)


def read_or_fail(folder: Path) -> Outcome:
    """:func:`read`; a folder that cannot be read becomes a failed record, and the other cells go on."""
    try:
        return read(folder)
    except Exception:  # whatever the folder lacks
        return failure(
            f"the run ended well, but its folder cannot be read\n{traceback.format_exc()}", folder.parent.parent
        )


def read(folder: Path) -> Outcome:
    """The record of a finished run folder."""
    rows, summary = read_rows(folder / METRICS_FILE), json.loads((folder / SUMMARY_FILE).read_text())
    found = series(rows, "verl")
    evaluations = _evaluations(folder, rows)
    metrics = measure(found, evaluations)
    wall = summary["wall_seconds"]
    # A resumed run's total is that of its last part.
    seconds = sum(wall["phases"].values()) if summary["provenance"].get("earlier_parts") else wall["total"]
    lag = json.loads((folder / LAG_FILE).read_text())
    digested = json.dumps([evaluations, found.get("grad_norm")])
    names = ("step", "success")
    return {
        "status": "done",
        "metrics": rounded(metrics | {"samples_per_s": _samples_per_s(rows, lag), "seconds": seconds}),
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
    """Responses over the seconds of all steps, each from the end of the one before: waiting, weight sync, evaluation.

    From the run's own rate per step: the rows of a weight-sync window are written together, so their times say nothing
    of its steps, and between two parts of a resumed run time passes without any.
    """
    rates = [(row["response_length/tokens"], row["perf/response_tokens_per_s"]) for row in rows]
    seconds = sum(tokens / rate for tokens, rate in rates if rate > 0)
    return lag["responses"] / seconds if seconds > 0 else None


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
