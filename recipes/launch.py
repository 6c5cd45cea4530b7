"""One run, from a composed config to a finished run folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from recipes import benchmark, dry_run, guards, megatron, provenance, report, resume, routing, values
from recipes.derive import derive
from recipes.environment import environment
from recipes.errors import ConfigError
from recipes.lock import locked
from recipes.progress import Progress
from recipes.resume import CONFIG_FILE
from recipes.schedule import schedule_of
from sat_verl.cpu.paths import SHM_DIR_ENV
from sat_verl.records import LAG_FILE, METRICS_FILE, RunRecorder

LOG_FILE = "train.log"


class RunFailedError(RuntimeError):
    """The training processes ended with an error; the message holds its first cause."""


@contextmanager
def _config_errors() -> Iterator[None]:
    """OmegaConf's errors as ours."""
    try:
        yield
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the config"
        raise ConfigError(key, "", str(error).strip().splitlines()[0].rstrip("."), "give it a value") from error


def check(cfg: DictConfig) -> None:
    """Derive the config, and refuse what cannot work.

    Raises:
        ConfigError: bad input.
    """
    with _config_errors():
        derive(cfg)
        guards.check(cfg)
        if cfg.resume:
            resume.check_same(cfg, prepared=False)
        guards.upstream(cfg)


def prepare(cfg: DictConfig) -> None:
    """Build (or find in the cache) the data and the tiny model, and write their paths into the config."""
    with open_dict(cfg):
        if cfg.task.name == "parquet":
            cfg.data.train_files, cfg.data.val_files = cfg.task.train_file, cfg.task.test_file
        else:
            cfg.data.train_files, cfg.data.val_files = build_data(cfg)
        if cfg.model.name != "hf":
            cfg.actor_rollout_ref.model.path = build_model(cfg)
        if cfg.benchmark is not None:
            found = benchmark.load(cfg)
            benchmark.check_lengths(found, cfg)
            cfg.data.val_files = str(benchmark.write(found, Path(cfg.cache_dir) / "data"))


def build_data(cfg: DictConfig) -> tuple[str, str]:
    from recipes.tasks import get_task, write_parquet

    task = get_task(cfg.task.name, dict(cfg.task.difficulty))
    data = write_parquet(task, Path(cfg.cache_dir) / "data", cfg.task.train_size, cfg.task.test_size, cfg.task.seed)
    return str(data.train), str(data.test)


def build_model(cfg: DictConfig) -> str:
    from transformers.utils.logging import disable_progress_bar

    from recipes.models import ensure_model
    from recipes.models.progress import reporter

    disable_progress_bar()  # transformers' bar for writing one small file
    difficulty = dict(cfg.task.difficulty)
    cache = Path(cfg.cache_dir) / "models"
    with reporter(f"warm start of {cfg.model.name} on {cfg.task.name}") as report_progress:
        path = ensure_model(cfg.model.name, cfg.task.name, difficulty, cfg.model.seed, cache, report=report_progress)
    return str(path)


