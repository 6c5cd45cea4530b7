"""Evaluation harness: not part of this version."""
