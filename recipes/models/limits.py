"""Limits of the tiny models that others need to know without loading torch."""

MAX_POSITIONS = 512
"""Tokens of prompt and response together."""
