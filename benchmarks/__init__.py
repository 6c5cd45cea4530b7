"""Benchmarks: not part of this version."""
