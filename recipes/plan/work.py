"""What a run computes: samples, tokens and arithmetic of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from recipes.plan.layout import ACTOR, Trainer, select
from recipes.plan.model import Model
from recipes.plan.settings import Settings
from recipes.schedule import AFTER_TRAINING, schedule_of
from sat_verl.batch_quantile import SAT_MODES


@dataclass(frozen=True)
class Pass:
    """One pass of the trainer over a step's batch, in forward passes (a backward pass is two)."""

    name: str
    forwards: float
    reason: str


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompt and response, in one case of what they may be."""

    case: str
    prompt: float
    response: float

    @property
    def whole(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class Case:
    """Tokens and arithmetic of one optimizer step, where all sequences are as long as ``lengths`` says.

    Attributes:
        lengths: of each sequence.
        trained: tokens of prompt and response that the trainer sees in one pass.
        generated: tokens that the rollout samples.
        forward: floating-point operations of one forward pass of the batch.
        flops: of all passes of the trainer.
    """

    lengths: Lengths
    trained: float
    generated: float
    forward: float
    flops: float


@dataclass(frozen=True)
class Work:
    """What a run computes.

    Attributes:
        steps: optimizer steps.
        prompts, responses: per step.
        window: optimizer steps between two weight syncs.
        passes: of the trainer per step.
        cases: by their name: low, expected, high, limit.
        validations, problems, samples: how often the run validates, on how many problems (None: unknown), with how
            many responses to each.
    """

    steps: int
    prompts: int
    responses: int
    window: int
    passes: tuple[Pass, ...]
    cases: dict[str, Case]
    validations: int
    problems: int | None
    samples: int


def forward_flops(model: Model, tokens: float, length: float) -> float:
    """Floating-point operations of a forward pass: ``2 x matmul`` per token, and causal attention.

    Attention of one sequence of ``s`` tokens is ``QK^T`` and ``PV``, each ``2 s^2 q`` per layer, half of it masked.
    As verl counts (``flops_counter``), but for the embedding's look-up, which multiplies nothing.
    """
    return tokens * (2 * model.matmul + 2 * length * model.q * model.layers)


def passes(cfg: DictConfig, trainer: Trainer) -> tuple[Pass, ...]:
    """The trainer's passes over a step's batch."""
    found = [Pass("update", 3.0, "forward and backward")]
    if trainer.recompute.kind == "layers":
        found.append(Pass("recomputed activations", 1.0, "gradient checkpointing of whole layers"))
    if trainer.reference:
        found.append(Pass("reference log-probs", 1.0, "KL to the start weights"))
    if not select(cfg, "algorithm.rollout_correction.bypass_mode", False):
        found.append(Pass("old log-probs", 1.0, "the ratio is to the trainer's own recompute"))
    loss = select(cfg, ACTOR + "policy_loss.loss_mode")
    scope = select(cfg, ACTOR + "policy_loss.quantile_scope", "microbatch")
    if loss in SAT_MODES and scope == "batch" and trainer.micro_batches[1] > 1:
        found.append(Pass("quantile of the batch", 1.0, "one q for several micro-batches (quantile_scope=batch)"))
    if select(cfg, "routing_replay.compare", False):
        found.append(Pass("log-probs without replay", 1.0, "routing_replay.compare"))
    if trainer.critic:
        extra = 5.0 if trainer.recompute.kind == "layers" else 4.0
        found.append(Pass("critic", extra, "values, forward and backward, recomputed activations"))
    return tuple(found)


def work_of(cfg: DictConfig, model: Model, trainer: Trainer, settings: Settings) -> Work:
    """What a run computes, for four cases of its lengths."""
    limit_prompt, limit_response = cfg.data.max_prompt_length, cfg.data.max_response_length
    named = {
        name: Lengths(name, getattr(settings.prompt, name), getattr(settings.response, name))
        for name in ("low", "expected", "high")
    }
    named["limit"] = Lengths("limit", limit_prompt, limit_response)
    of_step = passes(cfg, trainer)
    forwards = sum(one.forwards for one in of_step)
    responses = cfg.prompts_per_step * cfg.responses_per_prompt
    cases = {}
    for name, lengths in named.items():
        tokens = responses * lengths.whole
        forward = forward_flops(model, tokens, lengths.whole)
        cases[name] = Case(lengths, tokens, responses * lengths.response, forward, forwards * forward)
    interval = cfg.trainer.test_freq * schedule_of(cfg).sync_every
    validations = 2 if cfg.trainer.test_freq == AFTER_TRAINING else 1 + cfg.steps // interval
    return Work(
        steps=cfg.steps, prompts=cfg.prompts_per_step, responses=responses, window=schedule_of(cfg).sync_every,
        passes=of_step, cases=cases, validations=validations, problems=_problems(cfg),
        samples=select(cfg, "actor_rollout_ref.rollout.val_kwargs.n", 1),
    )  # fmt: skip


def _problems(cfg: DictConfig) -> int | None:
    """Problems of a validation, None where they are in a file that is not read here."""
    if cfg.benchmark is None:
        return select(cfg, "task.test_size")
    from eval.benchmarks.load import NAMED

    known = NAMED.get(cfg.benchmark)
    number = cfg.benchmark_data.limit or cfg.benchmark_data.size
    return number or (known.count if known else None)
