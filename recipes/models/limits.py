"""Limits of the tiny models that others need to know without loading torch."""

MAX_POSITIONS = 4096
"""Tokens of prompt and response together."""
