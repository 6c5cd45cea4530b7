"""Responses that end together are scored by one call, each as verl scores it alone."""

import asyncio
import random
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

import ray.cloudpickle as pickle  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker  # noqa: E402

from sat_verl import score_calls  # noqa: E402
from sat_verl.score_calls import GatheredScores, Rows  # noqa: E402


def response(prompt, tokens, answer="7"):
    """What verl's agent loop worker sends of one response."""
    prompts, responses = torch.arange(prompt)[None], torch.arange(tokens)[None]
    ids = torch.cat([prompts, responses], dim=1)
    batch = {"prompts": prompts, "responses": responses, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    truth = np.array([{"ground_truth": answer}])
    return DataProto(TensorDict(batch, batch_size=1), {"reward_model": truth, "extra_info": np.array([{"n": 1}])}, {})


class Manager:
    """A reward manager: the number of response tokens and the truth, or an error for a response without tokens."""

    async def run_single(self, data):
        assert len(data) == 1
        row = data[0]
        length = int(row.batch["attention_mask"][-row.batch["responses"].shape[-1] :].sum())
        if len(row.batch["responses"]) == 0:
            raise ValueError("no tokens")
        truth = row.non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": length, "reward_extra_info": {"truth": truth}}


class Handle:
    """verl's reward worker without Ray: what it is sent is pickled, its calls are counted."""

    def __init__(self, seconds=0.0):
        self.calls = []
        self.seconds = seconds
        self.worker = object.__new__(RewardLoopWorker)
        settings = {"reward": {"custom_reward_function": {"path": None}, "reward_model": {"enable": False}}}
        self.worker.config, self.worker.reward_manager = OmegaConf.create(settings), Manager()
        for name in ("compute_score", "compute_score_batch"):
            setattr(self, name, types.SimpleNamespace(remote=self._remote(name)))

    def _remote(self, name):
        async def call(data):
            self.calls.append((name, len(data)))
            await asyncio.sleep(self.seconds)
            return await getattr(self.worker, name)(pickle.loads(pickle.dumps(data)))

        return call


def scored(responses, *, pauses=None, running=None, seconds=0.0):
    """Results (or errors) of responses that ask for a score after their pauses in seconds; the calls that were made."""
    handle = Handle(seconds)
    count = len(responses)

    async def one(gathered, data, pause):
        nonlocal count
        await asyncio.sleep(pause)
        try:
            return await gathered.compute_score.remote(data)
        finally:
            count -= 1

    async def run():
        gathered = GatheredScores(handle, (lambda: count) if running is None else (lambda: running))
        waits = pauses or [0] * len(responses)
        tasks = [one(gathered, *pair) for pair in zip(responses, waits, strict=True)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run()), handle.calls


def test_responses_that_end_together_are_one_call_and_each_has_its_own_score():
    sizes = [(3, 5), (4, 2), (2, 9), (7, 1)]
    results, calls = scored([response(*size, answer=str(size)) for size in sizes])
    assert calls == [("compute_score_batch", 4)]
    assert [one["reward_score"] for one in results] == [tokens for _, tokens in sizes]
    assert [one["reward_extra_info"]["truth"] for one in results] == [str(size) for size in sizes]


def test_the_result_is_the_one_of_verls_own_call():
    data = response(3, 5)
    alone = asyncio.run(Handle().compute_score.remote(data))
    assert scored([data])[0] == [alone]


def test_the_last_one_on_its_way_does_not_wait(monkeypatch):
    monkeypatch.setattr(score_calls, "PATIENCE_S", 60)
    results, calls = scored([response(3, 5), response(3, 6)], pauses=[0, 0.02])
    assert [one["reward_score"] for one in results] == [5, 6]
    assert calls == [("compute_score_batch", 2)]
    assert scored([response(3, 5)])[1] == [("compute_score_batch", 1)]


def test_nobody_waits_longer_than_patience_for_those_that_still_generate():
    results, calls = scored([response(3, 5), response(3, 6)], pauses=[0, 0.1], running=9)
    assert [one["reward_score"] for one in results] == [5, 6]
    assert calls == [("compute_score_batch", 1)] * 2


def test_a_slow_score_holds_up_only_those_that_share_its_call():
    _, calls = scored([response(3, 5), response(3, 6)], pauses=[0, 0.05], running=9, seconds=0.5)
    assert calls == [("compute_score_batch", 1)] * 2


def test_an_error_is_that_of_its_response_alone():
    results, calls = scored([response(3, 5), response(3, 0), response(3, 2)])
    assert [type(one) for one in results] == [dict, ValueError, dict]
    assert str(results[1]) == "no tokens"
    assert calls == [("compute_score_batch", 3)] + [("compute_score", 1)] * 3


def test_a_cancelled_response_takes_no_other_along():
    async def run():
        handle = Handle(seconds=0.02)
        gathered = GatheredScores(handle, lambda: 3)
        futures = [gathered.remote(response(3, tokens)) for tokens in (1, 2, 3)]
        futures[0].cancel()
        await asyncio.sleep(0.01)
        return await asyncio.gather(*futures, return_exceptions=True)

    results = asyncio.run(run())
    assert isinstance(results[0], asyncio.CancelledError)
    assert [one["reward_score"] for one in results[1:]] == [2, 3]


def test_rows_travel_whole():
    sent = [response(random.randint(1, 9), random.randint(1, 9)) for _ in range(20)]
    got = pickle.loads(pickle.dumps(Rows(sent)))
    for place, data in enumerate(sent):
        there = got[place : place + 1]
        assert set(there.batch.keys()) == set(data.batch.keys())
        for name in data.batch.keys():  # noqa: SIM118
            assert torch.equal(there.batch[name], data.batch[name])
            assert there.batch[name].dtype == data.batch[name].dtype
        assert there.non_tensor_batch["extra_info"].tolist() == data.non_tensor_batch["extra_info"].tolist()
    assert len(got) == 20


def test_verl_still_scores_one_by_one():
    import inspect

    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    source = inspect.getsource(AgentLoopWorker._compute_score)
    assert "random.choice(self.reward_loop_worker_handles)" in source
    assert "await selected_reward_loop_worker_handle.compute_score.remote(data)" in source, (
        "if verl scores many by one call now, GatheredScores can go"
    )
    batch = inspect.getsource(RewardLoopWorker.compute_score_batch)
    assert "range(len(data))" in batch
    assert "self.compute_score(data[i : i + 1])" in batch