def open_run_folder(cfg: DictConfig, command: list[str]) -> Path:
    """Make the run folder with its resolved config and provenance; with ``resume``, drop what will be done again."""
    run_dir = Path(cfg.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if cfg.resume:
        resume.check_same(cfg)
        resume.go_back(cfg)
    else:
        (run_dir / METRICS_FILE).touch()
    partial = run_dir / (CONFIG_FILE + ".partial")
    OmegaConf.save(cfg, partial, resolve=True)
    partial.replace(run_dir / CONFIG_FILE)
    facts = provenance.collect(command) | {"seed": cfg.seed, "choices": OmegaConf.to_container(cfg.choices)}
    target = run_dir / "provenance.json"
    if cfg.resume and target.is_file():
        before = json.loads(target.read_text())
        facts["earlier_parts"] = [*before.pop("earlier_parts", []), before]
    target.write_text(json.dumps(facts, indent=2) + "\n")
    return run_dir


@contextmanager
def training_process(
    cfg: DictConfig,
    run_dir: Path,
    program: Sequence[str] = ("-m", "recipes.driver"),
    inherit: Sequence[int] = (),
    more: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """Start verl for a run folder under a supervisor, and leave nothing of it behind.

    Args:
        cfg: the derived config.
        run_dir: the run folder, which holds that config.
        program: what Python runs, with the run folder and a folder for sockets as arguments.
        inherit: file descriptors that the supervisor keeps open until all has ended.
        more: environment variables of the program and all that it starts.
    """
    # Short: Ray and vLLM put Unix sockets below it, whose paths may have 107 characters.
    runtime_dir = Path(tempfile.mkdtemp(prefix="satv-", dir="/tmp" if os.path.isdir("/tmp") else None))
    env = environment(cfg, runtime_dir) | dict(more or {})
    driver = [sys.executable, *program, str(run_dir), str(runtime_dir)]
    folders = [str(runtime_dir), *filter(None, [env.get(SHM_DIR_ENV)])]
    command = [sys.executable, "-m", "recipes.supervisor", os.pathsep.join(folders), str(run_dir / LOG_FILE), *driver]
    supervisor = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=env,
        cwd=provenance.ROOT,
        start_new_session=True,
        pass_fds=inherit,
    )
    try:
        yield supervisor
    finally:
        # Closing the pipe tells the supervisor to stop whatever still runs.
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        supervisor.wait()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def how_to_go_on(cfg: DictConfig) -> str:
    """The command that continues a run that was cut short, if it had begun."""
    if not cfg.run_dir or not (Path(cfg.run_dir) / CONFIG_FILE).is_file():
        return ""
    step = resume.last_step(Path(cfg.run_dir))
    return f"; go on from step {step} with: python -m recipes.train resume={shlex.quote(cfg.run_dir)}"


def watch(supervisor: subprocess.Popen, cfg: DictConfig, progress: Progress) -> str | None:
    """Follow a run to its end; returns what it waited for, if a wait had no end and the run was stopped for it."""
    limit = cfg.sat_verl.wait_limit_s
    patience = 1.1 * limit  # the sampler has the same limit, and more to say
    while supervisor.poll() is None:
        progress.update()
        waiting_for, seconds = progress.wait()
        if seconds > patience:
            return f"no progress for {seconds:.0f} s while waiting for {waiting_for} (sat_verl.wait_limit_s={limit})"
        time.sleep(0.3)
    progress.update()
    return None


def train(cfg: DictConfig, run_dir: Path, console: Console, lock: int) -> None:
    """Train, and check that the lag was kept.

    Raises:
        RunFailedError: see :func:`run`.
    """
    hung, log = None, run_dir / LOG_FILE
    log_start = log.stat().st_size if log.is_file() else 0
    try:
        with (
            training_process(cfg, run_dir, inherit=(lock,)) as supervisor,
            Progress(run_dir, cfg, console) as progress,
        ):
            hung = watch(supervisor, cfg, progress)
    finally:
        lag = RunRecorder(run_dir).finish_lag(schedule_of(cfg))
    if hung or supervisor.returncode:
        cause = hung or report.failure(log, supervisor.returncode, log_start)
        raise RunFailedError(cause + how_to_go_on(cfg))
    if not lag["ok"] or lag["optimizer_steps"] != cfg.steps:
        raise RunFailedError(
            f"the record of the run is not whole: {lag['optimizer_steps']} of {cfg.steps} steps, lag not kept in steps "
            f"{lag['broken_steps']}; see {run_dir / LAG_FILE}"
        )


def run(cfg: DictConfig, command: list[str] | None = None, console: Console | None = None) -> Path:
    """Check, prepare, train and report one run; returns its folder. With ``dry_run``, check it alone.

    Raises:
        ConfigError: bad input, before anything starts.
        RunFailedError: the training processes failed, or hung; their full log is ``train.log`` in the run folder.
    """
    console = console or Console()
    if values.switch(cfg, "dry_run"):
        named = cfg.run_dir  # before a default one follows
        with _config_errors():
            dry_run.run(derive(cfg), console, named)
        return Path(cfg.run_dir)
    check(cfg)
    prepare(cfg)
    if cfg.benchmark is not None:
        for line in benchmark.origin(cfg.data.val_files)["warnings"]:
            console.print(f"benchmark {cfg.benchmark}: {line}", soft_wrap=True, highlight=False)
    megatron.check_model(cfg)
    if (routes := routing.plan(cfg)) is not None:
        console.print(f"routing replay  {routes}", soft_wrap=True, highlight=False)
    started = time.time()
    with locked(Path(cfg.run_dir), console) as lock:
        run_dir = open_run_folder(cfg, command or [Path(sys.executable).name, *sys.argv])
        if cfg.resume:
            step = resume.last_step(run_dir)
            console.print(f"resuming after step {step}" if step else "no whole checkpoint: the run begins again")
        console.print(f"run folder  {run_dir}")
        train(cfg, run_dir, console, lock)
    report.write(run_dir, cfg, wall_seconds=time.time() - started, console=console)
    return run_dir
