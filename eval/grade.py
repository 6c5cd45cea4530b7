"""``python -m eval.grade cases=IN.jsonl out=OUT.jsonl``: grade responses from anywhere."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from eval.grading import grade_response
from eval.schema import POLICIES, STATUSES, Verdict
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings
from sat_verl.grading import DOMAINS, MathVerifyMissingError, verify

USAGE = """usage: python -m eval.grade cases=IN.jsonl out=OUT.jsonl [policy=strict|lenient] [limit_s=10] [workers=1]
           [max_grader_errors=N]
IN has one JSON object a line with "id", "response" and "gold", and if you like "domain" (aime or math), "limit_s"
(seconds by the clock for this case) and "finish_reason"; other fields are ignored, a null response counts as a failed
request. OUT gets a line for each in the same order, with "id", "status", "answer" and "seconds".
Exit code 0; 1 if more than max_grader_errors cases could not be graded; 2 for input that cannot be used."""

DEFAULTS: dict[str, Any] = {"policy": "strict", "limit_s": 10, "workers": 1, "max_grader_errors": ""}
MAX_WORKERS = 256


@dataclass(frozen=True)
class Case:
    """One line of the input."""

    id: Any
    response: str | None
    gold: Any
    domain: str | None
    limit_s: float | None
    finish_reason: str | None


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a file, one by one.

    Raises:
        ConfigError: naming the first line that is no case, and what is wrong with it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _case(path, number, line)
    except OSError as error:
        raise ConfigError("cases", path, error.strerror or "it cannot be read", "name a JSONL file") from None
    except UnicodeDecodeError:
        raise ConfigError("cases", path, "it is not UTF-8 text", "name a JSONL file") from None


def _case(path: Path, number: int, line: str) -> Case:
    def refuse(problem: str, fix: str) -> ConfigError:
        return ConfigError("cases", path, f"line {number}: {problem}", fix)

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"no JSON ({str(error)[:80]})", "write one JSON object a line") from None
    if not isinstance(row, dict):
        raise refuse("no JSON object", 'write e.g. {"id": 1, "response": "...", "gold": "204"}')
    for name in ("id", "response", "gold"):
        if name not in row:
            raise refuse(f"no field {name}", "every case has id, response and gold")
    if not isinstance(row["response"], str | None):
        raise refuse("response is neither text nor null", "write the model's text, or null for a failed request")
    domain, limit_s, reason = (row.get(name) for name in ("domain", "limit_s", "finish_reason"))
    if domain is not None and domain not in DOMAINS:
        raise refuse(f"there is no domain {domain!r}", f"write {' or '.join(DOMAINS)}, or leave it out")
    if limit_s is not None and not (_is_number(limit_s) and limit_s > 0):
        raise refuse("limit_s is no positive number", "write seconds, or leave it out")
    if not isinstance(reason, str | None):
        raise refuse("finish_reason is no text", "write stop or length, or leave it out")
    return Case(row["id"], row["response"], row["gold"], domain, limit_s, reason)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def grade_case(case: Case, policy: str, limit_s: float) -> Verdict:
    """Grade one case within its limit by the clock.

    Args:
        case: the case; a limit of its own goes before ``limit_s``.
        policy: "strict" or "lenient".
        limit_s: seconds.
    """
    return grade_response(
        case.response,
        case.gold,
        policy=policy,  # type: ignore[arg-type]
        domain=case.domain,
        finish_reason=case.finish_reason,
        limit_s=case.limit_s or limit_s,
    )


def _grade_in_order(
    cases: Iterator[Case], policy: str, limit_s: float, workers: int
) -> Generator[tuple[Case, Verdict], None, None]:
    if workers == 1:
        for case in cases:
            # Outside of any case's time, and after a worker was killed for an answer that hung: again.
            _start()
            yield case, grade_case(case, policy, limit_s)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start) as pool:
        # Only so many at a time: the pool would take in the whole file at once.
        waiting: list[Any] = []
        for case in cases:
            waiting.append((case, pool.submit(_in_pool, case, policy, limit_s)))
            if len(waiting) >= 4 * workers:
                first, future = waiting.pop(0)
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _start() -> None:
    with suppress(MathVerifyMissingError):  # integers can do without; a case that cannot will say so
        verify.start()


def _in_pool(case: Case, policy: str, limit_s: float) -> Verdict:
    _start()
    return grade_case(case, policy, limit_s)


def _write(case: Case, verdict: Verdict) -> bytes:
    row = {"id": case.id, "status": verdict.status, "answer": verdict.answer, "seconds": verdict.seconds}
    row |= {"source": verdict.source, "method": verdict.method, "detail": verdict.detail}
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in the id
        return json.dumps(row).encode() + b"\n"


def grade_file(
    cases: Path, out: Path, *, policy: str = "strict", limit_s: float = 10, workers: int = 1
) -> Counter[str]:
    """Grade a file of cases into another, line by line.

    Args:
        cases: the input; checked to its end before anything is graded.
        out: the output; replaced.
        policy: "strict" or "lenient".
        limit_s: seconds by the clock for a case that names no limit.
        workers: processes that grade.

    Returns:
        The number of cases by status.

    Raises:
        ConfigError: input that cannot be used.
        sat_verl.grading.MathVerifyMissingError: if math-verify is not installed.
    """
    ids: Counter[str] = Counter(json.dumps(case.id) for case in read_cases(cases))
    if not ids:
        raise ConfigError("cases", cases, "it has no cases", "write one JSON object a line")
    twice = [text for text, count in ids.items() if count > 1]
    if twice:
        print(f"warning: {len(twice)} ids stand on more than one line, e.g. {twice[0]}", file=sys.stderr)
    if out.resolve() == cases.resolve():
        raise ConfigError("out", out, "it is the input", "name another file")
    counts: Counter[str] = Counter()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "wb") as file, closing(_grade_in_order(read_cases(cases), policy, limit_s, workers)) as graded:
            for case, verdict in graded:
                counts[verdict.status] += 1
                file.write(_write(case, verdict))
                file.flush()
    except OSError as error:
        raise ConfigError("out", out, error.strerror or "it cannot be written", "name another file") from None
    return counts


def _settings(words: Sequence[str]) -> dict[str, Any]:
    settings = parse_settings(words, DEFAULTS | {"limit_s": "10"}, required=("cases", "out"))
    for name, value in settings["difficulty"].items():
        known = ", ".join(["cases", "out", *DEFAULTS])
        raise ConfigError(name, value, "there is no such setting", f"choose among {known}")
    if settings["policy"] not in POLICIES:
        raise ConfigError("policy", settings["policy"], "there is no such policy", f"choose {' or '.join(POLICIES)}")
    try:
        limit_s = float(settings["limit_s"])
    except ValueError:
        limit_s = math.nan
    if not (math.isfinite(limit_s) and limit_s > 0):
        raise ConfigError("limit_s", settings["limit_s"], "it is no positive number", "write seconds, e.g. limit_s=10")
    if not 1 <= settings["workers"] <= MAX_WORKERS:
        raise ConfigError("workers", settings["workers"], "it is out of range", f"write 1 to {MAX_WORKERS}")
    allowed = settings["max_grader_errors"]
    if allowed != "" and (not isinstance(allowed, int) or allowed < 0):
        raise ConfigError("max_grader_errors", allowed, "it is no number of cases", "write e.g. max_grader_errors=0")
    return settings | {"limit_s": limit_s}


def main(words: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        0; 1 if too many cases could not be graded; 2 for input that cannot be used.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0 if words else 2
    try:
        settings = _settings(words)
        counts = grade_file(
            Path(str(settings["cases"])),
            Path(str(settings["out"])),
            policy=settings["policy"],
            limit_s=settings["limit_s"],
            workers=settings["workers"],
        )
    except (ConfigError, MathVerifyMissingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{status} {counts[status]}" for status in STATUSES if counts[status]))
    allowed, errors = settings["max_grader_errors"], counts["grader_error"]
    if allowed != "" and errors > allowed:
        print(f"error: {errors} cases could not be graded, max_grader_errors={allowed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
