"""Optimizer steps with verl's Megatron engine on the CPU, beside the same ones with FSDP2: 1 rank, and 2 with gloo.

As :mod:`ranks`, of which it is a third program: :func:`results` runs it once per test session. The gradient of a
Megatron step is what a step of gradient descent subtracts from the weights, which Megatron's own export names as
transformers does, whatever the ranks hold of them.
"""

import functools
import os
import sys
from multiprocessing.connection import wait

import programs
import ranks
import torch

LAYERS, EXPERTS, TOP_K = 2, 8, 2
ORDER = list(range(ranks.SAMPLES))
INCOMPLETE = {3: [1], 5: [0, 2]}
"""Sample: tokens whose route the samples lack."""
BY_2, BY_TOKENS = {"micro_batch_size_per_gpu": 2}, {"max_token_len_per_gpu": 24}
WHOLE = {"micro_batch_size_per_gpu": None}
# Name: model, settings of the step, loss, whether routes are replayed.
CASES = {
    "dense": ("dense", BY_2, "sat_grpo", False),
    "dense, one micro-batch": ("dense", WHOLE, "sat_gspo", False),
    "dense, by tokens": ("dense", BY_TOKENS, "sat_gspo", False),
    "moe": ("moe", BY_2, "sat_grpo", False),
    "moe, replayed": ("moe", BY_2, "sat_grpo", True),
    "moe, replayed, by tokens": ("moe", BY_TOKENS, "sat_gspo", True),
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Name: world size, settings of the engine, settings of its transformer, cases.
LAYOUTS = {
    "one rank": (1, {}, {}, list(CASES)),
    "recompute": (1, {}, RECOMPUTE, ["moe, replayed"]),
    "data": (2, {}, {}, ["dense", "dense, by tokens", "moe, replayed"]),
    "tensor": (2, {"tensor_model_parallel_size": 2}, {}, ["dense", "moe, replayed"]),
    "expert": (2, {"expert_model_parallel_size": 2}, {}, ["moe, replayed", "moe, replayed, by tokens"]),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}, {}, ["dense", "moe, replayed"]),
}


def results():
    """Of the program below: ``fsdp`` and each layout by case, ``checkpoint`` by model, ``unneeded`` patches, ..."""
    return programs.results(
        __file__,
        ("samples", "fsdp", "checkpoint", "refusal", "unneeded", *LAYOUTS),
        TORCHDYNAMO_DISABLE="1",
        PYTHONWARNINGS="ignore",
    )


def build_model(kind):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rest = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False}
    rest |= {"initializer_range": 0.2, "attn_implementation": "sdpa"}
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **rest)).float().eval()
    moe = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **rest, **moe)).float().eval()


def build_samples(model, kind):
    samples = ranks.build_samples(model)[: ranks.SAMPLES]
    generator = torch.Generator().manual_seed(2)
    for index, sample in enumerate(samples if kind == "moe" else []):
        shape = (len(sample["input_ids"]), LAYERS, EXPERTS)
        routes = torch.rand(shape, generator=generator).argsort(-1)[..., :TOP_K].to(torch.uint8)
        routes[[*INCOMPLETE.get(index, []), -1]] = 0
        sample["routed_experts"] = routes
    samples[6]["response_mask"] = torch.zeros_like(samples[6]["response_mask"])  # takes no part
    return samples


def build_worker(folder, replay, transformer=None, engine=None, optimizer=None, incomplete="native"):
    """A worker with verl's Megatron engine in float32 on the folder's model."""
    from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreOptimizerConfig, TrainingWorkerConfig

    from sat_verl.cpu.megatron.config import CpuMcoreEngineConfig
    from sat_verl.routing.config import RouterReplayConfig
    from sat_verl.worker import BatchQuantileWorker

    local = {"attention_backend": "local", "persist_layer_norm": False, "moe_grouped_gemm": False}
    # The first step of Adam is lr * g / (|g| + eps), which is g for these; its distributed optimizer has Adam alone.
    descent = {"lr": 1e6, "weight_decay": 0.0, "override_optimizer_config": {"adam_eps": 1e6}}
    worker = BatchQuantileWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=folder, use_remove_padding=True),
            engine_config=CpuMcoreEngineConfig(
                vanilla_mbridge=True,
                override_transformer_config=local | (transformer or {}),
                router_replay=RouterReplayConfig(
                    mode="R3" if replay else "disabled", compare=replay, incomplete=incomplete
                ),
                **(engine or {}),
            ),
            optimizer_config=McoreOptimizerConfig(
                **{**(optimizer or descent), "clip_grad": 1e9, "total_training_steps": 1000, "lr_decay_steps": 1000}
            ),
            checkpoint_config=McoreCheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
        )
    )
    worker.reset()
    return worker


def weights(worker):
    return {name: value.clone() for name, value in worker.engine.get_per_tensor_param()[0]}


def load(worker, folder):
    worker.engine.bridge.load_weights(worker.engine.module, folder)
    worker.engine.optimizer.reload_model_params()
    for optimizer in worker.engine.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            for value in state.values():
                value.zero_()


