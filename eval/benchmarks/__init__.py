"""Benchmarks: named ones, the recipes' tasks, and any file of problems with answers.

No problem of a contest is in this package: statements come from the optional package sgl-eval, a file or the hub. What
is here are answer keys, which are facts, and fingerprints that recognise a statement.
"""

from eval.benchmarks.load import NAMES, check_name, load

__all__ = ["NAMES", "check_name", "load"]
