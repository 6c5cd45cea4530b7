"""The routes that vLLM's CPU kernels return are those of transformers, whatever happens to a request."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TIE = 1e-5
"""A difference of router logits that float32 sums in another order may turn round."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders and the models in them, of one architecture and different weights."""
    from recipes.models.architectures import MAX_POSITIONS, build_model
    from recipes.models.tokenizer import build_tokenizer

    tokenizer, found = build_tokenizer(MAX_POSITIONS), {}
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("models") / f"seed{seed}"
        found[folder] = build_model("tiny_moe", tokenizer, seed).eval()
        found[folder].save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def drawn(models, tmp_path_factory):
    """What one engine returned in all situations."""
    folder = tmp_path_factory.mktemp("drawn")
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "routes_engine.py"), *map(str, models), str(folder / "out")]
    log = folder / "log"
    with open(log, "w") as file:
        done = subprocess.run(command, env=env, stdout=file, stderr=file, check=False)
    assert done.returncode == 0, log.read_text()[-5000:]
    sys.path.insert(0, str(HERE))
    try:
        return pickle.loads((folder / "out").read_bytes())
    finally:
        sys.path.remove(str(HERE))


@torch.no_grad()
def assert_routes(model, tokens, routes, first=0):
    """``routes`` are the model's own, from the place ``first`` on; experts of a token have no order."""
    logits = torch.stack(model(torch.tensor([tokens]), output_router_logits=True).router_logits, 1)
    assert logits.shape[:2] == (len(tokens), model.config.num_hidden_layers)
    top = logits.topk(model.config.num_experts_per_tok)
    runner_up = logits.topk(model.config.num_experts_per_tok + 1).values[..., -1]
    clear = top.values[..., -1] - runner_up > TIE
    last = len(routes)
    own, theirs = top.indices.sort(-1).values[first:last], torch.from_numpy(routes).long().sort(-1).values[first:]
    wrong = ((own != theirs).any(-1) & clear[first:last]).nonzero().tolist()
    assert wrong == [], f"places and layers from {first} of {last}"
    assert clear.float().mean() > 0.95


def assert_all(model, responses, count):
    for one in responses:
        assert len(one.tokens) == count
        assert one.routes.shape == (len(one.prompt) + count - 1, 2, 2)
        assert one.routes.dtype == "uint8"
        assert_routes(model, one.prompt + one.tokens, one.routes)


def test_of_whole_and_of_chunked_prompts(drawn, models):
    old, _ = models.values()
    assert drawn["kernels"] == ["CPUFusedMOE"]
    assert_all(old, drawn["chunked"], 12)


def test_of_a_cached_prefix(drawn, models):
    old, _ = models.values()
    assert all(one.cached >= 48 for one in drawn["cached"]), [one.cached for one in drawn["cached"]]
    assert_all(old, drawn["cached"], 10)


def test_of_preempted_requests(drawn, models):
    old, _ = models.values()
    assert drawn["preemptions"] > 0
    assert_all(old, drawn["crowded"], 60)


def test_of_new_weights(drawn, models):
    """Not of the old ones either: the prefix is that of a request before, and its routes must not be."""
    old, new = models.values()
    assert_all(new, drawn["after"], 12)
    with pytest.raises(AssertionError, match="places and layers"):
        assert_all(old, drawn["after"], 12)


def test_of_a_request_that_a_weight_sync_interrupts(drawn, models):
    """A token has the route under the weights that read it first: up to the abort the old, from there on the new.

    The last token before the abort is read by the new weights.
    """
    old, new = models.values()
    interrupted = 0
    for one in drawn["resumed"]:
        assert one.routes.shape == (len(one.prompt) + 39, 2, 2)
        assert one.routes.dtype == "uint8"
        assert sum(count for _, count in one.segments) == len(one.tokens) == 40
        tokens = one.prompt + one.tokens
        if [version for version, _ in one.segments] == [1]:  # aborted before its first token
            assert_routes(new, tokens, one.routes)
            continue
        (first, before), (second, _) = one.segments
        assert (first, second) == (0, 1)
        border = len(one.prompt) + before - 1
        assert_routes(old, tokens, one.routes[:border])
        assert_routes(new, tokens, one.routes, border)
        interrupted += 1
    assert interrupted >= 2
