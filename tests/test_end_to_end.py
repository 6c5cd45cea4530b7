"""The real stack on this machine's CPU: verl's V1 trainer, Ray, TransferQueue, FSDP2 and a separate vLLM server.

Slow: each run starts the whole stack (a minute or two on 2 cores).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from recipes import launch, report
from recipes.compose import compose
from recipes.derive import derive
from recipes.supervisor import shared_memory_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent

SMALL = ["steps=3", "prompts_per_step=8", "task.test_size=32"]


def command(run_dir, *overrides):
    return [sys.executable, "-m", "recipes.train", f"run_dir={run_dir}", *SMALL, *overrides]


def train(run_dir, *overrides):
    done = subprocess.run(command(run_dir, *overrides), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def rows(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def lag(run_dir):
    return json.loads((run_dir / "lag.json").read_text())


def ages(run_dir):
    """Ages of the tokens of each optimizer step."""
    return [sorted(map(int, row["tokens_by_age"])) for row in rows(run_dir, "samples.jsonl")]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_lag_zero_reproduces_verls_synchronous_trainer(tmp_path, monkeypatch):
    """Step by step: the same samples, and gradients that differ by the noise of float32 sums."""
    ours, reference = tmp_path / "ours", tmp_path / "reference"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "ours.jsonl"))
    fast_start = ["actor_rollout_ref.actor.optim.lr_warmup_steps=0", "trainer.logger=[console,file]"]
    train(ours, "algorithm=grpo", "lag=0", *fast_start)

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "reference.jsonl"))
    reference.mkdir()
    (reference / "config.yaml").write_text((ours / "config.yaml").read_text().replace(str(ours), str(reference)))
    cfg = OmegaConf.load(reference / "config.yaml")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with launch.training_process(cfg, reference, program=[str(ROOT / "tests/sync_reference.py")]) as process:
        assert process.wait() == 0, (reference / "train.log").read_text()[-3000:]

    found, expected = ([row["data"] for row in rows(tmp_path, name)] for name in ("ours.jsonl", "reference.jsonl"))
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if "actor/grad_norm" in a]
    assert len(pairs) == 3
    for left, right in pairs:
        assert left["critic/rewards/mean"] == right["critic/rewards/mean"]
        assert left["response_length/mean"] == right["response_length/mean"]
        assert left["actor/grad_norm"] == pytest.approx(right["actor/grad_norm"], rel=1e-4)
    assert_grpo_on_policy(ours)


def assert_grpo_on_policy(run_dir):
    worker = json.loads((run_dir / "worker.json").read_text())
    assert [entry["function"] for entry in worker] == ["verl.trainer.ppo.core_algos.compute_policy_loss_vanilla"]
    assert summary(run_dir)["loss_mode_in_worker"] == "vanilla"
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]
    for row in rows(run_dir):
        # Trainer and rollout agree on fresh weights to the noise of float32, after every sync.
        assert 0 < row["actor/abs_log_ratio"] < 1e-5, row["step"]
        assert row["actor/grad_norm"] > 0
        assert "actor/sat/q" not in row
    assert lag(run_dir)["ok"]
    assert lag(run_dir)["realised"] == {"0": 1.0}


def test_sat_gspo_on_two_trainer_ranks_two_agent_loop_workers_and_two_rollout_replicas(tmp_path):
    run_dir = tmp_path / "run"
    two_micro_batches = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"
    loops = "actor_rollout_ref.rollout.agent.num_workers=2"
    sizes = ("trainer_ranks=2", "rollout_replicas=2", two_micro_batches, loops)
    done = train(run_dir, "algorithm=sat_gspo", "lag=0", *sizes)
    worker = json.loads((run_dir / "worker.json").read_text())
    assert len(worker) == 2
    for entry in worker:
        assert entry["loss_mode"] == "sat_gspo"
        assert entry["function"].startswith("sat_verl.policy_loss.")
        assert entry["alpha"] == 0.9
        assert entry["quantile_scope"] == "batch"
    for row in rows(run_dir):
        assert 0 < row["actor/abs_log_ratio"] < 1e-5, row["step"]
        assert row["actor/grad_norm"] > 0
        for name in (
            "q",
            "gate_rate",
            "radius_low",
            "radius_high",
            "strongest_contraction",
            "intercepted",
            "eps_eff_low",
        ):
            assert isinstance(row[f"actor/sat/{name}"], float)
    log = (run_dir / "train.log").read_text()
    servers = next(line for line in log.splitlines() if "LLMServerManager: [" in line and "," in line)
    assert servers.count("127.0.0.") == 2, "two replicas, on loopback only"
    assert_complete(run_dir, done)


def assert_complete(run_dir, done):
    """The run folder has everything that the README promises."""
    found = summary(run_dir)
    assert found["steps"] == 3
    for when in ("success_before", "success_after"):
        assert 0 <= found[when]["rate"] <= 1
        assert found[when]["problems"] == 32
    assert {"start engines", "engines ready", "train"} <= found["wall_seconds"]["phases"].keys()
    assert found["provenance"]["versions"]["verl"] == "0.9.1"
    assert found["provenance"]["git"].keys() == {"commit", "dirty"}
    for name in ("config.yaml", "provenance.json", "train.log", "plots/reward.png", "plots/staleness.png"):
        assert (run_dir / name).stat().st_size > 0
    checkpoint = run_dir / found["hf_checkpoint"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (
        len(AutoTokenizer.from_pretrained(checkpoint))
        == AutoModelForCausalLM.from_pretrained(checkpoint).config.vocab_size
    )
    assert "held-out success" in done.stdout
    for noise in ("WARNING", "Warning", "target_num_threads", "pid="):
        assert noise not in done.stdout + done.stderr, "the noise of the stack belongs into train.log"


def test_the_rollout_of_a_moe_runs_on_the_trainers_weights_at_start_and_after_updates(tmp_path):
    """verl recomputes the log-probs of the rollout's own samples and logs the largest difference.

    Routes are replayed, and on the same weights they are the trainer's own.
    """
    run_dir = tmp_path / "run"
    recompute = ["algorithm.rollout_correction.bypass_mode=false", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"]
    train(run_dir, "model=tiny_moe", "lag=0", "routing_replay=r3", *recompute)
    for row in rows(run_dir):
        assert row["actor/routing/incomplete_tokens"] == row["actor/routing/native"] == 0
        assert row["actor/routing/differing"] < 0.01, "but for ties"
        # 64 prompts of 9 tokens: 2 layers x 2 experts x 1 byte for every token.
        assert row["routing/payload_bytes"] == 2 * 2 * (64 * 9 + row["response_length/tokens"])
        assert row["actor/grad_norm"] > 1e-3
        # A difference of probabilities; an engine left on old weights shows 0.1 and more.
        assert row["training/rollout_probs_diff_max"] < 1e-4, row["step"]


LARGE_STEPS = ["actor_rollout_ref.actor.optim.lr=5e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]


def test_broadcast_lag_with_megatron_experts_and_routing_replay(tmp_path):
    """The flagship's path at tiny size: Megatron, a mixture of experts, replayed routes, SAT-GSPO, an exact lag."""
    from transformers import Qwen3MoeForCausalLM

    run_dir = tmp_path / "run"
    replay = ["routing_replay=r3", "routing_replay.compare=true"]
    arm = ["algorithm=sat_gspo", "backend=cpu_megatron", "model=tiny_moe"]
    train(run_dir, *arm, *replay, "lag=2", "steps=6", *LARGE_STEPS)
    assert ages(run_dir) == [[0], [1], [2], [1], [2], [1]]
    found = lag(run_dir)
    assert found["ok"]
    assert found["promised"] == found["realised"]
    assert found["mixed_responses"] == found["dropped_groups"] == found["refilled_groups"] == 0
    by_lag = summary(run_dir)["by_lag"]
    assert by_lag["0"]["abs_log_ratio"] < 1e-5, "Megatron and the rollout agree on the same weights"
    assert by_lag["1"]["abs_log_ratio"] > 1e-3, "an engine on old weights shows"
    assert by_lag["2"]["abs_log_ratio"] > 1e-3
    tokens = sum(row["response_length/tokens"] for row in rows(run_dir))
    assert found["tokens"] == tokens == sum(entry["tokens"] for entry in by_lag.values())
    fresh, *stale = rows(run_dir)
    assert fresh["actor/routing/differing"] < 0.01, "but for ties"
    assert max(row["actor/routing/differing"] for row in stale) > 0.01
    for row in rows(run_dir):
        assert row["actor/routing/incomplete_tokens"] == row["actor/routing/native"] == 0
        assert row["actor/routing/last_tokens"] == 64
    # Of so few tokens the largest ratio is chance, and differs between machines; the median does not cross over.
    median = [sum(row[f"actor/log_ratio_tail{which}/q50"] for row in stale) for which in ("", "_native")]
    assert median[0] < median[1], "replay takes the change of routes out of the ratio"
    exported = run_dir / summary(run_dir)["hf_checkpoint"]
    assert Qwen3MoeForCausalLM.from_pretrained(exported).config.num_experts == 8


