"""SAT-GRPO and SAT-GSPO as verl policy losses (arXiv 2607.18722, eq. 13-20).

Each is verl's own loss (``vanilla``, ``gspo``) with the clip interval of :mod:`sat_verl.trust_region` in place of the
nominal one, and equals it bit for bit where SAT is off: value, gradient and the metrics that both report.

The ratio's denominator must be the rollout engine's log-probs (``old_log_prob`` of verl's bypass mode). With log-probs
that the trainer recomputes at the start of a one-update step every ratio is about 1, and neither PPO nor SAT clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from sat_verl.config import SAT_OPTIONS, SATPolicyLossConfig
from sat_verl.moves import Moves, Options, response_moves, token_moves
from sat_verl.surrogate import (
    aggregate,
    clip_radii,
    clipped_surrogate,
    dual_clip_bound,
    share,
    to_host,
    zero_masked,
)
from sat_verl.trust_region import effective_radius, intercepted, negative_cap

__all__ = ["compute_policy_loss_sat_grpo", "compute_policy_loss_sat_gspo", "record_intercepted"]

NO_CAP = 1.0e9
"""A ratio that none reaches (verl bounds the log-ratio by 20)."""

_intercepted: ContextVar[list[torch.Tensor] | None] = ContextVar("sat_verl_intercepted", default=None)


@contextmanager
def record_intercepted() -> Iterator[list[torch.Tensor]]:
    """Inside the block every call of a SAT loss appends its mask of intercepted tokens, shape ``(B, T)``, bool.

    Those whose gradient SAT removes and the base loss keeps. The mask stays on its device; other losses append nothing.
    """
    masks: list[torch.Tensor] = []
    token = _intercepted.set(masks)
    try:
        yield masks
    finally:
        _intercepted.reset(token)


@register_policy_loss("sat_grpo")
def compute_policy_loss_sat_grpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GRPO: ``-min(r A, clip(r, 1 - eps_low c_minus, 1 + eps_high c_plus) A)`` with the token ratio ``r = exp(d)``.

    For ``A < 0`` the loss is capped at ``-clip_ratio_c A``, verl's dual clip (arXiv 1912.09729), as in ``vanilla``; the
    paper has none, which a very large ``clip_ratio_c`` reproduces. With ``negative_cap`` at the smaller of the two.

    Args:
        old_log_prob: log mu of the sampled tokens, shape ``(B, T)``, float.
        log_prob: log pi of the sampled tokens, shape ``(B, T)``, float; the gradient flows through it alone.
        advantages: A, shape ``(B, T)``, float.
        response_mask: 1 on the tokens that count, shape ``(B, T)``, bool, int or float. At the others any input may be
            NaN or infinite, and the gradient is 0.
        loss_agg_mode: see :func:`verl.trainer.ppo.core_algos.agg_loss`.
        config: the :class:`~verl.workers.config.ActorConfig`. Without a :class:`SATPolicyLossConfig` in it, SAT's
            options have that class's defaults.
        rollout_is_weights: optional factor of each token's loss, shape ``(B, T)``, float.

    Returns:
        The aggregated loss, shape ``()``, and the metrics of :func:`_metrics`.

    Raises:
        ValueError: no config, or ``clip_ratio_c`` of 1 or less.
        MissingBatchQuantileError: ``quantile_scope=batch``, and nobody computed q (see :mod:`sat_verl.batch_quantile`).
    """
    options = _options(config)
    return _loss(
        token_moves(log_prob.detach(), old_log_prob, response_mask, options),
        log_prob,
        advantages,
        response_mask,
        dual_clip_bound(config),
        options,
        loss_agg_mode,
        config,
        rollout_is_weights,
    )


@register_policy_loss("sat_gspo")
def compute_policy_loss_sat_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GSPO: ``-min(rho A, clip(rho, 1 - eps_low c_minus, 1 + eps_high c_plus) A)``, ``rho = exp(mean_t d_t)``.

    The length-normalised sequence mean is the score as well: it stands on every active token of its response *before*
    the quantile, so q weighs a sequence by its length. The gradient is that of GSPO-token (arXiv 2507.18071), as in
    verl's ``gspo``: ``rho`` is the value, ``log_prob`` of the token alone carries the gradient.

    Arguments, result and errors as in :func:`compute_policy_loss_sat_grpo`, without the dual clip: unless
    ``negative_cap`` is set, ``actor/pg_clipfrac_lower`` is 0. ``actor/abs_log_ratio`` is that of the token ratios.
    """
    options = _options(config)
    loss, metrics = _loss(
        response_moves(log_prob.detach(), old_log_prob, response_mask, options),
        log_prob,
        advantages,
        response_mask,
        None,
        options,
        loss_agg_mode,
        config,
        rollout_is_weights,
    )
    if not math.isfinite(metrics["actor/abs_log_ratio"]):
        # sg[log rho] + log pi - sg[log pi] is NaN where log pi is infinite, and is the loss then; an infinite log mu
        # has a finite loss, and no gradient. Only looked at here, as the metrics are on the host already.
        (nothing,) = zero_masked(response_mask.bool(), log_prob.detach() - log_prob.detach())
        loss = loss + nothing.sum().to(loss.dtype)
    return loss, metrics


def _options(config: Any) -> Options:
    """Radii from verl's actor config, the rest from its policy-loss config, checked by SATPolicyLossConfig."""
    if config is None:
        raise ValueError("the SAT losses need config, verl's ActorConfig, for their clip radii: got None")
    sat = config.policy_loss
    if not isinstance(sat, SATPolicyLossConfig):
        sat = SATPolicyLossConfig(**{name: sat.get(name, getattr(SATPolicyLossConfig, name)) for name in SAT_OPTIONS})
    eps_low, eps_high = clip_radii(config)
    return Options(
        eps_low=eps_low,
        eps_high=eps_high,
        alpha=sat.alpha,
        exponent=sat.kernel_exponent,
        whole_batch=sat.quantile_scope == "batch",
        reference=sat.reference,
        negative_cap=sat.negative_cap,
    )


