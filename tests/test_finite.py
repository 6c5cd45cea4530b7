"""Non-finite values are found, set aside as plain data, and named in the error."""

import json
import pickle

import numpy as np
import pytest
import torch

from sat_verl.finite import (
    Finding,
    NonFiniteError,
    find_nonfinite,
    nonfinite_metrics,
    prompt_groups_of,
    write_aside,
)

NAN, INF = float("nan"), float("inf")
MASK = [[1, 1, 0], [1, 1], [1, 0, 0, 0]]


def nested(rows, dtype=torch.float32):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def padded(rows, dtype=torch.float32):
    return nested(rows, dtype).to_padded_tensor(0)


@pytest.fixture(params=[nested, padded])
def layout(request):
    return request.param


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_rows_are_named_with_their_number_of_values(layout, bad, dtype):
    log_probs = layout([[-1, bad, 0], [bad, bad], [-1, 0, 0, 0]], dtype)
    rewards = layout([[0, 0, 0], [0, 1], [bad, 0, 0, 0]], dtype)
    found = find_nonfinite({"rm_scores": rewards, "rollout_log_probs": log_probs}, layout(MASK, torch.int64))
    assert found == [Finding("rm_scores", (2,), 1), Finding("rollout_log_probs", (0, 1), 3)]


def test_nothing_is_found_in_finite_values_and_outside_the_mask(layout):
    log_probs = layout([[-1, -2, NAN], [-1, -1], [-1, INF, NAN, -INF]])
    assert find_nonfinite({"rollout_log_probs": log_probs}, layout(MASK, torch.int64)) == []
    assert find_nonfinite({"rm_scores": layout([[0, 0, 1], [1, 0], [0, 0, 0, 0]])}, layout(MASK)) == []


def test_a_reward_counts_outside_the_mask_too_as_verl_sums_it_there(layout):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards, mask = [[0, 0, NAN], [0, 1], [1, 0, 0, 0]], [[1, 1, 0], [1, 1], [1, 0, 0, 0]]
    assert find_nonfinite({"rm_scores": layout(rewards)}, layout(mask)) == [Finding("rm_scores", (0,), 1)]
    group = np.array(["a", "a", "b"])
    advantages, _ = compute_grpo_outcome_advantage(padded(rewards), padded(mask), index=group)
    assert advantages[:2, 0].isnan().all(), "the group of a NaN reward is lost as a whole"
    assert advantages[2].isfinite().all()


def test_columns_that_do_not_fit_the_mask_are_refused(layout):
    mask = layout(MASK, torch.int64)
    with pytest.raises(ValueError, match="old has 2 rows, response_mask has 3"):
        find_nonfinite({"old": layout(MASK[:2])}, mask)
    with pytest.raises(ValueError, match=r"old, row 0: \d values for \d tokens"):
        find_nonfinite({"old": layout([[1, 1, 0, 0, 0], *MASK[1:]])}, mask)


def test_a_metric_that_is_not_finite_is_named():
    assert nonfinite_metrics({"actor/grad_norm": 1.0, "actor/loss": np.float32(0), "other": NAN}) == []
    assert nonfinite_metrics({"actor/grad_norm": "nan", "actor/abs_log_ratio": torch.tensor(INF)}) == [
        "actor/grad_norm",
        "actor/abs_log_ratio",
    ]
    assert nonfinite_metrics({"actor/loss": -INF, "actor/pg_loss": NAN}) == ["actor/loss", "actor/pg_loss"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], [False, False, False, False]),
        ([2], [True, False, True, False]),
        ([0, 3], [True, True, True, True]),
    ],
)
def test_a_prompt_group_is_left_out_as_one(rows, expected):
    mask = prompt_groups_of(rows, ["a", "b", "a", "b"])
    assert mask.dtype == bool
    assert mask.tolist() == expected


def test_the_batch_set_aside_is_plain_data(tmp_path, layout):
    fields = {
        "key": ["a_0", "a_1", "b_0"],
        "uid": np.array(["a", "a", "b"], dtype=object),
        "responses": layout([[5, 6, 7], [8, 9], [1, 2, 3, 4]], torch.int64),
        "rollout_log_probs": layout([[-1, NAN, 0], [INF, -INF], [-1, 0, 0, 0]], torch.bfloat16),
        "reward": np.array([0.5, NAN, 1.0]),
    }
    file = write_aside(tmp_path, 12, [0, 1], fields)
    assert file == tmp_path / "nonfinite" / "step-12.jsonl"
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines())
    assert (first["step"], first["row"], first["key"], first["uid"], first["reward"]) == (12, 0, "a_0", "a", 0.5)
    assert first["responses"][:3] == [5, 6, 7]
    assert first["rollout_log_probs"][:3] == [-1.0, "nan", 0.0]
    assert (second["row"], second["rollout_log_probs"][:2], second["reward"]) == (1, ["inf", "-inf"], "nan")
    assert [path.name for path in file.parent.iterdir()] == ["step-12.jsonl"], "no partial file is left"


def test_a_step_that_is_done_again_replaces_its_file(tmp_path):
    write_aside(tmp_path, 3, range(2), {"key": ["a", "b"]})
    file = write_aside(tmp_path, 3, [1], {"key": ["a", "b"]})
    assert [json.loads(line)["key"] for line in file.read_text().splitlines()] == ["b"]


def test_a_failed_write_leaves_no_half_file(tmp_path):
    with pytest.raises(IndexError):
        write_aside(tmp_path, 3, [0, 5], {"key": ["a", "b"]})
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_the_error_names_step_field_count_file_and_fix_and_survives_ray(tmp_path):
    error = NonFiniteError(7, {"rollout_log_probs": 3, "rm_scores": 1}, tmp_path / "x.jsonl")
    text = str(error)
    for part in (
        "step 7",
        "rollout_log_probs (3 values)",
        "rm_scores (1 value)",
        "x.jsonl",
        "sat_verl.on_nonfinite=skip",
    ):
        assert part in text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.counts, again.file) == (text, error.step, error.counts, error.file)
    assert "batch" not in str(NonFiniteError(7, {"actor/grad_norm": 1}, None))


def test_it_imports_without_verl():
    import subprocess
    import sys

    code = "import sys; sys.modules['verl'] = None; import sat_verl.finite"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
