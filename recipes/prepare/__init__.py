"""Training data in verl's schema: ``python -m recipes.prepare`` (see ``recipes/DATA.md``)."""

from recipes.prepare.build import prepare
from recipes.prepare.settings import Settings

__all__ = ["Settings", "prepare"]
