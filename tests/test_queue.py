"""What stands between the rollout and the trainer, on the real TransferQueue in a local Ray, without engines."""

import json
import time

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARTITION = "train"


@pytest.fixture(scope="module")
def queue():
    ray = pytest.importorskip("ray")
    from omegaconf import OmegaConf

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    import transfer_queue as tq

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        yield tq
    finally:
        tq.close()
        ray.shutdown()


@pytest.fixture
def tq(queue):
    yield queue
    for partition, keys in (queue.kv_list() or {}).items():
        if keys:
            queue.kv_clear(keys=list(keys), partition_id=partition)


def buffer(threshold=None, **options):
    from sat_verl.sampler import GuardedReplayBuffer

    options = {"poll_interval_s": 0.02, "exact": True, "failure_limit": 4, "stall_timeout_s": 1.0} | options
    return GuardedReplayBuffer(
        trainer_mode="sat_async",
        trainer_config={},
        max_off_policy_threshold=threshold,
        max_off_policy_strategy="wait",
        sampler_kwargs=options,
        refill_fn=lambda count: count,
    )


def uid(number):
    return f"{number:010d}"


def submit(tq, *numbers, step=1):
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in numbers]
    tq.kv_batch_put(keys=[uid(number) for number in numbers], partition_id=PARTITION, tags=tags)


