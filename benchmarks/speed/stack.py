"""The stack of a recipe, started to be measured instead of trained: Ray, the trainer's workers, the rollout server.

``python -m benchmarks.speed.stack RUN_DIR RUNTIME_DIR`` is started as :mod:`recipes.driver` is. What is measured is the
function ``measure(trainer, settings)`` of a module here, called in the process that would train.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes import driver, launch, report
from recipes.compose import compose, expand_short_forms
from recipes.lock import locked
from recipes.provenance import ROOT

TASK_FILE, RESULT_FILE = "measure.json", "measured.json"


def measured(module: str, settings: Mapping[str, Any], overrides: Sequence[str], run_dir: Path) -> Any:
    """Start the stack of ``python -m recipes.train OVERRIDES``, and return what ``benchmarks.speed.MODULE`` measures.

    Args:
        module: its name here; it has ``measure(trainer, settings)``, whose result is JSON.
        settings: for it; JSON.
        overrides: of recipes.train.
        run_dir: receives config, log and result, in place of an earlier measurement's.

    Raises:
        ConfigError: bad overrides.
        RunFailedError: the stack failed; its log is in the run folder.
    """
    if (run_dir / TASK_FILE).is_file():  # of an earlier measurement
        shutil.rmtree(run_dir)
    task = {TASK_FILE: json.dumps({"module": module, "settings": dict(settings)})}
    with started(module, overrides, run_dir, ("-m", "benchmarks.speed.stack"), task) as supervisor:
        code = supervisor.wait()
    if code or not (run_dir / RESULT_FILE).is_file():
        raise launch.RunFailedError(report.failure(run_dir / launch.LOG_FILE, code, 0))
    return json.loads((run_dir / RESULT_FILE).read_text())


@contextmanager
def started(
    name: str,
    overrides: Sequence[str],
    run_dir: Path,
    program: Sequence[str],
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """Check, prepare and start a program on a recipe, as ``recipes.train`` starts its driver; yields the supervisor.

    Args:
        name: of what is measured, for the run's record.
        overrides: of recipes.train.
        run_dir: the run folder.
        program: what Python runs.
        files: contents of files in the run folder, by name.
        env: environment variables of the program.
    """
    cfg = compose(expand_short_forms([*overrides, f"run_dir={run_dir}"]))
    launch.check(cfg)
    launch.prepare(cfg)
    # A worker of Ray finds this package as it finds the recipes'.
    more = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))} | dict(env or {})
    with locked(run_dir, Console()) as lock:
        launch.open_run_folder(cfg, ["python", "-m", "benchmarks.speed", name, *overrides])
        for file, text in (files or {}).items():
            (run_dir / file).write_text(text)
        with launch.training_process(cfg, run_dir, program, inherit=(lock,), more=more) as supervisor:
            yield supervisor


def runner() -> type:
    """verl's task runner, whose trainer measures instead of training."""
    from verl.trainer.main_ppo import TaskRunnerV1

    class Runner(TaskRunnerV1.__ray_actor_class__):
        def run(self, config: Any) -> None:
            from verl.utils.skip.skip_manager import SkipManager

            from sat_verl.trainer import SATAsyncTrainer

            def fit(trainer: Any, agent_loop_manager: Any) -> None:
                trainer.agent_loop_manager = agent_loop_manager
                trainer.global_steps += 1
                SkipManager.init(trainer.config)
                run_dir = Path(trainer.config.sat_verl.run_dir)
                task = json.loads((run_dir / TASK_FILE).read_text())
                module = importlib.import_module(f"benchmarks.speed.{task['module']}")
                result = module.measure(trainer, task["settings"])
                (run_dir / RESULT_FILE).write_text(json.dumps(result))

            # Of this process, which ends with the measurement: verl's registry takes no second trainer of the name.
            SATAsyncTrainer.fit = fit  # type: ignore[assignment, method-assign]
            super().run(config)

    return Runner


if __name__ == "__main__":
    driver.run(driver.load(Path(sys.argv[1]), Path(sys.argv[2])), runner)
