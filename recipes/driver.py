"""The process that runs verl for one run folder; the launcher starts it.

``python -m recipes.driver RUN_DIR RUNTIME_DIR``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from sat_verl import cpu
from sat_verl.cpu import forkserver


def load(run_dir: Path, runtime_dir: Path) -> DictConfig:
    """The run's config, for a Ray cluster of its own in ``runtime_dir`` if it has one.

    On the CPU its workers are then forked: call this before Ray and verl are imported, so that the server does it
    meanwhile.
    """
    config = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(config, DictConfig)
    init = config.ray_kwargs.ray_init
    if init.get("address") == "local":
        with open_dict(init):
            init._temp_dir = str(runtime_dir / "r")
        if cpu.enabled() and init.runtime_env.py_executable is None and forkserver.available():
            init.runtime_env.py_executable = str(forkserver.start(runtime_dir))
    return config


def run(config: DictConfig, runner: Callable[[], type] | None = None) -> None:
    """Run verl's V1 trainer to its end, and shut its Ray cluster down.

    Args:
        config: of :func:`load`.
        runner: gives the class, a subclass of verl's task runner, to run in its place; called once verl is imported.
    """
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    try:
        run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(runner()) if runner else TaskRunnerV1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run(load(Path(sys.argv[1]), Path(sys.argv[2])))
