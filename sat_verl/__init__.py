"""SAT (Staleness-Adaptive Trust Region) policy losses and the CPU backend, as a verl plug-in.

Importing this package is cheap: it loads neither torch nor verl nor vLLM. verl finds the losses by itself,
through the ``verl.plugins`` entry point (see :mod:`sat_verl.plugin`).
"""

__version__ = "0.1.0"
