"""The simulator against closed forms, against the real sampler over verl's own bookkeeping, and against itself."""

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.simulate.measured import covered, read
from benchmarks.simulate.measures import measure, steady, warm_windows, windows
from benchmarks.simulate.rollout import Pool, Response
from benchmarks.simulate.scenario import Engine, Lengths, QueueBytes, Scenario, Training
from recipes.errors import ConfigError
from sat_verl.lag import LagSchedule, verdict

pytest.importorskip("verl")
from benchmarks.simulate import __main__ as command
from benchmarks.simulate import fit, validate
from benchmarks.simulate.settings import Cell, parse
from benchmarks.simulate.trainer import SimulatedRun

FIXED = Lengths("fixed", 100, 0.0, 1000)
HEAVY = Lengths("lognormal", 80, 1.0, 600, within=0.5)
EVEN = Scenario(
    replicas=1, engine=Engine(slots=64, iteration_s=0.05), training=Training(2.0), lengths=FIXED, prompts=4,
    responses=2, prompt_tokens=10, steps=12, sync_s=0.5, other_s=0.25, poll_s=0.25,
)  # fmt: skip
"""Generation takes 5 s, training 2 s; whole numbers of looks at the queue."""
UNEVEN = EVEN.__class__(
    **{
        **EVEN.__dict__,
        "replicas": 2,
        "lengths": HEAVY,
        "engine": Engine(5, 0.01, 2e-4, 2e-6, 1e-4, 0.01, 0.01),
        "training": Training(0.5, 1e-3, noise=0.2),
        "poll_s": 0.05,
    }
)
POLICIES = [
    (LagSchedule(kind, steps), strategy)
    for kind, steps, strategy in (
        ("broadcast", 0, None), ("broadcast", 1, None), ("broadcast", 3, None), ("constant", 3, None),
        ("bounded", 1, "wait"), ("bounded", 3, "wait"), ("bounded", 1, "drop"), ("bounded", 3, "drop"),
    )
]  # fmt: skip


def changed(scenario, **fields):
    return Scenario(**{**scenario.__dict__, **fields})


def simulated(scenario, schedule, strategy=None, seed=0):
    run = SimulatedRun(scenario, schedule, strategy, seed)
    return run, run.run()


def numbers(scenario, kind, steps, strategy=None):
    schedule = LagSchedule(kind, steps)
    return measure(simulated(scenario, schedule, strategy)[1], scenario, schedule)


# --- lengths and engine


def test_lengths_have_their_median_their_limit_and_groups_that_are_alike():
    chance = np.random.default_rng(0)
    drawn = Lengths("lognormal", 200, 0.8, 1000, within=0.7).draw(chance, 4000, 2)
    assert np.median(drawn) == pytest.approx(200, rel=0.05)
    assert drawn.max() == 1000
    assert np.corrcoef(np.log(drawn).T)[0, 1] == pytest.approx(0.7, abs=0.06)
    pareto = Lengths("pareto", 100, 2.0, 10**9).draw(chance, 4000, 1)
    assert pareto.min() >= 100
    assert np.mean(pareto > 200) == pytest.approx(1 / 4, abs=0.03)


def ends(engine, lengths, prompt_tokens=10):
    found = []
    pool = Pool(engine, 1, prompt_tokens, found.append)
    pool.submit(Response(index, length) for index, length in enumerate(lengths))
    pool.advance(1e6)
    return {response.prompt: response.ended for response in found}, pool


def test_decoding_takes_what_the_formula_says():
    """b sequences of L tokens after prompts of P: L (a + c b + k b P) + k b L**2 / 2."""
    engine = Engine(slots=8, iteration_s=0.01, per_sequence_s=0.002, per_context_s=1e-5)
    times, pool = ends(engine, [50, 50, 50])
    expected = 50 * (0.01 + 0.006 + 3e-4) + 3e-5 * 50**2 / 2
    assert list(times.values()) == pytest.approx([expected] * 3)
    assert pool.totals()["tokens"] == pytest.approx(150)


