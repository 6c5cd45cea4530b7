"""Older prompts first: the agent loop workers start no more of them than the engines can work on.

verl starts every prompt as soon as it is submitted. A lag of n submits n batches at once, and one process then takes
turns among all of their responses, so that the first batch is complete hardly before the last one: the trainer waits
for the whole window, then the rollout for the trainer. And of several workers it gives the first one the oldest
prompts, the last one the newest. What waits here would wait in the engine's queue there.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

SINGLE_TURN = "single_turn_agent"


def prompts_at_once(config: DictConfig, workers: int, responses: int) -> int:
    """How many prompts one of ``workers`` agent loop workers may have in work.

    As many as have, with all their responses, a place each (``rollout.max_num_seqs``) in all engines, those beside the
    trainer counted; the next is started when one is complete.

    Args:
        config: verl's, of the run.
        workers: agent loop workers.
        responses: of a prompt.
    """
    rollout = config.actor_rollout_ref.rollout
    devices = rollout.nnodes * rollout.n_gpus_per_node
    if config.actor_rollout_ref.get("hybrid_engine", True):
        devices += config.trainer.nnodes * config.trainer.n_gpus_per_node
    parts = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    engines = max(1, devices // math.prod(rollout.get(part, 1) or 1 for part in parts))
    return math.ceil(rollout.max_num_seqs * engines / (responses * workers))


class OldestFirst:
    """For verl's agent loop worker: limits the prompts in work, those of training and of validation by themselves.

    Only prompts of verl's single-turn loop: an agent that waits for a tool occupies no engine.
    """

    config: DictConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places: dict[bool, asyncio.Semaphore] = {}

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        arguments = (prompt, sampling_params, trajectory, trace)
        if prompt.get("agent_name") != SINGLE_TURN:
            return await super()._run_prompt(*arguments)  # type: ignore[misc]
        async with self._place(bool(trajectory["validate"])):
            return await super()._run_prompt(*arguments)  # type: ignore[misc]

    def _place(self, validate: bool) -> asyncio.Semaphore:
        if validate not in self._places:
            rollout = self.config.actor_rollout_ref.rollout
            responses = rollout.val_kwargs.n if validate else rollout.n
            places = prompts_at_once(self.config, rollout.agent.num_workers, responses)
            self._places[validate] = asyncio.Semaphore(places)
        return self._places[validate]


def dealt(prompts: TensorDict, workers: int) -> TensorDict:
    """Prompts in such an order that verl's equal chunks of it give each worker old and new ones in turn."""
    hands = min(workers, len(prompts))
    if hands < 2:
        return prompts
    return tu.index_select_tensor_dict(prompts, [i for hand in range(hands) for i in range(hand, len(prompts), hands)])


class Dealing:
    """For verl's agent loop manager: its workers get the prompts in turn."""

    agent_loop_workers: list

    def generate_sequences(self, prompts: TensorDict) -> None:
        super().generate_sequences(dealt(prompts, len(self.agent_loop_workers)))  # type: ignore[misc]
