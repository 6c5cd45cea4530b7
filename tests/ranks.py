"""Optimizer steps with verl's own training worker and FSDP2 engine on the CPU, without Ray: 1 rank, and 2 with gloo.

:func:`results` runs this file once per test session, as a program: it imports verl, builds a tiny Qwen3, and forks the
three ranks, which all do every case of :data:`LAYOUTS`.
"""

import functools
import itertools
import os
import sys

import programs
import torch

SAMPLES, PADDING = 8, 8
METHODS = ["sat_grpo", "sat_gspo"]
REAL, PADDED = list(range(SAMPLES)), list(range(SAMPLES, SAMPLES + PADDING))
# Name: order of the samples (from SAMPLES on: fully masked), which the ranks share in equal parts, and micro-batches.
LAYOUTS = {
    "whole": (REAL, {"micro_batch_size_per_gpu": None}),
    "by 1": (REAL, {"micro_batch_size_per_gpu": 1}),
    "by 2": (REAL, {"micro_batch_size_per_gpu": 2}),
    "by tokens": (REAL, {"max_token_len_per_gpu": 24}),
    "all tokens": (REAL, {"max_token_len_per_gpu": 1000}),
    "permuted": ([3, 6, 0, 7, 1, 5, 2, 4], {"micro_batch_size_per_gpu": 2}),
    "padded": ([9, 3, 8, 0, 1, 2, 4, 5, 6, 10, 7, 11], {"micro_batch_size_per_gpu": 2}),
    "rank of padding": (REAL + PADDED, {"micro_batch_size_per_gpu": 4}),
}
# World size: layouts with one q for the step, and with one per micro-batch.
WORLDS = {
    1: {"batch": ["whole", "by 1", "by tokens", "permuted"], "microbatch": ["whole", "by tokens"]},
    2: {"batch": ["whole", "by 2", "by tokens", "all tokens", "padded", "rank of padding"], "microbatch": ["whole"]},
}
# World size: layouts with the q of the freshest tokens, each with and without a reference kept of an earlier step.
FRESH = {1: ["whole", "by 1", "permuted"], 2: ["whole", "by tokens", "padded"]}
KEPT_Q = 0.02
LAGS = [2, 0, 2, 5, 0, 2, 2, 5] + [0] * PADDING
ALPHA = 0.5


def results():
    """Of the program below: ``samples`` and, by world size, what each case's step gave (see :func:`step`)."""
    return programs.results(__file__, ("samples", *WORLDS))


