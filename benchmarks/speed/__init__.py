"""How fast are the parts? ``python -m benchmarks.speed COMMAND``."""
