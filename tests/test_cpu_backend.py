"""The CPU backend's parts that need neither Ray nor an engine."""

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_verl.cpu import bridges, paths, placement


def run_python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=os.environ | env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- placement


@given(cores=st.integers(1, 64), ranks=st.integers(1, 8), replicas=st.integers(1, 8))
@settings(deadline=None)
def test_placement_gives_every_worker_cores_and_shares_only_when_it_must(cores, ranks, replicas):
    ids = list(range(100, 100 + cores))
    plan = placement.plan(ids, ranks, replicas)
    assert plan.trainer_threads >= 1
    assert len(plan.rollout_cpus) == replicas
    used = [core for cpus in plan.rollout_cpus for core in cpus]
    assert used
    assert set(used) <= set(ids)
    if cores >= ranks + replicas:
        assert len(used) == len(set(used))
        assert len(used) + plan.trainer_threads * ranks <= cores


@pytest.mark.parametrize(
    ("cores", "ranks", "replicas", "threads", "cpus"),
    [
        ([0, 1], 1, 1, 1, ((1,),)),
        ([0, 1, 2, 3], 1, 1, 2, ((2, 3),)),
        ([0, 1, 2, 3], 2, 2, 1, ((3,), (2,))),
        ([0, 1], 2, 2, 1, ((1,), (0,))),
        ([4, 7, 9], 1, 1, 2, ((9,),)),
        ([0], 1, 1, 1, ((0,),)),
    ],
)
def test_placement_on_known_machines(cores, ranks, replicas, threads, cpus):
    assert placement.plan(cores, ranks, replicas) == placement.Placement(threads, cpus)


@pytest.mark.parametrize("bad", [([], 1, 1), ([0], 0, 1), ([0], 1, 0)])
def test_placement_refuses_nothing_to_place(bad):
    with pytest.raises(ValueError, match="a placement needs"):
        placement.plan(*bad)


def test_a_replica_takes_its_own_cores_and_never_overrides_the_user(monkeypatch):
    env = placement.plan([0, 1, 2, 3], 2, 2).environment()
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("VERL_REPLICA_RANK", "1")
    placement.apply_to_vllm()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    placement.apply_to_vllm()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


# --- activation


def test_nothing_is_active_outside_a_cpu_run():
    code = """
        import verl, vllm.plugins, sys
        from verl.plugin.platform.platform_manager import PlatformRegistry
        from sat_verl.cpu import bridges
        vllm.plugins.load_general_plugins()
        assert "cpu" not in PlatformRegistry.registered_names(), PlatformRegistry.registered_names()
        assert not bridges.installed(), bridges.installed()
        assert not any("sat_verl.cpu" in type(finder).__module__ for finder in sys.meta_path)
    """
    run_python(code, VERL_PLATFORM="")


