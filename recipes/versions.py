"""The verl that the recipes train with."""

from __future__ import annotations

from recipes.errors import ConfigError
from sat_verl.versions import UnsupportedVerlError, installed, require_asynchronous


def check_verl(version: str | None = None) -> None:
    """Refuse a verl without the asynchronous trainer, before its config fails to compose.

    Args:
        version: of verl; None: the installed one.

    Raises:
        ConfigError: not 0.9.1 or a later 0.9.
    """
    version = version or installed()
    try:
        require_asynchronous(version)
    except UnsupportedVerlError:
        raise ConfigError(
            "verl", version or "none", "the recipes train with the asynchronous trainer of verl 0.9.1 and later 0.9",
            "pip install verl==0.9.1; the losses alone work in 0.7.1, 0.8.0 and 0.9 too (sat_verl/VERSIONS.md)",
        ) from None  # fmt: skip