def test_a_short_response_leaves_the_rest_faster():
    engine = Engine(slots=2, iteration_s=0.0, per_sequence_s=0.01)
    times, _ = ends(engine, [10, 30])
    assert list(times.values()) == pytest.approx([0.2, 0.4])


def test_requests_wait_for_slots_and_the_host_first_come_first_served():
    times, _ = ends(Engine(slots=2, iteration_s=0.01), [100, 100, 100, 100])
    assert list(times.values()) == pytest.approx([1, 1, 2, 2])
    times, _ = ends(Engine(slots=9, iteration_s=0.01, request_s=0.5), [100, 100, 100])
    assert list(times.values()) == pytest.approx([1.5, 2.0, 2.5])
    # What is to be stored waits behind the requests: three of them, then one to store each 0.2 s.
    stored = []
    pool = Pool(Engine(slots=9, iteration_s=0.001, request_s=0.5, store_s=0.2), 1, 0)
    pool.on_end = lambda response: stored.append((response.prompt, round(pool.now, 6)))
    pool.submit(Response(index, 10) for index in range(3))
    pool.advance(10)
    assert stored == [(0, 1.7), (1, 1.9), (2, 2.1)]


def test_what_is_stored_in_rounds_is_stored_together():
    """Three responses end at 0.1 s, each with three rounds of 0.2 s: the first is stored after two rounds of all."""
    stored = []
    pool = Pool(Engine(slots=9, iteration_s=0.01, store_s=0.6, store_rounds=3), 1, 0)
    pool.on_end = lambda response: stored.append((response.prompt, round(response.ended, 6), round(pool.now, 6)))
    pool.submit(Response(index, 10) for index in range(3))
    pool.advance(10)
    assert stored == [(0, 0.1, 1.5), (1, 0.3, 1.7), (2, 0.5, 1.9)]
    assert pool.busy_s == pytest.approx(0.5), "in flight until the host has taken up the last"


def test_prefill_stops_decoding():
    times, _ = ends(Engine(slots=1, iteration_s=0.01, prefill_s=0.1), [100, 100], prompt_tokens=10)
    assert list(times.values()) == pytest.approx([2, 4])


def test_a_weight_sync_aborts_and_goes_on_with_what_is_there():
    found = []
    pool = Pool(Engine(slots=1, iteration_s=0.01, prefill_s=0.001), 1, 10, found.append)
    pool.submit([Response(0, 100), Response(1, 100)])
    pool.advance(0.41)  # 0.01 s of prefill, 40 tokens
    pool.sync_weights(2.0)
    pool.advance(1e3)
    assert found[0].segments == [(0, 40), (1, 60)]
    assert found[0].ended == pytest.approx(2.41 + 0.05 + 0.6), "its 10 + 40 tokens are read again"
    assert found[1].segments == [(1, 100)]


def test_requests_go_to_the_replica_with_the_fewest():
    pool = Pool(Engine(slots=1, iteration_s=0.01), 3, 0)
    pool.submit(Response(index, 100) for index in range(7))
    assert [replica.load for replica in pool.replicas] == [3, 2, 2]
    pool.advance(1.0)
    pool.submit([Response(7, 100)])
    assert sorted(replica.load for replica in pool.replicas) == [1, 2, 2]


# --- closed forms without variance: generation G = 5, training T = 2, sync 0.5, other 0.25


def test_synchronous_is_the_sum():
    found = numbers(EVEN, "broadcast", 0)
    assert found["step_s"] == pytest.approx(5 + 2 + 0.75)
    assert found["samples_per_s"] == pytest.approx(8 / 7.75)
    assert found["trainer_idle"] == pytest.approx(5.75 / 7.75)
    assert (found["wait"], found["drain"]) == (pytest.approx(5 / 7.75), 0.0)
    assert found["rollout_idle"] == found["rollout_quiet"] == pytest.approx(2.75 / 7.75)
    assert found["slots_used"] == pytest.approx(5 / 7.75 * 8 / 64)
    assert found["tokens_per_s"] == pytest.approx(800 / 7.75)


