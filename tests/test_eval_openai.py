"""engine=openai against a small HTTP server that misbehaves on demand: no bad reply stops a run or passes for good."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eval.__main__ import main
from eval.engines.base import Sampling
from eval.engines.openai import OWNED, OpenAIEngine, check_extra_body
from eval.engines.openai import Endpoint as Asked
from eval.prompts import Request
from eval.storage import read_plan, read_results, read_samples
from recipes.errors import ConfigError

MODEL = "served"


def chat(content="1", finish_reason="stop", model=MODEL, usage=None, **message):
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    usage = {"prompt_tokens": 9, "completion_tokens": 1} if usage is None else usage
    return {"id": "x", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}


def completion(text="1", model=MODEL, **choice):
    return {"model": model, "choices": [{"index": 0, "finish_reason": "stop", "text": text, **choice}]}


class Endpoint:
    """A server whose replies a test sets; it keeps the requests that it got."""

    def __init__(self):
        self.models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]}
        self.reply = chat()
        self.status = 200
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def send(self, status, body):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.send(200, outer.models)

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(asked)
                self.send(outer.status, outer.reply(asked) if callable(outer.reply) else outer.reply)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def endpoint():
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose chat template opens the reasoning."""
    from recipes.models.architectures import build_model
    from recipes.models.tokenizer import build_tokenizer

    made = tmp_path_factory.mktemp("models") / "thinks"
    tokenizer = build_tokenizer(4096)
    tokenizer.chat_template += "{% if add_generation_prompt and not closed %}<think>\n{% endif %}"
    build_model("tiny", tokenizer, seed=3).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def evaluate(endpoint, tmp_path, capsys):
    """Runs the command on two problems with two samples each; gives its exit code, the run's folder and stderr."""

    def run(*words, model=MODEL, out="run"):
        fixed = [f"model={model}", "engine=openai", f"engine.base_url={endpoint.url}", f"engine.served_model={MODEL}",
                 "engine.retries=0", "benchmark=chain", "data.size=2", "n=2", f"cache_dir={tmp_path / 'cache'}",
                 f"out={tmp_path / out}"]  # fmt: skip
        code = main([*fixed, *words])
        return code, tmp_path / out, capsys.readouterr().err

    return run


def test_a_well_behaved_server(endpoint, evaluate):
    code, run, _ = evaluate()
    assert code == 0
    assert {sample.response for sample in read_samples(run).values()} == {"1"}
    assert {(sample.prompt_tokens, sample.response_tokens) for sample in read_samples(run).values()} == {(9, 1)}
    assert len(endpoint.requests) == 4
    assert len({asked["seed"] for asked in endpoint.requests}) == 4
    assert {asked["model"] for asked in endpoint.requests} == {MODEL}
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert all(asked.items() >= neutral.items() for asked in endpoint.requests), "not what the model's folder says"


def test_fields_that_openai_does_not_know_are_sent_only_to_servers_that_do(endpoint, evaluate):
    del endpoint.models["data"][0]["max_model_len"]
    assert evaluate()[0] == 0
    assert all(not {"top_k", "min_p", "repetition_penalty"} & {*asked} for asked in endpoint.requests)
    endpoint.requests.clear()
    assert evaluate("sampling.top_k=5", out="other")[0] == 0
    assert {asked["top_k"] for asked in endpoint.requests} == {5}


BAD = {
    "truncated JSON": (json.dumps(chat()).encode()[:-20], "not JSON"),
    "HTML": (b"<html>busy</html>", "not JSON: '<html>busy</html>'"),
    "no UTF-8": (b"\xff\xfe", "not JSON"),
    "nothing": (b"", "not JSON"),
    "nested": (b"[" * 100_000, "not JSON"),
    "null": (None, "the whole"),
    "a list": ([chat()], "the whole"),
    "no choices": (chat() | {"choices": []}, "choices"),
    "choices null": (chat() | {"choices": None}, "choices"),
    "message null": (chat() | {"choices": [{"finish_reason": "stop", "message": None}]}, "choices.0.message"),
    "content a list": (chat([{"type": "text", "text": "1"}]), "choices.0.message.content"),
    "content a number": (chat(1), "choices.0.message.content"),
    "reasoning a number": (chat("1", reasoning_content=5), "choices.0.message.reasoning_content"),
    "tokens a text": (chat(usage={"completion_tokens": "x"}), "usage.completion_tokens"),
    "tokens negative": (chat(usage={"completion_tokens": -1}), "usage.completion_tokens"),
    "usage a list": (chat(usage=[]) | {"usage": [1]}, "usage"),
    "another model": (chat(model="other-model"), "'other-model' answered, not 'served'"),
    "filtered": (chat(finish_reason="content_filter"), "the server ended it with 'content_filter'"),
    "a completion": (completion(), "choices.0.message"),
}


