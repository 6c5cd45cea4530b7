"""From settings to what is to be sampled: the plan with its key, the requests, and the engine that answers them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from eval import models
from eval.engines.base import Engine, Sampling
from eval.prompts import Renderer, Request, check_template, conversation, requests, thinks
from eval.schema import Benchmark
from eval.storage import Plan
from recipes.errors import ConfigError


@dataclass(frozen=True)
class Prepared:
    """Everything but the engine, which takes time and memory: ``start`` makes it."""

    plan: Plan
    requests: list[Request]
    warnings: list[str]
    start: Callable[[], Engine]


def prepare(cfg: DictConfig, benchmark: Benchmark) -> Prepared:
    """Find the model, render the prompts, and settle the key.

    Args:
        cfg: of :func:`eval.settings.compose`.
        benchmark: what to ask.

    Raises:
        ConfigError: the model, the engine and the settings do not go together.
    """
    _check_endpoint(cfg)
    cache = Path(cfg.cache_dir)
    engine, sampling = cfg.engine, Sampling(cfg.sampling.temperature, cfg.sampling.top_p, cfg.sampling.top_k)
    folder = _folder(cfg, cache)
    renderer = _renderer(cfg, folder) if folder is not None else None
    context = engine.get("context") or (models.context_length(folder) if folder is not None else None)
    template = cfg.prompt.template or benchmark.prompt
    max_tokens = cfg.sampling.max_tokens or benchmark.max_tokens
    asked = requests(
        benchmark, template=template, system=cfg.prompt.system, n=cfg.n, seed=cfg.seed,
        max_tokens=max_tokens, context=context, renderer=renderer,
    )  # fmt: skip
    rendered = _rendered(benchmark, template, cfg.prompt.system, renderer)
    think_open = cfg.prompt.think_open if cfg.prompt.think_open is not None else thinks(rendered)
    key = {
        "model": {**(models.identity(folder, cache) if folder is not None else {}), **_endpoint_model(cfg)},
        "benchmark": {
            "name": benchmark.name,
            "problems": len(benchmark.problems),
            "graded_as": sorted({problem.data_source for problem in benchmark.problems}),
            "statements_sha256": benchmark.statements_sha256,
            "answers_sha256": benchmark.answers_sha256,
        },
        "prompt": {
            "template": template,
            "system": cfg.prompt.system,
            **(_server_rendering(cfg) if renderer is None or _server_renders(cfg) else renderer.identity()),
            "think_open": think_open,
        },
        "sampling": {**cfg.sampling, "max_tokens": max_tokens, "context": context, **_extra_body(cfg)},
        "seed": cfg.seed,
    }
    longest = max(len(request.token_ids) for request in asked)
    length = min(context, longest + max_tokens) if context else None
    start, identity = _engine(cfg, folder, renderer, sampling, length)
    key["engine"] = identity
    plan = Plan(
        model=cfg.model, benchmark=benchmark, n=cfg.n, key=key, think_open=think_open,
        deadline_s=cfg.grading.deadline_s,
    )  # fmt: skip
    warnings = [*benchmark.warnings, *_warnings(cfg, max_tokens, context, longest, folder)]
    if renderer is not None and renderer.lacks_template and not _server_renders(cfg):
        warnings.append(
            "the tokenizer has no chat template: prompts are plain text, which a chat model was not trained on "
            "(for a base model, prompt.chat=false says that it is meant)"
        )
    return Prepared(plan, asked, warnings, start)


def _folder(cfg: DictConfig, cache: Path) -> Path | None:
    """The model's folder; a server's chat interface can do without."""
    if _server_renders(cfg) and not Path(cfg.model).exists():
        return None
    return models.resolve(cfg.model, cache, cfg.revision)


def _plain(section: DictConfig) -> dict[str, Any]:
    return {str(key): value for key, value in cast(dict, OmegaConf.to_container(section)).items()}


def _server_renders(cfg: DictConfig) -> bool:
    return cfg.engine.name == "openai" and cfg.engine.api == "chat"


def _check_endpoint(cfg: DictConfig) -> None:
    """Refuse what an endpoint would not heed, or would heed against the settings."""
    if cfg.engine.name != "openai":
        return
    from eval.engines.openai import check_extra_body

    check_extra_body(cfg.engine.extra_body)
    if cfg.engine.api == "chat" and cfg.prompt.chat is False:
        raise ConfigError(
            "prompt.chat", False, "with engine.api=chat the server renders with its chat template",
            "engine.api=completions, with the model's folder for its tokenizer",
        )  # fmt: skip


def _server_rendering(cfg: DictConfig) -> dict[str, Any]:
    options = _plain(cfg.prompt.chat_template_options)
    return {"chat": "by the server", **({"chat_template_options": options} if options else {})}


def _endpoint_model(cfg: DictConfig) -> dict[str, Any]:
    """Of an endpoint nothing but a name is known, whatever folder the user names."""
    if cfg.engine.name != "openai":
        return {}
    return {"served_model": cfg.engine.served_model or cfg.model, "weights": "as named by the user, not seen"}


def _extra_body(cfg: DictConfig) -> dict[str, Any]:
    """Further fields of the requests: some change how a server draws."""
    extra = _plain(cfg.engine.extra_body) if cfg.engine.name == "openai" else {}
    return {"extra_body": extra} if extra else {}


def _renderer(cfg: DictConfig, folder: Path) -> Renderer:
    """Renders as the model's tokenizer does; for a chat interface, to see what the server will make of the prompts."""
    tokenizer = models.load_tokenizer(folder, cfg.trust_remote_code)
    return Renderer(tokenizer, cfg.prompt.chat, _plain(cfg.prompt.chat_template_options))


