"""Methods x lags x seeds x tasks, one record per cell: ``python -m benchmarks.lag_sweep``; see README.md."""

from benchmarks.lag_sweep.store import Cell, Sweep, load

__all__ = ["Cell", "Sweep", "load"]