def ask(endpoint, api="chat", problems="ab"):
    """The engine's replies to one request a problem, by problem."""
    known = Asked(endpoint.url, api, MODEL, 1, 10.0, 0, "NO_KEY", {}, {})
    requests = [Request(name, 0, 7, ({"role": "user", "content": name},), (1, 2, 3), 16) for name in problems]
    return {reply.request.problem: reply for reply in OpenAIEngine(known, Sampling(1.0, 1.0, -1)).generate(requests)}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_an_error_with_its_reason_and_the_next_request_is_sent(endpoint, name):
    endpoint.reply = lambda asked: BAD[name][0] if asked["messages"][0]["content"] == "a" else chat()
    found = ask(endpoint)
    assert (found["a"].finish_reason, found["a"].response) == ("error", None)
    assert BAD[name][1] in found["a"].error
    assert (found["b"].finish_reason, found["b"].response) == ("stop", "1")


def test_a_run_with_bad_replies_ends_and_goes_on(endpoint, evaluate):
    endpoint.reply = lambda asked: chat() if len(endpoint.requests) > 2 else b"<html></html>"
    code, run, _ = evaluate("engine.concurrency=1")
    assert code == 1
    assert read_results(run).scores["strict"].counts["request_error"] == 2
    assert evaluate("engine.concurrency=1")[0] == 0, "the same command draws them again"
    assert read_results(run).scores["strict"].counts["request_error"] == 0
    assert len(endpoint.requests) == 6


def test_what_a_server_refuses_is_an_error(endpoint):
    endpoint.status, endpoint.reply = 400, {"error": {"message": "too long", "type": "BadRequestError"}}
    assert all("too long" in reply.error for reply in ask(endpoint).values())


def test_a_connection_that_breaks_off_is_an_error(endpoint):
    def reply(asked):
        raise ConnectionAbortedError

    endpoint.reply = reply
    endpoint.server.handle_error = lambda *args: None  # which would print the traceback
    assert all(reply.error.startswith("APIConnectionError") for reply in ask(endpoint).values())


def test_half_a_surrogate_pair_and_parts_of_reasoning_are_kept(endpoint):
    endpoint.reply = chat("half \ud83d", reasoning_content="thought")
    assert {reply.response for reply in ask(endpoint).values()} == {"<think>thought</think>half ?"}
    endpoint.reply = chat(None, reasoning="thought", finish_reason="length")
    found = ask(endpoint)["a"]
    assert (found.response, found.finish_reason) == ("<think>thought", "length")
    endpoint.reply = chat(None)
    assert ask(endpoint)["a"].response == ""


@pytest.mark.parametrize("models", [b"<html></html>", b'{"data": [', {"data": None}, {"data": [{"name": 1}]}, None])
def test_models_that_are_no_list_are_refused(endpoint, evaluate, models):
    endpoint.models = models
    code, _, printed = evaluate()
    assert code == 2
    assert "its /models is no list of models" in printed
    assert not endpoint.requests


def test_an_unknown_model_is_refused(endpoint, evaluate):
    endpoint.models = {"data": [{"id": "a"}, {"id": "b"}]}
    code, _, printed = evaluate()
    assert code == 2
    assert "serves a, b" in printed


def test_completions_send_tokens_and_read_text_even_beside_a_message(endpoint):
    endpoint.reply = completion("1", message={"content": "other"})
    assert ask(endpoint, "completions")["a"].response == "1"
    assert endpoint.requests[0]["prompt"] == [1, 2, 3]
    endpoint.reply = chat()
    assert "choices.0.text" in ask(endpoint, "completions")["a"].error


# --- what is asked


def test_further_fields_may_not_override_settings(endpoint, evaluate):
    for field, instead in OWNED.items():
        with pytest.raises(ConfigError) as caught:
            check_extra_body({"min_p": 0.1, field: 1})
        assert (caught.value.setting, caught.value.fix) == (f"engine.extra_body.{field}", instead)
    code, _, printed = evaluate("engine.extra_body={temperature: 0.0}")
    assert code == 2
    assert "engine.extra_body.temperature=0.0" in printed
    assert "set sampling.temperature" in printed
    assert not endpoint.requests


