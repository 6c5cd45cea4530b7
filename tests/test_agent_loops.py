"""A prompt's responses are put into TransferQueue as one, exactly as verl would have put them one by one."""

import asyncio
import inspect
import textwrap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import NonTensorStack, TensorDict  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402

from sat_verl import agent_loops  # noqa: E402
from sat_verl.agent_loops import GroupedPuts, Waiting, alike, as_one, concatenated  # noqa: E402


def row(tokens, **more):
    return {
        "prompts": torch.arange(4),
        "responses": torch.arange(tokens),
        "log_probs": torch.linspace(0, 1, tokens),
        "uid": "a",
        "extra_fields": {"segments": [[0, tokens]], "none": None},
        "raw_prompt": [{"role": "user", "content": "1+1"}],
        "score": 0.5,
    } | more


def batch(*tokens, **more):
    return list_of_dict_to_tensordict([row(one, **more) for one in tokens])


def put(key, *tokens, partition="train", **more):
    keys = [f"{key}_{place}" for place in range(len(tokens))]
    tags = [{"seq_len": 4 + one} for one in tokens]
    return {"keys": keys, "tags": tags, "partition_id": partition, "fields": batch(*tokens, **more)}


def assert_same(ours, theirs):
    assert list(ours.keys()) == list(theirs.keys())
    assert ours.batch_size == theirs.batch_size
    for key in theirs.keys():  # noqa: SIM118
        mine, verls = ours.get(key), theirs.get(key)
        assert type(mine) is type(verls), key
        if isinstance(verls, NonTensorStack):
            assert mine.tolist() == verls.tolist()
            continue
        assert mine.is_nested == verls.is_nested
        assert mine.dtype == verls.dtype
        assert all(torch.equal(*pair) for pair in zip(mine.unbind(), verls.unbind(), strict=True))


@pytest.mark.parametrize("groups", [[(3,)], [(3,), (3,)], [(3,), (5,)], [(3, 5), (4,)], [(2,), (2, 7), (1,)]])
def test_concatenated_is_what_verl_makes_of_all_rows(groups):
    rows = [row(tokens) for group in groups for tokens in group]
    assert_same(concatenated([batch(*group) for group in groups]), list_of_dict_to_tensordict(rows))


def test_only_alike_puts_are_merged():
    one, two, other = put("a", 3), put("b", 5), put("c", 4, routes=torch.ones(2))
    kinds = [put("e", 3, score=torch.ones(())), put("f", 3, score=None), put("g", 3, log_probs=torch.ones(3).half())]
    validation = put("d", 3, partition="val")
    parts = alike([Waiting(rows, None) for rows in (one, other, two, validation, *kinds)])
    assert [[key for waiting in part for key in waiting.rows["keys"]] for part in parts] == [
        ["a_0", "b_0", "f_0"], ["c_0"], ["d_0"], ["e_0"], ["g_0"],
    ]  # fmt: skip
    found = as_one([one, two])
    assert found["tags"] == one["tags"] + two["tags"]
    assert_same(found["fields"], list_of_dict_to_tensordict([row(3), row(5)]))
    assert as_one([other]) is other


# --- when a group is sent


class Queue:
    """Keeps what was put, and fails when told to."""

    def __init__(self, error=None):
        self.puts, self.error = [], error

    async def put(self, **rows):
        await asyncio.sleep(0)
        self.puts.append(rows["keys"])
        if self.error:
            raise self.error


async def respond(group, delay, rows=None, error=None):
    group.begin()
    try:
        await asyncio.sleep(delay)
        if error:
            raise error
        if rows:
            await group.put(**rows)
    finally:
        group.end()


def settle(queue, *responses):
    """Run responses of one group; returns what each raised or None."""

    async def run():
        group = GroupedPuts(queue.put)
        tasks = [asyncio.create_task(respond(group, *one)) for one in responses]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    return asyncio.run(run())


def test_a_group_is_one_put():
    queue = Queue()
    assert settle(queue, (0.02, put("a", 3)), (0, put("b", 5)), (0.01, put("c", 3))) == [None] * 3
    assert queue.puts == [["b_0", "c_0", "a_0"]]


@pytest.mark.parametrize("when", [0, 0.02])
def test_a_response_that_fails_holds_nobody_up(when):
    queue, error = Queue(), ValueError("tool")
    assert settle(queue, (0.01, put("a", 3)), (when, None, error), (0, put("b", 5))) == [None, error, None]
    assert queue.puts == [["b_0", "a_0"]]


@pytest.mark.parametrize("when", [0, 0.02])
def test_a_response_without_an_output_holds_nobody_up(when):
    queue = Queue()
    assert settle(queue, (0.01, put("a", 3)), (when,)) == [None, None]
    assert queue.puts == [["a_0"]]


def test_a_failed_put_fails_every_response_of_it():
    error = RuntimeError("storage")
    assert settle(Queue(error), (0, put("a", 3)), (0.01, put("b", 5))) == [error, error]


def test_responses_that_begin_late_are_put_all_the_same():
    async def run():
        queue = Queue()
        group = GroupedPuts(queue.put)
        await respond(group, 0, put("a", 3))
        await respond(group, 0, put("b", 5))
        return queue.puts

    assert asyncio.run(run()) == [["a_0"], ["b_0"]]


def test_one_bad_row_fails_none_that_was_stored():
    async def run():
        stored = []

        async def some(keys, **rows):
            if keys == ["bad_0"]:
                raise ValueError("schema")
            stored.append(keys)

        group = GroupedPuts(some)
        responses = [put("a", 3), put("bad", 3, routes=torch.ones(2)), put("b", 5)]
        tasks = [asyncio.create_task(respond(group, 0, rows)) for rows in responses]
        return await asyncio.gather(*tasks, return_exceptions=True), stored

    results, stored = asyncio.run(run())
    assert [type(one) for one in results] == [type(None), ValueError, type(None)]
    assert stored == [["a_0", "b_0"]]


