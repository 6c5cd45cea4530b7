"""Counts what makes the host wait for the device, on any device."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sat_verl import batch_quantile, trust_region


class Waits(TorchDispatchMode):
    """Names of operations that wait for the device: the host needs a value, or a result's size depends on values.

    Copies from one kind of device to another are among them.
    """

    ALWAYS = (
        "_local_scalar_dense",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "bincount",
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        waits = name in self.ALWAYS or (name == "repeat_interleave" and "output_size" not in (kwargs or {}))
        waits |= name.startswith("index") and any(x.dtype == torch.bool for x in tensors[1:])
        waits |= name in ("_to_copy", "copy_") and len({x.device.type for x in (*tensors, out)}) > 1
        if waits:
            self.found.append(name)
        return out


@contextmanager
def waits(monkeypatch, *, meta=False):
    """Operations that wait inside the block; ``tolist``, one copy whatever it does on a CPU, is one of them."""
    counter, tolist = Waits(), torch.Tensor.tolist

    def counted(tensor):
        with _disable_current_modes():
            values = [0.1] * tensor.numel() if meta else tolist(tensor)
        counter.found.append("tolist")
        return values

    with monkeypatch.context() as patch, counter:
        patch.setattr(torch.Tensor, "tolist", counted)
        # The path of a GPU, on which numpy has no part.
        for module in (trust_region, batch_quantile):
            patch.setattr(module, "tail_reference", trust_region._on_device)
        yield counter.found