def answer(tq, number, responses=2, sync=0, score=1.0, status="finished"):
    """What an agent loop worker puts into the queue for one prompt."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    now = time.time()
    for response in reversed(range(responses)):  # completion is not in order
        extra = {"policy_segments": [[sync, 3]], "generation_started": now - 2, "generation_finished": now - 1}
        row = {
            "prompts": torch.tensor([1, 2]),
            "responses": torch.tensor([5, 6, 7]),
            "rm_scores": torch.tensor([0.0, 0.0, score]),
            "response_mask": torch.ones(3, dtype=torch.int64),
            "loss_mask": torch.ones(3, dtype=torch.int64),
            "rollout_log_probs": torch.full((3,), -0.5),
            "extra_fields": extra,
            "index": 100 + number,
        }
        tag = {"status": "success", "min_global_steps": sync, "max_global_steps": sync, "response_len": 3}
        key = f"{uid(number)}_{response}_0"
        tq.kv_batch_put(keys=[key], partition_id=PARTITION, fields=list_of_dict_to_tensordict([row]), tags=[tag])
    tq.kv_batch_put(keys=[uid(number)], partition_id=PARTITION, tags=[{"status": status}])


def test_an_exact_buffer_trains_in_the_order_of_submission(tq):
    submit(tq, 0, 1, 2, 3)
    for number in (3, 2, 1, 0):
        answer(tq, number)
    batch, _ = buffer().sample(1, PARTITION, 2)
    assert batch.keys == [f"{uid(number)}_{response}_0" for number in (0, 1) for response in (0, 1)]
    assert buffer().outstanding() == [uid(2), uid(3)]


def test_it_waits_for_the_first_prompts_although_others_are_ready(tq):
    from sat_verl.sampler import RolloutFailedError

    submit(tq, 0, 1, 2, 3)
    for number in (1, 2, 3):
        answer(tq, number)
    with pytest.raises(RolloutFailedError, match="1 pending"):
        buffer().sample(1, PARTITION, 2)
    # verl's own rule, for the bounded schedule: whatever is finished.
    batch, _ = buffer(exact=False).sample(1, PARTITION, 2)
    assert len(batch.keys) == 4


def test_waiting_keeps_the_bound_when_younger_prompts_overtake(tq):
    """At most 2 steps old, 2 prompts a step: with 6 and 7 taken in step 2, two of the first are 3 old in step 4."""
    from sat_verl.sampler import RolloutFailedError

    submit(tq, 0, 1, 4, 5)
    submit(tq, 6, 7, step=2)
    for number in (6, 7):
        answer(tq, number)
    with pytest.raises(RolloutFailedError, match="4 pending"):
        buffer(threshold=3, exact=False).sample(2, PARTITION, 2)
    for number in (4, 5):
        answer(tq, number)
    batch, _ = buffer(threshold=3, exact=False).sample(2, PARTITION, 2)
    assert sorted({key[:10] for key in batch.keys}) == [uid(4), uid(5)]


def test_successes_and_failures_of_one_look_do_not_end_a_run(tq):
    submit(tq, *range(9))
    for number in range(8):
        answer(tq, number, status="failure")
    answer(tq, 8)
    batch, _ = buffer(exact=False, failure_limit=4).sample(1, PARTITION, 1)
    assert {key[:10] for key in batch.keys} == {uid(8)}


def test_a_failed_group_is_generated_again_and_nothing_is_skipped(tq):
    submit(tq, 0, 1)
    answer(tq, 0, status="failure", score=9.0)
    answer(tq, 1)
    subject, again = buffer(), []

    def resubmit(uids):
        again.append(uids)
        tq.kv_clear(keys=[f"{one}_{response}_0" for one in uids for response in range(2)], partition_id=PARTITION)
        tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=[{"status": "pending"} for _ in uids])
        answer(tq, 0)

    subject.resubmit = resubmit
    batch, _ = subject.sample(1, PARTITION, 2)
    assert again == [[uid(0)]]
    assert [key[:10] for key in batch.keys] == [uid(0), uid(0), uid(1), uid(1)]
    assert subject.take_counts() == (0, 1)
    assert subject.take_counts() == (0, 0)


def test_a_group_that_fails_again_and_again_ends_the_run(tq):
    from sat_verl.sampler import RolloutFailedError

    submit(tq, 0)
    answer(tq, 0, status="failure")
    subject, attempts = buffer(), []

    def resubmit(uids):
        attempts.append(uids)
        tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=[{"status": "failure"} for _ in uids])

    subject.resubmit = resubmit
    with pytest.raises(RolloutFailedError, match="4 prompt groups failed in a row"):
        subject.sample(1, PARTITION, 1)
    assert len(attempts) == 3


def test_a_drain_waits_for_everything(tq):
    from sat_verl.sampler import RolloutFailedError

    submit(tq, 0, 1)
    answer(tq, 0)
    with pytest.raises(RolloutFailedError, match="has stopped"):
        buffer().drain()
    answer(tq, 1)
    assert buffer().drain() < 1.0


def record(tq, step=3, sync_every=2):
    from sat_verl import batch_record

    batch, _ = buffer().sample(1, PARTITION, len(buffer().outstanding()))
    return batch, batch_record.read(batch, step, sync_every)


def test_the_record_of_a_batch(tq):
    submit(tq, 0, 1)
    answer(tq, 0, sync=1, score=1.0)
    answer(tq, 1, sync=0, score=0.0)
    _, found = record(tq)
    # Optimizer step 3 meets version 2; sync 1 is version 2, sync 0 version 0.
    assert found.tokens_by_age == {0: 6, 2: 6}
    assert found.ages.tolist() == [[0, 0], [0, 0], [2, 2], [2, 2]]
    assert found.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found.data_rows == [100, 101]
    metrics = found.metrics(longest=3)
    assert metrics["lag/age"] == 1.0
    assert metrics["reward/groups_with_signal"] == 0.0
    assert metrics["response_length/truncated"] == 1.0
    assert metrics["lag/in_flight_s"] == pytest.approx(1.0, abs=0.01)
    assert metrics["lag/in_queue_s"] >= 1.0
    begin, end = found.sample_row(0, 0, 0)["generated_between"]
    assert end - begin == pytest.approx(1.0, abs=0.5)


def test_a_reward_that_is_not_finite_stops_the_run_and_is_kept(tq, tmp_path):
    from sat_verl.finite import NonFiniteError
    from sat_verl.step_guard import StepGuard

    submit(tq, 0, 1)
    answer(tq, 0, score=float("nan"))
    answer(tq, 1)
    batch, found = record(tq)
    with pytest.raises(NonFiniteError, match="optimizer step 3: not finite: rm_scores"):
        StepGuard(tmp_path, "stop").batch(found, 3, batch.partition_id)
    kept = [json.loads(line) for line in (tmp_path / "nonfinite" / "step-3.jsonl").read_text().splitlines()]
    assert [row["key"] for row in kept] == batch.keys[:2]
    assert kept[0]["responses"] == [5, 6, 7]
    assert kept[0]["rm_scores"] == [0.0, 0.0, "nan"]


def test_or_its_prompt_group_is_left_out(tq, tmp_path):
    from sat_verl.step_guard import StepGuard

    submit(tq, 0, 1)
    answer(tq, 0, score=float("inf"))
    answer(tq, 1)
    batch, found = record(tq)
    left = StepGuard(tmp_path, "skip").batch(found, 3, batch.partition_id)
    assert left.keys == batch.keys[2:]
    assert left.skipped == [uid(0)]
    assert left.prompts == [uid(0), uid(1)], "it is consumed all the same"
    assert np.isfinite(left.rewards).all()
    stored = tq.kv_batch_get(
        keys=batch.keys, partition_id=PARTITION, select_fields=["rm_scores", "response_mask", "loss_mask"]
    )
    for name in ("response_mask", "loss_mask"):
        assert [int(row.sum()) for row in stored[name].unbind()] == [0, 0, 3, 3]
    assert [float(row.sum()) for row in stored["rm_scores"].unbind()] == [0.0, 0.0, 1.0, 1.0]


def test_routes_keep_their_type_and_come_as_verls_engines_want_them(tq):
    """Jagged, one byte each; with a sample that verl adds to divide a batch among ranks."""
    from verl.trainer.ppo.padding_utils import build_padding_routed_experts
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    samples = [torch.randint(0, 8, (length, 3, 2), dtype=torch.uint8) for length in (5, 9)]
    samples.append(build_padding_routed_experts(samples[0], 4))
    keys = [f"{uid(0)}_{number}_0" for number in range(3)]
    fields = list_of_dict_to_tensordict([{"routed_experts": one} for one in samples])
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=[{} for _ in keys])
    found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["routed_experts"])["routed_experts"]
    assert found.is_nested
    assert found.dtype == torch.uint8
    assert found.layout == torch.jagged
    for one, other in zip(found.unbind(), samples, strict=True):
        assert torch.equal(one, other)