@pytest.mark.parametrize("training", [2.0, 7.0])
@pytest.mark.parametrize(("kind", "steps"), [("broadcast", 1), ("constant", 1), ("constant", 4)])
def test_lag_one_is_the_longer_of_the_two_and_a_larger_constant_lag_gains_nothing(kind, steps, training):
    found = numbers(changed(EVEN, training=Training(training)), kind, steps)
    step = max(5, training) + 0.75
    assert found["step_s"] == pytest.approx(step)
    assert found["drain"] == pytest.approx(max(0, 5 - training) / step)
    assert found["trainer_idle"] == pytest.approx(1 - training / step)
    assert found["rollout_idle"] == pytest.approx(1 - 5 / step)


def test_a_broadcast_window_generates_its_batches_at_once():
    """4 batches fit into the slots, so they take 5 s; the first step needs none of them."""
    found = numbers(EVEN, "broadcast", 4)
    assert found["step_s"] * 4 == pytest.approx(5 + 3 * 2 + 0.75)
    slots = changed(EVEN, engine=Engine(slots=8, iteration_s=0.05))  # one batch at a time: 5, 10, 15, 20 s
    found = numbers(slots, "broadcast", 4)
    assert found["step_s"] * 4 == pytest.approx(4 * 5 + 0.75)
    assert found["mean_age"] == 2.5


def test_memory_of_the_queue():
    """Synchronous: all 8 responses of a step, and while they are trained on what the trainer adds."""
    queue = QueueBytes(response_token=10, prompt_token=1, trained_token=2)
    found = numbers(changed(EVEN, queue=queue), "broadcast", 0)
    assert found["queue_peak_gb"] * 1e9 == pytest.approx(8 * (10 * 100 + 10 + 2 * 100))
    # From the end of training until the end of the sync it is still there.
    assert found["queue_mean_gb"] * 1e9 == pytest.approx(8 * 1210 * 2.5 / 7.75)


def test_two_sides_of_one_machine_slow_each_other():
    """Lag 1: training needs 2 s, 6 while the rollout works at half speed; 3 s of it are done then, 2 more alone."""
    shared = changed(EVEN, trainer_slowed=3.0, rollout_slowed=2.0)
    assert numbers(shared, "broadcast", 1)["step_s"] == pytest.approx(6 + 2 + 0.75)
    assert numbers(shared, "broadcast", 0)["step_s"] == pytest.approx(7.75), "they never work at once"


# --- what a run must keep


@pytest.mark.parametrize(("schedule", "strategy"), POLICIES)
def test_every_sample_is_trained_on_once(schedule, strategy):
    run, rows = simulated(UNEVEN, schedule, strategy)
    trained = [prompt for batch in run.trained for prompt in batch]
    dropped = sum(row["dropped_groups"] for row in rows)
    assert len(trained) == len(set(trained)) == UNEVEN.steps * UNEVEN.prompts
    assert run._next_prompt == len(trained) + len(run.prompts) + dropped
    assert run.buffer.outstanding_prompts() == len(run.prompts)
    assert not set(trained) & set(run.prompts)
    if schedule.exact:
        assert trained == list(range(len(trained))), "in the order of submission"
    if strategy != "drop":
        assert dropped == 0
    left = [response for responses in run.prompts.values() for response in responses if response.ended >= 0]
    assert run.memory.bytes >= 0
    stored = sum(run._bytes(response) for response in left if response not in run.pool.replicas[0].host)
    assert run.memory.bytes <= stored


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["broadcast", "constant"]), st.integers(0, 4), st.integers(0, 99), st.integers(1, 3),
    st.floats(0, 3),
)  # fmt: skip
def test_an_exact_schedule_has_the_ages_that_it_promises(kind, steps, seed, replicas, training):
    schedule = LagSchedule(kind, steps)
    scenario = changed(UNEVEN, replicas=replicas, training=Training(training), prompts=2, steps=12)
    _, rows = simulated(scenario, schedule, seed=seed)
    assert all(row["tokens_by_age"].keys() == {str(schedule.age(row["step"]))} for row in rows)
    found = verdict(schedule, rows)
    assert found["ok"]
    assert found["promised"] == found["realised"]
    assert found["mixed_responses"] == 0


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["wait", "drop"]), st.integers(1, 4), st.integers(0, 99), st.floats(0, 3))
def test_a_bounded_schedule_keeps_its_bound(strategy, steps, seed, training):
    schedule = LagSchedule("bounded", steps)
    run, rows = simulated(changed(UNEVEN, training=Training(training)), schedule, strategy, seed)
    assert verdict(schedule, rows)["ok"]
    for responses in run.prompts.values():
        for response in responses:
            assert sum(tokens for _, tokens in response.segments) == response.done <= response.length
            assert [sync for sync, _ in response.segments] == sorted({sync for sync, _ in response.segments})


