"""``python -m benchmarks.lag_sweep [plan|smoke] NAME=VALUE ...``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

USAGE = """usage: python -m benchmarks.lag_sweep [plan|smoke] out=DIR [engine=lab|verl] [task=chain,sort]
           [arms=[grpo,sat_grpo]] [lags=[0,1,8]] [seeds=10] [lr=[1e-3]] [schedule=broadcast|constant]
           [model=tiny|tiny_moe] [steps=128] [prompts_per_step=16] [responses_per_prompt=8] [micro_batches=1]
           [eval_every=8] [eval_problems=256] [noise=0] [dual_clip=3] [quantile_scope=batch|microbatch]
           [overrides=[WORDS of recipes.train]] [workers=1] [retry=true] [submit=local|ray|slurm]
           [slurm=[timeout_min=600]] [cache=.cache]
plan prints the cells and what is done; smoke runs two arms at two lags, small. Done cells of DIR are kept."""

SMOKE = (
    "task=chain", "arms=[grpo,sat_grpo]", "lags=[1,8]", "seeds=1", "steps=16", "prompts_per_step=4",
    "responses_per_prompt=4", "eval_every=8", "eval_problems=64",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit status: 0, 1 where a cell is not done, 2 for bad input, 130 on ctrl-C."""
    if "engine=verl" not in words:  # its runs place their threads themselves
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the workers inherit it
    verb, rest = (words[0], list(words[1:])) if words and "=" not in words[0] else ("run", list(words))
    if verb in ("help", "--help", "-h"):
        print(USAGE)
        return 0
    from rich.console import Console

    from recipes.errors import ConfigError

    # Ended by a signal, the sweep records what it was at, as on ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _do(verb, rest, [os.path.basename(sys.executable), "-m", "benchmarks.lag_sweep", *words], Console())
    except ConfigError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def _do(verb: str, words: list[str], command: list[str], console: object) -> int:
    from benchmarks.lag_sweep import progress, runner
    from benchmarks.lag_sweep.settings import parse
    from recipes.errors import ConfigError

    if verb == "smoke":
        given = {word.partition("=")[0] for word in words}
        words = [*(word for word in SMOKE if word.partition("=")[0] not in given), *words]
    elif verb not in ("run", "plan"):
        raise ConfigError("command", verb, "there is no such command", "use plan, smoke, or none to run the matrix")
    settings = parse(words)
    if verb == "plan":
        progress.plan(runner.Matrix(settings, command), console)  # type: ignore[arg-type]
        return 0
    return runner.run(settings, command, console)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