def _rendered(benchmark: Benchmark, template: str, system: str | None, renderer: Renderer | None) -> list[str]:
    check_template(template)
    if renderer is None:
        return []
    return [renderer.text(conversation(benchmark.problems[0].statement, template, system))]


def _engine(
    cfg: DictConfig, folder: Path | None, renderer: Renderer | None, sampling: Sampling, length: int | None
) -> tuple[Callable[[], Engine], dict[str, Any]]:
    """A function that starts the engine, and the engine's part of the key."""
    engine = cfg.engine
    options = _plain(engine.options) if "options" in engine else {}
    if engine.name == "openai":
        from eval.engines.openai import Endpoint, OpenAIEngine

        extra = _plain(engine.extra_body)
        served = engine.served_model or cfg.model
        endpoint = Endpoint(
            engine.base_url, engine.api, served, engine.concurrency, engine.timeout_s, engine.retries,
            engine.api_key_env, extra, _plain(cfg.prompt.chat_template_options),
        )  # fmt: skip
        client = OpenAIEngine(endpoint, sampling)
        return lambda: client, client.identity
    assert folder is not None
    if engine.name == "vllm":
        from eval.engines import vllm

        identity = vllm.identity(cfg.dtype, options)
        return lambda: vllm.VLLMEngine(
            folder, sampling, context=length, dtype=cfg.dtype, options=options, trust_remote_code=cfg.trust_remote_code
        ), identity
    if engine.name == "sglang":
        from eval.engines import sglang

        identity = sglang.identity(cfg.dtype, options)
        return lambda: sglang.SGLangEngine(
            folder, sampling, context=length, dtype=cfg.dtype, options=options, concurrency=engine.concurrency,
            trust_remote_code=cfg.trust_remote_code,
        ), identity  # fmt: skip
    from eval.engines import hf

    assert renderer is not None
    device = hf.device_of(engine.device)
    return lambda: hf.HFEngine(
        folder, renderer.tokenizer, sampling, dtype=cfg.dtype, device=device, batch_size=engine.batch_size,
        trust_remote_code=cfg.trust_remote_code,
    ), hf.identity(cfg.dtype)  # fmt: skip


def _warnings(cfg: DictConfig, max_tokens: int, context: int | None, longest: int, folder: Path | None) -> list[str]:
    found: list[str] = []
    if cfg.sampling.temperature == 0 and cfg.n > 1:
        found.append(f"temperature 0 with n={cfg.n}: every sample of a problem is the same; n=1 says as much")
    if context is not None and max(longest, 1) + max_tokens > context:  # no prompt is empty
        prompt = f"the longest prompt ({longest} tokens)" if longest else "the prompts, which the server renders,"
        found.append(
            f"sampling.max_tokens={max_tokens} and {prompt} exceed the "
            f"model's context of {context}: responses are cut there"
        )
    if cfg.engine.name == "openai":
        found.append(
            "the weights behind the endpoint cannot be digested: they are as the user names them, and nothing shows "
            "that they stay the same"
        )
    if folder is None and cfg.prompt.think_open is None:
        found.append(
            "the server renders the prompts: whether they end inside <think> is not known (prompt.think_open=true says "
            "that they do, so that a box in unfinished reasoning does not count)"
        )
    return found


def default_out(plan: Plan) -> Path:
    """The run folder of a plan: the same settings give the same folder, so the same command goes on with it."""
    digest = hashlib.sha256(OmegaConf.to_yaml(OmegaConf.create(plan.key)).encode()).hexdigest()[:8]
    model = "".join(char if char.isalnum() or char in "-_." else "-" for char in _short(plan.model))
    return Path("results") / f"{plan.benchmark.name}-{model}-{digest}"


def _short(model: str) -> str:
    """The last parts of a path that tell models apart."""
    parts = [part for part in Path(model).parts if part not in ("/", "checkpoints", "actor", "huggingface", "..", ".")]
    return "-".join(parts[-2:])[-60:] or "model"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Every field in which two keys differ, as "field: old value, now new value"."""
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, after, field = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{field}.")
        elif before != after:
            found.append(f"{field}: {before!r}, now {after!r}")
    return found


def check_same(folder: Path, old: Plan, new: Plan) -> None:
    """Refuse to put samples of two kinds into one folder.

    Raises:
        ConfigError: the keys differ; the message names every field.
    """
    changed = differences(old.key, new.key)
    if changed:
        raise ConfigError(
            "out", folder, "it holds samples that were drawn otherwise (" + "; ".join(changed) + ")",
            "choose another folder, or leave out empty for one that fits these settings",
        )  # fmt: skip
