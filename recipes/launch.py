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

from recipes import benchmark, dry_run, guards, megatron, provenance, report, resume, routing, trackers, values
from recipes.derive import derive
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


def environment(cfg: DictConfig, runtime_dir: Path) -> dict[str, str]:
    """Environment of the training processes."""
    env = dict(os.environ)
    env |= {
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DEDUP_LOGS": "1",
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    env |= trackers.environment(cfg, env)
    if cfg.backend.name == "cpu":
        # Ray takes the devices named here for its logical ones.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env |= cpu_environment(cfg, runtime_dir)
    elif cfg.backend.shared_gpu:
        env |= shared_gpu_environment(env.get("CUDA_VISIBLE_DEVICES"), runtime_dir)
    return env


def shared_gpu_environment(visible: str | None, runtime_dir: Path) -> dict[str, str]:
    """One GPU for both pools of verl's: Ray counts it twice, and gives each pool one of its two entries.

    CUDA shows a process that sees both entries no device at all. Those are the driver and actors without a GPU; verl
    is told its platform, which it would look for there.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES`` as it is; its first entry is used, or GPU 0.
        runtime_dir: the run's folder for sockets.
    """
    from sat_verl.cpu import paths

    card = (visible or "").split(",")[0].strip() or "0"
    weights = paths.shm_root() / runtime_dir.name
    weights.mkdir(mode=0o700)
    return {"CUDA_VISIBLE_DEVICES": f"{card},{card}", "VERL_PLATFORM": "nvidia", paths.SHM_DIR_ENV: str(weights)}


def cpu_environment(cfg: DictConfig, runtime_dir: Path) -> dict[str, str]:
    from sat_verl.cpu import ENGINE_ENV, paths, placement

    engine = cfg.actor_rollout_ref.actor.strategy
    cores = placement.usable_cores()
    if cfg.backend.cores is not None:
        cores = cores[: cfg.backend.cores]
    placed = placement.plan(cores, cfg.trainer_ranks, cfg.rollout_replicas)
    sockets, weights = runtime_dir / "s", paths.shm_root() / runtime_dir.name
    for folder in (sockets, weights):
        folder.mkdir(mode=0o700)
    return placed.environment() | {
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP engine for cuda and npu; the class itself asks the platform for its device.
        "VERL_ENGINE_DEVICE": "cuda",
        ENGINE_ENV: engine,
        # vLLM's sampler and megatron-core compile small functions at their first call: 10 and 30 seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Of TransferQueue, for every put and get; with more than there are cores it writes a warning each time.
        "TQ_NUM_THREADS": "1",
        "TMPDIR": str(runtime_dir),
        paths.SOCKET_DIR_ENV: str(sockets),
        paths.SHM_DIR_ENV: str(weights),
    }


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
        cwd=Path(__file__).resolve().parent.parent,
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
