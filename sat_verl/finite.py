"""Values that are not finite: which rows of a batch hold them, set aside as plain data, named in the error.

verl trains on with them: a NaN reward makes the advantages of its whole prompt group NaN, a NaN log-prob the gradient,
and its FSDP engine then leaves the optimizer step out with a line in the log. These functions let the trainer see them
before the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sat_verl.records import plain

__all__ = ["Finding", "NonFiniteError", "find_nonfinite", "nonfinite_metrics", "prompt_groups_of", "write_aside"]

ASIDE_DIR = "nonfinite"
SUMMED_FIELDS = ("rm_scores",)
"""verl sums these over the whole row, without the response mask: there a value counts at any position."""
WATCHED_METRICS = ("actor/grad_norm", "actor/loss", "actor/pg_loss", "actor/abs_log_ratio")


@dataclass(frozen=True)
class Finding:
    """The non-finite values of one field."""

    field: str
    rows: tuple[int, ...]
    count: int


class NonFiniteError(RuntimeError):
    """A training step met values that are not finite.

    Args:
        step: the optimizer step.
        counts: number of non-finite values of each field or metric.
        file: where :func:`write_aside` put the batch; ``None`` for a metric, which has none.
    """

    def __init__(self, step: int, counts: Mapping[str, int], file: Path | None) -> None:
        # All arguments go to the base class: Ray pickles the error, and unpickling calls the class with them.
        super().__init__(step, counts, file)
        self.step, self.counts, self.file = step, counts, file

    def __str__(self) -> str:
        found = ", ".join(f"{field} ({count} value{'s' if count != 1 else ''})" for field, count in self.counts.items())
        where = f"The batch is in {self.file}. " if self.file else ""
        fix = "find the cause, or go on without such prompt groups with sat_verl.on_nonfinite=skip"
        return f"optimizer step {self.step}: not finite: {found}. {where}Fix: {fix}."


def find_nonfinite(fields: Mapping[str, torch.Tensor], response_mask: torch.Tensor) -> list[Finding]:
    """The fields with NaN or infinite values, and the rows that hold them; empty where all is well.

    Positions outside the mask are not looked at, but for :data:`SUMMED_FIELDS`.

    Args:
        fields: per field a padded tensor of shape ``(B, T)``, or a nested one of ``B`` rows.
        response_mask: non-zero on the active tokens; padded or nested, with rows of the fields' lengths.

    Raises:
        ValueError: a field has another number of rows than the mask, or a row another length.
    """
    masks = response_mask.unbind()
    findings = []
    for name, tensor in fields.items():
        values = tensor.unbind()
        if len(values) != len(masks):
            raise ValueError(f"{name} has {len(values)} rows, response_mask has {len(masks)}")
        counts = [
            _bad_values(name, row, value, mask) for row, (value, mask) in enumerate(zip(values, masks, strict=True))
        ]
        rows = tuple(row for row, count in enumerate(counts) if count)
        if rows:
            findings.append(Finding(name, rows, sum(counts)))
    return findings


def _bad_values(name: str, row: int, values: torch.Tensor, mask: torch.Tensor) -> int:
    if name not in SUMMED_FIELDS:
        if values.shape != mask.shape:
            raise ValueError(f"{name}, row {row}: {values.numel()} values for {mask.numel()} tokens of response_mask")
        values = values[mask.bool()]
    return int((~torch.isfinite(values)).sum())


def nonfinite_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Which of :data:`WATCHED_METRICS` are in ``metrics`` (numbers, or their names as written) and not finite."""
    return [name for name in WATCHED_METRICS if name in metrics and not np.isfinite(float(metrics[name]))]


def prompt_groups_of(rows: Iterable[int], uids: Sequence[str]) -> np.ndarray:
    """Boolean mask, shape ``(B,)``: true on every row whose prompt (``uids``) has one of ``rows``.

    A group-normalised advantage needs the whole group, so a group with a bad row is left out as one. The mask may be
    true everywhere: then nothing is left to train on.
    """
    bad = {uids[row] for row in rows}
    return np.array([uid in bad for uid in uids], dtype=bool)


def write_aside(run_dir: Path, step: int, rows: Collection[int], fields: Mapping[str, Any]) -> Path:
    """Write ``rows`` of a batch to ``nonfinite/step-N.jsonl`` in the run folder, one JSON line a row; returns the file.

    Plain data, to be read by anything without unpickling: non-finite numbers are ``"nan"``, ``"inf"`` and ``"-inf"``.
    The file appears whole; one of the same step (a resumed run) is replaced.

    Args:
        run_dir: the run's folder.
        step: the optimizer step.
        rows: indices of the rows to write.
        fields: per name a column of the batch: a padded or nested tensor, an array or a list.
    """
    target = run_dir / ASIDE_DIR / f"step-{step}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: column.unbind() if isinstance(column, torch.Tensor) else column for name, column in fields.items()}
    lines = []
    for row in rows:
        values = {name: _json_value(column[row]) for name, column in columns.items()}
        lines.append(json.dumps({"step": step, "row": int(row), **values}, allow_nan=False) + "\n")
    partial = target.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, target)
    return target


def _json_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    return plain(value)
