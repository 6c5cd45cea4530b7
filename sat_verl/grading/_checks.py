"""Checks on sympy trees that run around math-verify's own comparison, inside the worker process.

:func:`compare_sizes` keeps numbers that cannot be written out away from sympy, which would compute them.
:func:`contradicts` takes back matches that rest on rounding or on an empty list of solutions.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
from sympy.core.relational import Equality, Unequality

MAX_DIGITS = 100_000.0
EXACT_TOLERANCE = sympy.Float("1e-20", 30)
DECIMAL_TOLERANCE = 1e-5


def compare_sizes(gold: Any, answer: Any) -> str | None:
    """Decide or refuse a comparison that involves a giant number.

    Args:
        gold: sympy form of the gold answer.
        answer: sympy form of the answer.

    Returns:
        "different" if the answer as a whole is an integer power or factorial of more than ``MAX_DIGITS`` digits and
        the gold a plain number; "too_large" if such a number hides deeper on either side; None otherwise.
    """
    if _is_huge(gold):
        return "too_large"
    if not _is_huge(answer):
        return None
    if isinstance(gold, sympy.Rational | sympy.Float) and _log10(answer) > MAX_DIGITS:
        return "different"
    return "too_large"


def _is_huge(expression: Any) -> bool:
    if not isinstance(expression, sympy.Basic):
        return False
    return any(_log10(node) > MAX_DIGITS for node in sympy.preorder_traversal(expression))


def _log10(node: Any) -> float:
    """Decimal digits of an integer power or factorial, -inf for anything else; only a lower bound for towers."""
    if isinstance(node, sympy.Integer):
        return math.log10(abs(int(node))) if node else -math.inf
    if isinstance(node, sympy.factorial):
        size = _log10(node.args[0])
        return 10.0 ** min(size, 300.0) * max(size - 1, 0.0)
    if isinstance(node, sympy.Pow):
        base, exponent = (_log10(arg) for arg in node.args)
        if base > 0 and exponent >= 0 and not node.args[1].could_extract_minus_sign():
            return base * 10.0 ** min(exponent, 300.0)
    return -math.inf


def contradicts(gold: Any, answer: Any) -> bool:
    """Whether two trees that math-verify calls equal certainly differ.

    math-verify compares numbers after rounding to 6 decimals (or 15 digits with small ones chopped to zero), and
    equations by their solutions, of which two different ones may have none.

    Args:
        gold: sympy form of the gold answer.
        answer: sympy form of the answer.

    Returns:
        True only if the difference is certain.
    """
    if _order_differs(gold, answer) or _order_differs(answer, gold):
        return True
    if isinstance(gold, sympy.Set | sympy.Tuple) and isinstance(answer, sympy.Set | sympy.Tuple):
        left, right = _sorted_numbers(gold), _sorted_numbers(answer)
        if left is None or right is None or len(left) != len(right):
            return False
        return any(numbers_differ(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(gold, Equality) and isinstance(answer, Equality):
        return _equations_differ(gold, answer)
    return numbers_differ(gold, answer)


def same_inequation(gold: Any, answer: Any) -> bool | None:
    """Compare ``x \\ne 3`` with its like, which math-verify cannot.

    Args:
        gold: sympy form of the gold answer.
        answer: sympy form of the answer.

    Returns:
        Whether both exclude the same, or None if either is no such statement.
    """
    if not (isinstance(gold, Unequality) and isinstance(answer, Unequality)):
        return None
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    return sympy.simplify(left - right) == 0 or sympy.simplify(left + right) == 0


def _order_differs(named: Any, ordered: Any) -> bool:
    """``x=2, y=1`` against the pair ``(1, 2)``: math-verify compares the values as a set."""
    if not isinstance(named, sympy.FiniteSet) or not all(isinstance(arg, Equality) for arg in named.args):
        return False
    if isinstance(ordered, sympy.Interval):
        values = [ordered.start, ordered.end]
    elif isinstance(ordered, sympy.Tuple):
        values = list(ordered.args)
    else:
        return False
    if len({arg.lhs for arg in named.args}) < len(named.args):
        return True  # "x=1, x=2" lists the values of one unknown
    stated = [arg.rhs for arg in sorted(named.args, key=lambda arg: str(arg.lhs))]
    return len(stated) == len(values) and any(numbers_differ(a, b) for a, b in zip(stated, values, strict=True))


def _sorted_numbers(group: Any) -> list[Any] | None:
    members = [arg for arg in group.args if isinstance(arg, sympy.Expr)]
    if not members or not all(arg.is_number and arg.is_extended_real for arg in members):
        return None
    return sorted(members, key=lambda arg: float(arg.evalf(20)))


def numbers_differ(gold: Any, answer: Any) -> bool:
    """Whether two trees are numbers with certainly different values.

    Cheap, and worth asking first: sympy's simplification of the difference of two unequal numbers can take forever.

    Args:
        gold: sympy form of the gold answer.
        answer: sympy form of the answer.

    Returns:
        True only if the difference is certain.
    """
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (gold, answer)):
        return False
    if _is_infinite(gold) != _is_infinite(answer):
        return True
    rounded = gold.has(sympy.Float) or answer.has(sympy.Float)
    difference, *sizes = (abs(x.evalf(30)) for x in (gold - answer, gold, answer))
    if not all(x.is_Float or x.is_Integer or x.is_Rational for x in (difference, *sizes)):
        return False
    return bool(difference > (DECIMAL_TOLERANCE if rounded else EXACT_TOLERANCE) * max(sizes))


_UNDEFINED = (sympy.zoo, sympy.nan)
_INFINITE = (sympy.oo, -sympy.oo, *_UNDEFINED)


def is_undefined(expression: Any) -> bool:
    """Whether an expression is a division by zero or the like.

    Args:
        expression: a sympy tree.

    Returns:
        True if it has no value, not even an infinite one with a sign.
    """
    return isinstance(expression, sympy.Expr) and expression.is_number and _comes_to(expression, _UNDEFINED)


def _is_infinite(number: sympy.Expr) -> bool:
    return _comes_to(number, _INFINITE)


def _comes_to(number: sympy.Expr, values: tuple[Any, ...]) -> bool:
    if number.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit):
        return False
    # An unevaluated 1/0 holds a power of zero and no infinity yet.
    if not number.has(*_INFINITE) and not any(power.base.is_zero for power in number.atoms(sympy.Pow)):
        return False
    return number.doit().has(*values)


def _equations_differ(gold: Equality, answer: Equality) -> bool:
    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if not all(isinstance(side, sympy.Expr) for side in (left, right)):
        return False
    ratio = sympy.simplify(left / right)
    if ratio.is_number and ratio.is_zero is False:
        return False
    return not sympy.solve(gold, list(gold.free_symbols), dict=True)
