"""The tiny models: a tokenizer without loss, weights that trainer and rollout agree on, a reproducible warm start."""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.errors import ConfigError
from recipes.models import build_model_at, ensure_model, read_manifest, store, warm_start
from recipes.models.__main__ import main
from recipes.models.architectures import ARCHITECTURES, MAX_POSITIONS, build_model
from recipes.models.sampling import encode_prompts, sample, success_rate
from recipes.models.tokenizer import ASSISTANT, CHARACTERS, EOS, PAD, SYSTEM, TOOL, UNKNOWN, USER, build_tokenizer
from recipes.models.warm_start import IGNORED, WarmStart
from recipes.tasks import TASKS, draw, get_task

PRINTABLE = "".join(chr(code) for code in range(32, 127))
NAMES = list(ARCHITECTURES)
# Enough to change every weight and far too little to learn anything.
SHORT = WarmStart(batch_size=8, max_steps=4, eval_every=2, eval_samples=16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """A second thread only waits for the first on models this small, for a long time when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(MAX_POSITIONS)


# Tokenizer


def test_printable_ascii_takes_one_token_a_character_and_comes_back(tokenizer):
    ids = tokenizer(PRINTABLE + "\n\t", add_special_tokens=False)["input_ids"]
    assert len(ids) == len(set(ids)) == 97
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == PRINTABLE + "\n\t"
    assert set(string.digits + string.ascii_letters + string.punctuation) < set(CHARACTERS)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=CHARACTERS, max_size=60))
def test_text_comes_back_unchanged(tokenizer, text):
    # "<|im_end|>" in a text is the token of that name, as in every chat tokenizer; it comes back all the same.
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=False) == text


def test_other_characters_are_unknown_one_by_one(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("é7日")["input_ids"]) == [UNKNOWN, "7", UNKNOWN]


def test_the_vocabulary_has_no_gaps(tokenizer):
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert len(tokenizer) % 8 == 0  # so that tensor parallelism can split it


def test_end_of_turn_and_padding_are_two_tokens(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id != tokenizer.unk_token_id


def test_chat_template(tokenizer):
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "3"},
        {"role": "tool", "content": "ok"},
        {"role": "critic", "content": "no"},
    ]
    text = f"{SYSTEM}Add.{EOS}{USER}12{EOS}{ASSISTANT}3{EOS}{TOOL}ok{EOS}{USER}no{EOS}"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text + ASSISTANT


def test_a_sampled_turn_is_what_the_template_would_write(tokenizer):
    user, assistant = {"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([user, assistant])["input_ids"]
    assert prompt + tokenizer("3")["input_ids"] + [tokenizer.eos_token_id] == whole


def test_prompts_are_encoded_as_the_rollout_does(tokenizer):
    problems = draw(get_task("arithmetic"), "train", 3, seed=0)
    for row, problem in zip(encode_prompts(tokenizer, problems).tolist(), problems, strict=True):
        chat = [{"role": "user", "content": problem.prompt}]
        assert row == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("name", "difficulty"),
    [
        ("chain", {"digits": 18}),
        ("sort", {"digits": 18}),
        *(("arithmetic", {"digits": 18 // n, "terms": n}) for n in (2, 9)),
    ],
)
def test_the_hardest_problems_fit(tokenizer, name, difficulty):
    task = get_task(name, difficulty)
    prompt = encode_prompts(tokenizer, [task.problem(task.num_problems - 1)]).shape[1]
    assert prompt + task.max_response_chars + 1 <= MAX_POSITIONS


# Architectures


@pytest.mark.parametrize(("name", "low", "high"), [("tiny", 200_000, 1_000_000), ("tiny_moe", 200_000, 1_000_000)])
def test_size_and_vocabulary(tokenizer, name, low, high):
    model = build_model(name, tokenizer, seed=0)
    assert low < sum(parameter.numel() for parameter in model.parameters()) < high
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert model.config.head_dim in (32, 64, 96, 128)  # what vLLM's CPU attention can do
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # Megatron trains the padding row too: it must start like any other.
    embedding = model.get_input_embeddings()
    assert embedding.padding_idx is None
    assert embedding.weight.norm(dim=1).min() > 0.1


def test_the_moe_model_has_eight_experts_two_at_a_time_and_no_auxiliary_loss(tokenizer):
    model = build_model("tiny_moe", tokenizer, seed=0)
    config = model.config
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    ids = encode_prompts(tokenizer, draw(get_task("chain"), "train", 4, seed=0))
    out = model(input_ids=ids, labels=ids)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_fixes_the_weights_and_nothing_else(tokenizer, name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (build_model(name, tokenizer, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tiny_meo.*tiny, tiny_moe"):
        ensure_model("tiny_meo", "chain", cache_dir=tmp_path)


# Sampling


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_equals_decoding_from_scratch(tokenizer, name):
    model = build_model(name, tokenizer, seed=0).eval()
    ids = encode_prompts(tokenizer, draw(get_task("chain"), "train", 8, seed=0))
    greedy = sample(model, ids, 6, generator=None)
    for column in range(greedy.shape[1]):
        with torch.no_grad():
            expected = model(input_ids=torch.cat([ids, greedy[:, :column]], dim=1)).logits[:, -1].argmax(-1)
        ended = (greedy[:, :column] == tokenizer.eos_token_id).any(dim=1)
        assert torch.equal(greedy[~ended, column], expected[~ended])


def test_samples_follow_the_generator_and_stop_at_the_end_of_turn(tokenizer):
    model = build_model("tiny", tokenizer, seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0  # uniform: every token, the end of the turn included
    ids = encode_prompts(tokenizer, draw(get_task("chain"), "train", 200, seed=0))
    first, again = (sample(model, ids, 40, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, sample(model, ids, 40, torch.Generator().manual_seed(2)))
    ended = (first == tokenizer.eos_token_id).cumsum(dim=1) > 0
    assert 0.1 < ended[:, -1].float().mean() < 0.6  # 1 - (103/104) ** 40 = 0.32
    assert (first[ended] == tokenizer.eos_token_id).all()


def test_success_rate_counts_right_answers(tokenizer):
    class Oracle:
        """Ends the turn at once for problems it fails, and otherwise writes the last digit."""

        def __init__(self, answers):
            self.config = build_model("tiny", tokenizer, 0).config
            self.training, self.answers, self.step = False, answers, 0

        def eval(self):
            return self

        def train(self, mode):
            assert mode is False

        def __call__(self, input_ids, **_):
            logits = torch.full((len(input_ids), 1, len(tokenizer)), -1e9)
            for row, answer in enumerate(self.answers):
                token = answer if self.step == 0 and answer is not None else tokenizer.eos_token_id
                logits[row, 0, token] = 0.0
            self.step += 1
            return type("Output", (), {"logits": logits})

    task = get_task("chain")
    problems = draw(task, "test", 8, seed=0)
    right = [tokenizer.convert_tokens_to_ids(problem.ground_truth) for problem in problems]
    generator = torch.Generator().manual_seed(0)
    assert success_rate(Oracle(right), tokenizer, task, problems, generator) == 1.0
    assert success_rate(Oracle([*right[:2], *[None] * 6]), tokenizer, task, problems, generator) == 0.25
    with pytest.raises(ValueError, match="at least one problem"):
        success_rate(Oracle([]), tokenizer, task, [], generator)


# Warm start


@pytest.mark.parametrize("name", TASKS)
def test_only_the_response_is_trained_on(tokenizer, name):
    task = get_task(name)
    inputs, labels = next(warm_start._batches(tokenizer, task, replace(SHORT, ceiling=1.0), seed=0))
    for row, problem in zip(range(len(inputs)), draw(task, "train", len(inputs), seed=0), strict=True):
        trained = labels[row] != IGNORED
        response = task.worked_response(problem, random.Random(0), 0.0)
        assert tokenizer.decode(inputs[row][trained]) == response + EOS
        assert torch.equal(inputs[row][trained], labels[row][trained])
        prompt = tokenizer.decode(inputs[row][: int(trained.int().argmax())])
        assert prompt == f"{USER}{problem.prompt}{EOS}{ASSISTANT}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target": 0.0}, "target=0.0"),
        ({"target": 0.5, "ceiling": 0.5}, "target=0.5.*ceiling of 0.5"),
        ({"ceiling": 1.1}, "ceiling of 1.1"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"eval_samples": 0}, "eval_samples=0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        WarmStart(**wrong)


def test_training_stops_at_the_target(tokenizer, monkeypatch):
    measured = iter([0.1, 0.3, 0.5, 0.5, 0.9])  # three evaluations, then the fresh sample and greedy decoding
    monkeypatch.setattr(warm_start, "success_rate", lambda *_: next(measured))
    seen = []
    model = build_model("tiny", tokenizer, 0)
    chosen = replace(SHORT, target=0.4, ceiling=0.6, max_steps=100)
    result = warm_start.train(model, tokenizer, get_task("chain"), chosen, 0, seen.append)
    assert result["reached_target"] is True
    assert (result["steps"], result["success_sampled"], result["success_greedy"]) == (6, 0.5, 0.9)
    assert [(at.step, at.success) for at in seen] == [(2, 0.1), (4, 0.3), (6, 0.5)]


def test_success_is_reported_on_problems_that_did_not_stop_the_training():
    task = get_task("chain")
    stopping = {problem.number for problem in warm_start._held_out(task, 512, seed=0)}
    reported = {problem.number for problem in warm_start._held_out(task, 1024, seed=1)}
    trained = {problem.number for problem in draw(task, "train", 8192, seed=0)}
    assert not trained & (stopping | reported)
    assert len(reported - stopping) > 950


def test_the_same_seed_builds_the_same_bytes_in_another_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from recipes.models import build_model_at\n"
        "from recipes.models.warm_start import WarmStart\n"
        "settings = WarmStart(batch_size=8, max_steps=4, eval_every=2, eval_samples=16)\n"
        "for name in sys.argv[2:]: build_model_at(Path(sys.argv[1]) / name, name, 'chain', seed=3, settings=settings)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code, tmp_path, *NAMES], env=environment, check=True)
    for name in NAMES:
        torch.manual_seed(11)  # whatever the caller did with torch's generator before
        here = build_model_at(tmp_path / "here", name, "chain", seed=3, settings=SHORT)
        assert here["files"] == read_manifest(tmp_path / name)["files"]
        other = build_model_at(tmp_path / "here", name, "chain", seed=4, settings=SHORT)
        assert other["files"]["model.safetensors"] != here["files"]["model.safetensors"]


# Store


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_loads_as_it_was(tmp_path, name):
    folder = ensure_model(name, "sort", {"digits": 4}, seed=1, cache_dir=tmp_path, settings=SHORT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert (model.generation_config.temperature, model.generation_config.top_k) == (1.0, 0)
    assert tokenizer.decode(tokenizer(PRINTABLE)["input_ids"]) == PRINTABLE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], add_generation_prompt=True, tokenize=False)
    manifest = read_manifest(folder)
    assert manifest["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert manifest["measured"]["steps"] == 4
    assert manifest["measured"]["reached_target"] is False
    assert manifest["key"]["difficulty"] == {"digits": 4}
    assert all((folder / file).stat().st_mode & 0o044 == 0o044 for file in manifest["files"])


def test_a_model_is_built_once_and_again_when_damaged(tmp_path, monkeypatch):
    builds = []
    train = store.train
    monkeypatch.setattr(store, "train", lambda *args: builds.append(1) or train(*args))
    folder = ensure_model("tiny", "chain", cache_dir=tmp_path, settings=SHORT)
    assert ensure_model("tiny", "chain", {"digits": 6}, cache_dir=tmp_path, settings=SHORT) == folder
    assert len(builds) == 1
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert ensure_model("tiny", "chain", cache_dir=tmp_path, settings=SHORT) == folder
    assert len(builds) == 2
    assert weights.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [folder]


def test_everything_that_matters_is_in_the_key(monkeypatch):
    def key(name="tiny", task="chain", difficulty=None, seed=0, settings=SHORT):
        return json.dumps(store.model_key(name, get_task(task, difficulty), seed, settings), sort_keys=True)

    keys = [
        key(),
        key(name="tiny_moe"),
        key(task="sort"),
        key(difficulty={"digits": 5}),
        key(seed=1),
        key(settings=replace(SHORT, batch_size=9)),
    ]
    monkeypatch.setattr(store, "MODEL_VERSION", store.MODEL_VERSION + 1)
    keys.append(key())
    monkeypatch.setitem(ARCHITECTURES, "tiny", {**ARCHITECTURES["tiny"], "hidden_size": 128})
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_files_of_others_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "train", lambda *_: pytest.fail("trained first"))
    (tmp_path / "model.safetensors").write_text("not ours")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        build_model_at(tmp_path, "tiny", "chain", settings=SHORT)


def test_a_killed_build_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "recipes.models", "build", "name=tiny", "task=chain", f"cache={tmp_path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as build:
        for line in build.stderr:
            if "step 10" in line:  # the first evaluation
                break
        build.kill()
    assert build.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


# Command line


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "default_warm_start", lambda task: SHORT)
    words = ["build", "name=tiny", "task=chain", "seed=2", "digits=3", f"out={tmp_path / 'model'}"]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{tmp_path / 'model'}\n210368 parameters, 4 steps")
    assert "tiny chain: step 2 (at most 4)" in captured.err
    assert "not reached" in captured.err
    assert read_manifest(tmp_path / "model")["key"]["seed"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "task=chain"], "name: it is missing"),
        (["build", "name=tiny", "task=chian"], "task=chian"),
        (["build", "name=tony", "task=chain"], "model=tony"),
        (["build", "name=tiny", "task=chain", "colour=3"], "task.difficulty.colour=3"),
        ([], "usage"),
    ],
)
def test_command_line_refuses_what_it_does_not_know(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
# Every task and every architecture once; those of chain are the ones that the end-to-end tests have built.
@pytest.mark.parametrize(
    ("name", "task"), [("tiny", "chain"), ("tiny_moe", "chain"), ("tiny", "sort"), ("tiny", "arithmetic")]
)
def test_the_default_build_leaves_room_to_learn(tmp_path, name, task):
    shared = Path(__file__).resolve().parent.parent / ".cache" / "models"
    folder = ensure_model(name, task, cache_dir=shared if task == "chain" else tmp_path)
    measured = read_manifest(folder)["measured"]
    assert measured["reached_target"]
    assert 0.3 < measured["success_sampled"] < 0.5
