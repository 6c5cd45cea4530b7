"""The reward function, alone and as verl's reward managers and validation metrics use it."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from sat_verl import reward
from sat_verl.grading import verify
from sat_verl.reward import compute_score

NUMBERS = {"score", "acc", "no_answer", "grader_error"}
STRINGS = {"pred", "verdict"}
# One call for each way through the function: data source, response, gold, expected acc, no_answer, grader_error, pred.
CALLS = [
    ("sat_verl/chain", "1350274", "4", 1, 0, 0, "4"),
    ("sat_verl/chain", "1350274 \n", 4, 1, 0, 0, "4"),
    ("sat_verl/chain", "1350247", "4", 0, 0, 0, "7"),
    ("sat_verl/chain", "", "4", 0, 1, 0, ""),
    ("sat_verl/chain", "4x", "4", 0, 1, 0, ""),
    ("sat_verl/chain", "٤", "4", 0, 1, 0, ""),
    ("sat_verl/chain", "14", "14", 0, 0, 1, ""),
    ("sat_verl/chain", "4", None, 0, 0, 1, ""),
    ("sat_verl/sort", " 12345\n", "12345", 1, 0, 0, "12345"),
    ("sat_verl/sort", "0012", "0012", 1, 0, 0, "0012"),
    ("sat_verl/sort", "12", "0012", 0, 0, 0, "12"),
    ("sat_verl/sort", "123456", "12345", 0, 0, 0, "123456"),
    ("sat_verl/sort", "  ", "12345", 0, 1, 0, ""),
    ("sat_verl/sort", "12345", "", 0, 0, 1, ""),
    ("sat_verl/arithmetic", "3+4 is \\boxed{7}", "7", 1, 0, 0, "7"),
    ("sat_verl/arithmetic", "7", "7", 0, 1, 0, ""),
    ("math_dapo", "Answer: 34", "34", 1, 0, 0, "34"),
    ("math_dapo", "Answer: 34", ["7", "34"], 1, 0, 0, "34"),
    ("aime", "\\boxed{033}", 33, 1, 0, 0, "33"),
    ("aime", "\\boxed{33}", "nan", 0, 0, 1, "33"),
    ("MATH", "\\boxed{0.5}", "\\frac{1}{2}", 1, 0, 0, "0.5"),
]


@pytest.mark.parametrize(("source", "response", "gold", "acc", "no_answer", "error", "pred"), CALLS)
def test_each_way_through_the_function(source, response, gold, acc, no_answer, error, pred):
    result = compute_score(source, response, gold)
    assert {key: result[key] for key in NUMBERS | {"pred"}} == {
        "score": acc, "acc": acc, "no_answer": no_answer, "grader_error": error, "pred": pred,
    }  # fmt: skip


def test_every_call_returns_the_same_keys_and_types():
    for source, response, gold, *_ in CALLS:
        result = compute_score(source, response, gold)
        assert set(result) == NUMBERS | STRINGS
        assert all(type(result[key]) is float for key in NUMBERS)
        assert all(type(result[key]) is str for key in STRINGS)


def test_options():
    assert compute_score("x", "\\boxed{1}", "1", correct_score=2, wrong_score=-1)["score"] == 2.0
    assert compute_score("x", "\\boxed{2}", "1", correct_score=2, wrong_score=-1)["score"] == -1.0
    assert compute_score("x", "The answer is 42 because of symmetry.", "42")["acc"] == 0.0
    assert compute_score("x", "The answer is 42 because of symmetry.", "42", policy="lenient")["acc"] == 1.0
    assert compute_score("x", "\\boxed{42}", "42", think_open=True)["verdict"] == "no_answer none think_unclosed"
    assert compute_score("x", "Answer: 42", "42", {"finish_reason": "length"})["verdict"] == "truncated none cut"
    assert compute_score("x", "Answer: 42", "42", {"finish_reason": None, "index": 3})["acc"] == 1.0


def test_a_cut_response_of_digits_has_no_answer():
    for source, gold in (("sat_verl/chain", "4"), ("sat_verl/sort", "134")):
        cut = compute_score(source, "134", gold, {"finish_reason": "length"})
        assert (cut["acc"], cut["no_answer"], cut["verdict"]) == (0.0, 1.0, "truncated none cut")
        assert compute_score(source, "134", gold, {"finish_reason": "stop"})["acc"] == 1.0


def test_mistakes_in_the_configuration_are_loud():
    with pytest.raises(TypeError, match="polcy"):
        compute_score("x", "\\boxed{1}", "1", polcy="lenient")
    with pytest.raises(ValueError, match="sat_verl/chian"):
        compute_score("sat_verl/chian", "1", "1")
    with pytest.raises(ValueError, match="policy"):
        compute_score("x", "\\boxed{1}", "1", policy="loose")
    assert compute_score("x", "\\boxed{1}", "1", reward_router_address="a:1", reward_model_tokenizer=None)["acc"] == 1.0


def test_deadline_reaches_the_worker_and_a_hang_is_visible(monkeypatch):
    asked = []
    monkeypatch.setattr(verify, "compare", lambda *args: asked.append(args) or verify.Verdict("error", "deadline"))
    result = compute_score("x", "\\boxed{x+1}", "\\frac12", deadline_s=0.7)
    assert (result["score"], result["acc"], result["grader_error"]) == (0.0, 0.0, 1.0)
    assert result["verdict"] == "grader_error math_verify deadline"
    assert asked[0][2] == 0.7


def test_long_answers_do_not_fill_the_batch():
    assert len(compute_score("x", f"\\boxed{{{'7' * 5000}}}", "7")["pred"]) == reward.MAX_PRED_CHARS


def test_grader_errors_are_logged_ever_more_rarely_and_without_the_response(monkeypatch, caplog):
    monkeypatch.setattr(reward, "_errors", 0)
    with caplog.at_level(logging.WARNING, logger=reward.__name__):
        for _ in range(100):
            compute_score("some/source", "secret response \\boxed{1}", "nan")
    assert len(caplog.records) == 7
    assert all("some/source" in r.getMessage() and "unusable_gold" in r.getMessage() for r in caplog.records)
    assert "secret" not in caplog.text


# --- with verl -----------------------------------------------------------------------------------------------------


class Tokenizer:
    """Ids 0-9 are digits, 10 is the end-of-sequence token."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(str(int(i)) if i < 10 else ("" if skip_special_tokens else "<eos>") for i in ids)


