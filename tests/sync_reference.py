"""verl's own synchronous trainer on a recipe's config: what lag=0 must reproduce.

``python sync_reference.py RUN_DIR RUNTIME_DIR``, as recipes.driver is started. Everything is verl's: trainer,
replay buffer, colocated engines, weight transfer. Only prompts and requests have the names and seeds that ours have, or
the two would sample different responses.
"""

import sys
from pathlib import Path

from recipes import driver


def synchronous(config):
    """A recipe's config for ``trainer_mode=sync``."""
    config.trainer.v1.trainer_mode = "sync"
    config.actor_rollout_ref.hybrid_engine = True
    config.actor_rollout_ref.rollout.nnodes = 0
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
    config.trainer.v1.sampler.custom_sampler = {"path": None, "name": None}
    config.trainer.v1.sampler.sampler_kwargs = {}
    config.trainer.resume_mode = "disable"
    return config


def runner():
    from verl.trainer.main_ppo import TaskRunnerV1

    class Runner(TaskRunnerV1.__ray_actor_class__):
        def run(self, config):
            from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

            from sat_verl.rollout import RecordingClient
            from sat_verl.trainer import NumberedPrompts

            PPOTrainerSync.__bases__ = (NumberedPrompts, *PPOTrainerSync.__bases__)
            PPOTrainerSync.get_llm_client = lambda self: self.llm_server_manager.get_client(client_cls=RecordingClient)
            super().run(config)

    return Runner


if __name__ == "__main__":
    driver.run(synchronous(driver.load(Path(sys.argv[1]), Path(sys.argv[2]))), runner)
