"""Routes between the engine and the trainer: whole, small, once, and never at a wrong place."""

import asyncio

import numpy as np
import pytest
import torch

from sat_verl import routes
from sat_verl.routes import IncompleteRoutesError, Router

LAYERS, TOP_K = 3, 2


def engine_routes(rows, dtype=np.uint8, start=1):
    """Row t holds t + start, so that a misplaced row shows."""
    return np.broadcast_to(np.arange(start, start + rows)[:, None, None], (rows, LAYERS, TOP_K)).astype(dtype)


def places(packed):
    assert (packed == packed[:, :1, :1]).all()
    return packed[:, 0, 0].tolist()


# --- size


@pytest.mark.parametrize(("experts", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "int16"), (32767, "int16")])
def test_the_type_is_the_smallest_that_holds_the_experts(experts, dtype):
    assert routes.route_dtype(experts) == dtype
    assert np.iinfo(dtype).max >= experts - 1


@pytest.mark.parametrize(
    ("config", "router"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"num_experts": 128, "top_k_experts": 8}, (128, 8)),
        ({"moe_num_experts": 64, "moe_k": 6}, (64, 6)),
        ({"num_experts": None, "num_experts_per_tok": 2}, None),
        ({"num_experts": 0, "num_experts_per_tok": 2}, None),
        ({}, None),
    ],
)
def test_a_router_is_read_from_the_models_config(config, router):
    expected = router and Router(48, *router)
    assert routes.router_of({"num_hidden_layers": 48} | config) == expected
    assert routes.router_of({"text_config": {"num_hidden_layers": 48} | config}) == expected


def test_what_a_long_response_of_a_large_model_costs():
    router = Router(layers=48, experts=128, top_k=8)
    assert router.nbytes(32768) == 12_582_912
    assert Router(layers=48, experts=512, top_k=8).nbytes(32768) == 2 * 12_582_912


# --- places


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize(("experts", "stored"), [(8, "uint8"), (300, "int16")])
def test_packed_routes_have_a_row_per_token_and_zeros_for_the_last(dtype, experts, stored):
    packed = routes.pack(engine_routes(6, dtype), experts, 3, [1, 1, 1, 1])
    assert packed.dtype == stored
    assert packed.shape == (7, LAYERS, TOP_K)
    assert places(packed) == [1, 2, 3, 4, 5, 6, 0]


def test_rows_beyond_a_cut_response_are_left_out():
    assert places(routes.pack(engine_routes(9), 8, 3, [1, 1])) == [1, 2, 3, 4, 5]


