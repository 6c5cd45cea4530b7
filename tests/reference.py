"""SAT-GRPO and SAT-GSPO from the equations (arXiv 2607.18722, eq. 13-20): float64, one token at a time, numpy only.

Shares no code with ``sat_verl``. A batch is a dict of ``(B, T)`` arrays ``log_prob``, ``old_log_prob``, ``advantages``,
``mask`` (bool) and ``weights`` (or None).
"""

import math

import numpy as np


def quantile(values, alpha):
    """Smallest observed value whose empirical CDF reaches alpha; 0 for no values."""
    for x in sorted(values):
        if sum(v <= x for v in values) / len(values) >= alpha:
            return float(x)
    return 0.0


def scores(batch, method):
    """``d`` of every token: its own log-ratio, or (gspo) the mean over its response's active tokens."""
    d = np.zeros(batch["mask"].shape)
    for i, row in enumerate(batch["mask"]):
        tokens = [t for t in range(len(row)) if row[t]]
        own = {t: batch["log_prob"][i, t] - batch["old_log_prob"][i, t] for t in tokens}
        for t in tokens:
            d[i, t] = own[t] if method == "grpo" else sum(own.values()) / len(tokens)
    return d


def interval(d, q, eps_low, eps_high, p):
    """Clip interval of one token."""
    c_plus = c_minus = 1.0
    if q > 0 and abs(d) > q:
        c_plus = 1 / (1 + (max(d, 0.0) / q) ** p)
        c_minus = 1 / (1 + (max(-d, 0.0) / q) ** p)
    return 1 - eps_low * c_minus, 1 + eps_high * c_plus


def surrogate(r, advantage, low, high, dual_clip=math.inf):
    """Objective of one token and its derivative with respect to the token's log-prob, ``d r / d log_prob = r``."""
    objective, derivative = r * advantage, r * advantage
    clipped = min(max(r, low), high) * advantage
    if clipped < objective:
        objective, derivative = clipped, 0.0
    if advantage < 0 and dual_clip * advantage > objective:
        objective, derivative = dual_clip * advantage, 0.0
    return objective, derivative


def token_weights(mask, mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None):
    """Weight of each active token's loss in verl's aggregated loss."""
    lengths = [sum(row) for row in mask.tolist()]
    sequences = sum(n > 0 for n in lengths) if global_batch_size is None else global_batch_size
    tokens = sum(lengths) if batch_num_tokens is None else batch_num_tokens
    weights = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        weights[i, t] = (
            dp_size
            * {
                "token-mean": 1 / tokens,
                "token-sum": 1.0,
                "seq-mean-token-sum": 1 / sequences,
                "seq-mean-token-mean": 1 / (sequences * lengths[i]),
                "seq-mean-token-sum-norm": 1 / (sequences * (loss_scale_factor or mask.shape[1])),
            }[mode]
        )
    return weights


def policy_loss(batch, method, mode, *, eps_low, eps_high, alpha, p, dual_clip=math.inf, **global_batch_info):
    """Loss, its gradient with respect to ``log_prob``, and what the metrics report, of one micro-batch."""
    mask, advantages = batch["mask"], batch["advantages"]
    d = scores(batch, method)
    active = [(i, t) for i, t in np.argwhere(mask)]
    q = quantile([abs(d[i, t]) for i, t in active], alpha)
    weights = token_weights(mask, mode, **global_batch_info)
    loss, gradient, base_gradient = 0.0, np.zeros(mask.shape), np.zeros(mask.shape)
    lows, highs, gated, removed = [], [], 0, {1: 0, -1: 0}
    for i, t in active:
        r, a = math.exp(d[i, t]), advantages[i, t]
        low, high = interval(d[i, t], q, eps_low, eps_high, p)
        lows.append(1 - low)
        highs.append(high - 1)
        gated += q > 0 and abs(d[i, t]) > q
        objective, derivative = surrogate(r, a, low, high, dual_clip)
        base_derivative = surrogate(r, a, 1 - eps_low, 1 + eps_high, dual_clip)[1]
        if base_derivative != 0 and derivative == 0:
            removed[1 if a > 0 else -1] += 1
        weight = weights[i, t] * (1.0 if batch["weights"] is None else batch["weights"][i, t])
        loss -= weight * objective
        gradient[i, t] = -weight * derivative
        base_gradient[i, t] = -weight * base_derivative
    n = max(len(active), 1)
    own = scores(batch, "grpo")
    metrics = {
        "actor/sat/q": q,
        "actor/sat/gate_rate": gated / n,
        "actor/sat/radius_low": sum(lows) / n if lows else eps_low,
        "actor/sat/radius_high": sum(highs) / n if highs else eps_high,
        "actor/sat/strongest_contraction": min([x / eps_low for x in lows] + [x / eps_high for x in highs] + [1.0]),
        "actor/sat/intercepted": (removed[1] + removed[-1]) / n,
        "actor/sat/intercepted_pos": removed[1] / n,
        "actor/sat/intercepted_neg": removed[-1] / n,
        "actor/abs_log_ratio": sum(abs(own[i, t]) for i, t in active) / n,
    }
    return loss, gradient, base_gradient, metrics


