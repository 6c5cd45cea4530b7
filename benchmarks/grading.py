"""How fast is the grader? ``python -m benchmarks.grading out=FILE.json``.

Each response is graded by this project's grader and by bare ``math_verify.verify(parse(gold), parse(response))``, in
turn in one process; both are timed by the CPU time that the process and its worker take.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import result_file
from recipes import provenance
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings
from sat_verl.grading import grade_policies, verify

USAGE = """usage: python -m benchmarks.grading [out=FILE.json] [repeats=7] [responses=50]
Samples per second and core: both policies of this grader, and bare math-verify, on the same responses."""
DEFAULTS: dict[str, Any] = {"out": "benchmarks/results/grading.json", "repeats": 7, "responses": 50}

LENGTHS = (2_000, 8_000, 32_000)
_STEP = (
    "We then consider the case where $n \\equiv 3 \\pmod{7}$ and $a_{k}=2^{k}+1$, which gives $x=\\frac{17}{4}$, "
    "so the partial total is $12 + 25 = 37$ and \\[ y^2 = \\left(x+\\frac{1}{2}\\right)^2 - 3. \\] "
    "Wait, let me check that again.\n"
)
# gold and answer in turn; the first column ends on the fast path, the second in math-verify
_ANSWERS = {
    "integer": [("204", "204"), ("025", "25"), ("902", "901"), ("73", "m+n = 48+25 = 73"), ("588", "588^\\circ")],
    "formula": [
        ("\\frac{1}{2}", "0.5"),
        ("12\\sqrt{3}", "\\sqrt{432}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\left(\\frac{3}{2},-13\\right)", "(1.5, -13)"),
        ("\\frac{3\\pi}{4}", "\\frac{\\pi}{4}"),
    ],
}


def responses(kind: str, length: int, count: int) -> list[tuple[str, str]]:
    """Pairs of a gold answer and a response of about ``length`` characters that ends in a box."""
    pairs = []
    for number in range(count):
        gold, answer = _ANSWERS[kind][number % len(_ANSWERS[kind])]
        work = _STEP * (length // len(_STEP)) + f"Case {number}.\n"
        pairs.append((gold, f"<think>\n{work}</think>\n\nThe final answer is $\\boxed{{{answer}}}$."))
    return pairs


def ours(pairs: Sequence[tuple[str, str]]) -> int:
    """Both policies of this grader; returns how many are correct (strict)."""
    return sum(grade_policies(response, gold)["strict"].status == "correct" for gold, response in pairs)


def bare(pairs: Sequence[tuple[str, str]]) -> int:
    """math-verify with its own extraction and defaults, but for its alarms; the gold is boxed, or it is not found."""
    from math_verify import parse, verify

    found = 0
    for gold, response in pairs:
        expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        found += verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None)
    return found


def cpu_seconds() -> float:
    """CPU time so far of this process and its worker."""
    total = time.process_time()
    if verify._shared.pid is not None:
        used = psutil.Process(verify._shared.pid).cpu_times()  # to 10 ms
        total += used.user + used.system
    return total


def measure(grader: Callable[[Sequence[tuple[str, str]]], int], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Samples per second of CPU time and by the clock, and how many were graded correct."""
    cpu, clock = cpu_seconds(), time.perf_counter()
    correct = grader(pairs)
    clock, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    return {"per_core": len(pairs) / max(cpu, 1e-6), "by_clock": len(pairs) / clock, "correct": correct}


def run(repeats: int, count: int) -> list[dict[str, Any]]:
    """All cells, each grader in turn in every repeat."""
    cells = []
    for kind in _ANSWERS:
        for length in LENGTHS:
            # Enough of the fast ones for a clock to see.
            pairs = responses(kind, length, count * (20 if kind == "integer" else 1))
            short = pairs[:count]
            ours(short), bare(short[:5])
            done = [(measure(ours, pairs), measure(bare, short)) for _ in range(repeats)]
            cell: dict[str, Any] = {"kind": kind, "characters": len(pairs[0][1]), "responses": [len(pairs), len(short)]}
            for name, place in (("ours", 0), ("math_verify", 1)):
                every = [pair[place] for pair in done]
                cell[name] = {key: median(one[key] for one in every) for key in every[0]}
                cell[name]["all_per_core"] = [round(one["per_core"], 2) for one in every]
            cell["ratio"] = median(one["per_core"] / other["per_core"] for one, other in done)
            cells.append(cell)
    return cells


def show(cells: Sequence[dict[str, Any]]) -> Table:
    """Medians over the repeats."""
    table = Table(title="Samples per second and core")
    for column in ("answers", "characters", "ours, both policies", "math-verify alone", "ratio"):
        table.add_column(column, justify="right")
    for cell in cells:
        numbers = [f"{cell[name]['per_core']:.1f}" for name in ("ours", "math_verify")]
        table.add_row(cell["kind"], str(cell["characters"]), *numbers, f"{cell['ratio']:.1f}")
    return table


def main(words: Sequence[str]) -> int:
    """Run the command line; 0, or 2 for settings that cannot work."""
    if {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0
    try:
        settings = parse_settings(words, DEFAULTS, ())
        out = result_file(settings["out"])
        for name, value in settings["difficulty"].items():
            raise ConfigError(name, value, "there is no such setting", f"choose among {', '.join(DEFAULTS)}")
        for name in ("repeats", "responses"):
            if settings[name] < 1:
                raise ConfigError(name, settings[name], "it is not positive", f"write e.g. {name}={DEFAULTS[name]}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)  # math-verify warns of its disabled alarms at every call
    verify.start()
    cells = run(settings["repeats"], settings["responses"])
    load = os.getloadavg()[0]
    kept = {key: settings[key] for key in ("repeats", "responses")}
    found = {
        "settings": kept,
        "load_average": load,
        "cells": cells,
        "provenance": provenance.collect(["python", "-m", "benchmarks.grading", *words]),
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    Console().print(show(cells))
    verify._shared.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
