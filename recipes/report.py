"""What a finished run leaves: ``summary.json``, plots, an HF checkpoint and a table on the terminal."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pyarrow import parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes import benchmark, plots, signal
from recipes.schedule import schedule_of
from sat_verl.records import LAG_FILE, METRICS_FILE, PHASES_FILE, VALIDATION_FILE, WORKER_FILE, read_rows

SUMMARY_FILE = "summary.json"
# The line that names an exception; Ray's wrapper of it comes first and says less.
_ERROR_LINE = re.compile(r"^(?!ray\.exceptions\.Ray\w*Error\()(?:[\w.]+\.)?\w*(?:Error|Exception)\b(?::.*)?$")
_RAY_PREFIX = re.compile(r"^\([^)]*\bpid=\d+[^)]*\)\s?")


def failure(log: Path, code: int, start: int = 0, lines: int = 8) -> str:
    """The first error in a log with some lines before it, and where the rest is; a resumed run begins at ``start``."""
    text = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    rows = [_RAY_PREFIX.sub("", line) for line in text.splitlines()]
    hits = [index for index, row in enumerate(rows) if _ERROR_LINE.match(row)]
    shown = rows[max(0, hits[0] - lines) : hits[0] + 1] if hits else rows[-lines:]
    return f"training ended with exit code {code}. First error in {log}:\n\n" + "\n".join(shown)


def success(metrics: dict[str, Any], problems: int) -> dict[str, float] | None:
    """Mean success of one validation (one sampled response per held-out problem) and its binomial standard error."""
    for key, value in metrics.items():
        if key.startswith("val-core/") and "/mean@" in key:
            rate = float(value)
            return {"rate": rate, "standard_error": math.sqrt(rate * (1 - rate) / problems), "problems": problems}
    return None


def _score(row: dict[str, Any], cfg: DictConfig) -> dict[str, Any] | None:
    """Of a benchmark if the run has one, else of the task's own test problems."""
    if cfg.get("benchmark") is None:
        return success(row, _held_out_problems(cfg))
    return benchmark.score(row, cfg.benchmark_samples)


def _curve(validations: list[dict[str, Any]], cfg: DictConfig) -> list[dict[str, Any]]:
    """The score by optimizer step, for a run that validates on a benchmark or more often than before and after."""
    if cfg.get("benchmark") is None and cfg.get("validate_every") is None:
        return []
    every = schedule_of(cfg).sync_every
    scored = ((row["global_step"] * every, _score(row, cfg)) for row in validations)
    return [{"step": step} | score for step, score in scored if score is not None]


def phase_seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per phase; one that comes more than once is added up."""
    totals: dict[str, float] = {}
    for row, following in pairwise(rows):
        if row["phase"] != "done" and following["phase"] != "start engines":  # cut short; resumed at some other time
            totals[row["phase"]] = totals.get(row["phase"], 0.0) + following["time"] - row["time"]
    return {name: round(seconds, 2) for name, seconds in totals.items()}


def _timings(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds spent per part of the step, summed over the run."""
    totals: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if key.startswith("timing_s/") and isinstance(value, int | float):
                totals[key.removeprefix("timing_s/")] = totals.get(key.removeprefix("timing_s/"), 0.0) + value
    return {key: round(value, 2) for key, value in sorted(totals.items())}