def batch(samples, rank, world, settings, replay):
    from verl.utils import tensordict_utils as tu

    data = ranks.batch_of(samples, ORDER, rank, world, **settings)
    tu.assign_non_tensor_data(data, "enable_routing_replay", replay)
    return data


def log_probs(worker, data):
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, compute_loss=False)
    out = worker.infer_batch(data)
    return [] if out is None else [row.clone() for row in out["log_probs"].unbind()]


def step(worker, data):
    """``metrics`` of one optimizer step, by name: numbers and lists of numbers."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric

    output = worker.train_batch(data)
    metrics = {} if output is None else tu.get(output, "metrics")
    plain = {}
    for name, value in metrics.items():
        parts = [one.values if isinstance(one, Metric) else one for one in value] if isinstance(value, list) else value
        plain[name] = parts
    return plain


def fsdp_main(folder, samples, rank, world):
    """All cases with FSDP2: gradients by name, experts apart as Megatron's export has them."""
    from sat_verl.routing.config import RouterReplayConfig

    out, workers = {}, {}
    for name, (kind, settings, loss, replay) in CASES.items():
        if kind not in workers:
            options = {"router_replay": RouterReplayConfig(mode="R3", compare=True)} if kind == "moe" else None
            workers[kind] = ranks.build_worker(f"{folder}/{kind}", None, options)
        worker = workers[kind]
        worker.set_loss_fn(ranks.loss_function(loss, "batch"))
        seen, numbers = {}, {}
        optimizer_step, engine = worker.engine.optimizer_step, worker.engine

        def spy(seen=seen, engine=engine, optimizer_step=optimizer_step):
            seen.update({name: p.grad.full_tensor() for name, p in engine.module.named_parameters()})
            return optimizer_step()

        engine.optimizer_step = spy
        numbers = step(worker, batch(samples[kind], rank, world, settings, replay))
        engine.optimizer_step = optimizer_step
        values = log_probs(worker, batch(samples[kind], rank, world, settings, replay))
        out[name] = {"gradient": apart(seen), "metrics": numbers, "log_probs": values}
    torch.save(out, f"{folder}/fsdp.pt")


