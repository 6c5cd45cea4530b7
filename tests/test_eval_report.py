"""The report and the terminal table: self-contained, escaped, bounded, and equal to the results."""

from __future__ import annotations

import random
import re
from collections import Counter
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval import charts, report, wording
from eval.report import clip, render, write_html
from eval.schema import POLICIES, STATUSES, Benchmark, Problem, Results, Sample, Status, Verdict
from eval.storage import Plan
from eval.summary import summarize
from eval.table import print_table

VOID = {"meta", "link", "input", "br", "img", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}</pre></style>[red]&amp;"


class Page(HTMLParser):
    """What a browser would make of the page: elements in order, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute of {tag} comes twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def cells(self) -> list[dict[str, str | None]]:
        return [
            found
            for tag, found in self.elements
            if tag in ("button", "span") and (found.get("class") or "")[:2] == "c "
        ]

    @property
    def text(self) -> str:
        """All visible text, with each run of white space as one space."""
        return " ".join(" ".join(text for place, text in self.texts if place != "style").split())


def verdict(status: Status, answer: str | None = None) -> Verdict:
    return Verdict(
        status=status, answer=answer, method="integer" if answer else "none", source="box" if answer else "none"
    )


def drawn(
    problems: int = 6, n: int = 4, name: str = "aime", response: str = "text", lost: int = 0, **plan: Any
) -> tuple[Plan, dict[tuple[str, int], Sample]]:
    """A run in which every status occurs; ``lost`` samples at the end are not there yet."""
    rng = random.Random(3)
    benchmark = Benchmark(
        name=name,
        problems=[
            Problem(id=f"{name}-{i}", statement=f"statement {i} of {name}", gold=str(100 + i)) for i in range(problems)
        ],
        lineage="a file",
        statements_sha256="5" * 64,
        answers_sha256="a" * 64,
    )
    samples = {}
    for index, problem in enumerate(benchmark.problems):
        for number in range(n):
            place = index * n + number
            status: Status = STATUSES[place] if place < len(STATUSES) else rng.choice(["correct", "wrong", "no_answer"])
            answer = {"correct": str(problem.gold), "wrong": "7"}.get(status)
            lenient = verdict("correct", str(problem.gold)) if status == "no_answer" else verdict(status, answer)
            failed = status == "request_error"
            samples[problem.id, number] = Sample(
                problem=problem.id,
                sample=number,
                seed=40_000 + place,
                gold=problem.gold,
                response=None if failed else f"{response} of sample {place}",
                finish_reason="error" if failed else "length" if status == "truncated" else "stop",
                error="server gone" if failed else "",
                response_tokens=None if failed else 50 + place,
                verdicts={"strict": verdict(status, answer), "lenient": lenient},
                grader="of the tests",
            )
    for missing in list(samples)[problems * n - lost :]:
        del samples[missing]
    given: dict[str, Any] = {"model": "org/model", "key": {"sampling": {"temperature": 1.0}}} | plan
    return Plan(n=n, benchmark=benchmark, **given), samples


def results_of(plan: Plan, samples: dict[tuple[str, int], Sample], **more: Any) -> Results:
    given: dict[str, Any] = {
        "grader": {"version": "1"},
        "timing": {"generate": 4000.0, "samples": 24, "tokens_per_second": 1234.5},
        "provenance": {"command": ["python", "-m", "eval", "model=a b"], "versions": {"torch": "2.13.0"}},
        "warnings": ["mind this"],
    }
    return summarize(plan, samples, **(given | more))


def printed(results: Results, width: int = 80) -> list[str]:
    stream = StringIO()
    print_table(results, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


@pytest.fixture(scope="module")
def run() -> tuple[Plan, dict[tuple[str, int], Sample], Results]:
    plan, samples = drawn()
    return plan, samples, results_of(plan, samples)


@pytest.fixture(scope="module")
def page(run) -> Page:
    plan, samples, results = run
    return Page(render(results, samples, plan.benchmark))


def test_page_is_whole_and_asks_for_nothing(page: Page) -> None:
    assert page.open == []
    policy = next(
        found["content"] for tag, found in page.elements if found.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script" not in policy
    for tag, found in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        for name, value in found.items():
            assert not name.startswith("on"), f"{tag} has {name}"
            assert name not in ("src", "srcset", "action", "xlink:href")
            assert name != "href" or (value or "").startswith("#")
    css = next(text for place, text in page.texts if place == "style")
    assert "url(" not in css
    assert "@import" not in css


def test_targets_exist_once(page: Page) -> None:
    ids = Counter(found["id"] for _, found in page.elements if found.get("id"))
    assert set(ids.values()) == {1}
    for _, found in page.elements:
        wanted = [
            found.get("popovertarget"),
            *(found.get("aria-labelledby") or "").split(),
            (found.get("href") or "")[1:],
        ]
        assert all(name in ids for name in wanted if name), found
    # The switches work by the ids that the style sheet names.
    css = next(text for place, text in page.texts if place == "style")
    switches = {found["id"] for tag, found in page.elements if tag == "input"}
    assert set(re.findall(r"#((?:show|only)-\w+):checked", css)) == switches - {"only-all"}


def test_every_problem_sample_and_status(page: Page, run) -> None:
    _, samples, results = run
    panels = [
        results.problems[i // results.n].statuses[p][i % results.n] for p in POLICIES for i in range(len(samples))
    ]
    cells = page.cells()
    assert [(cell["class"] or "").split()[1] for cell in cells] == panels
    assert {(cell["class"] or "").split()[1] for cell in cells} == set(STATUSES)
    for cell, ((problem, number), sample) in zip(cells, samples.items(), strict=False):
        tooltip = cell["title"] or ""
        assert f"{problem}, sample {number}: " in tooltip
        assert f"seed {sample.seed}" in tooltip
        assert sample.response_tokens is None or f"{sample.response_tokens} tokens" in tooltip
        answer = sample.verdicts["strict"].answer
        assert answer is None or f"answer {answer}" in tooltip
        assert ("cut at the limit" in tooltip) == (sample.finish_reason == "length")
        assert (sample.response or sample.error) in page.text
    for problem in results.problems:
        assert f"statement {problem.id[-1]} of" in page.text


def test_numbers_are_those_of_the_results(page: Page, run) -> None:
    _, _, results = run
    shown = [text for place, text in page.texts if place == "div" and re.fullmatch(r"[\d.]+%", text)]
    assert shown == [wording.percent(results.scores[policy].average) for policy in POLICIES]
    rows = "\n".join(text for _, text in page.texts)
    for policy in POLICIES:
        score = results.scores[policy]
        for interval in (score.sampling, score.population, score.bootstrap):
            assert interval is not None
            assert wording.span(interval.low, interval.high) in rows
            assert wording.method(interval) in rows
        assert wording.span(*score.bounds) in rows
        for k in wording.shown_ks(results):
            assert wording.percent(score.pass_at[k]) in rows
            assert wording.percent(score.majority_at[k]) in rows
    for text in (
        "mind this",
        "python -m eval 'model=a b'",
        "sampling.temperature",
        "versions.torch",
        "2.13.0",
        "1 h 07 min",
    ):
        assert text in rows
    assert all(covers.title in rows for covers in wording.INTERVALS.values())
    assert "request_error: server gone" in rows


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plan, samples = drawn(name=HOSTILE, response=HOSTILE, model=HOSTILE, key={HOSTILE: HOSTILE})
    grown = {place: sample.model_copy(update={"error": HOSTILE}) for place, sample in samples.items()}
    place, cell = next(
        (place, sample) for place, sample in grown.items() if sample.verdicts["strict"].status == "wrong"
    )
    grown[place] = cell.model_copy(update={"verdicts": dict.fromkeys(POLICIES, verdict("wrong", HOSTILE))})
    results = results_of(
        plan, grown, warnings=[HOSTILE], provenance={"command": [HOSTILE], HOSTILE: {HOSTILE: [HOSTILE]}}
    )
    written = write_html(results, tmp_path, grown, plan.benchmark).read_text(encoding="utf-8")
    page = Page(written)
    assert page.open == []
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert "<script" not in written
    for tag, text in (
        ("title", results.model),
        ("h1", results.model),
        ("li", HOSTILE),
        ("pre", f"{HOSTILE} of sample 0"),
    ):
        assert any(where == tag and text in found for where, found in page.texts), tag
    titles = [cell["title"] or "" for cell in page.cells()]
    assert all(title.startswith(HOSTILE) for title in titles)
    assert any(f"answer {HOSTILE[:50]}" in title for title in titles)


def test_unprintable_characters_are_replaced(tmp_path: Path) -> None:
    plan, samples = drawn(response="a\x00b\x1b[31mc\x85d\te")
    text = write_html(results_of(plan, samples), tmp_path, samples).read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
    assert "a\ufffdb\ufffd[31mc\ufffdd\te" in text
    # Half of a surrogate pair cannot be written at all; Results read from JSON have none, others may.
    warned = results_of(plan, samples).model_copy(update={"warnings": ["half \ud83d"]})
    assert "half \ufffd" in write_html(warned, tmp_path).read_text(encoding="utf-8")


def test_incomplete_run_says_so() -> None:
    plan, samples = drawn(lost=5)
    results = results_of(plan, samples)
    page = Page(render(results, samples))
    alerts = [text for place, text in page.texts if place == "strong" and "Incomplete" in text]
    assert alerts == ["Incomplete: 19 of 24 samples"]
    assert sum((cell["class"] or "") == "c missing" for cell in page.cells()) == 2 * 5
    assert any("INCOMPLETE: 19 of 24 samples" in line for line in printed(results))
    whole = results_of(*drawn())
    assert not any("Incomplete:" in text for _, text in Page(render(whole)).texts)
    assert not any("INCOMPLETE" in line for line in printed(whole))


def test_nothing_there_yet() -> None:
    results = results_of(*drawn(lost=24))
    page = Page(render(results))
    assert "Incomplete: 0 of 24 samples" in page.text
    assert "No sample counts yet." in page.text
    assert all(covers.absent in page.text for covers in wording.INTERVALS.values())
    assert any("INCOMPLETE: 0 of 24" in line for line in printed(results))


def test_without_samples_there_is_nothing_to_open(run) -> None:
    _, _, results = run
    page = Page(render(results))
    assert len(page.cells()) == 2 * 24
    assert not [found for _, found in page.elements if "popovertarget" in found or "popover" in found]


def test_clip_keeps_both_ends() -> None:
    text = "".join(map(chr, range(1000, 3000)))
    for limit in (1, 7, 400, 1999):
        cut = clip(text, limit)
        assert len(cut.head) + len(cut.tail) == limit
        assert text == cut.head + text[len(cut.head) : len(cut.head) + cut.left_out] + cut.tail
    assert clip(text, 2000) == report.Clipped(text)


def test_long_responses_are_shortened() -> None:
    plan, samples = drawn(response="<" * 300_000)
    text = render(results_of(plan, samples), samples)
    assert len(text) < 24 * 4 * report.RESPONSE_CHARACTERS + 150_000  # "<" takes four characters
    assert text.count("characters left out") == 23  # one request failed
    assert "of sample 23" in text


def test_page_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, samples = drawn(problems=25, n=8, response="\N{GREEK SMALL LETTER ALPHA}&" * 3000)
    results = results_of(plan, samples)
    bare = len(render(results).encode())
    sizes = {}
    for bound in (100_000, 600_000):
        monkeypatch.setattr(report, "TEXT_BYTES", bound)
        text = render(results, samples)
        shown = len(re.findall(r'<div popover id="r', text))
        sizes[bound] = shown
        left_out = re.search(r"The texts of (\d+) responses are left out", text)
        assert shown + int(left_out.group(1) if left_out else 0) == len(samples)
        assert len(text.encode()) < bare + 1.2 * bound
    assert 0 < sizes[100_000] < sizes[600_000] < 200


@pytest.mark.parametrize("top", [0, 1, 8, 64, 999, 32_768])
def test_histogram_counts_everything_once(top: int) -> None:
    rng = random.Random(top)
    values = [(rng.randint(0, top), rng.random() < 0.3) for _ in range(500)] + [(top, True)]
    drawing = charts.histogram(values)
    assert drawing is not None
    assert len(drawing.bars) <= 26
    for bar in drawing.bars:
        inside = [marked for value, marked in values if bar.low <= value < bar.high]
        assert (bar.plain, bar.marked) == (inside.count(False), inside.count(True))
        assert bar.x + bar.width <= charts.WIDTH
        assert bar.plain_height + bar.marked_height <= drawing.base - charts.TOP + 1e-9
    assert sum(bar.plain + bar.marked for bar in drawing.bars) == len(values)
    assert charts.histogram([]) is None


def test_cut_responses_are_marked(run) -> None:
    plan, samples, results = run
    marked = re.findall(r"(\d+) cut at the limit</title>", render(results, samples, plan.benchmark))
    assert sum(map(int, marked)) == sum(sample.finish_reason == "length" for sample in samples.values()) == 1


def test_table_fits_80_columns_and_holds_the_numbers(run) -> None:
    _, _, results = run
    lines = printed(results)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    strict, lenient = (results.scores[policy] for policy in POLICIES)
    row = next(line for line in lines if "avg@4" in line)
    assert row.split()[1:] == [wording.percent(strict.average), wording.percent(lenient.average)]
    for score in (strict, lenient):
        for interval in (score.sampling, score.population, score.bootstrap):
            assert interval is not None
            assert wording.span(interval.low, interval.high) in text
        assert wording.span(*score.bounds) in text
        assert all(wording.percent(score.pass_at[k]) in text for k in wording.shown_ks(results))
        assert all(wording.percent(score.majority_at[k]) in text for k in wording.shown_ks(results))
    for status in STATUSES:
        line = next(line for line in lines if line.strip().startswith(wording.STATUS_WORDS[status] + " "))
        assert re.findall(r"(\d+) \(", line) == [str(score.counts[status]) for score in (strict, lenient)]
    assert "warning: mind this" in text
    assert "1 sample: request_error: server gone" in text


def test_table_with_a_hostile_name_and_large_numbers() -> None:
    plan, samples = drawn(problems=250, n=4, model="[red]" + "/long" * 60)
    lines = printed(results_of(plan, samples, warnings=["[blink]not markup[/]"]))
    assert max(map(len, lines)) <= 80
    assert any("[red]/long" in line for line in lines)
    assert any("[blink]not markup[/]" in line for line in lines)
    assert any("1,000 of 1,000 samples" in line for line in lines)


def test_flat_settings() -> None:
    rows = wording.flat({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": {}, "g": "x"})
    assert rows == [("a.b.c", "1"), ("a.d", "1, 2"), ("e", "none"), ("f", "none"), ("g", "x")]
