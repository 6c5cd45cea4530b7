"""verl's plug-in entry point (``verl.plugins``): importing this module registers the losses.

verl imports it, and calls nothing, as the last act of ``import verl``, so in the driver and in every Ray worker.
"""

import logging

try:
    import sat_verl.policy_loss  # noqa: F401
except Exception:
    # verl logs a plug-in's failure at DEBUG and goes on, so that it would only show as an unknown loss mode.
    logging.getLogger(__name__).exception("sat_verl could not register its policy losses with verl")
    raise
