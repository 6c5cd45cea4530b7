"""verl's plug-in entry point (``verl.plugins``): importing this module registers the losses.

verl 0.9 imports it, and calls nothing, as the last act of ``import verl``, so in the driver and in every Ray worker.
Older ones have no entry point: ``actor_rollout_ref.model.external_lib=sat_verl.plugin`` makes their workers import it
(see :mod:`sat_verl.versions`).
"""

import importlib
import logging
from typing import Any

from sat_verl import cpu, sglang_routes, versions


def _register_trainer(module: Any) -> None:
    try:
        versions.require_asynchronous()
    except versions.UnsupportedVerlError as error:
        module.register_trainer("sat_async")(_refusing(module.PPOTrainer, error))
    else:
        importlib.import_module("sat_verl.trainer")


def _refusing(base: type, error: Exception) -> type:
    """A trainer that says why there is none, when it is asked for and not before."""

    def refuse(cls: type, *_args: Any, **_options: Any) -> None:
        raise error

    return type("UnsupportedTrainer", (base,), {"__new__": refuse})


def _register() -> None:
    import wrapt

    importlib.import_module("sat_verl.policy_loss")
    importlib.import_module("sat_verl.baselines")
    sglang_routes.install()
    # The trainer is registered when verl's own trainers are: importing them here would slow every process down.
    wrapt.register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1")
    if cpu.enabled():
        cpu.leave_out_megatron()
        importlib.import_module("sat_verl.cpu.platform")
        importlib.import_module("sat_verl.cpu.bridges").install()


try:
    _register()
except Exception:
    # verl logs a plug-in's failure at DEBUG and goes on, so that it would only show as an unknown loss mode.
    logging.getLogger(__name__).exception("sat_verl could not register itself with verl")
    raise
