"""Typed options of the losses, chosen with ``policy_loss._target_: sat_verl.config.SATPolicyLossConfig``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from verl.workers.config import PolicyLossConfig

__all__ = ["DPPOPolicyLossConfig", "M2POPolicyLossConfig", "SATPolicyLossConfig"]


SAT_OPTIONS = ("alpha", "kernel_exponent", "quantile_scope", "reference", "reference_steps", "negative_cap")
"""Names of SAT's own options among verl's."""


@dataclass
class SATPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss options and those of SAT (arXiv 2607.18722).

    Args:
        alpha: level of the tail reference q, in (0, 1]: at most a share 1 - alpha of the tokens is gated. The paper's
            value is 0.90; 1 switches SAT off and leaves the base loss, bit for bit.
        kernel_exponent: exponent p > 0 of the Hill kernel 1 / (1 + (u/q)^p); the paper's value is 2.
        quantile_scope: the tokens that q is taken over. ``microbatch``: those of one call of the loss, the paper's code
            as far as can be told. ``batch``: those of the whole optimizer step, all micro-batches and data-parallel
            ranks, so that no number depends on how the batch is split (see :mod:`sat_verl.batch_quantile`).

    The paper has none of the others:

    Args:
        reference: what q is. ``batch``: the alpha-quantile of ``|d|`` over the tokens of the scope, the paper's.
            ``fresh``: that of the freshest tokens, also of recent steps, at most the batch's own; it needs
            ``quantile_scope=batch`` (see :mod:`sat_verl.fresh`). A number above 0: that number, whatever the tokens,
            alpha and the scope; the gradient is then that of the base loss at one fixed radius.
        reference_steps: with ``fresh``, the optimizer steps after its own in which a reference is used; None: the lag.
        negative_cap: for ``A < 0`` cap the ratio at ``C(q) = (1 + eps_high) e^q``
            (see :func:`sat_verl.trust_region.negative_cap`).

    Raises:
        ValueError: a value out of range, or settings that exclude each other.
    """

    alpha: float = 0.90
    kernel_exponent: float = 2.0
    quantile_scope: str = "microbatch"
    reference: str | float = "batch"
    reference_steps: int | None = None
    negative_cap: bool = False

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if not (_is_number(self.alpha) and 0 < self.alpha <= 1):
            raise ValueError(
                f"policy_loss.alpha must be a number in (0, 1], got {self.alpha!r}: "
                "use 0.90 (the paper's), or 1.0 to switch SAT off"
            )
        if not (_is_number(self.kernel_exponent) and 0 < self.kernel_exponent < math.inf):
            raise ValueError(
                f"policy_loss.kernel_exponent must be a finite number above 0, got {self.kernel_exponent!r}: "
                "use 2.0 (the paper's)"
            )
        if self.quantile_scope not in ("microbatch", "batch"):
            raise ValueError(
                f"policy_loss.quantile_scope must be 'microbatch' or 'batch', got {self.quantile_scope!r}: "
                "use 'microbatch' (the paper's)"
            )
        self._check_reference()

    def _check_reference(self) -> None:
        if self.reference not in ("batch", "fresh") and not (
            _is_number(self.reference) and 0 < self.reference < math.inf  # type: ignore[operator]
        ):
            raise ValueError(
                f"policy_loss.reference must be 'batch', 'fresh' or a finite number above 0, got {self.reference!r}: "
                "use 'batch' (the paper's)"
            )
        if self.reference == "fresh" and self.quantile_scope != "batch":
            raise ValueError(
                "policy_loss.reference='fresh' is one q for a whole optimizer step, got "
                f"quantile_scope={self.quantile_scope!r}: use quantile_scope='batch'"
            )
        steps = self.reference_steps
        if steps is not None and not (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1):
            raise ValueError(
                f"policy_loss.reference_steps must be a whole number of at least 1, or null, got {steps!r}: "
                "use null (the lag)"
            )
        if steps is not None and self.reference != "fresh":
            raise ValueError(
                f"policy_loss.reference_steps={steps} is for reference='fresh', got {self.reference!r}: use null"
            )
        if not isinstance(self.negative_cap, bool):
            raise ValueError(f"policy_loss.negative_cap must be true or false, got {self.negative_cap!r}")


@dataclass
class DPPOPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss options and that of ``dppo_clip``, the DPPO of the SAT paper (arXiv 2607.18722).

    Args:
        delta: an outward token is masked where ``|pi - mu|`` exceeds it; above 0. The paper's value is 1e-3; from 1 on
            no token is masked.

    Raises:
        ValueError: a value out of range.
    """

    OWN: ClassVar[tuple[str, ...]] = ("delta",)
    delta: float = 1e-3

    def __post_init__(self) -> None:
        _positive("delta", self.delta, "1e-3 (the paper's)")


@dataclass
class M2POPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss options and that of ``m2po`` (arXiv 2510.01161).

    Args:
        second_moment: bound of the mean ``(log r)^2`` of the outward tokens that are kept; above 0. The paper's value
            is 0.04.

    Raises:
        ValueError: a value out of range.
    """

    OWN: ClassVar[tuple[str, ...]] = ("second_moment",)
    second_moment: float = 0.04

    def __post_init__(self) -> None:
        _positive("second_moment", self.second_moment, "0.04 (the paper's)")


def _positive(name: str, value: object, default: str) -> None:
    if not (_is_number(value) and 0 < value < math.inf):  # type: ignore[operator]
        raise ValueError(f"policy_loss.{name} must be a finite number above 0, got {value!r}: use {default}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
