"""Command lines of ``name=value`` words, checked by a pydantic model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from recipes.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def split_items(value: Any) -> Any:
    """``a,b`` or ``[a,b]`` as a list; commas inside brackets or quotes do not separate."""
    if not isinstance(value, str):
        return value
    text = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    found, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{(") - (char in "]})")
        if char == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += char
    return [item.strip() for item in found if item.strip()]


def seed_range(value: Any) -> Any:
    """``10`` stands for the seeds 0 to 9."""
    return list(range(int(value))) if isinstance(value, str) and value.isdecimal() else split_items(value)


def or_null(value: Any) -> Any:
    return None if value == "null" else value


def once(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Raise ValueError for a value that is there twice."""
    twice = [value for index, value in enumerate(values or ()) if value in (values or ())[:index]]
    if twice:
        raise ValueError(f"{twice[0]} is there twice")
    return values


def parse(model: type[Model], words: Sequence[str], command: str, more: str = "") -> Model:
    """An instance of ``model`` from ``name=value`` words.

    Args:
        model: its fields are the settings; ``out``, which all of these commands have, is the folder of the results.
        words: the command line.
        command: ``python -m ...``, whose ``help`` an error names.
        more: what to say beside the names of the settings where one is unknown.

    Raises:
        ConfigError: a word that is none, an unknown or repeated setting, a value that cannot work.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError("argument", word, "it is not of the form name=value", "write e.g. lags=[0,1,8]")
        if name not in model.model_fields:
            close = difflib.get_close_matches(name, list(model.model_fields), n=2)
            fix = f"did you mean {' or '.join(close)}" if close else f"use {', '.join(model.model_fields)}"
            raise ConfigError(name, value, "there is no such setting", fix + more)
        if name in given:
            raise ConfigError(name, value, f"it is given twice, as {given[name]} before", "give it once")
        given[name] = value
    if "out" not in given:
        raise ConfigError("out", "", "it is missing", "add out=DIR, where the results are kept")
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        name = str(first["loc"][0]) if first["loc"] else text.partition(":")[0]
        fix = f"see {command} help"
        raise ConfigError(name, given.get(name, ""), text.removeprefix(f"{name}: "), fix) from None


def result_file(name: object) -> Path:
    """The file of that name (a command's ``out``), which can be written; its folder is made.

    Raises:
        ConfigError: no file can be written there.
    """
    out = Path(str(name))
    if out.is_dir():
        raise ConfigError("out", out, "it is a folder", f"name a file, for instance out={out / 'result.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", out, f"its folder cannot be made ({error.strerror})", "name another") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError("out", out, "it cannot be written", "name a file that you may write")
    return out
