"""A context in which a Hugging Face MoE model's forward uses given experts. Knows nothing of verl.

::

    replayer = RoutingReplay(model)
    with replayer.replay(Routes(experts, wanted)) as counts:
        loss = model(**inputs).loss
    loss.backward()  # in the context or after it, with gradient checkpointing or without
    counts.differing / counts.replayed

Inside the context every router has a forward hook that replaces its experts, and computes their gates from the logits
that the router just gave. Outside it nothing is left in the model. Gradient checkpointing runs a layer's forward again
during the backward: while the context is open, transformers' checkpointing function of every layer is wrapped so that
this second forward sees the same routes, whatever else has been run since.

Where the replayed set is the one that the router chose itself, the router's own order of the experts is kept, so that
replaying a model's own routes changes no bit, however the engine orders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from sat_verl.routing.routers import Router, UnsupportedModelError, find_routers, gates_of

__all__ = ["Counts", "Routes", "RoutingReplay", "complete_rows", "same_sets"]


@dataclass(frozen=True)
class Routes:
    """The routes of the rows that the routers of one forward see, in the same order.

    Args:
        experts: shape ``(T, L, k)``, any integer dtype (the rollout's is uint8 for up to 256 experts, else int16; cast
            to int64 where they index), on the model's device. L: the decoder layers, of which only
            those with a router are read; or the routers alone. A row of a layer is complete if it names k different
            experts that exist; anything else, such as zeros or -1, is no route.
        wanted: rows to replay, shape ``(T,)``, bool. The others route natively and are not counted: padding, and the
            last token of a sequence.
    """

    experts: torch.Tensor
    wanted: torch.Tensor


@dataclass
class Counts:
    """Of one forward, over its wanted rows and all routers; int64 tensors of shape ``()`` on the model's device.

    Args:
        wanted: rows times routers.
        replayed: those with a complete route; the others routed natively.
        differing: replayed ones whose native set of experts is another.
        incomplete: rows without a complete route in at least one layer.
    """

    wanted: torch.Tensor
    replayed: torch.Tensor
    differing: torch.Tensor
    incomplete: torch.Tensor


@torch.no_grad()
def complete_rows(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Whether each row of ``experts``, shape ``(..., k)``, any integer dtype, is a route: k different that exist."""
    ordered = experts.to(torch.int64).sort(dim=-1).values
    inside = (ordered[..., 0] >= 0) & (ordered[..., -1] < num_experts)
    return inside & (ordered.diff(dim=-1) > 0).all(dim=-1)


