"""Rows of a training set in batches, from the hub or a local copy: never all of a large file at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks import rows as files
from eval.benchmarks import sources
from recipes.errors import ConfigError
from recipes.prepare.sets import Known, Row
from recipes.tasks.artifacts import file_digest

BATCH = 16384
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class Opened:
    """Where rows are, and how to read them.

    Attributes:
        lineage: in words.
        commit: on the hub; None for a local copy.
        sha256: digest of each file, by its path below the folder that was asked for.
        warnings: what the user should know of the source.
        batches: reads it, from the beginning.
    """

    lineage: str
    commit: str | None
    sha256: dict[str, str]
    warnings: tuple[str, ...]
    batches: Callable[[], Iterator[list[Row]]]


def open_source(known: Known, source: str | None, revision: str | None) -> Opened:
    """Find a set's files.

    Args:
        known: the set.
        source: a local file or folder (parquet, JSON lines, or saved by the ``datasets`` library), or ``OWNER/NAME``
            of another copy on the hub; None: the set's own.
        revision: on the hub; None: the set's pinned one, else the newest.

    Raises:
        ConfigError: not there, not reachable, of another kind, or not clear which file.
    """
    if source is not None and Path(source).expanduser().exists():
        if revision is not None:
            raise ConfigError("revision", revision, f"{source} is a local copy, it has none", "leave it out")
        return _local(Path(source).expanduser(), known)
    if source is not None and source.count("/") != 1:
        raise ConfigError(
            "source", source, "there is no such file or folder", "give a path that exists, or OWNER/NAME of the hub"
        )
    if not (source or known.hub):
        raise ConfigError("source", "", f"{known.name} is at no known place", "give a path, or OWNER/NAME of the hub")
    return _hub(known, source or known.hub, revision if source or revision else known.revision)


def _hub(known: Known, where: str, revision: str | None) -> Opened:
    name, _, file = where.partition(":")
    file = file or (known.file if name == known.hub else "")
    try:
        folder = sources.snapshot(name, revision, [file] if file else ["*.parquet", "*.jsonl", "*.json"], where)
    except ConfigError as error:
        raise ConfigError(
            "source", where, error.problem, f"{error.fix}; or give a copy of the files with source=PATH"
        ) from None
    chosen = [folder / file] if file else sources.of_split(folder, known.split, where)
    commit = folder.name  # a snapshot lies in a folder that is named by its commit
    warnings = () if revision == commit else (f"{name} is not pinned; read at commit {commit}, which is recorded",)
    return Opened(f"hub {name}", commit, _digests(chosen, folder), warnings, lambda: _read(chosen))


def _local(path: Path, known: Known) -> Opened:
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        saved = sorted(
            one
            for one in path.rglob("*.arrow")
            if known.split in one.relative_to(path).parts or not (path / _SAVED[1]).is_file()
        )
        return Opened(f"data set {path.name}", None, _digests(saved, path), (), lambda: _saved(path, known.split))
    if path.is_dir():
        chosen = sources.of_split(path, known.split, str(path))
    elif files.is_file_name(path.name):
        chosen = [path]
    else:
        raise ConfigError(
            "source", path, "its kind is not known", f"give a file that ends in {', '.join(files.SUFFIXES)}"
        )
    root = path if path.is_dir() else path.parent
    return Opened(f"file {chosen[0].name}", None, _digests(chosen, root), (), lambda: _read(chosen))


def _digests(paths: list[Path], root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): file_digest(path) for path in paths}


def _read(paths: list[Path]) -> Iterator[list[Row]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    for path in paths:
        if path.suffix.lower() != ".parquet":
            found = files.read(path)
            yield from (found[start : start + BATCH] for start in range(0, len(found), BATCH))
            continue
        try:
            for batch in ParquetFile(path).iter_batches(BATCH):
                yield batch.to_pylist()
        except (OSError, ArrowInvalid):
            raise ConfigError("source", path, "it is not a parquet file", "give one that is whole") from None


def _saved(path: Path, split: str) -> Iterator[list[Row]]:
    from datasets import Dataset, load_from_disk

    found: Any = load_from_disk(path)
    if not isinstance(found, Dataset):
        if split not in found:
            raise ConfigError("source", path, f"it has no split {split}", f"it has {', '.join(found)}")
        found = found[split]
    for batch in found.with_format("arrow").iter(BATCH):
        yield batch.to_pylist()