def test_further_fields_are_sent_and_are_part_of_the_sampling(endpoint, evaluate):
    assert evaluate("engine.extra_body={min_p: 0.1}", "sampling.top_k=5")[0] == 0
    assert {(asked["min_p"], asked["top_k"]) for asked in endpoint.requests} == {(0.1, 5)}
    code, run, printed = evaluate("engine.extra_body={min_p: 0.2}", "sampling.top_k=5")
    assert code == 2
    assert "sampling.extra_body.min_p: 0.1, now 0.2" in printed
    assert read_plan(run).key["sampling"]["extra_body"] == {"min_p": 0.1}
    assert "extra_body" not in read_plan(run).key["engine"]


def test_the_weights_of_an_endpoint_are_never_called_seen(evaluate, folder):
    for name, model in (("named", MODEL), ("folder", folder)):
        code, run, _ = evaluate(model=model, out=name)
        assert code == 0
        assert read_plan(run).key["model"]["weights"] == "as named by the user, not seen"
        assert read_plan(run).key["model"]["served_model"] == MODEL
        assert any("cannot be digested" in warning for warning in read_results(run).warnings)


@pytest.mark.parametrize("option", ["{}", "{closed: true}"])
def test_a_folder_says_whether_prompts_end_in_the_reasoning(endpoint, evaluate, folder, option):
    endpoint.reply = chat(r"so far \boxed{1}", finish_reason="length")
    code, run, _ = evaluate(f"prompt.chat_template_options={option}", model=folder)
    assert code == 0
    plan, opened = read_plan(run), option == "{}"
    assert plan.think_open is opened
    assert "messages" in endpoint.requests[0]
    assert endpoint.requests[0].get("chat_template_kwargs") == (None if opened else {"closed": True})
    assert plan.key["prompt"].get("chat_template_options") == (None if opened else {"closed": True})
    assert plan.key["prompt"]["chat"] == "by the server"


def test_an_unfinished_reasoning_has_no_answer_under_strict(endpoint, evaluate, folder, tmp_path):
    problem = tmp_path / "one.jsonl"
    problem.write_text(json.dumps({"problem": "One?", "answer": "1"}) + "\n")
    words = [f"benchmark={problem}", "data.size=null"]
    endpoint.reply = chat(r"I try \boxed{1} first, and then")
    for name, model, correct in (("folder", folder, 0), ("named", MODEL, 2)):
        # Without a folder nobody knows that the prompt opened the reasoning, which is what the warning is about.
        code, run, _ = evaluate(
            f"benchmark={problem}", "data.size=null", "sampling.max_tokens=99", model=model, out=name
        )
        results = read_results(run)
        assert code == 0
        assert results.scores["strict"].counts["correct"] == correct
        assert any("inside <think> is not known" in warning for warning in results.warnings) is (name == "named")
    code, run, _ = evaluate(*words, "prompt.think_open=true", out="said")
    assert read_results(run).scores["strict"].counts["correct"] == 0
    assert not any("is not known" in warning for warning in read_results(run).warnings)


def test_plain_prompts_need_the_other_interface(endpoint, evaluate, folder):
    code, _, printed = evaluate("prompt.chat=false", model=folder)
    assert code == 2
    assert "engine.api=completions" in printed
    endpoint.reply = completion()
    assert evaluate("prompt.chat=false", "engine.api=completions", model=folder)[0] == 0


def test_the_limit_is_what_the_context_leaves(endpoint, evaluate, folder):
    endpoint.models["data"][0]["max_model_len"] = 64
    wanted = "sampling.max_tokens=64"
    assert evaluate(wanted, model=folder)[0] == 0
    (limit,) = {asked["max_tokens"] for asked in endpoint.requests}
    endpoint.requests.clear()
    endpoint.reply = completion()
    assert evaluate(wanted, "engine.api=completions", model=folder, out="completions")[0] == 0
    assert {asked["max_tokens"] + len(asked["prompt"]) for asked in endpoint.requests} == {64}
    assert {asked["max_tokens"] for asked in endpoint.requests} == {limit}
    endpoint.requests.clear()
    endpoint.reply = chat()
    _, run, _ = evaluate(wanted, out="named")
    # Only the server knows how long the prompt is.
    assert {asked.get("max_tokens") for asked in endpoint.requests} == {None}
    assert read_plan(run).key["engine"]["context"] == 64


def test_the_warning_of_the_context_names_no_length_that_is_not_known(evaluate, folder):
    for name, model, text in (("named", MODEL, "the prompts, which the server renders,"),
                              ("folder", folder, "the longest prompt (")):  # fmt: skip
        _, run, _ = evaluate("engine.context=4096", "sampling.max_tokens=4096", model=model, out=name)
        (warning,) = [one for one in read_results(run).warnings if "responses are cut there" in one]
        assert text in warning
        assert "(0 tokens)" not in warning