def m2po_dropped(log_ratios, outward, bound):
    """Indices that M2PO (arXiv 2510.01161) drops: one after the other, those that tie with the last one as well."""
    kept = [i for i in range(len(log_ratios)) if outward[i]]
    dropped = []
    while kept and math.fsum(log_ratios[i] ** 2 for i in kept) / len(kept) > bound:
        farthest = max(log_ratios[i] ** 2 for i in kept)
        dropped += [i for i in kept if log_ratios[i] ** 2 == farthest]
        kept = [i for i in kept if log_ratios[i] ** 2 < farthest]
    return dropped, kept


def baseline_loss(batch, name, mode, *, eps=(0.2, 0.2), dual_clip=math.inf, option=None, **global_batch_info):
    """``dppo_clip`` (option: delta) or ``m2po`` (option: its bound): loss, gradient and metrics, token by token."""
    mask, advantages = batch["mask"], batch["advantages"]
    d = scores(batch, "grpo")
    active = [(i, t) for i, t in np.argwhere(mask)]
    outward = [d[at] * advantages[at] > 0 for at in active]
    if name == "m2po":
        numbers, kept = m2po_dropped([d[at] for at in active], outward, option)
        gone = {active[k] for k in numbers}
        seconds = [[d[active[k]] ** 2 for k in part] for part in (np.flatnonzero(outward), kept)]
    else:
        change = {at: abs(math.exp(batch["log_prob"][at]) - math.exp(batch["old_log_prob"][at])) for at in active}
        gone = {at for at, out in zip(active, outward, strict=True) if out and change[at] > option}
    weights = token_weights(mask, mode, **global_batch_info)
    loss, gradient, removed, clipped = 0.0, np.zeros(mask.shape), 0, 0
    for at in active:
        r, a = math.exp(d[at]), advantages[at]
        interval_of = (1 - eps[0], 1 + eps[1]) if name == "dppo_clip" else (-math.inf, math.inf)
        objective, derivative = surrogate(r, a, *interval_of, dual_clip if name == "dppo_clip" else math.inf)
        clipped += min(max(r, interval_of[0]), interval_of[1]) * a < r * a
        if at in gone:
            removed += derivative != 0
            objective = derivative = 0.0
        weight = weights[at] * (1.0 if batch["weights"] is None else batch["weights"][at])
        loss -= weight * objective
        gradient[at] = -weight * derivative
    n = max(len(active), 1)
    metrics = {"actor/abs_log_ratio": sum(abs(d[at]) for at in active) / n}
    if name == "dppo_clip":
        metrics |= {"actor/dppo/masked": len(gone) / n, "actor/dppo/removed": removed / n}
        metrics["actor/pg_clipfrac"] = clipped / n
    else:
        means = [sum(part) / max(len(part), 1) for part in seconds]
        metrics |= {"actor/m2po/second_moment": means[0], "actor/m2po/second_moment_kept": means[1]}
        metrics["actor/pg_clipfrac"] = len(gone) / n
    return loss, gradient, metrics
