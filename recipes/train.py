"""``python -m recipes.train [algorithm=...] [task=...] [model=...] [backend=...] [KEY=VALUE ...]``."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from rich.console import Console

from recipes.compose import CONFIG_NAME, compose, expand_short_forms
from recipes.errors import ConfigError


def _fail(text: str, code: int) -> None:
    Console(stderr=True).print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True, markup=True)
    sys.exit(code)


def main() -> None:
    """Check the command line, then run; exit code 2 for bad input, 1 for a failed run, 130 when interrupted."""
    arguments = sys.argv[1:]
    overrides = expand_short_forms([item for item in arguments if not item.startswith("-")])
    flags = [item for item in arguments if item.startswith("-")]
    try:
        cfg = compose(overrides)
    except ConfigError as error:
        _fail(str(error), 2)
    if flags:
        # Hydra's own services: --help, --cfg job, --multirun, shell completion.
        sys.argv[1:] = [*flags, *overrides]
        hydra.main(config_path="pkg://recipes.config", config_name=CONFIG_NAME, version_base=None)(_run)()
        return
    _run(cfg)


def _run(cfg: DictConfig) -> None:
    from recipes.launch import RunFailedError, run

    try:
        run(cfg)
    except ConfigError as error:
        _fail(str(error), 2)
    except RunFailedError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; every process of the run has been stopped", 130)


if __name__ == "__main__":
    main()
