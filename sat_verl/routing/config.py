"""Options of routing replay on verl's FSDP2 and Megatron engines, chosen with ``router_replay._target_``."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config.engine import EngineRouterReplayConfig

__all__ = ["RouterReplayConfig"]


@dataclass
class RouterReplayConfig(EngineRouterReplayConfig):
    """verl's router-replay options and ours: ``router_replay._target_`` of the engine's config names this class.

    Args:
        mode: ``disabled``, or ``R3``: the rollout's routes.
        incomplete: tokens without a complete route, apart from the last of each sequence: ``native`` routes them by the
            current weights and counts them, ``fail`` stops the step.
        compare: also measure the log-ratio's tail without replay, by one more forward of each optimizer step's batch
            (about a third of its arithmetic).

    Raises:
        ValueError: a value out of range, or R2.
    """

    incomplete: str = "native"
    compare: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "R2":
            raise ValueError(
                "router_replay.mode='R2' replays routes that the trainer recorded, which these options are not for: "
                "use R3 (the rollout's routes)"
            )
        if self.incomplete not in ("native", "fail"):
            raise ValueError(
                f"router_replay.incomplete must be 'native' or 'fail', got {self.incomplete!r}: "
                "use 'native' to route such tokens by the current weights, counted"
            )
        if not isinstance(self.compare, bool):
            raise ValueError(f"router_replay.compare must be true or false, got {self.compare!r}: use false")