def test_a_cpu_run_has_platform_bridges_and_alias():
    code = """
        import verl
        from verl.plugin.platform import get_platform
        from sat_verl.cpu import bridges
        import importlib.metadata as m
        assert get_platform().device_name == "cpu"
        assert bridges.installed() == {bridge.name for bridge in bridges.BRIDGES}
        import verl.utils.distributed as d
        assert d.initialize_global_process_group_ray.__wrapped__
        d.initialize_global_process_group_ray()
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1))
        print(m.version("vllm"))
    """
    environment = {
        "VERL_PLATFORM": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    assert run_python(code, **environment).endswith("+cpu")


def test_every_bridge_says_why_and_for_which_versions():
    assert len({bridge.name for bridge in bridges.BRIDGES}) == len(bridges.BRIDGES)
    for bridge in bridges.BRIDGES:
        assert len(bridge.reason) > 20
        assert "0." in bridge.versions


# --- sockets


def test_sockets_move_into_the_private_folder(monkeypatch, tmp_path):
    handle = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    monkeypatch.delenv(paths.SOCKET_DIR_ENV, raising=False)
    assert bridges.private_socket(handle) == handle
    tmp_path.chmod(0o700)
    monkeypatch.setenv(paths.SOCKET_DIR_ENV, str(tmp_path))
    assert bridges.private_socket(handle) == f"ipc://{tmp_path}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    assert bridges.private_socket("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        bridges.private_socket(handle)


# --- checkpoint engine


def transfer(weights, ranks=2, replicas=2, bucket_size=1 << 20):
    """One sync, as verl drives it: prepare, topology, process group, send and receive, finalize."""
    from sat_verl.cpu.checkpoint_engine import ShmCheckpointEngine

    senders = [ShmCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(ranks)]
    receivers = [ShmCheckpointEngine(bucket_size, timeout_s=20) for _ in range(replicas)]
    metadata = [engine.prepare() for engine in (*senders, *receivers)]
    send, receive = ShmCheckpointEngine.build_topology(ranks, replicas, metadata)
    for engine, folder in zip((*senders, *receivers), (*send["folder"], *receive["folder"]), strict=True):
        engine.init_process_group(folder=folder)

    async def collect(engine):
        return {name: weight async for name, weight in engine.receive_weights(1)}

    async def everything():
        sends = [engine.send_weights(iter(weights.items()), 1) for engine in senders]
        return await asyncio.gather(*[collect(engine) for engine in receivers], *sends)

    results = asyncio.run(everything())[:replicas]
    files = os.listdir(senders[0].folder)
    for engine in (*senders, *receivers):
        engine.finalize()
    return results, files, send["folder"][0]


@pytest.fixture
def _shm(monkeypatch, tmp_path):
    monkeypatch.setenv(paths.SHM_DIR_ENV, str(tmp_path))


@pytest.mark.usefixtures("_shm")
def test_every_replica_gets_every_weight_bit_for_bit_and_nothing_is_left():
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(16, 16, generator=generator)
    weights = {
        "a": torch.randn(64, 64, generator=generator),
        "bf16": torch.randn(8, 3, generator=generator).bfloat16(),
        "ids": torch.arange(5),
        "tied.1": shared,
        "tied.2": shared,
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "scalar": torch.tensor(3.5),
    }
    results, files, folder = transfer(weights, bucket_size=4096)
    assert len(files) > 1, "the test is to cross bucket borders"
    assert len(results) == 2
    for received in results:
        assert received.keys() == weights.keys()
        for name, weight in weights.items():
            assert received[name].dtype == weight.dtype
            assert torch.equal(received[name], weight)
    assert not os.path.exists(folder)


@pytest.mark.usefixtures("_shm")
def test_what_is_sent_is_the_weight_at_that_time():
    weight = torch.zeros(4)

    def weights():
        yield "w", weight
        weight.fill_(7)  # FSDP reuses a gathered buffer for the next parameter
        yield "v", weight

    class Once(dict):
        def items(self):
            return weights()

    results, _, _ = transfer(Once(), ranks=1, replicas=1)
    assert results[0]["w"].tolist() == [0] * 4
    assert results[0]["v"].tolist() == [7] * 4


@pytest.mark.usefixtures("_shm")
def test_a_replica_does_not_wait_for_ever():
    from sat_verl.cpu.checkpoint_engine import ShmCheckpointEngine

    engine = ShmCheckpointEngine(1024, timeout_s=0.05)
    engine.init_process_group(folder=str(paths.shm_parent()))

    async def receive():
        return [item async for item in engine.receive_weights(1)]

    with pytest.raises(TimeoutError, match="timeout_s"):
        asyncio.run(receive())


def test_workers_on_two_nodes_are_refused():
    from sat_verl.cpu.checkpoint_engine import ShmCheckpointEngine

    metadata = [{"node": "a", "folder": "/x"}, {"node": "b", "folder": None}]
    with pytest.raises(RuntimeError, match="one node"):
        ShmCheckpointEngine.build_topology(1, 1, metadata)
