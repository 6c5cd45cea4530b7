"""A run folder: what is to be sampled (``plan.json``), and every sample as soon as it is there (``samples.jsonl``)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eval.schema import Benchmark, Results, Sample
from recipes.errors import ConfigError

PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.jsonl"
RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"


class Plan(BaseModel):
    """What a run folder is for; everything that its samples depend on stands in ``key``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """As the user named it."""
    benchmark: Benchmark
    n: int
    """Samples per problem. Not part of the key: more samples may be added later."""
    key: dict[str, Any]
    think_open: bool = False
    """Whether the rendered prompt ends inside ``<think>``."""
    deadline_s: float = 5.0
    """CPU seconds that math-verify may take for one answer."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write ``plan.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN_FILE, plan.model_dump_json(indent=2) + "\n")


def _checked(kind: type[BaseModel], path: Path, text: bytes, where: str) -> Any:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            "run", path, f"{where}{place}: {first['msg']}", "name a folder that this version of eval has written"
        ) from None


def read_plan(folder: Path) -> Plan:
    """The plan of a run folder.

    Raises:
        ConfigError: there is none, or it is not one of this version's.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        raise ConfigError("run", folder, f"it has no {PLAN_FILE}", "name a folder that python -m eval has written")
    return _checked(Plan, path, path.read_bytes(), "")


def read_results(folder: Path) -> Results:
    """The results of a run folder.

    Raises:
        ConfigError: there are none, or they are not of this version.
    """
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise ConfigError("run", folder, f"it has no {RESULTS_FILE}", "run python -m eval out=... to its end first")
    return _checked(Results, path, path.read_bytes(), "")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file; a killed process may leave half of one."""
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n"), start=1):
        if line:
            yield number, line


def read_samples(folder: Path) -> dict[tuple[str, int], Sample]:
    """All whole samples of a run folder by problem and sample number; a later line replaces an earlier one.

    Raises:
        ConfigError: a line that is no sample.
    """
    path = folder / SAMPLES_FILE
    found: dict[tuple[str, int], Sample] = {}
    for number, line in _lines(path):
        sample = _checked(Sample, path, line, f"line {number}: ")
        found[sample.problem, sample.sample] = sample
    return found


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Replace all samples of a run folder, whole or not at all."""
    write_atomically(folder / SAMPLES_FILE, "".join(sample.model_dump_json() + "\n" for sample in samples))


class SampleWriter:
    """Appends samples, from any thread; what was written outlives the process, however it ends.

    Half a line that a killed run has left is cut off first.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / SAMPLES_FILE
        self._file = open(path, "ab+")  # noqa: SIM115 - closed by close()
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)
        self._lock = threading.Lock()

    def write(self, sample: Sample) -> None:
        """Append one sample."""
        line = json.dumps(sample.model_dump(), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Bring what was written to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
