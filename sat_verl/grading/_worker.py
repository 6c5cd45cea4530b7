"""The process that runs math-verify: reads one JSON request a line from stdin, writes one JSON reply a line.

Started by :mod:`sat_verl.grading.verify` as ``python -m sat_verl.grading._worker``. Texts are parsed as LaTeX and
never evaluated as Python. Each request arms kernel timers whose default action ends the process, so that a computation
that never returns ends even if the parent is gone and the interpreter is stuck inside one C call. The timer that
matters counts CPU time: on a busy machine a wall clock would fail correct answers.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

MEMORY_LIMIT = 2 << 30
ORPHAN_POLL_MS = 2000
MAX_ANSWER_CHARS = 2000
# The first parse builds tables and compiles patterns, which takes longer than most comparisons.
_WARM_UP = ((r"\frac{1}{2}", "0.5"), ("x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", "2,1"))

_OF_SETS = ("\\infty", "\\cup", "[", "]")
_OF_INEQUALITIES = ("<", ">", "\\le ", "\\ge ", "\\leq", "\\geq")

Compare = Callable[[str, str], tuple[str, str]]


def main() -> None:
    """Serve requests until stdin closes or the parent is gone."""
    parent = os.getppid()
    # Libraries may print; the protocol gets a descriptor of its own and everything else goes nowhere.
    replies = os.dup(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    logging.disable(logging.CRITICAL)
    _limit_resources()
    try:
        compare = load()
        for gold, answer in _WARM_UP:
            compare(gold, answer)
    except ImportError as error:
        _send(replies, {"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    _send(replies, {"ready": True})
    for line in _lines(parent):
        request = json.loads(line)
        _arm(float(request["deadline_s"]), float(request["limit_s"]))
        found = ""
        try:
            if "response" in request:
                verdict, detail, found = whole(request["gold"], request["response"])
            else:
                verdict, detail = compare(request["gold"], request["answer"])
        except Exception as error:
            verdict, detail = "error", type(error).__name__
        _arm(0.0, 0.0)
        _send(replies, {"id": request["id"], "verdict": verdict, "detail": detail, "answer": found})


def whole(gold: str, response: str) -> tuple[str, str, str]:
    """math-verify as it comes, but for its timeouts (see ``load``): for a second opinion, not for grading.

    Args:
        gold: the gold answer, delimited.
        response: the whole response.

    Returns:
        Verdict and detail as of ``load``'s comparison, and the text of the extracted answer.
    """
    from math_verify import parse, verify

    expected, found = parse(gold, parsing_timeout=None), parse(response, parsing_timeout=None)
    if not expected or not found:
        return ("gold_unparsed" if not expected else "answer_unparsed"), "", ""
    same = verify(expected, found, timeout_seconds=None)
    return ("equal" if same else "different"), "", str(found[-1])[:MAX_ANSWER_CHARS]


def load() -> Compare:
    """Import math-verify and build the comparison.

    Returns:
        A function of a gold and an answer formula that returns a verdict and a detail: "equal", "different",
        "answer_unparsed" (the gold can be read, the answer cannot), "gold_unparsed" or "too_large".

    Raises:
        ImportError: if math-verify or one of its parts is missing.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.cache import clear_cache
    from sympy.core.random import seed

    from sat_verl.grading import _checks

    # Units are off: math-verify takes the last letter of "5t" for one. Boxes are opened by the extraction.
    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    formula = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules),)

    def read(text: str) -> Any:
        if _unbalanced(text):
            return None
        # The library's own timeouts rest on SIGALRM, and its string fallback calls texts equal that it cannot read.
        parsed = parse(
            f"\\boxed{{{text}}}", extraction_config=formula, fallback_mode="no_fallback", parsing_timeout=None
        )
        return parsed[0] if parsed else None

    def compare(gold: str, answer: str) -> tuple[str, str]:
        # sympy tries random numbers, and what it finds depends on what it has cached: 204 = oo**oo came out true in one
        # run of a hundred. A verdict must depend on the question alone.
        clear_cache()
        seed(0)
        expected = read(gold)
        if expected is None:
            return "gold_unparsed", ""
        found = read(answer)
        if found is None:
            return "answer_unparsed", ""
        size = _checks.compare_sizes(expected, found)
        if size is not None:
            return size, "size"
        if _checks.is_undefined(expected):
            return "gold_unparsed", ""
        if _checks.numbers_differ(expected, found):
            return "different", ""
        same = _checks.same_inequation(expected, found)
        if same is not None:
            return ("equal" if same else "different"), ""
        # "(1, 2)" may be a point, but these golds are certainly sets, which an inequality may describe as well.
        # An inequality against such a pair leaves no doubt either.
        certainly_set = any(mark in gold for mark in _OF_SETS) or any(mark in answer for mark in _OF_INEQUALITIES)
        if not verify(
            expected, found, allow_set_relation_comp=certainly_set, timeout_seconds=None, raise_on_error=True
        ):
            return "different", ""
        return ("different", "recheck") if _checks.contradicts(expected, found) else ("equal", "")

    return compare


def _unbalanced(text: str) -> bool:
    """Whether a box around the text would end elsewhere than after it."""
    bare = text.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    return bare.count("{") != bare.count("}")


def _lines(parent: int) -> Iterator[bytes]:
    """Yield request lines; end at end of file, or when the parent has changed.

    End of file alone is not enough: a child that the parent forked holds the pipe open after the parent's death.
    """
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    pending = b""
    while True:
        if not poller.poll(ORPHAN_POLL_MS):
            if os.getppid() != parent:
                return
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *complete, pending = (pending + chunk).split(b"\n")
        yield from complete


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _arm(deadline_s: float, limit_s: float) -> None:
    """Start both timers; 0 stops them."""
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    signal.setitimer(signal.ITIMER_REAL, limit_s)


def _limit_resources() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # a blocked signal is inherited and would never end it
    try:
        import resource

        for limit, value in ((resource.RLIMIT_AS, MEMORY_LIMIT), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