def by_lag(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean |d|, intercepted share (SAT) and tokens of all samples of one age in optimizer steps, over the whole run."""
    sums: dict[str, dict[str, float]] = {}
    for row in metrics:
        for age in {key.split("/")[1] for key in row if re.fullmatch(r"lag/\d+/tokens", key)}:
            tokens = row[f"lag/{age}/tokens"]
            total = sums.setdefault(age, {"tokens": 0.0})
            total["tokens"] += tokens
            for name in ("abs_log_ratio", "intercepted"):
                if f"lag/{age}/{name}" in row:
                    total[name] = total.get(name, 0.0) + row[f"lag/{age}/{name}"] * tokens
    return {
        age: {name: value if name == "tokens" else value / max(total["tokens"], 1) for name, value in total.items()}
        for age, total in sorted(sums.items(), key=lambda item: int(item[0]))
    }


def hf_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of the run in Hugging Face format."""
    places = ("actor/huggingface", "actor/model/huggingface")  # of FSDP, and of Megatron
    steps = sorted(run_dir.glob("checkpoints/global_step_*"), key=lambda folder: int(folder.name.split("_")[-1]))
    folders = [step / place for step in steps for place in places if (step / place).is_dir()]
    return folders[-1] if folders else None


def summarise(run_dir: Path, metrics: list[dict[str, Any]], cfg: DictConfig, wall_seconds: float) -> dict[str, Any]:
    """Everything that a reader or a sweep needs of a run, as plain JSON; ``metrics`` are its optimizer steps."""
    validations = read_rows(run_dir / VALIDATION_FILE)
    workers = json.loads((run_dir / WORKER_FILE).read_text())
    lag = json.loads((run_dir / LAG_FILE).read_text())
    checkpoint = hf_checkpoint(run_dir)
    return {
        "algorithm": cfg.choices.algorithm,
        "task": cfg.choices.task,
        "model": cfg.choices.model,
        "seed": cfg.seed,
        "steps": len(metrics),
        "warnings": signal.warnings(metrics),
        "benchmark": benchmark.origin(cfg.data.val_files) if cfg.get("benchmark") else None,
        "success_before": _score(validations[0], cfg),
        "success_after": _score(validations[-1], cfg),
        "learning_curve": _curve(validations, cfg),
        "loss_mode_in_worker": workers[0]["loss_mode"],
        "loss_in_worker": workers[0],
        "wall_seconds": {
            "total": round(wall_seconds, 1),
            "phases": phase_seconds(read_rows(run_dir / PHASES_FILE)),
            "steps": _timings(metrics),
            "validation": round(sum(row["seconds"] for row in validations), 2),
        },
        "lag": lag,
        "by_lag": by_lag(metrics),
        "last_step": {key: value for key, value in metrics[-1].items() if key.startswith(("actor/", "reward/"))},
        "hf_checkpoint": str(checkpoint.relative_to(run_dir)) if checkpoint else None,
        "provenance": json.loads((run_dir / "provenance.json").read_text()),
    }


def _held_out_problems(cfg: DictConfig) -> int:
    """Rows of the validation file (read from its footer)."""
    return parquet.read_metadata(cfg.data.val_files).num_rows


def write(run_dir: Path, cfg: DictConfig, wall_seconds: float, console: Console) -> dict[str, Any]:
    """Write ``summary.json`` and the plots, and print the table."""
    metrics = read_rows(run_dir / METRICS_FILE)
    summary = summarise(run_dir, metrics, cfg, wall_seconds)
    partial = run_dir / (SUMMARY_FILE + ".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(run_dir / SUMMARY_FILE)
    title = f"{summary['algorithm']} on {summary['task']}"
    plots.draw(metrics, run_dir / "plots", title=title)
    if summary["learning_curve"]:
        plots.draw_curve(summary["learning_curve"], run_dir / "plots", _scored(cfg), title=title)
    console.print(table(summary, run_dir))
    for line in summary["warnings"]:
        console.print(Text(line, style="bold red"))
    return summary


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(success: dict[str, Any] | None) -> str:
    if success is None:
        return "-"
    if "low" in success:
        return f"{success['rate']:.1%} [{success['low']:.1%}, {success['high']:.1%}]"
    error = success.get("standard_error")
    return f"{success['rate']:.1%}" + (f" ± {error:.1%}" if error is not None else "")


def _scored(cfg: DictConfig) -> str:
    """What a validation measures."""
    return "held-out success" if cfg.get("benchmark") is None else f"{cfg.benchmark} avg@{cfg.benchmark_samples}"


def lag_row(lag: dict[str, Any]) -> tuple[str, str]:
    """What was promised and what came of it, in one line."""
    realised = ", ".join(f"{age}: {share:.1%}" for age, share in lag["realised"].items())
    kept = "kept" if lag["ok"] else f"BROKEN in steps {lag['broken_steps']}"
    return f"lag {lag['schedule']} {lag['steps']}, {kept}", f"{{{realised}}} of the tokens"


def table(summary: dict[str, Any], run_dir: Path) -> Table:
    """The summary for the terminal."""
    out = Table(title=f"{summary['algorithm']} · {summary['task']} · {summary['model']}", show_header=False)
    out.add_row("loss in the worker", summary["loss_in_worker"]["function"])
    out.add_row("optimizer steps", str(summary["steps"]))
    rise = f"{_rate(summary['success_before'])} -> {_rate(summary['success_after'])}"
    after = summary["success_after"] or {}
    if "samples" in after:
        out.add_row(f"{summary['benchmark']['benchmark']} avg@{after['samples']} [95 % over problems]", rise)
        if after["not_counted"]:
            out.add_row("responses that do not count", f"{after['not_counted']}: never drawn, or not to be graded")
    else:
        out.add_row("held-out success (± SE)", rise)
    out.add_row(*lag_row(summary["lag"]))
    last = summary["last_step"]
    out.add_row("mean |d|, last step", f"{last.get('actor/abs_log_ratio', float('nan')):.4f}")
    if "actor/sat/q" in last:
        out.add_row("q, last step", f"{last['actor/sat/q']:.4f}")
        out.add_row("intercepted, last step", _share(last["actor/sat/intercepted"]))
        out.add_row("eps_eff low / high", f"{last['actor/sat/eps_eff_low']:.3f} / {last['actor/sat/eps_eff_high']:.3f}")
    out.add_row("wall time", f"{summary['wall_seconds']['total']:.0f} s")
    out.add_row("HF checkpoint", str(summary["hf_checkpoint"]))
    out.add_row("run folder", str(run_dir))
    return out
