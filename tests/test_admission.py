"""Older prompts first: how many prompts an agent loop worker has in work, and which."""

import asyncio
import inspect

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

from sat_verl.admission import Dealing, OldestFirst, dealt, prompts_at_once


def config(sequences, *, n=4, workers=1, **more):
    rollout = {"max_num_seqs": sequences, "nnodes": 1, "n_gpus_per_node": 1, "n": n, "val_kwargs": {"n": 1}}
    rollout |= {"agent": {"num_workers": workers}} | more.pop("rollout", {})
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "hybrid_engine": False} | more})


@pytest.mark.parametrize(
    ("sequences", "workers", "responses", "rollout", "prompts"),
    [
        (256, 1, 8, {}, 32),
        (256, 8, 8, {}, 4),
        (100, 1, 8, {}, 13),
        (4, 1, 8, {}, 1),
        (256, 1, 8, {"nnodes": 2, "n_gpus_per_node": 8, "tensor_model_parallel_size": 4}, 128),
        (256, 1, 8, {"n_gpus_per_node": 8, "tensor_model_parallel_size": 2, "data_parallel_size": 2}, 64),
        (256, 1, 8, {"n_gpus_per_node": 1, "tensor_model_parallel_size": 4}, 32),
    ],
)
def test_as_many_prompts_as_the_engines_have_places_for(sequences, workers, responses, rollout, prompts):
    assert prompts_at_once(config(sequences, rollout=rollout), workers, responses) == prompts


def test_engines_beside_the_trainer_count():
    cfg = config(64, hybrid_engine=True)
    cfg.trainer = {"nnodes": 1, "n_gpus_per_node": 3}
    assert prompts_at_once(cfg, 1, 8) == 32


class Worker:
    """The part of verl's worker that a prompt goes through; notes what is in work when one begins."""

    def __init__(self, cfg):
        self.config = cfg
        self.running: list[str] = []
        self.began: list[tuple[str, ...]] = []
        self.ended: list[str] = []

    async def _run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        self.running.append(prompt["uid"])
        self.began.append(tuple(self.running))
        try:
            await asyncio.sleep(prompt["seconds"])
            if prompt.get("fails"):
                raise RuntimeError(prompt["uid"])
        finally:
            self.running.remove(prompt["uid"])
            self.ended.append(prompt["uid"])


class Limited(OldestFirst, Worker):
    pass


def run(cfg, *prompts):
    async def all_of_them():
        worker = Limited(cfg)
        tasks = [
            worker._run_prompt({"agent_name": "single_turn_agent", **one}, {}, {"validate": one.get("validate", False)})
            for one in prompts
        ]
        await asyncio.gather(*tasks, return_exceptions=True)
        return worker

    return asyncio.run(all_of_them())


def test_the_next_prompt_begins_when_one_is_complete():
    worker = run(config(8), *({"uid": uid, "seconds": 0.02} for uid in "abcde"))
    assert [begun[-1] for begun in worker.began] == list("abcde")
    assert max(map(len, worker.began)) == 2


def test_a_prompt_that_fails_gives_its_place_away():
    worker = run(config(4), *({"uid": uid, "seconds": 0, "fails": uid == "a"} for uid in "abc"))
    assert worker.ended == list("abc")


def test_validation_does_not_wait_for_training_nor_counts_as_many_responses():
    train = [{"uid": uid, "seconds": 0.1} for uid in "ab"]
    validation = [{"uid": str(uid), "seconds": 0, "validate": True} for uid in range(6)]
    worker = run(config(4), *train, *validation)
    assert worker.ended[:6] == list("012345")
    assert ("a", "0", "1", "2", "3") in worker.began


def test_agents_that_wait_for_tools_are_all_begun():
    worker = run(config(4), *({"uid": uid, "seconds": 0.01, "agent_name": "tool_agent"} for uid in "abc"))
    assert worker.began[-1] == tuple("abc")


def test_verl_still_begins_every_prompt_at_once():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    theirs = AgentLoopWorkerTQ.__ray_actor_class__
    given, ours = (inspect.signature(kind._run_prompt).parameters for kind in (theirs, OldestFirst))
    assert [name for name in given if not name.startswith("_ray")] == [*ours]
    assert "Semaphore" not in inspect.getsource(theirs), "if verl limits them now, OldestFirst can go"
    assert 'batch["agent_name"] = NonTensorData(default_agent_loop)' in inspect.getsource(theirs.generate_sequences)


def prompts(count):
    columns = {"index": torch.arange(count), "uid": NonTensorStack(*[str(i) for i in range(count)])}
    ragged = torch.nested.as_nested_tensor([torch.full((i + 1,), i) for i in range(count)], layout=torch.jagged)
    fields = {**columns, "raw": ragged, "global_steps": NonTensorData(3)}
    return TensorDict(fields, batch_size=[count])


@pytest.mark.parametrize(("count", "workers"), [(8, 2), (10, 4), (3, 8), (1, 4), (16, 1)])
def test_every_worker_gets_old_and_new_prompts_in_turn(count, workers):
    order = dealt(prompts(count), workers)
    assert sorted(order["index"].tolist()) == list(range(count))
    assert (
        [int(uid) for uid in order["uid"]]
        == [row[0].item() for row in order["raw"].unbind()]
        == order["index"].tolist()
    )
    assert order["global_steps"] == 3
    begun = [chunk["index"][0].item() for chunk in order.chunk(workers)]  # as verl's manager does
    assert sorted(begun)[:2] == list(range(min(2, len(begun))))
    if count % workers == 0:
        assert begun == list(range(workers))


def test_verl_still_gives_each_worker_one_chunk():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

    source = inspect.getsource(AgentLoopManagerTQ.generate_sequences)
    assert "prompts.chunk(len(self.agent_loop_workers))" in source


def test_the_recipes_workers_limit_them():
    from sat_verl import rollout

    for manager in (rollout.RecordingAgentLoopManager, rollout.SeededAgentLoopManager):
        assert issubclass(manager, Dealing)
    for worker in (rollout.RecordingAgentLoopWorker, rollout.SeededAgentLoopWorker):
        assert issubclass(worker.__ray_actor_class__, OldestFirst)
