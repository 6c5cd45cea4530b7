"""vLLM: verl's server makes the command line of ``vllm serve``, and vLLM's parser reads it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants
from omegaconf import DictConfig

from recipes.engines import FIRST_REPLICA, NotInstalledError, model_of, nodes_of, refusals


def arguments(cfg: DictConfig, numbers: Mapping[str, Any]) -> Any:
    """vLLM's ``AsyncEngineArgs`` of the run's first engine, on its first node.

    Nothing is started: of verl's ``launch_server``, which makes the arguments, parses them and then starts the engine,
    the last part is left out.

    Args:
        cfg: the derived config.
        numbers: the model's own config.

    Raises:
        NotInstalledError: vLLM is not here.
        ConfigError: what verl or vLLM says of the arguments.
    """
    with refusals("vLLM"):
        from recipes.upstream import dataclasses_of

        server_class = _server_class()
        server: Any = object.__new__(server_class)
        server.config = dataclasses_of(cfg)["rollout"]
        server.model_config = model_of(cfg, numbers)
        server.nnodes, server.gpus_per_node = nodes_of(cfg), cfg.actor_rollout_ref.rollout.n_gpus_per_node
        size = server.config.tensor_model_parallel_size * server.config.data_parallel_size
        server.workers = [None] * min(size, server.gpus_per_node)
        server.__dict__.update(FIRST_REPLICA)
        # Addresses are known when the servers are there.
        server._master_address, server._master_port, server._dp_rpc_port = "127.0.0.1", 29500, 29501
        server._disaggregation_role, server._disaggregation_kv_transfer_config = "null", None
        server.profiler_controller = SimpleNamespace(check_enable=lambda: False)
        server._validate_configs()
        asyncio.run(server.launch_server())
        return server.engine_arguments


@contextlib.contextmanager
def _by_name() -> Iterator[None]:
    """Let the model be a name: with ``HF_HUB_OFFLINE`` vLLM looks for its files as soon as it has its arguments."""
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


@functools.cache
def _server_class() -> type:
    from sat_verl.cpu.bridges import alias_vllm_distribution

    alias_vllm_distribution()  # of a machine that has only the CPU build, which verl does not know by its name
    try:
        from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncEngineArgs, vLLMHttpServer
    except ImportError as error:
        raise NotInstalledError(f"vLLM: {error}") from error

    class NeverStarted(vLLMHttpServer):
        async def run_server(self, args: Any) -> None:
            with _by_name():
                self.engine_arguments = AsyncEngineArgs.from_cli_args(args)

    return NeverStarted
