"""The settings of verl that follow from the recipe's own, written into the composed config."""

from __future__ import annotations

import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes import clip, divisibility, megatron, resume, routing, schedule, smoke, values, variants

SPARE_POSITIONS = {"sglang": 1}
"""Positions that a rollout engine needs beyond prompt and response: verl gives SGLang one token less than fit."""


def default_run_dir(cfg: DictConfig) -> Path:
    lag = f"lag{cfg.lag.steps}" if cfg.lag.schedule == "broadcast" else f"{cfg.lag.schedule}{cfg.lag.steps}"
    correction = "" if cfg.choices.correction == "none" else f"-{cfg.choices.correction}"
    setting = cfg.choices.get("recipe") or f"{cfg.choices.task}-{cfg.choices.model}"
    name = f"{cfg.choices.algorithm}{correction}-{setting}-{lag}-seed{cfg.seed}"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _fill(cfg: DictConfig, key: str, value: object) -> None:
    """Set ``key`` unless the user has (the recipe leaves such settings null)."""
    if OmegaConf.select(cfg, key) is None:
        OmegaConf.update(cfg, key, value)


def derive(cfg: DictConfig) -> DictConfig:
    """Check the values, and fill in what follows from them; returns ``cfg``.

    - ``run_dir``: absolute, with a default name.
    - with ``smoke``, small sizes (:mod:`recipes.smoke`).
    - what follows from the lag schedule (:mod:`recipes.schedule`), and from routing replay in rollout and trainer
      (:mod:`recipes.routing`).
    - ``data.train_batch_size``: prompts of one weight-sync window, which verl wants to be
      ``parameter_sync_step * ppo_mini_batch_size``.
    - ``actor.ppo_micro_batch_size_per_gpu``: a rank's share of the mini-batch (one micro-batch).
    - ``actor.clip_ratio_low``, ``_high``, ``_c``: from ``clip_ratio`` and ``dual_clip`` (:mod:`recipes.clip`).
    - ``actor.policy_loss.reference``, ``.negative_cap``: from those words (:mod:`recipes.variants`).
    - ``rollout.max_model_len``: prompt plus response, and one more for SGLang.
    - ``rollout.n_gpus_per_node`` (GPUs): those of ``rollout_replicas`` engines, on ``rollout.nnodes`` nodes.
    - ``rollout.val_kwargs.n``: ``benchmark_samples``, if the run validates on a benchmark, else 1.
    - ``rollout.max_num_batched_tokens`` (CPU): room for one whole sequence, see the backend's config.
    - ``actor.optim.lr_decay_steps`` (Megatron): of a learning rate that depends on the number of steps, that number.
    - ``ray_init.num_gpus`` (CPU, and one GPU for both): one logical slot per trainer rank and rollout replica.
    """
    clip.derive(cfg)
    variants.derive(cfg)
    values.check(cfg)
    smoke.apply(cfg)
    megatron.consistent(cfg)
    run_dir = Path(cfg.run_dir or default_run_dir(cfg)).absolute()
    actor = cfg.actor_rollout_ref.actor
    with open_dict(cfg):
        cfg.run_dir = str(run_dir)
        cfg.cache_dir = str(Path(cfg.cache_dir).absolute())
        cfg.sat_verl.run_dir = str(run_dir)
        cfg.trainer.experiment_name = run_dir.name
        schedule.follow(cfg, "trainer.default_local_dir", f"{run_dir}/checkpoints", "run_dir")
        schedule.derive(cfg)
        routing.derive(cfg)
        window = cfg.trainer.v1.separate_async.parameter_sync_step
        _fill(cfg, "data.train_batch_size", window * actor.ppo_mini_batch_size)
        share = max(1, actor.ppo_mini_batch_size * cfg.responses_per_prompt // megatron.data_parallel(cfg))
        _fill(cfg, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", share)
        megatron.derive(cfg)
        if megatron.chosen(cfg):
            # Megatron wants a number above the warm-up even where nothing decays.
            _fill(
                cfg, "actor_rollout_ref.actor.optim.lr_decay_steps", 10**9 if resume.steady(actor.optim) else cfg.steps
            )
        length = cfg.data.max_prompt_length + cfg.data.max_response_length
        rollout = cfg.actor_rollout_ref.rollout
        _fill(cfg, "actor_rollout_ref.rollout.max_model_len", length + SPARE_POSITIONS.get(rollout.name, 0))
        if cfg.benchmark is None:
            _fill(cfg, "actor_rollout_ref.rollout.val_kwargs.n", 1)
        else:
            schedule.follow(cfg, "actor_rollout_ref.rollout.val_kwargs.n", cfg.benchmark_samples, "benchmark_samples")
            if OmegaConf.is_missing(cfg.task, "test_file"):
                cfg.task.test_file = None
        if cfg.backend.name == "cpu":
            _fill(cfg, "actor_rollout_ref.rollout.max_num_batched_tokens", max(4096, length))
        else:
            gpus = divisibility.rollout_gpus(cfg)
            schedule.follow(cfg, "actor_rollout_ref.rollout.n_gpus_per_node", gpus, "rollout_replicas")
        if cfg.backend.name == "cpu" or cfg.backend.shared_gpu:
            _fill(cfg, "ray_kwargs.ray_init.num_gpus", cfg.trainer_ranks + cfg.rollout_replicas)
    return cfg
