"""The process that runs verl for one run folder; the launcher starts it.

``python -m recipes.driver RUN_DIR RUNTIME_DIR``
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf, open_dict

from sat_verl import cpu
from sat_verl.cpu import forkserver


def main(run_dir: Path, runtime_dir: Path) -> None:
    config = OmegaConf.load(run_dir / "config.yaml")
    if config.ray_kwargs.ray_init.get("address") == "local":
        config.ray_kwargs.ray_init._temp_dir = str(runtime_dir / "r")
        if cpu.enabled():
            with open_dict(config):
                config.ray_kwargs.ray_init.runtime_env = {"py_executable": str(forkserver.start(runtime_dir))}

    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
