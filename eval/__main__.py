"""``python -m eval model=PATH [benchmark=aime24] [n=8] [engine=vllm] [KEY=VALUE ...]``."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from eval.schema import Benchmark, Results
from eval.settings import compose
from recipes.errors import ConfigError

USAGE = """usage: python -m eval model=PATH [benchmark=aime24] [n=8] [engine=vllm|openai|hf|sglang] [KEY=VALUE ...]
all settings with their defaults: eval/config/eval.yaml and eval/config/engine/*.yaml
related: python -m eval.compare, python -m eval.regrade, python -m eval.grade"""


def main(words: list[str]) -> int:
    """Run the command line.

    Returns:
        0; 1 if too many samples could not be drawn or graded, or the run is not complete; 2 for bad input; 130 if
        interrupted (what was drawn is kept).
    """
    if any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    errors, console = Console(stderr=True), Console()
    try:
        return _run(compose(words), words, console)
    except ConfigError as error:
        errors.print("[bold red]error[/] ", end="")
        errors.print(str(error), soft_wrap=True, markup=False, highlight=False)
        return 2


def _run(cfg: DictConfig, words: list[str], console: Console) -> int:
    from eval.prepare import default_out, prepare
    from eval.run import conclude, draw, missing, open_folder
    from eval.table import print_table
    from recipes.lock import locked

    command = ["python", "-m", "eval", *words]
    prepared = prepare(cfg, _benchmark(cfg))
    folder = Path(cfg.out) if cfg.out else default_out(prepared.plan)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, console, patience_s=5.0):
        have = open_folder(folder, prepared.plan)
        todo = missing(prepared.requests, have)
        console.print(f"{folder}: {len(prepared.requests) - len(todo)} of {len(prepared.requests)} samples are there",
                      highlight=False, soft_wrap=True)  # fmt: skip
        timing: dict[str, float] = {}
        try:
            if todo:
                begin = time.monotonic()
                engine = prepared.start()
                loaded = time.monotonic() - begin
                try:
                    timing = draw(prepared, engine, folder, todo, cfg.grading.threads, console) | {"load": loaded}
                finally:
                    engine.close()
        except KeyboardInterrupt:
            conclude(folder, prepared.plan, timing, prepared.warnings, command)
            console.print(f"interrupted; to go on: {shlex.join(command)}", soft_wrap=True, highlight=False)
            return 130
        except Exception:
            # The engine failed; what was drawn before counts, and the cause is shown below.
            conclude(folder, prepared.plan, timing, prepared.warnings, command)
            raise
        results = conclude(folder, prepared.plan, timing, prepared.warnings, command)
    print_table(results, console)
    console.print(f"{folder}/report.html", soft_wrap=True, highlight=False)
    return _status(results, cfg.max_errors, console)


def _benchmark(cfg: DictConfig) -> Benchmark:
    from eval.benchmarks import load

    data = OmegaConf.to_container(cfg.data)
    try:
        return load(cfg.benchmark, **data)
    except ConfigError as error:
        if error.setting not in data:
            raise
        raise ConfigError(f"data.{error.setting}", error.value, error.problem, error.fix) from error


def _status(results: Results, allowed: float, console: Console) -> int:
    excluded = max(
        sum(score.counts.get(status, 0) for status in ("request_error", "grader_error"))
        for score in results.scores.values()
    )
    if excluded > allowed * results.expected:
        console.print(
            f"{excluded} of {results.expected} samples could not be drawn or graded (max_errors={allowed:g}); "
            "the same command tries the requests again", soft_wrap=True, highlight=False, style="bold red",
        )  # fmt: skip
        return 1
    return 0 if results.complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
