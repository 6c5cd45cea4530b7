"""Lag schedules as pure logic: what they promise, and that a loop like the trainer's keeps it, killed or not."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_verl.lag import COUNTS, TIMES, LagSchedule, shares, token_ages, verdict

KINDS = ("broadcast", "constant", "bounded")


def ages(kind, steps, count):
    schedule = LagSchedule(kind, steps)
    return [schedule.age(step) for step in range(1, count + 1)]


def test_broadcast_is_the_papers_sawtooth():
    assert ages("broadcast", 4, 10) == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert ages("broadcast", 1, 4) == [0, 1, 1, 1]


def test_constant_is_constant_after_its_ramp():
    assert ages("constant", 3, 7) == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_lag_zero_is_synchronous(kind):
    schedule = LagSchedule(kind, 0)
    assert ages(kind, 0, 5) == [0] * 5
    assert (schedule.exact, schedule.sync_every, schedule.batches_ahead) == (True, 1, 0)


@pytest.mark.parametrize("steps", [-1, 1.0, "8", True, None])
def test_steps_must_be_whole(steps):
    with pytest.raises(ValueError, match=r"lag\.steps"):
        LagSchedule("broadcast", steps)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="broadcast, constant, bounded"):
        LagSchedule("sometimes", 1)


def test_an_exact_schedule_accepts_its_age_alone_and_a_bounded_one_anything_below():
    assert LagSchedule("constant", 2).keeps(5, [2])
    assert not LagSchedule("constant", 2).keeps(5, [1])
    assert not LagSchedule("constant", 2).keeps(5, [2, 1]), "one token of another age breaks it"
    assert LagSchedule("bounded", 2).keeps(5, [0, 1, 2])
    assert not LagSchedule("bounded", 2).keeps(5, [3])
    assert not LagSchedule("bounded", 2).keeps(5, [-1]), "weights from the future"
    assert not LagSchedule("bounded", 4).keeps(2, [2]), "step 2 cannot meet weights two steps old"


def test_ages_count_the_steps_within_a_window():
    # Weight syncs every 4 steps: step 7 meets version 6; sync 1 is version 4.
    assert token_ages(7, 4, [(1, 10), (0, 3)]) == {2: 10, 6: 3}


class Loop:
    """The trainer's loop on a schedule, with a rollout that answers as late as it may: when sampled or drained."""

    def __init__(self, schedule, batch=3):
        self.schedule, self.batch = schedule, batch
        self.window, self.version, self.next_prompt = 0, 0, 0
        self.queue, self.trained = [], []  # [prompt, version or None], (prompt, age)
        self.started = False

    def submit(self, batches):
        for _ in range(batches * self.batch):
            self.queue.append([self.next_prompt, None])
            self.next_prompt += 1

    def generate(self):
        for entry in self.queue:
            entry[1] = self.version if entry[1] is None else entry[1]

    def global_step(self):
        """One window; yields where a process may be killed, and is told of a checkpoint by the caller."""
        if not self.started:
            self.submit(self.schedule.batches_ahead - len(self.queue) // self.batch)
            self.started = True
        self.submit(self.schedule.sync_every)
        for inner in range(self.schedule.sync_every):
            self.generate()
            taken, self.queue = self.queue[: self.batch], self.queue[self.batch :]
            step = self.window * self.schedule.sync_every + inner + 1
            self.trained += [(prompt, step - 1 - version) for prompt, version in taken]
            yield
        self.generate()
        self.window += 1
        saved = copy.deepcopy(self.__dict__) | {"started": False}
        yield saved
        self.version = self.window * self.schedule.sync_every

    def restore(self, saved):
        self.__dict__.update(copy.deepcopy(saved))
        self.version = self.window * self.schedule.sync_every


exact = st.builds(LagSchedule, st.sampled_from(["broadcast", "constant"]), st.integers(0, 9))


@given(exact, st.integers(1, 12))
def test_the_loop_keeps_every_exact_schedule(schedule, windows):
    loop = Loop(schedule)
    for _ in range(windows):
        for _ in loop.global_step():
            pass
    for index, (prompt, age) in enumerate(loop.trained):
        assert prompt == index, "in the order of submission, none twice, none skipped"
        assert age == schedule.age(index // loop.batch + 1)


@settings(max_examples=200)
@given(exact, st.integers(0, 2**32))
def test_kills_at_any_moment_lose_and_repeat_nothing(schedule, seed):
    loop, chance, kills = Loop(schedule), random.Random(seed), 0
    saved = copy.deepcopy(loop.__dict__)
    while loop.window < 8:
        for state in loop.global_step():
            if state and chance.random() < 0.5:
                saved = state
            if kills < 20 and chance.random() < 0.1:
                kills += 1
                loop.restore(saved)
                break
    expected = [(index, schedule.age(index // loop.batch + 1)) for index in range(len(loop.trained))]
    assert loop.trained == expected


def row(step, ages, **counts):
    return {"step": step, "tokens_by_age": ages} | dict.fromkeys(COUNTS + TIMES, 0) | counts


def test_the_verdict_holds_promise_and_outcome_side_by_side():
    rows = [row(1, {"0": 10}), row(2, {"1": 30}), row(3, {"2": 20}, drain_seconds=1.5), row(4, {"1": 40})]
    found = verdict(LagSchedule("broadcast", 2), rows)
    assert found["ok"]
    assert found["promised"] == found["realised"] == {"0": 0.1, "1": 0.7, "2": 0.2}
    assert found["mean_age"] == pytest.approx(1.1)
    assert found["drain_seconds"] == 1.5
    assert found["optimizer_steps"] == 4


def test_times_are_means_over_responses():
    rows = [row(1, {"0": 1}, responses=1, in_queue_s=4.0), row(2, {"1": 1}, responses=3, in_queue_s=8.0)]
    assert verdict(LagSchedule("broadcast", 1), rows)["in_queue_s"] == 7.0


def test_the_verdict_names_the_broken_steps():
    found = verdict(LagSchedule("constant", 1), [row(1, {"0": 10}), row(2, {"1": 9, "0": 1}), row(3, {"1": 10})])
    assert not found["ok"]
    assert found["broken_steps"] == [2]
    assert found["promised"] != found["realised"]


def test_the_right_histogram_in_the_wrong_order_is_not_ok():
    found = verdict(LagSchedule("broadcast", 2), [row(1, {"0": 5}), row(2, {"2": 5}), row(3, {"1": 5})])
    assert found["promised"] == found["realised"]
    assert found["broken_steps"] == [2, 3]
    assert not found["ok"]


@pytest.mark.parametrize("steps", [(1, 3), (2, 3), (1, 1, 2), (2, 1)])
def test_steps_that_are_missing_or_come_twice_prove_nothing(steps):
    assert not verdict(LagSchedule("bounded", 5), [row(step, {"0": 5}) for step in steps])["ok"]


def test_a_run_without_a_token_proves_nothing():
    assert not verdict(LagSchedule("broadcast", 1), [])["ok"]


def test_a_bounded_schedule_promises_its_bound():
    found = verdict(LagSchedule("bounded", 2), [row(1, {"0": 5}), row(2, {"0": 2, "1": 3})])
    assert found["promised"] == {"at_most": 2}
    assert found["ok"]


def test_shares_leave_empty_ages_out():
    assert shares({3: 1, 1: 3, 2: 0}) == {"1": 0.75, "3": 0.25}
    assert shares({}) == {}
