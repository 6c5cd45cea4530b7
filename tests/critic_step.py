"""A process in which verl's critic, with the config of ``algorithm=ppo``, learns constant returns (test_arms.py)."""

import os
import sys
from functools import partial

import ranks
import torch
from omegaconf import open_dict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from recipes.compose import compose
from recipes.derive import derive

COMMON = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8, "temperature": 1.0, "global_batch_size": 8}


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def main(folder):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    os.environ["DIST_INIT_METHOD"] = f"file://{folder}/rendezvous"
    rows = ranks.build_samples(ranks.build_model(f"{folder}/model"))[:8]
    cfg = derive(compose(["algorithm=ppo", f"run_dir={folder}/run"]))
    cfg.actor_rollout_ref.model.path = f"{folder}/model"
    with open_dict(cfg):
        cfg.critic.model.load_tokenizer = False  # the model of the ranks' tests has none
    critic = omega_conf_to_dataclass(cfg.critic)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    data = tu.get_tensordict({name: nested([row[name] for row in rows]) for name in rows[0]})
    forward = data.copy()
    tu.assign_non_tensor(forward, compute_loss=False, **COMMON)
    values = worker.infer_batch(forward)["values"].unbind()
    data["values"] = nested([v[-len(row["responses"]) :].detach() for v, row in zip(values, rows, strict=True)])
    data["returns"] = nested([torch.ones(len(row["responses"])) for row in rows])
    losses = []
    for _ in range(12):
        batch = data.copy()
        tu.assign_non_tensor(batch, mini_batch_size=8, dataloader_kwargs={"shuffle": False}, epochs=1, **COMMON)
        losses += tu.get(worker.train_mini_batch(batch), "metrics")["critic/vf_loss"]
    print("losses", *losses)


if __name__ == "__main__":
    main(sys.argv[1])