def test_the_seed_decides():
    schedule = LagSchedule("bounded", 3)
    same = [simulated(UNEVEN, schedule, "drop", seed)[1] for seed in (1, 1, 2)]
    assert same[0] == same[1]
    assert same[0] != same[2]


# --- the real sampler over verl's own bookkeeping


class Kept:
    """TransferQueue's part in verl's replay buffer, in memory: keys with tags."""

    def __init__(self):
        self.data = defaultdict(dict)

    def kv_list(self):
        return self.data

    def kv_clear(self, partition_id, keys):
        for key in keys:
            self.data[partition_id].pop(key, None)


def looking(run, store, strategy):
    """The recipes' sampler, which reads the queue at every look, and looks after every interval."""
    from recipes.schedule import sampler_settings
    from sat_verl.sampler import GuardedReplayBuffer

    class Looking(GuardedReplayBuffer):
        dropped: tuple = ()

        def _now(self):
            return run.pool.now

        def _wait_for_next_poll(self, partition_id, last_debug_time):
            run.pool.advance(run.pool.now + self.poll_interval)
            return last_debug_time

        def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
            # The order of a set of strings is not that of another process.
            return super()._select_prompt_uids(partition_id, sorted(sampleable_keys), batch_size)

        def submitted(self, prompts, global_step):
            for prompt in prompts:
                store.data["train"][f"{prompt:010d}"] = {
                    "is_prompt": True, "status": "pending", "global_steps": global_step
                }  # fmt: skip

        def finished(self, prompt):
            for response in reversed(range(run.scenario.responses)):
                store.data["train"][f"{prompt:010d}_{response}_0"] = {"status": "success"}
            store.data["train"][f"{prompt:010d}"]["status"] = "finished"

        def outstanding_prompts(self):
            return len(self.outstanding())

    options = sampler_settings(run.schedule, strategy)
    options["sampler_kwargs"]["poll_interval_s"] = run.scenario.poll_s
    return Looking(trainer_mode="sat_async", trainer_config={}, refill_fn=run._submit, **options)


@pytest.mark.parametrize(("schedule", "strategy"), POLICIES)
def test_the_order_is_that_of_the_real_sampler(schedule, strategy, monkeypatch):
    from verl.trainer.ppo.v1 import replay_buffer as upstream

    ours, rows = simulated(UNEVEN, schedule, strategy)
    real, store = SimulatedRun(UNEVEN, schedule, strategy, 0), Kept()
    monkeypatch.setattr(upstream, "tq", SimpleNamespace(kv_list=store.kv_list, kv_clear=store.kv_clear))
    real.buffer = looking(real, store, strategy)
    expected = real.run()
    assert ours.trained == real.trained
    assert [row["end"] for row in rows if "end" in row] == pytest.approx(
        [row["end"] for row in expected if "end" in row]
    )
    refilled = [sum(row["refilled_groups"] for row in one) for one in (rows, expected)]
    assert refilled[0] == refilled[1]
    assert strategy == "drop" or refilled[0] == 0


