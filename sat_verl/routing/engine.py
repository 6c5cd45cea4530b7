"""verl's FSDP2 engine with routing replay; verl's own (0.9.1) replays with Megatron and VeOmni only.

verl sets the flag ``enable_routing_replay`` on the batches of the actor update and of the old log-prob recompute, where
the actor worker's attribute of that name is true; :class:`FSDPRoutingReplay` replays in every forward of such a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine import BaseEngine, FSDPEngine

from sat_verl.routes import ROUTES, IncompleteRoutesError
from sat_verl.routing.batch import have_response, micro_batch_routes
from sat_verl.routing.replay import RoutingReplay
from sat_verl.routing.routers import UnsupportedModelError

__all__ = ["FSDPRoutingReplay", "replay_mode"]

FLAG = "enable_routing_replay"
METRICS = "actor/routing/"


def replay_mode(engine_config: Any) -> str:
    """``disabled`` or ``R3`` of an engine's config (a dataclass or an OmegaConf node); ``disabled`` if it has none."""
    settings = engine_config.get("router_replay", None)
    return settings.get("mode", "disabled") if settings else "disabled"


class FSDPRoutingReplay:
    """Wraps the ``forward_step`` of one engine; inert for batches without the flag.

    Args:
        engine: FSDP2, not yet initialised.

    Raises:
        UnsupportedModelError: an engine or a setting with which routes are not replayed.
    """

    def __init__(self, engine: BaseEngine) -> None:
        _refuse(engine)
        self.engine: FSDPEngine = engine
        self.fail = getattr(engine.engine_config.router_replay, "incomplete", "native") == "fail"
        self._replayer: RoutingReplay | None = None
        self._forward_step: Callable[..., Any] = engine.forward_step
        self._totals: list[torch.Tensor] = []
        engine.forward_step = self.forward_step
        self._initialize: Callable[[], None] = engine.initialize
        engine.initialize = self.initialize

    def initialize(self) -> None:
        """The engine's, and its model's routers.

        Raises:
            UnsupportedModelError: routes cannot be replayed in the model; now, and not after the first rollout.
        """
        self._initialize()
        self._replayer = RoutingReplay(self.engine.module)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """The engine's, with the routes of the micro-batch.

        Raises:
            IncompleteRoutesError: no routes, or with ``incomplete=fail`` a token without.
        """
        if not tu.get_non_tensor_data(data=micro_batch, key=FLAG, default=False):
            return self._forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        assert self._replayer is not None, "forward_step before initialize"
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        tokens = int(micro_batch["input_ids"].offsets()[-1])
        on_device = micro_batch.select("input_ids", "response_mask", ROUTES, strict=False).to(get_device_id())
        routes = micro_batch_routes(on_device, packed, self.engine._get_packed_pad_size(tokens) if packed else 0)
        with self._replayer.replay(routes) as counts:
            if self.fail:
                refuse_incomplete(int(counts.incomplete))
            output = self._forward_step(
                micro_batch.exclude(ROUTES), loss_function=loss_function, forward_only=forward_only
            )
        if not forward_only:
            last = sum(have_response(on_device))
            numbers = (counts.wanted, counts.replayed, counts.differing, counts.incomplete)
            self._totals.append(torch.stack([*numbers, numbers[0].new_tensor(last)]))
        return output

    def take_metrics(self) -> dict[str, float]:
        """Of the training forwards since the last call, over all ranks, every one of which calls this.

        Returns:
            ``actor/routing/differing``: share of the replayed tokens x layers whose native set of experts is another;
            ``actor/routing/native``: share of the tokens x layers that should have been replayed and routed natively;
            ``actor/routing/incomplete_tokens`` and ``actor/routing/last_tokens``: numbers of tokens without a complete
            route, and of last tokens, which have none by rule. Empty if there was no such forward on any rank.
        """
        zero = torch.zeros(5, dtype=torch.int64, device=get_device_id())
        total = torch.stack([zero, *self._totals]).sum(dim=0)
        self._totals.clear()
        torch.distributed.all_reduce(total, group=self.engine.get_data_parallel_group())
        return metrics_of(*total.tolist())


def metrics_of(wanted: int, replayed: int, differing: int, incomplete: int, last: int) -> dict[str, float]:
    """See :meth:`FSDPRoutingReplay.take_metrics`; the first three count tokens x layers, the others tokens."""
    if not wanted:
        return {}
    return {
        METRICS + "differing": differing / max(replayed, 1),
        METRICS + "native": (wanted - replayed) / wanted,
        METRICS + "incomplete_tokens": float(incomplete),
        METRICS + "last_tokens": float(last),
    }


def refuse_incomplete(tokens: int) -> None:
    """What ``incomplete=fail`` does.

    Raises:
        IncompleteRoutesError: unless ``tokens`` is 0.
    """
    if tokens:
        raise IncompleteRoutesError(
            f"router_replay.incomplete=fail: {tokens} tokens of a batch have no complete route; "
            "use incomplete=native to route them by the current weights, counted"
        )


def _refuse(engine: BaseEngine) -> None:
    config = engine.engine_config
    what = None
    if not isinstance(engine, FSDPEngine) or config.strategy != "fsdp2":
        what = f"the engine {config.strategy}: use actor.strategy=fsdp2"
    elif config.router_replay.mode != "R3":
        what = f"mode {config.router_replay.mode} with FSDP2, which records no routes: use R3"
    elif config.ulysses_sequence_parallel_size > 1:
        what = "Ulysses sequence parallelism: set ulysses_sequence_parallel_size=1"
    elif engine.model_config.enable_activation_offload:
        what = "activation offloading, which reruns layers out of reach: set model.enable_activation_offload=false"
    if what is not None:
        raise UnsupportedModelError(f"routing replay is not built for {what}, or set router_replay.mode=disabled")