@torch.no_grad()
def same_sets(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Whether the rows of two tensors, shapes ``(T, k)``, each without repetition, are the same sets."""
    return (own.unsqueeze(-1) == given.unsqueeze(-2)).any(dim=-1).all(dim=-1)


class RoutingReplay:
    """Replays routes in a model; finds its routers once, and changes nothing until :meth:`replay`.

    Args:
        model: a Hugging Face model on transformers 5.x, wrapped with FSDP2 or not.

    Raises:
        UnsupportedModelError: see :func:`~sat_verl.routing.routers.find_routers`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.routers = find_routers(model)
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.num_layers: int = config.num_hidden_layers
        self.num_experts: int = self.routers[0].module.num_experts  # type: ignore[assignment]
        self._checked: set[str] = set()

    @contextmanager
    def replay(self, routes: Routes) -> Iterator[Counts]:
        """Context in which the model's forward, one of exactly the rows of ``routes``, uses them.

        Raises:
            ValueError: routes of another number of layers, rows or experts per token than the model's.
            RuntimeError: on leaving without an error of another kind, a router that did not run.
        """
        forward = _Forward(self, routes)
        with forward.active(), _checkpointed(self.model, forward):
            yield forward.counts
        idle = [router.name for router in self.routers if router.name not in forward.counted]
        if idle:
            raise RuntimeError(
                f"routing replay: the forward did not run {', '.join(idle)}: is it this model's forward?"
            )

    def check_gates(self, router: Router, logits: torch.Tensor, gates: torch.Tensor, experts: torch.Tensor) -> None:
        """Once per router: that its own gates are what :func:`gates_of` computes."""
        if router.name in self._checked:
            return
        expected = gates_of(router, logits.detach(), experts)
        # NaN counts as equal: a diverged model is not a changed router.
        if expected.dtype != gates.dtype or not torch.allclose(expected, gates, rtol=0, atol=0, equal_nan=True):
            raise UnsupportedModelError(
                f"{router.name} ({type(router.module).__name__}) computes its gates in another way than "
                "sat_verl/routing/routers.py says: correct its family there, or switch replay off"
            )
        self._checked.add(router.name)


_stack: list[_Forward] = []
"""Forwards whose routes are in use, the innermost last: a checkpointed layer's second forward may run while another
context is open. Not a context variable, because autograd runs the backward of a GPU in a thread of its own."""


@dataclass
class _Forward:
    """The routes of one forward, and its hooks."""

    owner: RoutingReplay
    routes: Routes
    counts: Counts = field(init=False)
    complete: torch.Tensor = field(init=False)
    counted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        experts, wanted, routers = self.routes.experts, self.routes.wanted, self.owner.routers
        top_k = routers[0].module.top_k
        if experts.dim() != 3 or experts.shape[-1] != top_k or wanted.shape != experts.shape[:1]:
            raise ValueError(
                f"routes must be (rows, layers, {top_k}) with one flag a row, got {tuple(experts.shape)} and "
                f"{tuple(wanted.shape)}: is the rollout engine serving the same model?"
            )
        if experts.shape[1] == self.owner.num_layers:
            self.columns = [router.layer for router in routers]
        elif experts.shape[1] == len(routers):
            self.columns = [router.position for router in routers]
        else:
            raise ValueError(
                f"routes of {experts.shape[1]} layers, but the model has {self.owner.num_layers} layers and "
                f"{len(routers)} routers: is the rollout engine serving the same model?"
            )
        self.complete = self._complete()
        zero = torch.zeros((), dtype=torch.int64, device=experts.device)
        replayed = self.complete.sum()
        missing = (wanted & ~self.complete.all(dim=-1)).sum()
        self.counts = Counts(wanted.sum() * len(routers), replayed, zero, missing)

    @torch.no_grad()
    def _complete(self) -> torch.Tensor:
        """Of each row and router, whether its route is wanted and complete, shape ``(T, routers)``, bool."""
        experts, wanted = self.routes.experts, self.routes.wanted
        # Layer by layer: all of them in int64 would be large.
        flags = [complete_rows(experts[:, column], self.owner.num_experts) & wanted for column in self.columns]
        return torch.stack(flags, dim=-1)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hooks on all routers, unless this forward is the innermost active one already."""
        if _stack and _stack[-1] is self:
            yield
            return
        with ExitStack() as hooks:
            for router in self.owner.routers:
                handle = router.module.register_forward_hook(partial(self._hook, router))
                hooks.callback(handle.remove)
            _stack.append(self)
            try:
                yield
            finally:
                _stack.pop()

    def _hook(self, router: Router, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Replaces ``(logits, gates, experts)``, shapes ``(T, E)``, ``(T, k)``, ``(T, k)``."""
        if _stack[-1] is not self:
            return None
        logits, own_gates, own = output
        complete, given = self.complete[:, router.position], self.routes.experts[:, self.columns[router.position]]
        if own.shape != given.shape:
            raise ValueError(f"routes of {len(given)} rows, but the forward has {len(own)} rows in {router.name}")
        with torch.no_grad():
            self.owner.check_gates(router, logits, own_gates, own)
            given = given.to(own)
            changed = complete & ~same_sets(own, given)
            experts = torch.where(changed.unsqueeze(-1), given, own)
            if router.name not in self.counted:  # and not again where a checkpointed layer runs a second time
                self.counted.add(router.name)
                self.counts.differing += changed.sum()
        return logits, gates_of(router, logits, experts), experts


@contextmanager
def _checkpointed(model: nn.Module, forward: _Forward) -> Iterator[None]:
    """Layers whose gradient checkpointing, by transformers' ``GradientCheckpointingLayer``, replays ``forward``."""
    name = "_gradient_checkpointing_func"
    originals = [(module, vars(module)[name]) for module in model.modules() if name in vars(module)]
    for layer, original in originals:
        setattr(layer, name, partial(_checkpoint, original, forward))
    try:
        yield
    finally:
        for layer, original in originals:
            setattr(layer, name, original)


def _checkpoint(original: Callable[..., Any], forward: _Forward, function: Callable[..., Any], *args: Any) -> Any:
    def replayed(*inputs: Any) -> Any:
        with forward.active():
            return function(*inputs)

    return original(replayed, *args)
