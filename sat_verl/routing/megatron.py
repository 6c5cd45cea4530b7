"""Counts, and the rule for incomplete routes, in verl's Megatron engine, which replays by itself.

verl (0.9.1) replays whatever is in the batch: a row that the rollout did not record, which holds zeros, would send its
token k times to expert 0, and nobody would know. Here the routers of one engine's model are watched: a row without k
different experts that exist routes natively, layer by layer, and is counted, as with FSDP2
(:mod:`sat_verl.routing.replay`). What is replayed otherwise, and how, stays verl's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine import BaseEngine

from sat_verl.routes import ROUTES
from sat_verl.routing.batch import have_response, no_routes
from sat_verl.routing.engine import FLAG, metrics_of, refuse_incomplete
from sat_verl.routing.replay import complete_rows, same_sets

__all__ = ["MegatronRoutingReplay"]


ROWS_AT_ONCE = 4096
"""Tokens whose routes are looked at together: of 48 layers and 8 experts, 13 MB in int64, and its sort and copy."""


class MegatronRoutingReplay:
    """Watches the replay of one engine; inert for batches without verl's flag ``enable_routing_replay``.

    Args:
        engine: verl's Megatron engine with ``router_replay.mode=R3``, not yet initialised.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.fail = getattr(engine.engine_config.router_replay, "incomplete", "native") == "fail"
        self.counting = False
        self._replayers: list[Any] = []
        self._routed: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._initialize: Callable[[], None] = engine.initialize
        engine.initialize = self.initialize
        self._forward_backward: Callable[..., Any] = engine.forward_backward_batch
        engine.forward_backward_batch = self.forward_backward_batch

    def initialize(self) -> None:
        """The engine's; then its model's routers are watched."""
        from verl.utils.megatron.router_replay_utils import iter_model_routers
        from verl.utils.megatron_utils import unwrap_model

        self._initialize()
        experts = self.engine.tf_config.num_moe_experts
        self._replayers = [router for _, router in iter_model_routers(unwrap_model(self.engine.module))]
        for router in self._replayers:
            _Watch(self, router, experts)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """The engine's.

        Raises:
            IncompleteRoutesError: no routes, or with ``incomplete=fail`` a token without.
        """
        if not tu.get_non_tensor_data(data=data, key=FLAG, default=False):
            return self._forward_backward(data, loss_function, forward_only=forward_only)
        incomplete = self._incomplete(data)
        if self.fail:
            refuse_incomplete(int(incomplete))
        self._register()
        if forward_only:
            return self._forward_backward(data, loss_function, forward_only=True)
        self._tokens.append(torch.stack([incomplete, incomplete.new_tensor(sum(have_response(data)))]))
        self.counting = True
        try:
            return self._forward_backward(data, loss_function, forward_only=False)
        finally:
            self.counting = False

    def _register(self) -> None:
        """Put this engine's routers into verl's list, which is the process's: it switches replay on for what is there.

        Another engine that replays empties the list when it is made, and this one would route natively without a word.
        """
        from verl.utils.megatron.router_replay_patch import RouterReplay

        RouterReplay.router_instances[:] = self._replayers

    @torch.no_grad()
    def _incomplete(self, data: TensorDict) -> torch.Tensor:
        """Number of tokens that should be replayed and have no complete route in at least one layer, shape ``()``.

        Of this rank's whole share of the step, so in parts, and where the model is: all of it in int64 would take
        gigabytes of every rank's host, and a core for tens of seconds.

        Raises:
            IncompleteRoutesError: no routes.
            ValueError: routes of another number of layers or experts per token than the model's.
        """
        from verl.utils.megatron.router_replay_utils import is_moe_layer

        if data.get(ROUTES, None) is None:
            raise no_routes()
        config, device = self.engine.tf_config, get_device_id()
        moe = [layer for layer in range(config.num_layers) if is_moe_layer(config, layer)]
        incomplete = torch.zeros((), dtype=torch.int64, device=device)
        for rows, length, counts in zip(
            data[ROUTES].unbind(), data["input_ids"].offsets().diff().tolist(), have_response(data), strict=True
        ):
            if rows.shape[1] not in (config.num_layers, len(moe)) or rows.shape[2] != config.moe_router_topk:
                raise ValueError(
                    f"routes of {rows.shape[1]} layers and {rows.shape[2]} experts per token, but the model has "
                    f"{config.num_layers} layers, {len(moe)} routers and {config.moe_router_topk} experts per token: "
                    "is the rollout engine serving the same model?"
                )
            if not counts:
                continue
            columns = moe if rows.shape[1] == config.num_layers else list(range(len(moe)))
            incomplete += length - 1  # a row that is not there is none
            for part in rows[: length - 1].split(ROWS_AT_ONCE):
                incomplete -= complete_rows(part.to(device)[:, columns], config.num_moe_experts).all(dim=-1).sum()
        return incomplete

    def count(self, wanted: torch.Tensor, replayed: torch.Tensor, native: torch.Tensor, experts: torch.Tensor) -> None:
        """Of one router's forward.

        Args:
            wanted: rows to replay, shape ``(T,)``, bool.
            replayed: those with a complete route, same shape.
            native: the router's own experts, shape ``(T, k)``.
            experts: those in use, same shape.
        """
        differing = replayed & ~same_sets(native, experts)
        self._routed.append(torch.stack([wanted.sum(), replayed.sum(), differing.sum()]))

    def take_metrics(self) -> dict[str, float]:
        """As :meth:`sat_verl.routing.engine.FSDPRoutingReplay.take_metrics`; every rank calls it."""
        zero = torch.zeros(3, dtype=torch.int64, device=get_device_id())
        routed = torch.stack([zero, *self._routed]).sum(dim=0)
        tokens = torch.stack([zero[:2], *(one.to(zero.device) for one in self._tokens)]).sum(dim=0)
        self._routed.clear()
        self._tokens.clear()
        # Ranks share the rows of a forward (data, sequence and context parallel) or its routers (pipeline).
        torch.distributed.all_reduce(routed)
        torch.distributed.all_reduce(tokens, group=self.engine.get_data_parallel_group())
        return metrics_of(*routed.tolist(), *tokens.tolist())