def test_bounded_lag_keeps_its_bound_and_the_reward_knows_what_was_cut(tmp_path):
    run_dir, dumped = tmp_path / "run", tmp_path / "validation"
    # Six digits fill the limit, so that no response can end by itself.
    cut = ["data.max_response_length=6", f"trainer.validation_data_dir={dumped}"]
    train(run_dir, "algorithm=sat_gspo", "lag=bounded2", "steps=8", *cut)
    full = [row for path in dumped.iterdir() for row in rows(dumped, path.name) if len(row["output"]) == 6]
    assert len(full) > 32
    assert {row["verdict"] for row in full} == {"truncated none cut"}
    found = lag(run_dir)
    assert found["ok"]
    assert found["promised"] == {"at_most": 2}
    assert max(map(max, ages(run_dir))) in (1, 2), "it runs ahead, but not further"
    assert found["optimizer_steps"] == 8
    prompts = [prompt for row in rows(run_dir, "samples.jsonl") for prompt in row["prompts"]]
    assert len(prompts) == len(set(prompts)) == 64


def test_a_run_that_breaks_its_promise_ends_with_a_failure_not_a_number(tmp_path):
    """The rollout gets the weights at every step, and the schedule says every second one."""
    run_dir = tmp_path / "run"
    cfg = derive(compose([f"run_dir={run_dir}", *SMALL, "steps=6", "lag=1", "trainer.val_before_train=false"]))
    launch.prepare(cfg)
    cfg.sat_verl.lag = {"schedule": "broadcast", "steps": 2}
    launch.open_run_folder(cfg, ["test"])
    with launch.training_process(cfg, run_dir) as process:
        assert process.wait() != 0
    cause = report.failure(run_dir / "train.log", 1)
    assert "LagViolationError: lag.schedule=broadcast lag.steps=2 promises age 2 for optimizer step 3" in cause
    assert not lag(run_dir)["ok"]
    assert lag(run_dir)["broken_steps"] == [3]
    assert len(rows(run_dir)) == 2, "nothing was trained on it"


