"""Runs of the evaluation made by hand: one letter a sample."""

from eval.schema import Benchmark, Problem, Sample, Verdict
from eval.storage import Plan

LETTERS = {
    "+": ("correct", "204"),
    "-": ("wrong", "17"),
    "0": ("no_answer", None),
    "T": ("truncated", None),
    "!": ("request_error", None),
    "?": ("grader_error", None),
}

KEY = {
    "model": {"weights_sha256": "aa"},
    "benchmark": {"name": "hand", "answers_sha256": "bb"},
    "prompt": {"template": "{statement}", "system": None},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "context": 4096},
    "seed": 0,
    "engine": {"name": "vllm", "version": "0.27.1"},
}


def plan(rows, n=None, key=KEY):
    """A plan with one problem for each row of letters."""
    problems = [Problem(id=f"p{i}", statement=f"What is {i}?", gold="204") for i in range(len(rows))]
    benchmark = Benchmark(
        name="hand", problems=problems, lineage="here", statements_sha256="aa", answers_sha256="bb",
        warnings=["of the benchmark"],
    )  # fmt: skip
    return Plan(model="models/x", benchmark=benchmark, n=n or max(map(len, rows)), key=key)


def sample(problem, number, letter, **changes):
    """One sample; both policies agree unless ``changes`` says otherwise."""
    status, answer = LETTERS[letter]
    verdict = Verdict(status=status, answer=answer, detail="too slow" if letter == "?" else "")
    values = {
        "problem": problem,
        "sample": number,
        "seed": 1000 + number,
        "gold": "204",
        "response": None if letter == "!" else f"{letter} text {number}",
        "finish_reason": {"!": "error", "T": "length"}.get(letter, "stop"),
        "error": "time limit" if letter == "!" else "",
        "response_tokens": None if letter == "!" else 10 + number,
        "verdicts": {"strict": verdict, "lenient": verdict},
        "grader": "of the tests",
    }
    return Sample(**(values | changes))


def samples(rows):
    """By problem and number; a blank is a sample that is not there yet."""
    return {
        (f"p{i}", number): sample(f"p{i}", number, letter)
        for i, row in enumerate(rows)
        for number, letter in enumerate(row)
        if letter != " "
    }


def save_random_model(folder):
    """An untrained tiny model: its responses are noise, long and all different. Returns ``folder``."""
    from recipes.models.architectures import build_model
    from recipes.models.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(4096)
    build_model("tiny", tokenizer, seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