class _Watch:
    """One router's replay object, whose targets and choices pass through here."""

    def __init__(self, owner: MegatronRoutingReplay, router: Any, num_experts: int) -> None:
        self.owner, self.router, self.num_experts = owner, router, num_experts
        self.wanted: torch.Tensor | None = None
        self._set_target_indices, self._get_replay_topk = router.set_target_indices, router.get_replay_topk
        router.set_target_indices, router.get_replay_topk = self.set_target_indices, self.get_replay_topk

    def set_target_indices(self, topk_indices: torch.Tensor, replay_mask: torch.Tensor | None = None) -> None:
        """verl's, without the rows that have no complete route."""
        if replay_mask is not None:
            self.wanted = replay_mask.bool()
            replay_mask = self.wanted & complete_rows(topk_indices, self.num_experts)
        self._set_target_indices(topk_indices, replay_mask)

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *args: Any, default_compute_topk: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """verl's, counted on the first forward of a training step (a recomputed one replays again)."""
        native: list[torch.Tensor] = []

        def compute_topk(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = default_compute_topk(*args, **kwargs)
            native.append(chosen[1])
            return chosen

        forward = getattr(self.router.router_replay_action, "name", None) == "REPLAY_FORWARD"
        probs, experts = self._get_replay_topk(scores, topk, *args, default_compute_topk=compute_topk, **kwargs)
        if self.owner.counting and forward and native and self.wanted is not None:
            self.owner.count(self.wanted, self.router.target_replay_mask, native[0], experts)
        return probs, experts
