"""The node of the SAT paper (arXiv 2607.18722): its reported setting beside ours, and our plan of it.

``python -m recipes.plan paper`` writes ``recipes/plan/PAPER.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from recipes.compose import compose
from recipes.derive import derive
from recipes.plan.build import Plan, build
from recipes.plan.gpus import GPUS
from recipes.plan.layout import ACTOR, select
from recipes.plan.quantities import count, size, total
from recipes.plan.render import seconds, sizes, span
from recipes.plan.rollout_layout import ROLLOUT

RECIPE = "qwen3_30b_a3b_megatron_sglang"
ARM = ("algorithm=sat_gspo", "routing_replay=r3", "lag=8")
"""The arm of the paper with the best score at lag 8."""


@dataclass(frozen=True)
class Compared:
    """One setting: the paper's, ours, whether they are the same (None: cannot be told), and a remark."""

    setting: str
    paper: Any
    ours: Any
    same: bool | None
    remark: str = ""


def _key(name: str) -> Callable[[DictConfig, Plan], Any]:
    return lambda cfg, plan: select(cfg, name)


def _dual_clip(cfg: DictConfig, plan: Plan) -> Any:
    """None where no ratio reaches it."""
    bound = select(cfg, ACTOR + "clip_ratio_c")
    return "none" if bound is None or bound >= 1e6 else bound


_SETTINGS: tuple[tuple[str, Any, Callable[[DictConfig, Plan], Any], str], ...] = (
    ("framework", "slime", lambda cfg, plan: "verl", "another framework"),
    ("training engine", "megatron", lambda cfg, plan: plan.trainer.engine, ""),
    ("rollout engine", "sglang", _key(ROLLOUT + "name"), ""),
    ("model", "Qwen3-30B-A3B-Base", lambda cfg, plan: plan.model.name.rsplit("/", 1)[-1], ""),
    ("layers", 48, lambda cfg, plan: plan.model.layers, ""),
    ("hidden size", 2048, lambda cfg, plan: plan.model.hidden, ""),
    ("experts", 128, lambda cfg, plan: plan.model.experts, ""),
    ("experts of a token", 8, lambda cfg, plan: plan.model.top_k, ""),
    ("GPUs", 8, lambda cfg, plan: plan.trainer.ranks + plan.rollout.gpus, "the paper does not name their type"),
    ("GPUs that train", 4, lambda cfg, plan: plan.trainer.ranks, ""),
    ("GPUs that generate", 4, lambda cfg, plan: plan.rollout.gpus, "the paper does not say how they are divided"),
    ("tensor parallel", 4, lambda cfg, plan: plan.trainer.tensor, ""),
    ("pipeline parallel", 1, lambda cfg, plan: plan.trainer.pipeline, ""),
    ("context parallel", 1, lambda cfg, plan: plan.trainer.context, ""),
    ("expert parallel", 4, lambda cfg, plan: plan.trainer.expert, ""),
    ("expert tensor parallel", 1, lambda cfg, plan: plan.trainer.expert_tensor, ""),
    ("sequence parallel", True, lambda cfg, plan: plan.trainer.sequence_parallel, ""),
    ("rollout memory fraction", 0.85, _key(ROLLOUT + "gpu_memory_utilization"), ""),
    ("weights, bytes", 2, lambda cfg, plan: plan.trainer.weights, "bfloat16"),
    ("gradients in the all-reduce, bytes", 4, lambda cfg, plan: plan.trainer.gradients, "float32"),
    ("prompts per iteration", 256, _key("prompts_per_step"), ""),
    ("responses per prompt", 16, _key("responses_per_prompt"), ""),
    ("iterations", 544, _key("steps"), ""),
    ("prompts of the data", 30712, lambda cfg, plan: None,
     "DAPO-Math-17k (17,398) + Dolci-RL-Zero-Math-7B (13,314); ours are counted when the data is prepared"),
    ("response limit", 32768, _key("data.max_response_length"),
     "the paper says 32k; prompt and response share the model's 32,768 positions"),
    ("tokens of a micro-batch per GPU", 32768, lambda cfg, plan: plan.trainer.tokens, ""),
    ("temperature", 1.0, _key(ROLLOUT + "temperature"), "one passage of the paper says 0.95"),
    ("top-p", 1.0, _key(ROLLOUT + "top_p"), ""),
    ("top-k", -1, _key(ROLLOUT + "top_k"), ""),
    ("Adam's betas", [0.9, 0.98], lambda cfg, plan: list(select(cfg, ACTOR + "optim.betas")), ""),
    ("learning rate", 1e-6, _key(ACTOR + "optim.lr"), ""),
    ("its schedule", "constant", lambda cfg, plan: select(
        cfg, ACTOR + "optim.lr_decay_style", select(cfg, ACTOR + "optim.lr_scheduler_type")), ""),
    ("KL loss", "low_var_kl", lambda cfg, plan: select(cfg, ACTOR + "use_kl_loss") and select(
        cfg, ACTOR + "kl_loss_type"), ""),
    ("its weight", 1e-3, _key(ACTOR + "kl_loss_coef"), ""),
    ("entropy bonus", 0, _key(ACTOR + "entropy_coeff"), ""),
    ("advantage", "grpo", _key("algorithm.adv_estimator"), ""),
    ("lower radius", 0.2, _key(ACTOR + "clip_ratio_low"), "for all methods"),
    ("upper radius", 0.2, _key(ACTOR + "clip_ratio_high"), "for all methods"),
    ("dual clip", "none", _dual_clip, ""),
    ("SAT: alpha", 0.9, _key(ACTOR + "policy_loss.alpha"), ""),
    ("SAT: exponent of the kernel", 2.0, _key(ACTOR + "policy_loss.kernel_exponent"), ""),
    ("SAT: quantile over", None, _key(ACTOR + "policy_loss.quantile_scope"),
     "the paper's text says batch, its table of symbols microbatch"),
    ("steps between weight syncs", 8, lambda cfg, plan: plan.work.window, "the paper's lag 8"),
    ("evaluation", "aime24", _key("benchmark"), ""),
    ("iterations between evaluations", 5, lambda cfg, plan: cfg.trainer.test_freq * plan.work.window,
     "verl validates at weight syncs"),
    ("samples of an evaluation", 8, _key("benchmark_samples"), "text: avg@8; appendix: 16 samples x 4 runs"),
)  # fmt: skip


