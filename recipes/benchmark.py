"""``benchmark=NAME``: a run validates on a benchmark of ``python -m eval``, with its prompts and its grader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from recipes.errors import ConfigError
from recipes.tasks.artifacts import MANIFEST, key_digest, publish, read_intact

if TYPE_CHECKING:
    from eval.schema import Benchmark, Problem

# Part of the cache key: raise it when a change here changes the rows.
ROWS_VERSION = 1


def load(cfg: DictConfig) -> Benchmark:
    """The benchmark that a config names, through the loader of ``python -m eval``.

    Raises:
        ConfigError: there is none, it cannot be had, or it has a fault.
    """
    from eval import benchmarks

    settings = OmegaConf.to_container(cfg.benchmark_data)
    assert isinstance(settings, dict)
    try:
        return benchmarks.load(cfg.benchmark, **{str(key): value for key, value in settings.items()})
    except ConfigError as error:
        if error.setting.partition(".")[0] not in settings:
            raise
        raise ConfigError(f"benchmark_data.{error.setting}", error.value, error.problem, error.fix) from None


def known(cfg: DictConfig) -> None:
    """The benchmark that a config names is one, as far as its name says; nothing is loaded.

    Raises:
        ConfigError: it is none.
    """
    from eval import benchmarks

    benchmarks.check_name(cfg.benchmark)


def rows(problems: Sequence[Problem], prompt: str, split: str) -> list[dict[str, Any]]:
    """Problems in verl's schema; what the user turn says is what ``python -m eval`` asks.

    Args:
        problems: in their order.
        prompt: template of the user turn, with ``{statement}``.
        split: ``train`` or ``test``.
    """
    from eval.benchmarks.columns import ground_truth
    from eval.prompts import conversation

    return [
        {
            "data_source": problem.data_source,
            "prompt": conversation(problem.statement, prompt, None),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ground_truth(problem.gold)},
            "extra_info": {"split": split, "index": index, "problem": problem.id},
        }
        for index, problem in enumerate(problems)
    ]


def write(benchmark: Benchmark, out_dir: Path) -> Path:
    """Write a benchmark as a parquet file, unless it is there already.

    Args:
        benchmark: the problems.
        out_dir: where data sets are kept, each in a folder that is named by what it holds.

    Returns:
        The file. The manifest beside it says where the problems come from.
    """
    import pandas as pd

    key = {
        "benchmark": benchmark.name,
        "statements_sha256": benchmark.statements_sha256,
        "answers_sha256": benchmark.answers_sha256,
        "prompt": benchmark.prompt,
        "data_sources": sorted({problem.data_source for problem in benchmark.problems}),
        "version": ROWS_VERSION,
    }
    origin = {"lineage": benchmark.lineage, "warnings": benchmark.warnings}
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in benchmark.name)
    folder = out_dir / f"benchmark-{name}-{key_digest(key | origin)}"

    def fill(staged: Path) -> dict[str, Any]:
        pd.DataFrame(rows(benchmark.problems, benchmark.prompt, "test")).to_parquet(
            staged / "test.parquet", index=False
        )
        return origin

    if read_intact(folder, key) is None:
        publish(folder, key, fill, owned=True)
    return folder / "test.parquet"


def check_lengths(benchmark: Benchmark, cfg: DictConfig) -> None:
    """Refuse prompts that are longer than ``data.max_prompt_length``: verl would cut off where they begin.

    Raises:
        ConfigError: the longest prompt does not fit.
    """
    from transformers import AutoTokenizer

    from eval.prompts import Renderer, conversation

    model = cfg.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(
        model.get("tokenizer_path") or model.path, trust_remote_code=model.trust_remote_code
    )
    renderer = Renderer(tokenizer, True, dict(cfg.data.get("apply_chat_template_kwargs") or {}))
    longest = max(
        len(renderer.token_ids(renderer.text(conversation(problem.statement, benchmark.prompt, None))))
        for problem in benchmark.problems
    )
    if longest > cfg.data.max_prompt_length:
        raise ConfigError(
            "data.max_prompt_length", cfg.data.max_prompt_length,
            f"the longest prompt of benchmark={cfg.benchmark} has {longest} tokens", f"set it to {longest} or more",
        )  # fmt: skip


def origin(val_file: str | Path) -> dict[str, Any]:
    """What is known of the benchmark in a file of :func:`write`: name, digests, lineage and warnings."""
    manifest = json.loads(Path(val_file).with_name(MANIFEST).read_text())
    kept = ("benchmark", "statements_sha256", "answers_sha256", "prompt")
    return {name: manifest["key"][name] for name in kept} | {name: manifest[name] for name in ("lineage", "warnings")}


def score(row: dict[str, Any], samples: int) -> dict[str, Any] | None:
    """avg@n of one validation, with the interval over a population of such problems, as ``python -m eval`` has it.

    Args:
        row: a line of ``validation.jsonl``.
        samples: responses per problem that were asked for.

    Returns:
        ``rate``, ``problems``, ``samples``, ``not_counted`` (responses that were never drawn or that nobody could
        grade) and, of two problems or more, the fields of the interval. None if the line has no counts.
    """
    from eval import statistics

    counts = row.get("problems")
    if not counts:
        return None
    rate = statistics.average(counts["correct"], counts["counting"])
    if rate is None:
        return None
    found = {"rate": rate, "problems": len(counts["counting"]), "samples": samples}
    found["not_counted"] = found["problems"] * samples - sum(counts["counting"])
    interval = statistics.population_interval(counts["correct"], counts["counting"])
    return found | (interval.model_dump() if interval else {})
