"""Routes from SGLang 0.5.12 and later, for verl's server, which imports their reader from where it was before.

verl 0.9.1 asks ``sglang.srt.layers.moe.routed_experts_capturer`` for it (``rollout.skip_tokenizer_init=false``; with
true it expects tensors, which SGLang has not returned since 0.5.10). SGLang 0.5.12, the version that verl itself pins,
has that module under another name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

BEFORE = "sglang.srt.layers.moe.routed_experts_capturer"
NOW = "sglang.srt.state_capturer.routed_experts"
READER = "extract_routed_experts_from_meta_info"


class MovedReader(MetaPathFinder, Loader):
    """Answers an import of the old module where SGLang has only the new one.

    It sits at the end of ``sys.meta_path``: an SGLang that has the old module is found first.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != BEFORE:
            return None
        try:
            moved = find_spec(NOW)
        except ModuleNotFoundError:  # an SGLang without either
            return None
        return ModuleSpec(fullname, self) if moved else None

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, READER, getattr(importlib.import_module(NOW), READER))


def install() -> None:
    """Once per process; nothing is imported until verl asks."""
    if not any(isinstance(finder, MovedReader) for finder in sys.meta_path):
        sys.meta_path.append(MovedReader())