def apart(tensors):
    """Transformers' stacked experts, one by one."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(value):
                prefix = name.removesuffix("gate_up_proj") + f"{expert}."
                out[prefix + "gate_proj.weight"], out[prefix + "up_proj.weight"] = matrix.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(value):
                out[name.removesuffix("down_proj") + f"{expert}.down_proj.weight"] = matrix
        else:
            out[name] = value
    return out


def one_layout(layout, folder, samples, cases):
    _, engine, transformer, _ = LAYOUTS[layout]
    out, workers = {}, {}
    for name in cases:
        kind, settings, loss, replay = CASES[name]
        if (kind, replay) not in workers:
            workers[kind, replay] = build_worker(f"{folder}/{kind}", replay, transformer, engine)
        worker = workers[kind, replay]
        load(worker, f"{folder}/{kind}")
        before = weights(worker)
        worker.set_loss_fn(ranks.loss_function(loss, "batch"))
        dp, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
        values = log_probs(worker, batch(samples[kind], dp, size, settings, replay))
        metrics = step(worker, batch(samples[kind], dp, size, settings, replay))
        after = weights(worker)
        gradient = {key: before[key] - after[key] for key in before}
        out[name] = {"gradient": gradient, "before": before, "metrics": metrics, "log_probs": values}
    return out


def layout_main(layout, folder, samples, rank, world):
    out = one_layout(layout, folder, samples, LAYOUTS[layout][3])
    parts = [None] * world
    torch.distributed.all_gather_object(parts, out)
    if rank == 0:
        # Where the metrics and the log-probs are: on the ranks that have outputs.
        for name, found in out.items():
            found["all_metrics"] = [part[name]["metrics"] for part in parts if part[name]["metrics"]]
            found["all_log_probs"] = [part[name]["log_probs"] for part in parts if part[name]["log_probs"]]
        torch.save(out, f"{folder}/{layout}.pt")


def resumed(folder, samples, kind, replay, saved):
    """Two Adam steps with a checkpoint between them, and again from that checkpoint in a worker on other weights."""
    adam, out = {"lr": 1e-2, "weight_decay": 0.0}, {}

    def one_step(worker):
        out["metrics"] = step(worker, batch(samples[kind], 0, 1, BY_2, replay))
        return weights(worker)

    first, second = (build_worker(f"{folder}/{kind}", replay, optimizer=adam) for _ in range(2))
    for worker in (first, second):
        worker.set_loss_fn(ranks.loss_function("sat_grpo", "batch"))
    out["saved"] = one_step(first)
    first_metrics = out["metrics"]
    first.save_checkpoint(f"{folder}/{saved}", None, 1, None)
    out["expected"] = one_step(first)
    one_step(second)
    one_step(second)
    second.load_checkpoint(f"{folder}/{saved}", None, False)
    out["loaded"] = weights(second)
    out["resumed"] = one_step(second)
    return out | {"metrics": first_metrics}


def checkpoint_main(folder, samples, rank, world):
    out = {}
    for kind, replay in (("dense", False), ("moe", True)):
        out[kind] = resumed(folder, samples, kind, replay, f"saved-{kind}")
        out[kind]["exported"] = exported(f"{folder}/saved-{kind}/model/huggingface")
    torch.save(out, f"{folder}/checkpoint.pt")


def exported(folder):
    from transformers import AutoModelForCausalLM

    return apart(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def refusal_main(folder, samples, rank, world):
    """``incomplete=fail``, in the actor update and in a recompute."""
    from sat_verl.routes import IncompleteRoutesError

    worker = build_worker(f"{folder}/moe", True, incomplete="fail")
    worker.set_loss_fn(ranks.loss_function("sat_grpo", "batch"))
    out = {}
    for name, call in {"update": step, "recompute": log_probs}.items():
        try:
            call(worker, batch(samples["moe"], 0, 1, BY_2, True))
        except IncompleteRoutesError as error:
            out[name] = str(error)
    others = [one | {"routed_experts": one["routed_experts"][:, [0, 0, 1]]} for one in samples["moe"]]
    try:
        step(worker, batch(others, 0, 1, BY_2, True))
    except ValueError as error:
        out["layers"] = str(error)
    torch.save(out, f"{folder}/refusal.pt")


# What shows that a patch of sat_verl.cpu.megatron is needed: a layout and a case that fail without it.
ONE_STEP = ("one rank", "moe, replayed")
NEEDED = {
    "split_sizes_as_numbers": ("expert", "moe, replayed"),
    "norm_of_split_sequences": ("tensor", "moe, replayed"),
    "load_float32_state": ("checkpoint", "dense"),
    "own_step_counters": ("checkpoint", "dense"),
}


def without_main(patch, folder, samples, rank, world):
    """Ends with an error, unless all goes well without that patch."""
    from sat_verl.cpu import megatron

    for one in megatron.PATCHES:
        if one.name != patch:
            one.apply()
    layout, case = NEEDED.get(patch, ONE_STEP)
    if layout == "checkpoint":
        found = resumed(folder, samples, case, False, f"saved-without-{patch}")
        if not all(torch.equal(found["expected"][name], value) for name, value in found["resumed"].items()):
            raise RuntimeError("another step after the checkpoint")
    else:
        one_layout(layout, folder, samples, [case])


def rank_main(function, patched, name, folder, samples, rank, world):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"DIST_INIT_METHOD": f"file://{folder}/rendezvous-{name}", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    if patched:
        from sat_verl.cpu import megatron

        megatron.apply()
    function(folder, samples, rank, world)


def run(context, function, name, world, patched, folder, samples):
    """Whether all ranks end well; the others are stopped when one does not."""
    arguments = (function, patched, name, folder, samples)
    processes = [context.Process(target=rank_main, args=(*arguments, rank, world)) for rank in range(world)]
    for process in processes:
        process.start()
    waiting = {process.sentinel for process in processes}
    while waiting:
        waiting -= set(wait(waiting))
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    for process in processes:
        process.join()
    return not any(process.exitcode for process in processes)


def main(folder):
    from sat_verl.cpu import bridges

    bridges._installed.add("run_megatron")  # every process below applies the patches that it needs
    import mbridge  # noqa: F401  here, and not in every process after the fork
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    import sat_verl.worker  # noqa: F401
    from recipes.models.tokenizer import build_tokenizer
    from sat_verl.cpu import megatron

    samples = {}
    for kind in ("dense", "moe"):
        model = build_model(kind)
        samples[kind] = build_samples(model, kind)
        model.save_pretrained(f"{folder}/{kind}")
        build_tokenizer(64).save_pretrained(f"{folder}/{kind}")
    held = {kind: exported(f"{folder}/{kind}") for kind in ("dense", "moe")}
    torch.save(samples | {"weights": held}, f"{folder}/samples.pt")
    go = functools.partial(run, torch.multiprocessing.get_context("fork"), folder=folder, samples=samples)
    jobs = [(fsdp_main, "fsdp", 1), (checkpoint_main, "checkpoint", 1), (refusal_main, "refusal", 1)]
    jobs += [(functools.partial(layout_main, name), name, world) for name, (world, *_) in LAYOUTS.items()]
    failed = [name for function, name, world in jobs if not go(function, name, world, True)]
    unneeded = []
    for patch in (one.name for one in megatron.PATCHES):
        world = LAYOUTS.get(NEEDED.get(patch, ONE_STEP)[0], (1,))[0]
        if go(functools.partial(without_main, patch), f"without-{patch}", world, False):
            unneeded.append(patch)
    torch.save(unneeded, f"{folder}/unneeded.pt")
    sys.exit(", ".join(failed) or 0)


if __name__ == "__main__":
    main(sys.argv[1])