def cancelled(which, held):
    """Of two responses, the first waits for the second ("waiting"), or their put is on its way ("sending")."""

    async def run():
        second, sending, storage, stored = (*(asyncio.Event() for _ in range(3)), [])

        async def slow(keys, **rows):
            sending.set()
            await storage.wait()
            stored.append(keys)

        async def after(event, group, rows):
            group.begin()
            try:
                await event.wait()
                await group.put(**rows)
            finally:
                group.end()

        group, first = GroupedPuts(slow), asyncio.Event()
        tasks = [
            asyncio.create_task(after(*one)) for one in ((first, group, put("a", 3)), (second, group, put("b", 3)))
        ]
        await asyncio.sleep(0)  # both have begun
        first.set()
        while not group._waiting:
            await asyncio.sleep(0)
        if held == "sending":
            second.set()
            await asyncio.wait_for(sending.wait(), 10)
        for place in which:
            tasks[place].cancel()
        while not all(tasks[place].done() for place in which):
            await asyncio.sleep(0)
        second.set()
        storage.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        await asyncio.gather(*group._sending)
        return [isinstance(one, asyncio.CancelledError) for one in results], results, stored

    return asyncio.run(run())


@pytest.mark.parametrize("which", [[0], [0, 1]])
def test_a_response_that_is_cancelled_before_its_group_is_complete_is_not_put(which):
    gone, _, stored = cancelled(which, "waiting")
    assert gone == [0 in which, 1 in which]
    assert stored == ([["b_0"]] if which == [0] else [])


@pytest.mark.parametrize("which", [[0], [1]])
def test_a_response_that_is_cancelled_during_the_put_takes_no_other_along(which):
    gone, results, stored = cancelled(which, "sending")
    assert gone == [0 in which, 1 in which]
    assert results[1 - which[0]] is None
    assert stored == [["a_0", "b_0"]]


# --- where it takes hold


class Worker:
    """The part of verl's worker around a response: it puts what it has, under a group or not."""

    reward_loop_worker_handles = None

    def __init__(self):
        self.config = None

    async def _run_prompt(self, responses):
        import transfer_queue

        tasks = [asyncio.create_task(self._run_agent_loop({}, {}, agent_name="none", rows=one)) for one in responses]
        await asyncio.gather(*tasks)
        await transfer_queue.async_kv_batch_put(**put("status", 1))

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, rows):
        await asyncio.sleep(0.01)
        await self._agent_loop_postprocess(rows)

    async def _agent_loop_postprocess(self, rows):
        import transfer_queue

        await transfer_queue.async_kv_batch_put(**rows)


def test_only_the_puts_of_responses_are_held_back(monkeypatch):
    import transfer_queue

    queue = Queue()

    async def batch_put(keys, partition_id, fields=None, tags=None, data_parser=None):
        await queue.put(keys=keys)

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", batch_put)

    class Frugal(agent_loops.Frugal, Worker):
        pass

    async def run():
        worker = Frugal()
        await worker._run_prompt([put("a", 3), put("b", 5)])
        await transfer_queue.async_kv_batch_put(**put("outside", 1))

    asyncio.run(run())
    assert queue.puts == [["a_0", "b_0"], ["status_0"], ["outside_0"]]


def test_an_agent_loop_with_settings_of_its_own_is_left_to_hydra(monkeypatch):
    from verl.experimental.agent_loop import agent_loop, single_turn_agent_loop

    monkeypatch.setitem(agent_loop._agent_loop_registry, "mine", {"_target_": "a.B", "depth": 3})
    monkeypatch.setattr(agent_loops.Frugal, "__init__", lambda self: setattr(self, "_loops", {}))
    worker = agent_loops.Frugal()
    assert worker._loop("mine") is None
    assert worker._loop("unknown") is None
    assert agent_loop._agent_loop_registry["single_turn_agent"] == {
        "_target_": f"{single_turn_agent_loop.__name__}.SingleTurnAgentLoop"
    }


# --- what it relies on in verl and TransferQueue


def test_verl_still_puts_every_response_alone():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    source = inspect.getsource(AgentLoopWorkerTQ.__ray_actor_class__._agent_loop_postprocess)
    assert source.count("tq.") == 1
    assert "await tq.async_kv_batch_put(\n            keys=keys,\n            fields=list_of_dict" in source, (
        "if verl puts by group now, GroupedPuts can go"
    )


def test_verl_still_builds_every_agent_loop_through_hydra():
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    theirs = inspect.getsource(AgentLoopWorker._run_agent_loop)
    ours = inspect.getsource(agent_loops.Frugal._loop)
    call = textwrap.dedent(theirs.partition("hydra.utils.instantiate(\n")[2].partition(")\n            output")[0])
    given = {line.split("=")[0].strip() for line in call.splitlines() if "=" in line} - {"config"}
    assert given == {line.split("=")[0].strip() for line in ours.partition("](\n")[2].splitlines() if "=" in line}
    assert "output: AgentLoopOutput = await agent_loop.run(sampling_params, **kwargs)" in theirs


def test_the_queue_takes_what_a_group_holds():
    import transfer_queue

    put_function = inspect.unwrap(transfer_queue.async_kv_batch_put)
    assert list(inspect.signature(put_function).parameters) == ["keys", "partition_id", "fields", "tags", "data_parser"]
    assert isinstance(batch(3), TensorDict)
