"""Benchmarks: experiments that are small enough for one CPU core."""