def _same(paper: Any, ours: Any) -> bool | None:
    return None if paper is None or ours is None else paper == ours


def compared(cfg: DictConfig, plan: Plan) -> list[Compared]:
    """Every reported setting of the paper beside that of a derived config and its plan."""
    found = []
    for setting, paper, read, remark in _SETTINGS:
        ours = read(cfg, plan)
        found.append(Compared(setting, paper, ours, _same(paper, ours), remark))
    return found


def node() -> tuple[DictConfig, Plan]:
    """The paper's node with the arm :data:`ARM`: derived config and plan."""
    cfg = derive(compose([f"recipe={RECIPE}", *ARM]))
    return cfg, build(cfg)


def _cell(value: Any) -> str:
    return "not stated" if value is None else str(value)


def _table(rows: list[Compared]) -> list[str]:
    lines = ["| setting | paper | ours | equal | remark |", "|---|---|---|---|---|"]
    for row in rows:
        equal = {True: "yes", False: "**no**", None: "?"}[row.same]
        ours = "not known here" if row.ours is None else row.ours
        lines.append(f"| {row.setting} | {_cell(row.paper)} | {ours} | {equal} | {row.remark} |")
    return lines


def _planned(plan: Plan) -> list[str]:
    """Our plan of the node in numbers."""
    lines = [
        f"- Model: {count(plan.model.parameters.total)} parameters, {count(plan.model.active)} active.",
        f"- A GPU that trains: {sizes(plan.trainer_memory.peak)} at its peak.",
        f"- KV cache of the rollout's GPUs ({plan.gpu.title}): {sizes(plan.rollout_memory.cache)} each, "
        f"{span(plan.rollout_memory.full, '{:.0f}')} sequences of {plan.rollout.length} tokens on a server of "
        f"TP {plan.rollout.tensor}.",
        f"- Outside the rollout's share of a GPU: {sizes(plan.rollout_memory.outside)} of "
        f"{size(plan.gpu.memory * (1 - plan.rollout.utilization))}.",
    ]
    lines += [f"- {row.name[:1].upper()}{row.name[1:]}: {sizes(row.size)} on the node." for row in plan.host]
    lines.append(f"- Host memory together: {sizes(total(plan.host))}.")
    lines.append(f"- A checkpoint: {sizes(plan.checkpoint.size)} on disk.")
    if plan.routes is not None:
        one, step = plan.routes
        lines.append(f"- Routes: at most {size(one)} a response, {size(step)} an iteration.")
    if plan.time is not None:
        lines.append(
            f"- One iteration on {plan.gpu.title} at {plan.settings.response.expected:.0f} tokens a response: trainer "
            f"{seconds(plan.time.train)}, rollout {seconds(plan.time.generate)}; the run {seconds(plan.time.run)}, "
            f"{span(plan.time.gpu_hours, '{:.0f}')} GPU hours."
        )
    lines += [f"- With `{one.settings}` as well: {sizes(one.peak)} ({one.price})." for one in plan.remedies]
    lines += [f"- Note: {note}." for note in plan.notes]
    lines += ["", "| GPU type | trainer | rollout |", "|---|---|---|"]
    return lines + [f"| {GPUS[one.gpu].title} | {one.trainer} | {one.rollout} |" for one in plan.verdicts]


def document() -> str:
    """The text of ``PAPER.md``."""
    cfg, plan = node()
    rows = compared(cfg, plan)
    equal = sum(row.same is True for row in rows)
    differing = ", ".join(row.setting for row in rows if row.same is False) or "none"
    head = [
        "# The paper's node, as reported and as planned here",
        "",
        f"Written by `python -m recipes.plan paper` from `recipe={RECIPE} {' '.join(ARM)}`. `paper` is what the SAT",
        "paper (arXiv 2607.18722) reports; `ours` is read back from the composed and derived config.",
        f"{equal} of {len(rows)} are equal; different: {differing}. Nothing here was run on a GPU.",
        "",
    ]
    return "\n".join([*head, *_table(rows), "", "## The plan", "", *_planned(plan), ""])