def test_tokens_of_tools_at_the_end_need_no_routes():
    assert places(routes.pack(engine_routes(4), 8, 3, [1, 1, 0, 0])) == [1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize(("rows", "mask"), [(4, [1, 1, 1]), (4, [1, 0, 1]), (2, [1]), (0, [1])])
def test_a_missing_row_is_refused(rows, mask):
    with pytest.raises(IncompleteRoutesError, match=f"returned {rows}"):
        routes.pack(engine_routes(rows), 8, 3, mask)


def test_no_routes_at_all_are_refused():
    with pytest.raises(IncompleteRoutesError, match="returned none"):
        routes.pack(None, 8, 3, [1, 1])


# --- verl's client, which aborts and resumes

verl_client = pytest.importorskip("verl.workers.rollout.llm_server")


def resumed(monkeypatch, requests, **inputs):
    """The output of the recording client, whose requests are answered with ``(new tokens, rows or None, reason)``."""
    from verl.workers.rollout.replica import TokenOutput

    from sat_verl.rollout import RecordingClient

    answers, prompts = iter(requests), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        count, rows, reason = next(answers)
        prompts.append(len(prompt_ids))
        version = len(prompts)
        found = None if rows is None else engine_routes(rows, start=50 * version)
        extra = {"global_steps": version}
        return TokenOutput(token_ids=[7] * count, routed_experts=found, stop_reason=reason, extra_fields=extra)

    async def at_once(seconds):
        return None

    monkeypatch.setattr(verl_client.LLMServerClient, "generate", generate)
    monkeypatch.setattr(verl_client.asyncio, "sleep", at_once)
    client = object.__new__(RecordingClient)
    client.config = None
    call = client.generate("request", prompt_ids=[1, 2, 3], sampling_params={"max_tokens": 9}, **inputs)
    return asyncio.run(call), prompts


def test_a_token_keeps_the_route_of_the_weights_that_read_it_first(monkeypatch):
    requests = [(0, None, "aborted"), (2, 4, "aborted"), (3, 7, "aborted"), (1, 8, "completed")]
    output, prompts = resumed(monkeypatch, requests)
    assert prompts == [3, 3, 5, 8]
    assert len(output.token_ids) == 6
    # The second request has read 4 tokens; the third reads the fifth first, and so on.
    assert output.routed_experts[:, 0, 0].tolist() == [100, 101, 102, 103, 154, 155, 156, 207]
    packed = routes.pack(output.routed_experts, 256, 3, [1] * 6)
    assert packed.shape == (9, LAYERS, TOP_K)
    assert not packed[-1].any()


@pytest.mark.parametrize(
    "requests",
    [
        [(2, None, "aborted"), (3, 6, "completed")],  # rows of the new weights at the old tokens' places
        [(2, 3, "aborted"), (3, 7, "completed")],  # one row short: all later ones one place too early
        [(2, 5, "completed")],
    ],
)
def test_routes_that_do_not_line_up_are_refused(monkeypatch, requests):
    with pytest.raises(IncompleteRoutesError):
        resumed(monkeypatch, requests)


def test_an_image_has_more_rows_than_the_request_has_tokens(monkeypatch):
    output, _ = resumed(monkeypatch, [(2, 40, "completed")], image_data=["image"])
    assert len(output.routed_experts) == 40


# --- verl's agent loop worker, which stores


class Base:
    def __init__(self, replay=True, **config):
        self.rollout_config = type("Rollout", (), {"enable_rollout_routing_replay": replay})
        hf_config = type("Config", (), {"to_dict": lambda self: config})()
        self.model_config = type("Model", (), {"hf_config": hf_config})

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        self.stored = [one.as_dict() for one in (output if isinstance(output, list) else [output])]


def stored(found, validate=False, **options):
    from verl.experimental.agent_loop import AgentLoopOutput
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

    from sat_verl.rollout import _PacksRoutes

    class Worker(_PacksRoutes, Base):
        pass

    output = AgentLoopOutput(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5],
        response_mask=[1, 1],
        response_logprobs=[-0.5, -0.25],
        routed_experts=found,
        reward_score=1.0,
        metrics=AgentLoopMetrics(),
        extra_fields={"kept": 1},
    )
    worker = Worker(**({"num_experts": 8, "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS} | options))
    asyncio.run(worker._agent_loop_postprocess(output, validate, uid="0"))
    (fields,) = worker.stored
    return fields


def test_routes_are_stored_in_verls_field_and_the_rest_is_verls():
    fields, plain = stored(engine_routes(4)), stored(None, replay=False)
    found = fields.pop(routes.ROUTES)
    assert found.dtype == torch.uint8
    assert found[:, 0, 0].tolist() == [1, 2, 3, 4, 0]
    assert fields.pop("extra_fields") == {"kept": 1, routes.ROUTES_BYTES: found.nbytes}
    assert plain.pop("extra_fields") == {"kept": 1}
    assert fields.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(fields[key], value) if isinstance(value, torch.Tensor) else fields[key] == value


def test_without_replay_verl_stores_what_it_always_did():
    found = stored(engine_routes(4), replay=False)[routes.ROUTES]
    assert found.dtype == torch.int16
    assert found[:, 0, 0].tolist() == [1, 2, 3, 4, 0]


def test_a_validation_stores_none():
    assert routes.ROUTES not in stored(engine_routes(4), validate=True)


def test_a_response_without_routes_is_not_stored():
    with pytest.raises(IncompleteRoutesError, match="returned none"):
        stored(None)
    with pytest.raises(IncompleteRoutesError, match="no experts"):
        stored(engine_routes(4), num_experts=None)
