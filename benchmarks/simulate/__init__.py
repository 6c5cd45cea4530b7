"""A run without models: the recipes' own schedule and sampler on a clock that is not real (SIMULATOR.md)."""