# --- monotone


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([("broadcast", 0), ("broadcast", 2), ("constant", 2)]), st.integers(0, 9), st.floats(0.1, 5))
def test_more_work_is_never_faster(policy, seed, more):
    schedule = LagSchedule(*policy)
    scenario = changed(UNEVEN, engine=Engine(5, 0.01), training=Training(1.0), steps=8)

    def end(**fields):
        return simulated(changed(scenario, **fields), schedule, seed=seed)[1][-1]["end"]

    slack = 2 * scenario.steps * scenario.poll_s  # a look may come just before or just after an end
    base = end()
    assert end(training=Training(1.0 + more)) >= base - slack
    assert end(sync_s=scenario.sync_s + more) >= base
    assert end(engine=Engine(5, 0.01 * (1 + more))) >= base - slack
    assert end(engine=Engine(50, 0.01)) <= base + slack, "room for more sequences"


@pytest.mark.parametrize("seed", range(2))
def test_lag_hides_generation_and_costs_memory(seed):
    def found(kind, steps):
        schedule = LagSchedule(kind, steps)
        rows = simulated(changed(UNEVEN, steps=24), schedule, "wait" if kind == "bounded" else None, seed)[1]
        return measure(rows, UNEVEN, schedule)

    synchronous, one = found("broadcast", 0), found("broadcast", 1)
    assert one["samples_per_s"] > synchronous["samples_per_s"]
    assert found("broadcast", 4)["samples_per_s"] > one["samples_per_s"]
    assert found("bounded", 4)["samples_per_s"] > one["samples_per_s"]
    peaks = [found("constant", steps)["queue_peak_gb"] for steps in (1, 2, 4)]
    assert peaks == sorted(peaks)


# --- real runs: here one whose records the simulator has written


def recorded(folder, scenario, schedule, strategy=None, validates=True):
    """The records that a run of this kind would leave, as far as they are read."""
    _, rows = simulated(scenario, schedule, strategy)
    folder.mkdir()
    clock = 1000.0
    metrics, samples = [], []
    for part in windows(rows):
        last = part[-1]
        for row in part:
            samples.append({key: row[key] for key in (
                "step", "global_step", "tokens_by_age", "responses", "mixed_responses", "in_flight_s", "in_queue_s"
            )})  # fmt: skip
            if not validates:
                samples[-1]["generated_between"] = [time + clock for time in row["generated_between"]]
            metrics.append({
                "step": row["step"], "global_step": row["global_step"], "time": clock + last["end"],
                "response_length/tokens": row["tokens"],
                "timing_s/optimizer_step": row["wait_s"] + row["train_s"],
            })  # fmt: skip
        busy = sum(row["wait_s"] + row["train_s"] for row in part) + last["submit_s"]
        metrics[-1] |= {
            "prompt_length/mean": 10.0,
            "timing_s/gen": sum(row["wait_s"] for row in part),
            "timing_s/drain": last["drain_seconds"],
            "timing_s/update_weights": last["sync_s"],
            "timing_s/step": busy + last["drain_seconds"] + last["sync_s"],
        }
        if validates and last["global_step"] == 5:  # a validation, which is not the training's time
            metrics[-1] |= {"timing_s/testing": 40.0, "time": metrics[-1]["time"] + 40.0}
            clock += 40.0
    for name, content in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "lag.json").write_text(json.dumps(verdict(schedule, rows)))
    config = {
        "lag": {"schedule": schedule.kind, "steps": schedule.steps, "strategy": strategy},
        "prompts_per_step": scenario.prompts, "responses_per_prompt": scenario.responses,
        "rollout_replicas": scenario.replicas,
        "actor_rollout_ref": {"rollout": {"max_num_seqs": scenario.engine.slots}},
        "data": {"max_response_length": 1000},
        "trainer": {"v1": {"sampler": {"sampler_kwargs": {"poll_interval_s": scenario.poll_s}}}},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


HOST = changed(
    EVEN, engine=Engine(256, 0.005, request_s=0.2, store_s=0.3, store_rounds=fit.STORE_ROUNDS),
    training=Training(2.5), steps=20, poll_s=0.05,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "steps"), [("broadcast", 0), ("broadcast", 1), ("bounded", 2)])