def build_model(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": 1}
    config = Qwen3Config(**sizes, **heads, **ids, initializer_range=0.2, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def build_samples(model):
    """Sequences of all lengths; old log-probs are the model's own plus noise with a tail."""
    g = torch.Generator().manual_seed(1)
    samples = []
    for index in range(SAMPLES + PADDING):
        prompt, length = (int(torch.randint(low, high, (1,), generator=g)) for low, high in ((1, 5), (2, 12)))
        ids = torch.randint(2, 32, (prompt + length,), generator=g)
        log_probs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)[prompt - 1 :]
        noise = 0.03 * torch.randn(length, generator=g) * (1 + 6 * (torch.rand(length, generator=g) < 0.3))
        drift = 0.1 * torch.randn(1, generator=g)
        mask = torch.rand(length, generator=g) < 0.8
        samples.append(
            {
                "prompts": ids[:prompt],
                "responses": ids[prompt:],
                "input_ids": ids,
                "position_ids": torch.arange(prompt + length),
                "response_mask": mask.long() * (index < SAMPLES),
                "loss_mask": mask.long() * (index < SAMPLES),
                "old_log_probs": log_probs - noise - drift,
                "advantages": (drift.sign() * torch.rand(1, generator=g)).expand(length),  # outward: what SAT acts on
            }
        )
    return samples


def build_worker(model_folder, model=None, engine=None):
    """A worker on the folder's model; ``model`` and ``engine`` go to verl's configs of those names."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from sat_verl.worker import BatchQuantileWorker

    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    worker = BatchQuantileWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model_folder,
                load_tokenizer=False,
                override_config={"attn_implementation": "sdpa"},
                **{"use_remove_padding": False, "enable_gradient_checkpointing": False, **(model or {})},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                mixed_precision=precision,
                use_torch_compile=False,
                **(engine or {}),
            ),
            # The weights stay as they are, and the gradients as they come.
            optimizer_config=FSDPOptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def loss_function(loss_mode, scope, **options):
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    from sat_verl.config import SATPolicyLossConfig
    from sat_verl.drift import ppo_loss_with_drift

    if loss_mode in METHODS:
        policy_loss = SATPolicyLossConfig(loss_mode=loss_mode, quantile_scope=scope, alpha=ALPHA, **options)
    else:
        policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    config = FSDPActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28, policy_loss=policy_loss
    )
    return functools.partial(ppo_loss_with_drift, config=config)


def batch_of(samples, order, rank, world, **settings):
    """This rank's share of the samples, as verl hands it to its training worker."""
    from verl.utils import tensordict_utils as tu

    share = len(order) // world
    mine = order[rank * share : (rank + 1) * share]
    names = list(samples[0])
    rows = {k: torch.nested.as_nested_tensor([samples[i][k] for i in mine], layout=torch.jagged) for k in names}
    data = tu.get_tensordict({**rows, "version_lag": torch.tensor([LAGS[i] for i in mine])})
    tu.assign_non_tensor_data(data, "version_lags", sorted(set(LAGS)))
    dynamic = "max_token_len_per_gpu" in settings
    settings = {k: share if v is None else v for k, v in settings.items()}
    common = {"temperature": 1.0, "global_batch_size": SAMPLES, "calculate_entropy": True}
    tu.assign_non_tensor(data, use_dynamic_bsz=dynamic, **common, **settings)
    return data


def aged(data, kept):
    """Ages from 1 on; and if asked for, a reference of age 0, kept of an earlier step."""
    from verl.utils import tensordict_utils as tu

    from sat_verl.fresh import KEPT

    data["version_lag"] = data["version_lag"] + 1
    tu.assign_non_tensor_data(data, "version_lags", [lag + 1 for lag in sorted(set(LAGS))])
    if kept:
        tu.assign_non_tensor_data(data, KEPT, [0, KEPT_Q, 7])
    return data


def step(worker, data):
    """One optimizer step: ``loss``, ``gradient`` (all weights, flat), ``metrics`` and the number of ``forwards``."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric

    engine, seen = worker.engine, {"forwards": 0}
    optimizer_step, forward_step = engine.optimizer_step, engine.forward_step

    def spy_step():
        seen["gradient"] = torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()])
        return optimizer_step()

    def spy_forward(*args, **kwargs):
        seen["forwards"] += 1
        return forward_step(*args, **kwargs)

    engine.optimizer_step, engine.forward_step = spy_step, spy_forward
    try:
        metrics = tu.get(worker.train_batch(data), "metrics")
    finally:
        engine.optimizer_step, engine.forward_step = optimizer_step, forward_step
    # By rank and micro-batch.
    values = {k: [m.values for m in v] for k, v in metrics.items() if isinstance(v, list) and isinstance(v[0], Metric)}
    return {**seen, "loss": metrics["loss"], "metrics": values}


def update_actor(worker, data):
    """What the driver has of verl's ``update_actor`` of two mini-batches."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    tu.assign_non_tensor(data, mini_batch_size=SAMPLES // 2, dataloader_kwargs={"shuffle": False}, epochs=1)
    return reduce_metrics(rename_dict(tu.get(worker.train_mini_batch(data), "metrics"), "actor/"))


def rank_main(folder, samples, rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"DIST_INIT_METHOD": f"file://{folder}/rendezvous{world}", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    worker = build_worker(f"{folder}/model")
    out = {}
    for method, (scope, layouts) in itertools.product(METHODS, WORLDS[world].items()):
        worker.set_loss_fn(loss_function(method, scope))
        for layout in layouts:
            order, settings = LAYOUTS[layout]
            out[method, scope, layout] = step(worker, batch_of(samples, order, rank, world, **settings))
    worker.set_loss_fn(loss_function("sat_grpo", "batch", reference="fresh"))
    for layout, kept in itertools.product(FRESH[world], (False, True)):
        order, settings = LAYOUTS[layout]
        out["fresh", layout, kept] = step(worker, aged(batch_of(samples, order, rank, world, **settings), kept))
    worker.set_loss_fn(loss_function("gspo", "batch"))
    out["gspo"] = step(worker, batch_of(samples, REAL, rank, world, micro_batch_size_per_gpu=2))
    for loss_mode in ("vanilla", "sat_grpo"):
        worker.set_loss_fn(loss_function(loss_mode, "batch"))
        # Mini-batches are cut from the ranks' shares: the first one holds the same samples for 1 rank and for 2.
        order = [0, 1, 2, 3, 4, 5, 6, 7] if world == 1 else [0, 1, 4, 5, 2, 3, 6, 7]
        out["update", loss_mode] = update_actor(
            worker, batch_of(samples, order, rank, world, micro_batch_size_per_gpu=2)
        )
    if rank == 0:
        torch.save(out, f"{folder}/{world}.pt")


def main(folder):
    import sat_verl.worker  # noqa: F401  here, and not three times after the fork

    model = build_model(f"{folder}/model")
    samples = build_samples(model)
    torch.save(samples, f"{folder}/samples.pt")
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(folder, samples, rank, world))
        for world in WORLDS
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main(sys.argv[1])
