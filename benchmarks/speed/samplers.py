"""verl's own samplers, looking as often as the project's.

verl looks for finished prompts every 2 seconds, and no setting changes it: of a step of that length it would be most
of what is measured.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class Sync(ReplayBuffer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=settings["sampler_kwargs"]["poll_interval_s"], **settings)


class Async(ReplayBufferAsync):
    def __init__(self, **settings: Any) -> None:
        super().__init__(poll_interval=settings["sampler_kwargs"]["poll_interval_s"], **settings)
