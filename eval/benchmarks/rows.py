"""Files of problems as rows: JSON lines, JSON and parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid, parquet

from recipes.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet", ".json", ".txt")

Row = dict[str, Any]


def is_file_name(name: str) -> bool:
    """Whether a name ends as those of files that :func:`read` takes."""
    return name.lower().endswith(SUFFIXES)


def read(path: Path) -> list[Row]:
    """The rows of a file.

    Args:
        path: ``.jsonl`` or ``.txt`` (one JSON object a line), ``.json`` (a list of objects, or lines) or ``.parquet``.

    Returns:
        One dict a row, never none.

    Raises:
        ConfigError: no such file, another format, a line that is no JSON object, or no rows.
    """
    if not path.is_file():
        raise ConfigError("benchmark", path, "there is no such file", "give the path of a file of problems")
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("benchmark", path, "its kind is not known", f"give a file that ends in {', '.join(SUFFIXES)}")
    rows = _parquet(path) if path.suffix.lower() == ".parquet" else _json(path)
    if not rows:
        raise ConfigError("benchmark", path, "it holds no rows", "give a file with one row a problem")
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ArrowInvalid):
        raise ConfigError("benchmark", path, "it is not a parquet file", "give one that is whole") from None


def _json(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("benchmark", path, "it is not UTF-8 text", "store it as UTF-8") from None
    rows = _document(path, text) if path.suffix.lower() == ".json" and text.strip() else None
    if rows is None:
        # Only a line feed ends a line: other separators of Unicode may stand inside a JSON string.
        numbered = enumerate(text.split("\n"), start=1)
        rows = [_parsed(path, number, line) for number, line in numbered if line.strip()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError("benchmark", path, f"row {number} is not a JSON object", "write one object a problem")
    return rows


def _document(path: Path, text: str) -> list[Any] | None:
    """The rows of a text that is one JSON value; None if there are more values, one a line."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise _not_json(path, error.lineno, error) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(path, 1, error) from None
    return whole if isinstance(whole, list) else [whole]


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(path, number, error) from None


def _not_json(path: Path, number: int, error: Exception) -> ConfigError:
    if isinstance(error, RecursionError):
        return ConfigError("benchmark", path, f"line {number} is nested too deeply", "mend that line")
    return ConfigError("benchmark", path, f"line {number} is not JSON ({error})", "mend that line")
