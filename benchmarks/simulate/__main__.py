"""``python -m benchmarks.simulate [validate] ...``."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence

USAGE = """usage: python -m benchmarks.simulate out=DIR [schedules=[broadcast,constant,bounded,bounded_drop,colocated]]
           [lags=[0,1,2,4,8]] [gpus=[8,64,512]] [seeds=2] [steps=40] [prompts_per_step=[32,128,512]]
           [responses_per_prompt=16] [prompt_tokens=512] [response_limit=32768] [lengths=lognormal|pareto|fixed]
           [length_typical=6000] [length_shape=0.9] [length_within=0.5] [rollout_share=0.8125] [gpus_per_replica=2]
           [slots=64] [iteration_ms=6.3] [per_sequence_us=20] [per_context_ns=30] [prefill_us=16] [request_ms=5]
           [store_ms=5] [train_us=142] [train_fixed_s=5] [train_noise=0] [sync_s=4] [other_s=2] [poll_s=0.05]
       python -m benchmarks.simulate validate RUN_DIR... [fit=RUN_DIR|fit=[SYNC_RUN,RUN]] [seeds=8] [steps=LAST_STEP]
           [out=DIR]
The first simulates every schedule at every lag and size. validate fits the simulator to the first half of each finished
run of recipes.train and compares what it says of the other half with what was measured; with fit, to other runs."""


def _portable(word: str) -> str:
    """A word of the command line without the place of folders on this machine."""
    return re.sub(r"(^|[=\[,])/(?:[^,\]]*/)?([^/,\]]+)/?", r"\1\2", word)


def main(words: Sequence[str]) -> int:
    """Run the command line; returns 0, 1 where a schedule was not kept, 2 for bad input, 130 on ctrl-C."""
    if set(words) & {"help", "--help", "-h"}:
        print(USAGE)
        return 0
    from rich.console import Console

    from recipes.errors import ConfigError

    # Ended by a signal, and where a shell starts it in the background, it writes what it has, as on ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    command = [os.path.basename(sys.executable), "-m", "benchmarks.simulate", *map(_portable, words)]
    try:
        if words and words[0] == "validate":
            from benchmarks.simulate import validate

            return validate.main(words[1:], command, Console())
        from benchmarks.simulate.settings import parse

        settings = parse(words)
        from benchmarks.simulate import matrix

        return matrix.run(settings, command, Console())
    except ConfigError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before anything was done", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