def test_a_run_is_predicted_from_its_first_half(tmp_path, kind, steps):
    schedule = LagSchedule(kind, steps)
    run = read(recorded(tmp_path / "run", HOST, schedule, None if schedule.exact else "wait"), 4)
    first, rest = fit.halves(run)
    found = fit.fit(run, first, [0])
    assert found.identified
    assert found.scenario.training.fixed_s == pytest.approx(2.5, rel=0.01)
    assert found.scenario.engine.request_s + found.scenario.engine.store_s == pytest.approx(0.5, rel=0.06)
    result = validate.compare(fit.transferred(found, run, len(run.windows[rest])), run, rest, [0])
    assert result["quantities"]["samples_per_s"]["error"] == pytest.approx(0, abs=0.03)
    assert result["quantities"]["trainer_idle"]["error"] == pytest.approx(0, abs=0.03)
    assert result["ages_distance"] < 0.05


def test_another_schedule_is_predicted_from_a_synchronous_run_and_one_that_overlaps(tmp_path):
    shared = changed(HOST, trainer_slowed=1.8, rollout_slowed=1.3)
    runs = [
        read(recorded(tmp_path / str(steps), shared, LagSchedule("broadcast", steps)), 2) for steps in (0, 1, 4)
    ]  # fmt: skip
    found = validate._fit(runs[:2], [0])
    assert found.scenario.trainer_slowed == pytest.approx(1.8, rel=0.05)
    assert found.scenario.rollout_slowed == pytest.approx(1.3, rel=0.1)
    result = validate.compare(fit.transferred(found, runs[2], len(runs[2].windows)), runs[2], slice(None), [0])
    assert result["quantities"]["samples_per_s"]["error"] == pytest.approx(0, abs=0.04)
    with pytest.raises(ConfigError, match="synchronous run and one that is not"):
        validate._fit(runs[1:], [0])


def test_a_measured_window_adds_up(tmp_path):
    run = read(recorded(tmp_path / "run", HOST, LagSchedule("broadcast", 1)), 4)
    for part in run.windows:
        assert part.wall == pytest.approx(part.wait + part.train + part.drain + part.sync + part.submit + part.other)
        assert part.other == pytest.approx(HOST.other_s)
    assert sum(run.after_validation) == 1


@pytest.mark.parametrize(("kind", "steps"), [("broadcast", 0), ("broadcast", 1), ("bounded", 3)])
def test_how_long_the_rollout_was_quiet_is_read_from_the_times_of_generation(tmp_path, kind, steps):
    schedule = LagSchedule(kind, steps)
    run = read(recorded(tmp_path / "run", HOST, schedule, None if schedule.exact else "wait", validates=False), 2)
    _, rows = simulated(HOST, schedule, None if schedule.exact else "wait")
    seen = fit.summary(run, slice(0, 4))
    expected = steady(windows(rows)[warm_windows(schedule) - 1 :][:5], 1, 256)
    assert seen["rollout_quiet"] == pytest.approx(expected["rollout_quiet"], abs=0.02)
    assert not seen["rollout_quiet_is_bound"]
    assert seen["step_s"] == pytest.approx(expected["step_s"])
    assert seen["trainer_idle"] == pytest.approx(expected["trainer_idle"])


def test_a_step_records_when_its_responses_were_in_flight():
    from sat_verl.batch_record import BatchRecord

    record = BatchRecord(
        keys=["0000000000_0_0", "0000000001_0_0"], data_rows=[0, 1], data=None, rewards=np.zeros(2),
        tokens=np.ones(2), ages=np.zeros((2, 2)), row_ages=[Counter(), Counter()], in_flight=np.array([3.0, 1.0]),
        in_queue=np.ones(2), started=np.array([10.0, 14.0]),
    )  # fmt: skip
    assert record.sample_row(0, 0, 0)["generated_between"] == [10.0, 15.0]
    assert record.without(np.array([False, True])).sample_row(0, 0, 0)["generated_between"] == [10.0, 13.0]


