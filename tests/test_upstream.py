"""What we patch, subclass or rely on in verl and vLLM is still there, and each patch is still needed.

A failure of a ``still_needs`` test is good news: the bridge that it names can go.
"""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("verl")


def run_python(code, **env):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")} | env
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_versions_are_the_ones_that_the_bridges_were_made_for():
    from sat_verl.cpu.bridges import BRIDGES

    for bridge in BRIDGES:
        for part in bridge.versions.split(", "):
            name, version = part.split()
            assert importlib.metadata.version(name) == version, (
                f"{bridge.name} was made for {part}: check it, then name the new version"
            )


# --- what we plug into


def test_registries_and_signatures():
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.trainer.ppo import core_algos

    assert parameters(core_algos.register_policy_loss) == ["name"]
    assert parameters(PlatformRegistry.register) == ["platform"]
    assert parameters(CheckpointEngineRegistry.register) == ["backend"]
    assert CheckpointEngine.__abstractmethods__ == {
        "prepare",
        "build_topology",
        "init_process_group",
        "finalize",
        "send_weights",
        "receive_weights",
    }
    expected = [
        "old_log_prob",
        "log_prob",
        "advantages",
        "response_mask",
        "loss_agg_mode",
        "config",
        "rollout_is_weights",
    ]
    for name in ("vanilla", "gspo"):
        assert parameters(core_algos.get_policy_loss_fn(name)) == expected


def test_agent_loop_hooks_that_we_override():
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    assert parameters(AgentLoopWorker._compute_score)[:3] == ["self", "outputs", "kwargs"]
    postprocess = inspect.getsource(AgentLoopWorkerTQ.__ray_actor_class__._agent_loop_postprocess)
    assert "self._compute_score(outputs, kwargs=kwargs)" in postprocess


def test_trainer_hooks_that_we_override():
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync as Trainer

    assert parameters(Trainer._step_once) == ["self", "metrics", "timing_raw", "sample_batch_size"]
    assert parameters(Trainer._compute_old_log_prob) == ["self", "batch", "metrics"]
    assert parameters(Trainer._compute_metrics) == ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"]
    assert parameters(Trainer._validate) == ["self"]
    assert parameters(Trainer.fit) == ["self", "agent_loop_manager"]
    assert "self.role_worker_mapping[Role.Actor]" in inspect.getsource(Trainer._init_resource_pool_mgr)


def test_sampler_hooks_that_we_override():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync as Buffer

    assert parameters(Buffer.sample) == ["self", "global_steps", "partition_id", "batch_size"]
    assert parameters(Buffer._wait_for_next_poll) == ["self", "partition_id", "last_debug_time"]
    source = inspect.getsource(Buffer._sync_metadata_from_transfer_queue)
    assert "self.finished_keys" in source
    assert "self.failure_keys" in source


def test_worker_hooks_that_we_override():
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    assert "partial(ppo_loss, config=actor_config)" in inspect.getsource(ActorRolloutRefWorker.init_model)
    assert "self.loss_fn = loss_fn" in inspect.getsource(TrainingWorker.set_loss_fn)


def test_policy_loss_config_fields_are_not_taken():
    from verl.workers.config import PolicyLossConfig

    from sat_verl.config import SAT_OPTIONS

    taken = {field.name for field in dataclasses.fields(PolicyLossConfig)}
    assert not taken & set(SAT_OPTIONS)


def test_the_platform_interface_is_complete():
    from verl.plugin.platform.platform_base import PlatformBase

    code = "import sat_verl.cpu.platform as p; print(sorted(p.PlatformCPU.__abstractmethods__))"
    done = run_python(f"import verl; {code}", VERL_PLATFORM="cpu")
    assert done.stdout.strip() == "[]", done.stderr
    assert "ray_resource_name" in PlatformBase.__abstractmethods__


# --- is each bridge still needed?


def test_verl_still_needs_alias_vllm_distribution():
    done = run_python("import verl.third_party.vllm", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "not supported" in done.stderr


def test_verl_still_needs_use_plain_gloo():
    code = """
        import verl, sat_verl.cpu.platform
        from verl.utils.distributed import initialize_global_process_group_ray as initialize
        initialize()
    """
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "VERL_PLATFORM": "cpu",
    }
    done = run_python(code, VERL_USE_EXTERNAL_PLUGINS="none", **environment)
    assert done.returncode != 0
    assert "uplicate" in done.stderr


