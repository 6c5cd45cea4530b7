"""What is checked of every optimizer step: before it, that its batch is finite; after it, that its gradient was."""

from __future__ import annotations

from pathlib import Path

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

from sat_verl.batch_record import VALUES, BatchRecord, prompt_of
from sat_verl.finite import NonFiniteError, find_nonfinite, nonfinite_metrics, prompt_groups_of, write_aside

STOP, SKIP = "stop", "skip"


class StepGuard:
    """Stops the run at a value that is not finite, or leaves its prompt groups out (``sat_verl.on_nonfinite``).

    A group that is left out keeps its place in the batch with an empty mask: it adds nothing to loss and gradient, but
    where a loss is a mean over sequences it still counts in the number that verl divides by.
    A gradient that is not finite is never applied (verl's engine leaves such a step out); with ``skip`` the run goes
    on after it.
    """

    def __init__(self, run_dir: Path, on_nonfinite: str) -> None:
        self._run_dir, self._skip = run_dir, on_nonfinite == SKIP

    def batch(self, record: BatchRecord, step: int, partition_id: str) -> BatchRecord:
        """The record of what is left of a batch.

        Raises:
            NonFiniteError: a reward or rollout log-prob is not finite, and the run should stop, or nothing is left.
        """
        watched = {"rm_scores", "rollout_log_probs"} & set(record.data.keys())
        fields = {name: record.data[name] for name in sorted(watched)}
        findings = find_nonfinite(fields, record.data["response_mask"])
        if not findings:
            return record
        rows = sorted({row for finding in findings for row in finding.rows})
        text = tq.kv_batch_get(keys=record.keys, partition_id=partition_id, select_fields=["prompts", "responses"])
        columns = {"key": record.keys, **text, "response_mask": record.data["response_mask"], **fields}
        file = write_aside(self._run_dir, step, rows, columns)
        uids = [prompt_of(key) for key in record.keys]
        bad = prompt_groups_of(rows, uids)
        if not self._skip or bad.all():
            raise NonFiniteError(step, {finding.field: finding.count for finding in findings}, file)
        _leave_out(bad.nonzero()[0].tolist(), record, partition_id)
        return record.without(bad)

    def metrics(self, metrics: dict[str, float], step: int) -> None:
        """Look at what the workers report of a step.

        Raises:
            NonFiniteError: loss, gradient or log-ratio were not finite, and the run should stop.
        """
        found = nonfinite_metrics(metrics)
        if found and not self._skip:
            raise NonFiniteError(step, dict.fromkeys(found, 1), None)


def _leave_out(rows: list[int], record: BatchRecord, partition_id: str) -> None:
    """Empty the masks of these rows in the queue, and put zeros where a value was not finite."""
    fields = {}
    for name in set(VALUES) & set(record.data.keys()):
        column = record.data[name].unbind()
        fields[name] = nested_tensor_from_tensor_list([torch.zeros_like(column[row]) for row in rows])
    fields["loss_mask"] = fields["response_mask"]
    keys = [record.keys[row] for row in rows]
    tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=TensorDict(fields, batch_size=len(keys)))
