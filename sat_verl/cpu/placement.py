"""Which cores the trainer ranks and the rollout replicas of a CPU run use.

OpenMP threads of two processes on one core cost far more than half the speed each (they spin while they wait), so
every process of a run gets a share of its own. Pure logic; :func:`apply_to_vllm` is the one place that acts on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

ROLLOUT_CPUS_ENV = "SAT_VERL_ROLLOUT_CPUS"
"""Core lists of the rollout replicas in vLLM's notation, one per replica, separated by ``;`` (``"1;2-3"``)."""


def usable_cores() -> list[int]:
    """Ids of the cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Placement:
    """Threads of each trainer rank and the core ids of each rollout replica."""

    trainer_threads: int
    rollout_cpus: tuple[tuple[int, ...], ...]

    def environment(self) -> dict[str, str]:
        """Environment variables that carry the placement to the processes of a run."""
        replicas = ";".join(",".join(str(core) for core in cores) for cores in self.rollout_cpus)
        return {"OMP_NUM_THREADS": str(self.trainer_threads), ROLLOUT_CPUS_ENV: replicas}


def plan(cores: list[int], trainer_ranks: int, rollout_replicas: int) -> Placement:
    """Divide ``cores`` between trainer ranks and rollout replicas, as evenly as they go.

    The rollout takes its share from the end of the list: core 0 serves interrupts and the drivers. With fewer cores
    than workers, workers share cores round-robin.

    Args:
        cores: ids of the cores that the run may use, e.g. :func:`usable_cores`.
        trainer_ranks: number of trainer processes, at least 1.
        rollout_replicas: number of vLLM engines, at least 1.

    Raises:
        ValueError: no core, or a count below 1.
    """
    if not cores or trainer_ranks < 1 or rollout_replicas < 1:
        raise ValueError(
            f"a placement needs a core, a trainer rank and a rollout replica, got {len(cores)} cores, "
            f"{trainer_ranks} ranks, {rollout_replicas} replicas"
        )
    workers = trainer_ranks + rollout_replicas
    share = max(1, len(cores) // workers)
    pool = list(reversed(cores))
    replicas = tuple(
        tuple(sorted(pool[(index * share + offset) % len(pool)] for offset in range(share)))
        for index in range(rollout_replicas)
    )
    left = max(1, len(cores) - share * rollout_replicas)
    return Placement(trainer_threads=max(1, left // trainer_ranks), rollout_cpus=replicas)


def apply_to_vllm() -> None:
    """Bind the OpenMP threads of this vLLM replica to its cores, unless the user has set the binding.

    verl starts every replica with the same environment and tells it its number in ``VERL_REPLICA_RANK``.
    """
    replicas = os.environ.get(ROLLOUT_CPUS_ENV, "")
    rank = os.environ.get("VERL_REPLICA_RANK")
    if not replicas or rank is None:
        return
    lists = replicas.split(";")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", lists[int(rank) % len(lists)])
