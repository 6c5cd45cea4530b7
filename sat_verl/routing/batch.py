"""From verl's ``routed_experts`` to the rows that the routers of one micro-batch's forward see.

In the batch ``routed_experts`` is a nested (jagged) tensor of one ``(tokens, layers, k)`` a sample, over prompt and
response: row t has the experts that token t went through, layers are all decoder layers of the model, and rows that the
engine did not record are zeros. It records one row less than the sequence has tokens, since it never feeds the last
one; a row of zeros takes its place. The dtype is that of :func:`sat_verl.routes.route_dtype`, uint8 for up to 256
experts, else int16 (which verl's own workers always have); it is kept here, and cast to int64 where it indexes.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch.nn.functional import pad

from sat_verl.routes import ROUTES, IncompleteRoutesError
from sat_verl.routing.replay import Routes

__all__ = ["have_response", "micro_batch_routes", "no_routes"]


def micro_batch_routes(micro_batch: TensorDict, packed: bool, packed_padding: int = 0) -> Routes:
    """The routes of one micro-batch, on the device it is on.

    Wanted are the tokens of every sample but its last, as with verl's Megatron engine; none of a sample whose response
    mask is empty, which has no part in the loss (verl adds such samples to divide a batch among ranks).

    Args:
        micro_batch: with ``input_ids``, nested; ``routed_experts``, nested, as many samples, in each as many rows as
            tokens or fewer; and, unless all samples count, ``response_mask``, nested or ``(B, T)``.
        packed: whether the forward's rows are the tokens of all samples, one after the other, and then
            ``packed_padding`` more (``use_remove_padding``); else they are samples padded on the right to the longest.
        packed_padding: rows.

    Raises:
        IncompleteRoutesError: no ``routed_experts``.
        ValueError: more rows than tokens in a sample.
    """
    if micro_batch.get(ROUTES, None) is None:
        raise no_routes()
    lengths = micro_batch["input_ids"].offsets().diff().tolist()
    samples = list(micro_batch[ROUTES].unbind())
    counts = have_response(micro_batch)
    size = max(lengths)
    experts, wanted = [], []
    for rows, length, count in zip(samples, lengths, counts, strict=True):
        if len(rows) > length:
            raise ValueError(f"{ROUTES} has {len(rows)} rows for a sequence of {length} tokens")
        total = length if packed else size
        experts.append(pad(rows, (0, 0, 0, 0, 0, total - len(rows))))
        wanted.append(torch.arange(total, device=rows.device) < (length - 1 if count else 0))
    tail = packed_padding if packed else 0
    return Routes(pad(torch.cat(experts), (0, 0, 0, 0, 0, tail)), pad(torch.cat(wanted), (0, tail)))


def no_routes() -> IncompleteRoutesError:
    """The error of a batch that should be replayed and has no routes."""
    return IncompleteRoutesError(
        f"router_replay.mode=R3, but the batch has no {ROUTES}: set rollout.enable_rollout_routing_replay=true "
        "with an engine that returns them, or router_replay.mode=disabled"
    )


def have_response(micro_batch: TensorDict) -> list[bool]:
    """Of each sample, whether its response mask has a 1; true where there is no mask."""
    mask = micro_batch.get("response_mask", None)
    if mask is None:
        return [True] * len(micro_batch)
    padded = mask.to_padded_tensor(0) if mask.is_nested else mask
    return padded.bool().any(dim=-1).tolist()