def _loss(
    moves: Moves,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    dual_clip: float | None,
    options: Options,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss and its metrics; ``moves``: held by nobody else; ``dual_clip``: its bound."""
    ratio, derivative, nominal, clipped, q, size, of_step, sums = moves
    del moves  # with what is no longer used each tensor can go
    slope = zero_masked(response_mask.bool(), advantages)[0].neg_()
    bound: float | torch.Tensor | None = dual_clip
    if options.negative_cap:
        bound = negative_cap(q, options.eps_high, NO_CAP if dual_clip is None else dual_clip)
        of_step["actor/sat/cap"] = bound
    sums |= _removed(ratio, nominal, clipped, slope)
    del nominal
    surrogate = clipped_surrogate(log_prob, ratio, derivative, clipped, slope, bound)
    del ratio, derivative, clipped, slope
    loss = aggregate(surrogate.loss, rollout_is_weights, response_mask, loss_agg_mode, config)
    with torch.no_grad():
        capped = loss.new_zeros(()) if surrogate.capped is None else share(surrogate.capped, size)
        base = {"actor/pg_clipfrac": share(surrogate.clipped, size), "actor/pg_clipfrac_lower": capped}
    return loss, _metrics(base | of_step, sums, options)


def _removed(
    ratio: torch.Tensor, nominal: torch.Tensor, clipped: torch.Tensor, slope: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Numbers of the intercepted tokens, whose mask goes to :func:`record_intercepted`."""
    positive, negative = intercepted(ratio, nominal, clipped, slope)
    if (masks := _intercepted.get()) is not None:
        masks.append((positive + negative).bool())
    return {"removed_pos": positive.sum(), "removed_neg": negative.sum()}


def _metrics(base: dict[str, torch.Tensor], sums: dict[str, torch.Tensor], options: Options) -> dict[str, float]:
    """The metrics of one call, as floats; verl averages each over micro-batches and ranks.

    * those of the base loss (``base``), and ``actor/abs_log_ratio``: mean ``|d|`` of the token ratios;
    * ``actor/sat/q``: tail reference, with ``quantile_scope=batch`` that of the whole step;
      ``gate_rate``: gated share of the active tokens;
    * ``radius_low``, ``radius_high``: mean effective radii ``eps * c`` over the active tokens (paper, Table 10);
      ``strongest_contraction``: the smallest c;
    * ``intercepted``: share of the active tokens whose gradient SAT removes and the base loss keeps, of which
      ``intercepted_pos`` with A > 0, ``intercepted_neg`` with A < 0: shares of **all** active tokens, so they add up;
    * ``eps_eff_low``, ``eps_eff_high``: the one radius PPO would need for the same gradient, nominal if the gate is
      empty, unless q is a number.
    * with ``reference=fresh`` ``q_batch``, ``q_fresh``, ``fresh_age``: the quantile of all tokens of the step, of those
      of the least age, and that age; with ``negative_cap`` ``cap``, its value. Then ``pg_clipfrac_lower`` is the
      share of the tokens that it, or the dual clip, caps.

    With no active token all are 0, but the radii nominal and the contraction 1.
    """
    host = to_host(base | sums)
    n, q, gated = max(host["count"], 1.0), host["q"], host["gated"]
    # An empty gate is nominal, but a q that is a number stays in force: nobody was beyond it.
    active_q = q if gated or not isinstance(options.reference, str) else 0.0
    eps_low, eps_high, exponent = options.eps_low, options.eps_high, options.exponent
    return {
        **{name: value for name, value in host.items() if name.startswith("actor/")},
        "actor/abs_log_ratio": host["distance"] / n,
        "actor/sat/q": q,
        "actor/sat/gate_rate": gated / n,
        "actor/sat/radius_low": eps_low * (1 - host["cut_low"] / n),
        "actor/sat/radius_high": eps_high * (1 - host["cut_high"] / n),
        "actor/sat/strongest_contraction": host["strongest"],
        "actor/sat/intercepted": (host["removed_pos"] + host["removed_neg"]) / n,
        "actor/sat/intercepted_pos": host["removed_pos"] / n,
        "actor/sat/intercepted_neg": host["removed_neg"] / n,
        "actor/sat/eps_eff_low": effective_radius(active_q, eps_low, exponent, upper=False),
        "actor/sat/eps_eff_high": effective_radius(active_q, eps_high, exponent, upper=True),
    }