def test_verl_still_needs_detach_received_weights():
    # Read, not imported: the modules do not import without the alias of vLLM's distribution.
    folder = Path(importlib.util.find_spec("verl").origin).parent / "workers/rollout/vllm_rollout"
    receiver = (folder / "bucketed_weight_transfer.py").read_text().partition("class BucketedWeightReceiver")[2]
    assert "self.buffer[offset : offset + size]" in receiver
    assert "tensor.to(self.device)" in receiver
    assert "recv_pyobj" in receiver
    assert "ipc:///tmp/rl-colocate-zmq-{job_id}" in (folder / "vllm_rollout.py").read_text()


def test_verl_still_needs_load_value_model():
    from verl.utils import model

    with open(model.__file__) as source:
        loader = source.read().partition("def load_valuehead_model(")[2].partition("\ndef ")[0]
    assert loader.startswith("local_path, torch_dtype, model_config, trust_remote_code)")
    assert 'attn_implementation="flash_attention_2"' in loader


def test_vllm_still_needs_keep_linear_weights():
    from vllm.model_executor.layers import linear, utils

    assert parameters(utils.dispatch_cpu_unquantized_gemm) == ["layer", "remove_weight"]
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)" in inspect.getsource(linear)


def test_vllm_still_needs_keep_expert_weights():
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    assert 'replace_parameter(layer, "w13_weight", new_w13)' in inspect.getsource(cpu_fused_moe.CPUFusedMOE)
    assert parameters(cpu_fused_moe.CPUFusedMOE.check_grouped_gemm) == ["self", "layer"]


def test_vllm_still_needs_tell_routes():
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    from sat_verl.cpu.routes import KERNELS

    assert "capture" not in inspect.getsource(cpu_fused_moe), "vLLM's CPU kernels tell their routes now"
    kernel = cpu_fused_moe.CPUFusedMOE
    called = inspect.getsource(kernel.__call__).partition("return self.forward_method(")[2]
    assert [word.strip() for word in called.split(",")[:4]] == ["layer", "x", "topk_weights", "topk_ids"]
    for name in KERNELS:
        assert f"self.forward_method = self.{name}" in inspect.getsource(kernel.__init__)
        assert parameters(getattr(kernel, name))[:5] == ["self", "layer", "input", "topk_weights", "topk_ids"]


def test_vllm_still_needs_bind_routes():
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    bind = GPUModelRunner._bind_routed_experts_capturer
    assert parameters(bind) == ["self", "capturer"]
    assert "is not supported with" in inspect.getsource(bind), "vLLM refuses no kernel any more"
    assert parameters(RoutedExpertsCapturer.capture) == ["self", "layer_id", "topk_ids"]


def test_vllm_still_needs_sleep_between_looks():
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = inspect.unwrap(SpinCondition.wait)
    assert parameters(wait) == ["self", "timeout_ms"]
    assert "if current_time <= self.last_read + self.busy_loop_s:\n            sched_yield()" in inspect.getsource(wait)


def test_verl_still_stores_routes_as_int16():
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    source = inspect.getsource(AgentLoopOutput.as_dict)
    assert "dtype=torch.int16" in source, "verl's own type may do: PackedOutput can go"
    assert 'output["routed_experts"] = aligned' in source


def test_verl_still_logs_with_flush():
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    assert "flush=True" in inspect.getsource(PPOTrainerSeparateAsync._setup), "the log-level workaround can go"


MODULES = ["trainer", "rollout", "worker"]


def test_every_module_can_be_the_first_one_imported():
    """A Ray worker begins with whichever it unpickles; and verl's V1 trainers, once imported, import ours.

    Every import is made in a fork of a process that has what verl imports, and neither verl nor ours.
    """
    done = run_python(
        f"""
        import importlib, os, sys
        import hydra, ray, tensordict, torch, transformers, vllm
        sys.modules["megatron"] = None  # another second for each
        assert not {{"verl", "sat_verl"}} & set(sys.modules)
        failed = []
        for name in {MODULES}:
            child = os.fork()
            if child == 0:
                importlib.import_module("sat_verl." + name)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                failed.append(name)
        sys.exit(", ".join(failed) or 0)
        """
    )
    assert done.returncode == 0, done.stderr
