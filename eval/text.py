"""Text of models and files, made fit to be shown."""

from __future__ import annotations

# Control characters steer a terminal and have no place in HTML; a lone surrogate has none in UTF-8; marks of direction
# and invisible ones make a text look like another.
_CONTROL = {*range(32), *range(127, 160)} - {ord(character) for character in "\t\n\r"}
_DIRECTION = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF}
_UNFIT = dict.fromkeys((*_CONTROL, *_DIRECTION, *range(0xD800, 0xE000)), "\N{REPLACEMENT CHARACTER}")


def visible(text: str) -> str:
    """The text with a replacement character for everything that would act instead of being shown."""
    return text.translate(_UNFIT)
