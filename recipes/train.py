"""``python -m recipes.train [algorithm=...] [task=...] [model=...] [backend=...] [KEY=VALUE ...]``."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from recipes.compose import CONFIG_NAME, compose, expand_short_forms, with_choices
from recipes.errors import ConfigError
from recipes.resume import with_earlier
from recipes.versions import check_verl


def _fail(text: str, code: int) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("error ", "bold red"), text), soft_wrap=True)
    sys.exit(code)


def main() -> None:
    """Check the command line, then run; exit code 2 for bad input, 1 for a failed run, 130 when interrupted."""
    # Ended by a signal, a run cleans up and says how to go on, as it does on ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_verl()
        arguments = expand_short_forms(with_earlier(sys.argv[1:]))
    except ConfigError as error:
        _fail(str(error), 2)
    if any(argument.startswith("-") for argument in arguments):
        # Hydra's own services: --help, --cfg job, --multirun, shell completion.
        sys.argv[1:] = arguments
        hydra.main(config_path="pkg://recipes.config", config_name=CONFIG_NAME, version_base=None)(_run_from_hydra)()
        return
    try:
        cfg = compose(arguments)
    except ConfigError as error:
        _fail(str(error), 2)
    _run(cfg)


def _run_from_hydra(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    _run(with_choices(cfg, hydra_config.runtime.choices, list(hydra_config.overrides.task)))


def _run(cfg: DictConfig) -> None:
    from recipes.launch import RunFailedError, how_to_go_on, run

    try:
        run(cfg)
    except ConfigError as error:
        _fail(str(error), 2)
    except RunFailedError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail(f"interrupted; every process of the run has been stopped{how_to_go_on(cfg)}", 130)


if __name__ == "__main__":
    main()