def test_a_run_that_is_none_or_too_short_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no lag\.json"):
        read(tmp_path, 4)
    short = recorded(tmp_path / "short", changed(HOST, steps=4), LagSchedule("broadcast", 1))
    with pytest.raises(ConfigError, match="2 weight syncs after its start, but 4 are needed"):
        read(short, 4)


def test_intervals_that_overlap_count_once():
    assert covered([(0, 2), (1, 3), (5, 9), (6, 7)], 1, 8) == 2 + 3
    assert covered([], 0, 1) == 0


# --- the command


def test_cells_are_there_once():
    cells = parse(["out=x", "gpus=8", "prompts_per_step=4", "lags=[0,1,2]", "seeds=1"]).cells()
    names = [cell.name for cell in cells]
    assert names == [
        "synchronous", "broadcast 1", "broadcast 2", "constant 2", "bounded 1", "bounded 2", "bounded_drop 1",
        "bounded_drop 2", "colocated",
    ]  # fmt: skip
    assert Cell("bounded_drop", 2, 8, 0).policy == (LagSchedule("bounded", 2), "drop")
    assert Cell("bounded", 0, 8, 0).policy[0].exact


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("gpu=8", "did you mean gpus"),
        ("schedules=weekly", "there is no schedule weekly"),
        ("steps=36", "broadcast 8 syncs every 8 steps"),
        ("steps=8", "nothing of .* is left to measure"),
        ("gpus=[2,8,64]", "leaves none to one side"),
        ("prompts_per_step=[1,2]", "give one number, or one for each"),
        ("lags=[1,1]", "1 is there twice"),
    ],
)
def test_bad_words_are_refused(word, said):
    with pytest.raises(ConfigError, match=said):
        parse(["out=x", word])


def test_the_command_writes_its_files(tmp_path, capsys):
    words = [
        f"out={tmp_path / 'o'}", "gpus=8", "prompts_per_step=2", "lags=[0,1,2]", "seeds=1", "steps=8",
        "responses_per_prompt=2",
    ]  # fmt: skip
    assert command.main(words) == 0
    content = json.loads((tmp_path / "o" / "simulate.json").read_text())
    assert {row["name"] for row in content["results"]} >= {"synchronous", "constant 2", "colocated"}
    assert all(row["kept"] for row in content["results"])
    assert content["provenance"]["command"][-1] == "responses_per_prompt=2"
    assert str(tmp_path) not in json.dumps(content)
    written = {path.name for path in (tmp_path / "o").iterdir()}
    assert written >= {"cells.parquet", "table.md", "ages.png", "throughput.png", "gpu_idle.png"}
    assert "9/9" in capsys.readouterr().out
    assert command.main(words) == 0
    again = json.loads((tmp_path / "o" / "simulate.json").read_text())
    assert again["cells"] == content["cells"]
    assert "9/9" not in capsys.readouterr().out, "what is done is kept"
    settings = [parse([*words, more]) for more in ("slots=64", "slots=32", "sync_s=5")]
    assert len({one.key(Cell("broadcast", 1, 8, 0)) for one in settings}) == 3
    assert settings[0].key(Cell("broadcast", 1, 8, 0)) == parse(words).key(Cell("broadcast", 1, 8, 0))
    assert command.main(["out=x", "gpus=1"]) == 2
    assert command.main(["validate", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("out=/a/b/c", "out=c"),
        ("fit=[/a/b,/c/d/]", "fit=[b,d]"),
        ("/a/run", "run"),
        ("runs/run", "runs/run"),
        ("out=runs/x", "out=runs/x"),
    ],
)
def test_the_recorded_command_names_no_place_of_this_machine(word, kept):
    assert command._portable(word) == kept


def test_steady_counts_from_the_end_of_its_first_window():
    _, rows = simulated(EVEN, LagSchedule("broadcast", 1))
    parts = windows(rows)
    assert warm_windows(LagSchedule("broadcast", 1)) == 2
    found = steady(parts[3:6], 1, 64)
    assert found["step_s"] == pytest.approx((parts[5][-1]["end"] - parts[3][-1]["end"]) / 2)