def load(**options):
    """The function as verl's workers load it."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    custom = {"path": "pkg://sat_verl.reward", "name": "compute_score", "reward_kwargs": options}
    return get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": custom}}))


def sample(response_ids, gold, padding=2):
    import torch
    from verl import DataProto

    prompt, response = [1, 2, 3], [*response_ids, *[0] * padding]
    mask = [1] * (len(prompt) + len(response_ids)) + [0] * padding
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([response]),
            "attention_mask": torch.tensor([mask]),
        },
        non_tensors={
            "data_source": np.array(["sat_verl/chain"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": gold}], dtype=object),
            "extra_info": np.array([{"index": 0}], dtype=object),
        },
    )


@pytest.mark.parametrize("manager", ["naive", "dapo", "gdpo"])
def test_every_reward_manager_hands_on_how_the_response_ended(manager):
    """What the recipes' agent loop worker puts into ``extra_info``."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    async def run(reason):
        config = OmegaConf.create({"reward": {}, "trainer": {"experiment_name": "x"}})
        made = get_reward_manager_cls(manager)(config=config, tokenizer=Tokenizer(), compute_score=load())
        made.loop = asyncio.get_running_loop()
        data = sample([5, 1, 7], "7")
        data.non_tensor_batch["extra_info"][0]["finish_reason"] = reason
        return (await made.run_single(data))["reward_extra_info"]

    cut, ended = asyncio.run(run("length")), asyncio.run(run("stop"))
    assert (cut["verdict"], cut["acc"]) == ("truncated none cut", 0.0)
    assert (ended["verdict"], ended["acc"]) == ("correct digits", 1.0)


def test_finish_reason_of_a_response():
    pytest.importorskip("verl")
    from sat_verl.rollout import finish_reason

    prompt, stops = [1, 2, 3], {10, 11}
    assert finish_reason(prompt, [5, 6, 7], stops, 4, None) == "stop"
    assert finish_reason(prompt, [5, 6, 7, 8], stops, 4, None) == "length"
    assert finish_reason(prompt, [5, 6, 7, 11], stops, 4, None) == "stop", "it ended with the last token allowed"
    assert finish_reason(prompt, [5, 6], stops, 4, 5) == "length", "the context is full"
    assert finish_reason(prompt, [], stops, 4, 3) == "length"


def test_stop_tokens_are_those_of_tokenizer_and_generation_config():
    pytest.importorskip("verl")
    from transformers import GenerationConfig

    from sat_verl.rollout import stop_tokens

    class Ends:
        eos_token_id = 10

    assert stop_tokens(Ends, GenerationConfig(eos_token_id=[11, 12])) == {10, 11, 12}
    assert stop_tokens(Ends, GenerationConfig(eos_token_id=11)) == {10, 11}
    assert stop_tokens(Ends, None) == {10}


@pytest.mark.parametrize("manager", ["naive", "dapo"])
@pytest.mark.parametrize("ending", [[10], []])
def test_verl_reward_managers_accept_the_result_and_hide_the_end_of_sequence(manager, ending):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    async def run(gold):
        made = get_reward_manager_cls(manager)(
            config=OmegaConf.create({"reward": {}}), tokenizer=Tokenizer(), compute_score=load(correct_score=2.0)
        )
        made.loop = asyncio.get_running_loop()
        return await made.run_single(sample([5, 1, 7, *ending], gold))

    right, wrong = asyncio.run(run("7")), asyncio.run(run("1"))
    assert (right["reward_score"], wrong["reward_score"]) == (2.0, 0.0)
    assert right["reward_extra_info"] == {
        "score": 2.0, "acc": 1.0, "no_answer": 0.0, "grader_error": 0.0, "pred": "7", "verdict": "correct digits",
    }  # fmt: skip
    assert right["reward_extra_info"].keys() == wrong["reward_extra_info"].keys()


def test_verl_validation_averages_the_numbers_and_votes_on_the_predictions():
    pytest.importorskip("verl")
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    answers = ["\\boxed{7}", "\\boxed{007}", "\\boxed{8}", "no idea"]
    results = [compute_score("aime", answer, "7") for answer in answers]
    infos = {key: [result[key] for result in results] for key in results[0]}
    metrics = process_validation_metrics(["aime"] * 4, ["p"] * 4, infos)["aime"]
    assert set(metrics) == NUMBERS
    assert metrics["acc"]["mean@4"] == 0.5
    assert metrics["no_answer"]["mean@4"] == 0.25
    assert metrics["grader_error"]["mean@4"] == 0.0
    # "7" and "007" are one vote, or the majority would be as good as random.
    assert metrics["acc"]["maj@4/mean"] > 0.6


@pytest.mark.slow
def test_formulas_are_graded_inside_a_ray_actor():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=1)(compute_score)
        golds = ["\\frac{1}{2}", "\\frac{1}{3}"]
        results = ray.get([task.remote("MATH", "\\boxed{0.5}", gold) for gold in golds], timeout=120)
        assert [result["verdict"] for result in results] == ["correct math_verify", "wrong math_verify"]
    finally:
        ray.shutdown()
