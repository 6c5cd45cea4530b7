"""Kill a run again and again, at random moments and in all of its parts, and see whether anything is lost.

``python -m benchmarks.soak out=DIR kills=20 [seed=0] [any override of recipes.train]``

First one run goes through undisturbed; then the same run is started, killed, resumed, killed ... The two must have
trained on the same prompts in the same order, none twice, none skipped, at the same ages. ``DIR/soak.json`` holds the
result. Started again with the same DIR, it goes on with the kills that are missing.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from recipes import provenance
from recipes.compose import compose
from recipes.resume import begin_or_go_on
from sat_verl.records import LAG_FILE, METRICS_FILE, SAMPLES_FILE, read_rows

TARGETS: dict[str, tuple[str | None, signal.Signals]] = {
    # what is killed: the title of its process (None: the command itself), and with which signal
    "command, ctrl-C": (None, signal.SIGINT),
    "command, SIGTERM": (None, signal.SIGTERM),
    "command, kill -9": (None, signal.SIGKILL),
    "driver": ("recipes.driver", signal.SIGKILL),
    "trainer": ("ray::TaskRunner", signal.SIGKILL),
    "trainer worker": ("ray::WorkerDict", signal.SIGKILL),
    "vLLM server": ("ray::vLLMHttpServer", signal.SIGKILL),
    "vLLM engine": ("VLLM::EngineCore", signal.SIGKILL),
}
END_LIMIT_S = 300.0
"""A run whose part was killed must have ended by itself after this time."""


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    with open(log, "ab") as file:
        command = [sys.executable, "-m", "recipes.train", *arguments]
        # A shell starts what it runs in the background with SIGINT ignored; ctrl-C is to be heard.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            command, cwd=provenance.ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def find(run: subprocess.Popen, title: str) -> psutil.Process | None:
    """The process of the run whose command line contains ``title``."""
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if any(title in part for part in process.cmdline()) and "recipes.supervisor" not in process.cmdline():
                return process
        except psutil.Error:
            continue
    return None


def strike(run: subprocess.Popen, target: str) -> list[psutil.Process] | None:
    """Kill a part of the run; returns all of its processes, or None if that part is not there (yet)."""
    title, number = TARGETS[target]
    family = psutil.Process(run.pid).children(recursive=True)
    process = run if title is None else find(run, title)
    if process is None:
        return None
    process.send_signal(number)
    return family


def wait_for_end(run: subprocess.Popen, family: list[psutil.Process]) -> float:
    """Seconds until the run has ended and none of its processes is left.

    Raises:
        TimeoutError: it has not.
    """
    begin = time.monotonic()
    while run.poll() is None or any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
        if time.monotonic() - begin > END_LIMIT_S:
            raise TimeoutError(
                f"{END_LIMIT_S:.0f} s after a kill these still run: {[p for p in family if p.is_running()]}"
            )
        time.sleep(0.5)
    return time.monotonic() - begin


def is_training(run_dir: Path, begun: float) -> bool:
    """Whether the run that was started at ``begun`` (Unix time) has recorded an optimizer step."""
    return any(row["time"] > begun for row in read_rows(run_dir / METRICS_FILE))


def one_kill(run_dir: Path, arguments: list[str], target: str, chance: random.Random, log: Path) -> dict[str, Any]:
    """Start or resume the run, kill the target after some time of training, and wait until all has ended."""
    before = len(read_rows(run_dir / METRICS_FILE))
    begin, begin_at = time.monotonic(), time.time()
    run = start(begin_or_go_on(run_dir, arguments), log)
    # A run spends most of its short life on its start: so do most of the kills; the others come while it trains.
    early = chance.random() < 0.6
    moment = chance.uniform(5, 60) if early else chance.uniform(0, 12)
    trained_since: float | None = None
    family: list[psutil.Process] | None = None
    while run.poll() is None:
        if trained_since is None and is_training(run_dir, begin_at):
            trained_since = time.monotonic()
        since = begin if early else trained_since
        if since is not None and time.monotonic() - since > moment and (family := strike(run, target)):
            break
        time.sleep(0.1)
    lived = time.monotonic() - begin
    if family is None and run.poll() != 0:
        raise RuntimeError(f"the run has failed before it was killed: see {log}")
    return {
        "target": target,
        "lived_s": round(lived, 1),
        "finished": family is None,
        "ended_after_s": round(wait_for_end(run, family or []), 1),
        "steps_before": before,
        "steps_after": len(read_rows(run_dir / METRICS_FILE)),
    }


def finish(run_dir: Path, arguments: list[str], log: Path) -> None:
    """Let the run go through to its end."""
    run = start(begin_or_go_on(run_dir, arguments), log)
    if run.wait() != 0:
        raise RuntimeError(f"a run that was not disturbed has failed: see {log}")


def compare(whole: Path, killed: Path) -> dict[str, Any]:
    """The two runs' prompts, ages and rewards, step by step."""
    first, second = read_rows(whole / SAMPLES_FILE), read_rows(killed / SAMPLES_FILE)
    rewards = [[row["reward/mean"] for row in read_rows(run / METRICS_FILE)] for run in (whole, killed)]
    prompts = [prompt for row in second for prompt in row["prompts"]]
    same = [
        (a["prompts"], a["data_rows"]) == (b["prompts"], b["data_rows"]) for a, b in zip(first, second, strict=False)
    ]
    ages = [a["tokens_by_age"].keys() == b["tokens_by_age"].keys() for a, b in zip(first, second, strict=False)]
    return {
        "steps": [len(first), len(second)],
        "same_prompts": all(same) and len(first) == len(second),
        "trained_twice": len(prompts) - len(set(prompts)),
        "same_ages": all(ages),
        "same_rewards_share": sum(a == b for a, b in zip(*rewards, strict=False)) / max(len(rewards[0]), 1),
        "lag_kept": json.loads((killed / LAG_FILE).read_text())["ok"],
    }


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    if "out" not in options:
        raise SystemExit("python -m benchmarks.soak out=DIR kills=20 [seed=0] [overrides of recipes.train]")
    out, kills = Path(options.pop("out")).absolute(), int(options.pop("kills", 20))
    chance = random.Random(int(options.get("seed", 0)))
    overrides = [f"{key}={value}" for key, value in options.items()]
    compose(overrides)  # a typo shows now
    out.mkdir(parents=True, exist_ok=True)
    console, log, result = Console(), out / "runs.log", out / "soak.json"
    report = json.loads(result.read_text()) if result.is_file() else {"kills": []}
    whole, killed = out / "whole", out / "killed"
    if not (whole / "summary.json").is_file():
        finish(whole, overrides, log)
    targets = [list(TARGETS)[index % len(TARGETS)] for index in range(kills)]
    chance.shuffle(targets)
    for index in range(len(report["kills"]), kills):
        report["kills"].append(one_kill(killed, overrides, targets[index], chance, log))
        console.print(f"kill {index + 1}/{kills}: {report['kills'][-1]}", soft_wrap=True)
        result.write_text(json.dumps(report, indent=2) + "\n")
        if report["kills"][-1]["finished"]:
            break
    finish(killed, overrides, log)
    report |= {"comparison": compare(whole, killed), "provenance": provenance.collect()}
    result.write_text(json.dumps(report, indent=2) + "\n")
    console.print(report["comparison"])
    found = report["comparison"]
    good = found["same_prompts"] and not found["trained_twice"] and found["same_ages"] and found["lag_kept"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
