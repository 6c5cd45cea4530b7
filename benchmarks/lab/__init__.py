"""A single-process laboratory for policy losses under exact policy lag.

The losses, the advantage and the optimizer are verl's own, tasks, tiny models, rewards and settings those of the
recipes. Only the asynchronous machinery is replaced, by snapshots of the parameters: no Ray, no vLLM, and a lag that is
exact at every step. A hundred steps take about fifteen seconds on one core.

>>> from benchmarks.lab import LabConfig, run
>>> result = run(LabConfig(algorithm="sat_gspo", task="chain", schedule="broadcast", lag=8))  # doctest: +SKIP
>>> result.evaluations[-1]["success"]  # doctest: +SKIP
"""

from benchmarks.lab.config import LabConfig
from benchmarks.lab.engine import Result, run
from benchmarks.lab.identity import cell_key, identity

__all__ = ["LabConfig", "Result", "cell_key", "identity", "run"]
