"""Clocks and memory of calls that are measured in turn, in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any

import torch

WARM_UP = 2


def in_turn(calls: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[list[float]]]:
    """Milliseconds of each call in each repeat, by the clock and of CPU time; every repeat begins with another call.

    Args:
        calls: by name.
        repeats: measured ones, after :data:`WARM_UP` others.
        device: waited for before and after a call.

    Returns:
        By name ``repeats`` pairs.
    """
    names = list(calls)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for repeat in range(-WARM_UP, repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            _wait(device)
            clock, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            _wait(device)
            spent = [1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - cpu)]
            if repeat >= 0:
                found[name].append(spent)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that the call holds at one time beyond what is there before, as the device's allocator counts."""
    gc.collect()
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results
    for event in events.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
