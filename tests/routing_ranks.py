"""Optimizer steps of a tiny MoE with verl's FSDP2 engine and routing replay on the CPU: 1 rank, and 2 with gloo.

As :mod:`ranks`, of which it is a second program: :func:`results` runs it once per test session.
"""

import os
import sys

import programs
import ranks
import torch

SAMPLES, EXPERTS, TOP_K, LAYERS, MOE_LAYERS = 8, 8, 2, 3, (0, 2)
ORDER = list(range(SAMPLES))
# Name: settings of the model, of the step, and perhaps of the engine.
PLAIN, BY_2 = {}, {"micro_batch_size_per_gpu": 2}
CHECKPOINTED = {"enable_gradient_checkpointing": True}
PACKED = {"use_remove_padding": True}
CASES = {
    1: {
        "whole": (PLAIN, {"micro_batch_size_per_gpu": None}),
        "by 2": (PLAIN, BY_2),
        "by tokens": (PLAIN, {"max_token_len_per_gpu": 24}),
        "checkpointed": (CHECKPOINTED, BY_2),
        "packed": (PACKED, BY_2),
        "packed, checkpointed": (PACKED | CHECKPOINTED, {"max_token_len_per_gpu": 24}),
        "packed to a length": (PACKED, BY_2, {"pad_to_length": True, "pad_to_length_bucket": 16}),
    },
    2: {"by 2": (PLAIN, BY_2), "packed, checkpointed": (PACKED | CHECKPOINTED, {"max_token_len_per_gpu": 24})},
}
INCOMPLETE = {3: [1], 5: [0, 2]}
"""Sample: tokens whose route the samples lack."""


def results():
    """Of the program below: ``samples``, ``model`` (its folder's weights), and by world size what each case gave."""
    return programs.results(__file__, ("samples", *CASES))


def build_model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": 1}
    moe = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16, "norm_topk_prob": True}
    moe |= {"mlp_only_layers": [i for i in range(LAYERS) if i not in MOE_LAYERS], "attn_implementation": "sdpa"}
    config = Qwen3MoeConfig(**sizes, **heads, **ids, **moe, initializer_range=0.2, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config).float().eval()


def random_routes(tokens, generator):
    """Different experts in every row of the MoE layers, zeros in the dense one; the last row is zeros."""
    routes = torch.zeros(tokens, LAYERS, TOP_K, dtype=torch.int16)
    for layer in MOE_LAYERS:
        routes[:, layer] = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].to(torch.int16)
    routes[-1] = 0
    return routes


def build_samples(model):
    generator = torch.Generator().manual_seed(2)
    samples = ranks.build_samples(model)[:SAMPLES]
    for index, sample in enumerate(samples):
        routes = random_routes(len(sample["input_ids"]), generator)
        routes[INCOMPLETE.get(index, [])] = 0
        sample["routed_experts"] = routes
    samples[6]["response_mask"] = torch.zeros_like(samples[6]["response_mask"])  # takes no part
    return samples


def step(worker, data):
    """:func:`ranks.step`, and ``numbers``: this rank's metrics that are one number."""
    numbers, postprocess = {}, worker._postprocess_output

    def spy(output, **rest):
        numbers.update({k: v[0] for k, v in output["metrics"].items() if isinstance(v, list) and len(v) == 1})
        return postprocess(output, **rest)

    worker._postprocess_output = spy
    try:
        return ranks.step(worker, data) | {"numbers": numbers}
    finally:
        worker._postprocess_output = postprocess


def rank_main(folder, samples, rank, world):
    from verl.utils import tensordict_utils as tu

    from sat_verl.routes import IncompleteRoutesError
    from sat_verl.routing.config import RouterReplayConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"DIST_INIT_METHOD": f"file://{folder}/rendezvous{world}", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    out, workers = {}, {}

    def worker_of(model, engine=None, **options):
        key = str((model, engine, options))
        if key not in workers:
            replay = {"router_replay": RouterReplayConfig(mode="R3", **options)}
            workers[key] = ranks.build_worker(f"{folder}/model", model, replay | (engine or {}))
            workers[key].set_loss_fn(ranks.loss_function("sat_grpo", "batch"))
        return workers[key]

    def batch(replay, settings, rows=samples):
        data = ranks.batch_of(rows, ORDER, rank, world, **settings)
        tu.assign_non_tensor_data(data, "enable_routing_replay", replay)
        return data

    for name, (model, settings, *engine) in CASES[world].items():
        worker = worker_of(model, *engine, compare=True)
        out[name] = step(worker, batch(True, settings))
        out["native", name] = step(worker, batch(False, settings))
    worker = worker_of(PLAIN, compare=True)
    out["update"] = ranks.update_actor(worker, batch(True, BY_2))
    if world == 1:
        data = batch(True, BY_2)
        tu.assign_non_tensor(data, compute_loss=False)
        out["recompute"] = list(worker.infer_batch(data)["log_probs"].unbind())
        absent = [{k: v for k, v in sample.items() if k != "routed_experts"} for sample in samples]
        for name, rows in {"incomplete": samples, "absent": absent}.items():
            try:
                step(worker_of(PLAIN, incomplete="fail"), batch(True, BY_2, rows))
            except IncompleteRoutesError as error:
                out["error", name] = str(error)
    if rank == 0:
        torch.save(out, f"{folder}/{world}.pt")


def main(folder):
    import sat_verl.worker  # noqa: F401  here, and not three times after the fork

    model = build_model()
    model.save_pretrained(f"{folder}/model")
    samples = build_samples(model)
    torch.save(samples, f"{folder}/samples.pt")
    context = torch.multiprocessing.get_context("fork")
    processes = [
        context.Process(target=rank_main, args=(folder, samples, rank, world))
        for world in CASES
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(sys.argv[1])
