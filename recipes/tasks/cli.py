"""The ``key=value`` command line shared by ``python -m recipes.tasks`` and ``python -m recipes.models``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.errors import ConfigError


def parse_settings(words: Sequence[str], defaults: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` words; what is neither in ``defaults`` nor required is returned as difficulty.

    Args:
        words: the command line after the command.
        defaults: optional settings with their defaults.
        required: settings that must be given.

    Returns:
        All settings, plus ``difficulty`` with the rest. Whole numbers become ``int``.

    Raises:
        ConfigError: for a word that is not ``key=value``, a repeated or a missing setting.
    """
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError("argument", word, "it is not of the form name=value", "write e.g. task=chain")
        if name in given:
            raise ConfigError(name, value, f"it is given twice, as {given[name]} before", "give it once")
        given[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    for name in required:
        if name not in given:
            raise ConfigError(name, "", "it is missing", f"add {name}=...")
    settings = {**defaults, **{name: given[name] for name in given if name in defaults or name in required}}
    settings["difficulty"] = {name: value for name, value in given.items() if name not in settings}
    for name, default in defaults.items():
        if isinstance(default, int) and not isinstance(settings[name], int):
            raise ConfigError(name, settings[name], "it is not a whole number", f"write e.g. {name}={default}")
    return settings
