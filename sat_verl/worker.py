"""The actor worker of the recipes: verl's own, observed."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.utils.losses import ppo_loss

from sat_verl.drift import ppo_loss_with_drift


class ObservedActorWorker(DetachActorWorker):
    """verl's actor worker whose every policy loss also reports ``actor/abs_log_ratio``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        loss_fn = getattr(self, "loss_fn", None)
        # Only verl's plain PPO loss is observed; a distillation loss stays as it is.
        if isinstance(loss_fn, partial) and loss_fn.func is ppo_loss:
            self.actor.set_loss_fn(partial(ppo_loss_with_drift, **loss_fn.keywords))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_loss_in_use(self) -> dict[str, Any]:
        """What this process computes, read back from the objects that compute it (not from the driver's config)."""
        config = self.actor.loss_fn.keywords["config"]
        function = get_policy_loss_fn(config.policy_loss.loss_mode)
        options = {name: getattr(config.policy_loss, name, None) for name in ("alpha", "kernel_exponent")}
        return {
            "loss_mode": config.policy_loss.loss_mode,
            "function": f"{function.__module__}.{function.__qualname__}",
            "loss_agg_mode": config.loss_agg_mode,
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "clip_ratio_c": config.clip_ratio_c,
            **{name: value for name, value in options.items() if value is not None},
        }
