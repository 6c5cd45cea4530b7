"""python -m benchmarks.speed: that it runs, and what it writes; no times."""

import json

import pytest
import torch

from benchmarks.speed import loss, timing
from benchmarks.speed.__main__ import COMMANDS, main


def test_loss_at_tiny_size(tmp_path, capsys):
    out = tmp_path / "new" / "loss.json"
    assert main(["loss", "sizes=4x64,2x128", "repeats=1", "device=cpu", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    assert [(cell["responses"], cell["length"]) for cell in found["cells"]] == [(4, 64), (2, 128)]
    for cell in found["cells"]:
        assert set(cell["calls"]) >= {"floor", "vanilla", "gspo", "sat_grpo", "sat_gspo", "sat_grpo, scope batch"}
        assert set(cell["ratios"]) >= {"sat_grpo / vanilla", "sat_gspo / gspo", "sat_gspo, scope batch / sat_gspo"}
        for row in cell["calls"].values():
            assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
            assert row["peak_tensors"] >= 1  # the gradient, or the scores
        assert 0 < cell["active_share"] < 1
        assert 0 < cell["gate_rate"]["sat_grpo"] <= 0.1
    assert all(0 < found["tiny_model_forward_share"][clock]["median"] < 1 for clock in ("clock", "cpu"))
    assert {"versions", "git", "hardware", "command"} <= set(found["provenance"])
    assert str(tmp_path) not in json.dumps({**found, "provenance": None})
    assert found["table"] in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


def test_peak_is_what_is_held_at_one_time():
    def call():
        kept = torch.ones(1000)
        torch.ones(500)
        return kept + torch.ones(1000)

    assert timing.peak_bytes(call, torch.device("cpu")) == 3 * 4000


def test_calls_are_taken_in_turn():
    order = []
    found = timing.in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 3, torch.device("cpu"))
    assert all(sorted(order[at : at + 3]) == ["a", "b", "c"] for at in range(0, len(order), 3))
    assert {order[at] for at in range(0, len(order), 3)} == {"a", "b", "c"}
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start_all"], "command=start_all"),
        (["loss", "sizes=8"], "sizes=8"),
        (["loss", "sizes=0x4"], "sizes=0x4"),
        (["loss", "repeats=0"], "repeats=0"),
        (["loss", "device=tpu"], "device=tpu"),
        (["loss", "speed=9"], "speed=9"),
    ],
)
def test_bad_words(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_every_command_explains_itself(capsys):
    assert main([]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"benchmarks.speed {name}" in capsys.readouterr().out


def test_the_batch_is_like_training():
    batch = loss.batch_of(64, 512, torch.device("cpu"))
    d = (batch.log_prob - batch.old_log_prob)[batch.response_mask].abs()
    assert 0.3 < batch.response_mask.float().mean() < 0.8
    assert d.median() < 0.01
    assert d.max() > 20 * d.median()
    assert loss.sizes_of("64x1k,8x512") == [(64, 1024), (8, 512)]