def shared_memory():
    return {entry.name for entry in os.scandir("/dev/shm")} if os.path.isdir("/dev/shm") else set()


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.2)


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def start(arguments, log):
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "recipes.train", *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )


def wait_for_steps(run, run_dir, count):
    metrics = run_dir / "metrics.jsonl"
    wait_until(
        lambda: run.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= count),
        600,
        f"{count} steps",
    )
    assert run.poll() is None, "the run ended by itself"
    return psutil.Process(run.pid).children(recursive=True)


def assert_nothing_left(processes, before):
    wait_until(lambda: not alive(processes), 60, f"still running: {alive(processes)}")
    # Of what is new, other programs may have their part: those segments are mapped, those folders are named by them.
    others = [process for process in psutil.process_iter() if process not in processes]
    mapped = {path.relative_to("/dev/shm").parts[0] for path in shared_memory_of(others)}
    named = " ".join(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    assert {name for name in shared_memory() - before[0] - mapped if name not in named} == set()
    assert [path for path in set(Path("/tmp").glob("satv-*")) - before[1] if str(path) not in named] == []


def data_rows(cfg, count):
    """Rows of the data set in the order in which a run that is never disturbed would train on them."""
    from verl.trainer.ppo.utils import create_rl_sampler

    order = []
    sampler = create_rl_sampler(cfg.data, range(cfg.task.train_size))
    while len(order) < count:
        order += list(sampler)
    return order[:count]


def test_a_killed_run_leaves_nothing_behind_and_goes_on_with_nothing_lost(tmp_path):
    """kill -9 of the command while it starts, then of vLLM's engine in training; the record of the run has no seam."""
    before, run_dir = (shared_memory(), set(Path("/tmp").glob("satv-*"))), tmp_path / "run"
    settings = ["algorithm=sat_grpo", "lag=constant2", "steps=16", "checkpoint.every=2"]
    run = start([f"run_dir={run_dir}", *SMALL, *settings], tmp_path / "first.log")
    try:
        processes = psutil.Process(run.pid)
        wait_until(lambda: len(processes.children(recursive=True)) > 15, 300, "Ray and the trainer")
        processes = processes.children(recursive=True)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert_nothing_left(processes, before)

    run = start([f"resume={run_dir}"], tmp_path / "second.log")
    processes = wait_for_steps(run, run_dir, 5)
    engine = next(process for process in processes if "EngineCore" in " ".join(process.cmdline()))
    assert "sat_verl.cpu.forkserver" in engine.parent().cmdline(), "it need not import anything"
    engine.kill()
    assert run.wait(timeout=300) == 1, "a dead engine ends the run, and soon"
    text = (tmp_path / "second.log").read_text()
    assert "no whole checkpoint: the run begins again" in text
    assert "EngineDead" in text
    assert f"python -m recipes.train resume={run_dir}" in text.replace("\n", "")
    assert_nothing_left(processes, before)
    assert rows(run_dir)[-1]["step"] < 16

    run = start([f"resume={run_dir}"], tmp_path / "third.log")
    assert run.wait(timeout=600) == 0, (tmp_path / "third.log").read_text()
    assert "resuming after step" in (tmp_path / "third.log").read_text()
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 17))
    assert ages(run_dir) == [[0], [1], *[[2]] * 14]
    assert lag(run_dir)["ok"]
    samples = rows(run_dir, "samples.jsonl")
    assert [int(prompt) for row in samples for prompt in row["prompts"]] == list(range(128))
    trained = [row for sample in samples for row in sample["data_rows"]]
    assert trained == data_rows(OmegaConf.load(run_dir / "config.yaml"), 128)
    folders = sorted(folder.name for folder in (run_dir / "checkpoints").glob("global_step_*"))
    assert folders == ["global_step_14", "global_step_16"], "two are kept"


def test_a_broken_rollout_ends_the_run_with_its_cause(tmp_path):
    """Upstream replaces failed groups for ever: the run would neither train nor stop."""
    reward, run_dir = tmp_path / "reward.py", tmp_path / "run"
    reward.write_text("def compute_score(*args, **kwargs):\n    raise ZeroDivisionError('no reward today')\n")
    overrides = [f"reward.custom_reward_function.path={reward}", "trainer.val_before_train=false"]
    done = subprocess.run(command(run_dir, *overrides), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "training ended with exit code" in done.stderr
    assert "no reward today" in done.stderr
    assert str(run_dir / "train.log") in done.stderr


def test_doctor_finds_no_problem():
    done = subprocess.run(
        [sys.executable, "-m", "sat_verl", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    findings = {entry["subject"]: entry for entry in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    assert "sat_gspo" in findings["plug-in, Ray worker"]["detail"]
    assert findings["plug-in, vLLM process"]["status"] == "ok"
