"""``python -m recipes.models build name=tiny task=chain seed=0 out=DIR``: build a warm-started model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m recipes.models build name=tiny|tiny_moe task=NAME [seed=N] [out=DIR|cache=DIR] [DIFFICULTY]
  out=DIR    put the model into exactly this folder
  cache=DIR  keep it in a folder of its own under DIR (default .cache/models) and print which
tasks: chain (digits=6), sort (digits=8), arithmetic (digits=2 terms=2)"""


def main(words: list[str]) -> int:
    """Run the command line.

    Args:
        words: the arguments.

    Returns:
        The exit status: 0, or 1 if the target success was not reached, or 2 for arguments that cannot work.
    """
    if words[:1] != ["build"]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        settings = parse_settings(words[1:], {"seed": 0, "cache": ".cache/models", "out": ""}, ("name", "task"))
        folder, manifest = _build(settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measured = manifest["measured"]
    print(
        f"{folder}\n{manifest['parameters']} parameters, {measured['steps']} steps in {measured['seconds']} s; success "
        f"{measured['success_sampled']} sampled, {measured['success_greedy']} greedy "
        f"({measured['measured_problems']} held-out problems); weights {manifest['files']['model.safetensors'][:12]}"
    )
    if not measured["reached_target"]:
        print("error: the target success was not reached; lower the difficulty", file=sys.stderr)
        return 1
    return 0


def _build(settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    # Imported late: arguments that cannot work are refused without the seconds that torch takes to load.
    from transformers.utils.logging import disable_progress_bar

    from recipes.models.progress import reporter
    from recipes.models.store import build_model_at, ensure_model, read_manifest

    disable_progress_bar()  # a bar for writing one small file

    name, task = str(settings["name"]), str(settings["task"])
    difficulty, seed = settings["difficulty"], settings["seed"]
    with reporter(f"{name} {task}") as report:
        if settings["out"]:
            folder = Path(str(settings["out"]))
            return folder, build_model_at(folder, name, task, difficulty, seed, report=report)
        folder = ensure_model(name, task, difficulty, seed, str(settings["cache"]), report=report)
        return folder, read_manifest(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
