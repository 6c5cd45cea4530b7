"""``python -m eval model=PATH [benchmark=aime24] [n=8] [engine=vllm] [KEY=VALUE ...]``."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from eval.schema import EXCLUDED, Benchmark, Results
from eval.settings import compose
from recipes.errors import ConfigError
from sat_verl.grading import MathVerifyMissingError

if TYPE_CHECKING:
    from eval.prepare import Prepared
    from eval.resume import Samples

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
    except (ConfigError, MathVerifyMissingError) as error:
        _say(errors, str(error))
        return 2
    except OSError as error:
        _say(errors, f"{error}; what was drawn before is kept, and the same command goes on")
        return 1
    except KeyboardInterrupt:
        _say(errors, f"interrupted; to go on: {shlex.join(['python', '-m', 'eval', *words])}")
        return 130


def _say(console: Console, text: str) -> None:
    console.print("[bold red]error[/] ", end="")
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _run(cfg: DictConfig, words: list[str], console: Console) -> int:
    from eval.prepare import default_out, prepare
    from eval.resume import open_folder
    from eval.run import conclude
    from eval.table import print_table
    from recipes.lock import locked

    command = ["python", "-m", "eval", *words]
    prepared = prepare(cfg, _benchmark(cfg))
    folder = Path(cfg.out) if cfg.out else default_out(prepared.plan)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, console, patience_s=5.0, setting="out"):
        have = open_folder(folder, prepared.plan, console)
        try:
            timing = _draw_missing(cfg, prepared, folder, have, console)
        except BaseException:
            # Whatever it was, what was drawn counts; a second failure must not hide the first.
            with contextlib.suppress(OSError):
                conclude(folder, prepared.plan, {}, prepared.warnings, command)
            raise
        results = conclude(folder, prepared.plan, timing, prepared.warnings, command)
    print_table(results, console)
    console.print(f"{folder}/report.html", soft_wrap=True, highlight=False)
    return _status(results, cfg.max_errors, console)


def _draw_missing(
    cfg: DictConfig, prepared: Prepared, folder: Path, have: Samples, console: Console
) -> dict[str, float]:
    from eval.resume import missing
    from eval.run import draw

    todo, total = missing(prepared.requests, have), len(prepared.requests)
    console.print(f"{folder}: {total - len(todo)} of {total} samples are there", highlight=False, soft_wrap=True)
    if not todo:
        return {}
    begin = time.monotonic()
    engine = prepared.start()
    loaded = time.monotonic() - begin
    try:
        return draw(prepared, engine, folder, todo, cfg.grading.threads, console) | {"load": loaded}
    finally:
        engine.close()


def _benchmark(cfg: DictConfig) -> Benchmark:
    from eval.benchmarks import load

    data = {str(name): value for name, value in cast(dict, OmegaConf.to_container(cfg.data)).items()}
    try:
        return load(cfg.benchmark, **data)
    except ConfigError as error:
        if error.setting not in data:
            raise
        raise ConfigError(f"data.{error.setting}", error.value, error.problem, error.fix) from error


def _status(results: Results, allowed: float, console: Console) -> int:
    failed = {status: max(score.counts.get(status, 0) for score in results.scores.values()) for status in EXCLUDED}
    if sum(failed.values()) > allowed * results.expected:
        console.print(
            f"of {results.expected} samples {failed['request_error']} could not be drawn (the same command tries them "
            f"again) and {failed['grader_error']} could not be graded: more than max_errors={allowed:g}",
            soft_wrap=True,
            highlight=False,
            style="bold red",
        )
        return 1
    return 0 if results.complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
