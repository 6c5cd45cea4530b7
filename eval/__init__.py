"""Evaluation of language models on AIME 2024 and its like: samples that are kept, graded, counted and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.grading import grade_response, grader_identity, verdicts

__all__ = ["grade_response", "grader_identity", "verdicts"]


def __getattr__(name: str) -> Any:
    # Importing the package costs nothing; its parts need pydantic and more.
    if name in __all__:
        from eval import grading

        return getattr(grading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
