"""What the evaluation costs beyond bare generation, side by side in one process and on one engine.

``python -m benchmarks.eval_overhead model=PATH out=FILE.json [repeats=5] [any setting of python -m eval]``

Each repeat draws the same samples twice, in turns: once by ``LLM.generate`` alone, once by the whole loop of
``python -m eval`` (one request a sample, grading under both policies, every sample written to disk). The ratio of the
medians is the harness's cost.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

from rich.console import Console

from benchmarks.arguments import result_file
from eval.benchmarks import load
from eval.engines.vllm import VLLMEngine
from eval.prepare import Prepared, prepare
from eval.run import draw
from eval.settings import compose
from recipes import provenance
from recipes.errors import ConfigError


def bare(llm, prepared: Prepared, temperature: float) -> float:
    """Seconds that ``LLM.generate`` takes for all requests."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(request.token_ids)} for request in prepared.requests]
    parameters = [
        SamplingParams(temperature=temperature, max_tokens=request.max_tokens, seed=request.seed)
        for request in prepared.requests
    ]
    begin = time.perf_counter()
    llm.generate(prompts, parameters, use_tqdm=False)
    return time.perf_counter() - begin


def whole(engine, prepared: Prepared, threads: int) -> float:
    """Seconds that the evaluation takes for them."""
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
        begin = time.perf_counter()
        draw(prepared, engine, Path(folder), prepared.requests, threads, Console(file=nowhere))
        return time.perf_counter() - begin


def main(words: list[str]) -> int:
    """Run the command line; returns the exit status."""
    own = dict(word.split("=", 1) for word in words if word.startswith(("out=", "repeats=")))
    try:
        out = result_file(own["out"]) if "out" in own else None
        cfg = compose([word for word in words if not word.startswith(("out=", "repeats="))])
        if cfg.engine.name != "vllm":
            raise ConfigError("engine", cfg.engine.name, "the comparison is with vLLM alone", "engine=vllm")
        data = {name: value for name, value in cfg.data.items() if value is not None}
        prepared = prepare(cfg, load(cfg.benchmark, **data))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    engine = cast(VLLMEngine, prepared.start())
    rows = []
    try:
        for number in range(int(own.get("repeats", 5)) + 1):
            row = {
                "bare_s": bare(engine.llm, prepared, cfg.sampling.temperature),
                "eval_s": whole(engine, prepared, cfg.grading.threads),
            }
            if number:  # the first warms up both
                rows.append(row)
                print(f"{number}: bare {row['bare_s']:.2f} s, eval {row['eval_s']:.2f} s", flush=True)
    finally:
        engine.close()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    found = {
        "ratio": medians["eval_s"] / medians["bare_s"],
        "medians": medians,
        "repeats": rows,
        "samples": len(prepared.requests),
        "key": prepared.plan.key,
        "provenance": provenance.collect(["python", "-m", "benchmarks.eval_overhead", *words]),
    }
    print(f"ratio of the medians {found['ratio']:.3f}")
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
