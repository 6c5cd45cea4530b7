"""Parameters that the fullest rank of Megatron holds, by layout: real models of megatron-core in a group without peers.

A program, for ``test_plan``; it prints one JSON object. (Megatron's parallel state is global to a process.)
"""

import json
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4


def transformer(config, tensor, pipeline, expert, expert_tensor):
    """megatron-core's config of a Qwen3 or Qwen3-MoE."""
    experts = {}
    if "num_experts" in config:
        experts = {
            "num_moe_experts": config["num_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_token_dispatcher_type": "allgather",  # the other one makes a CUDA stream
        }
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        sequence_parallel=False,  # torch's norm knows none; it changes no parameter
        use_cpu_initialization=True,
        bf16=False,
        **experts,
    )


def parameters(config, tensor, pipeline, expert, expert_tensor):
    """Numbers of the dense part and of the experts on rank 0."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        create_gloo_process_groups=False,
    )
    try:
        spec = get_gpt_layer_local_spec(
            num_experts=config.get("num_experts"), moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
        model = GPTModel(
            config=transformer(config, tensor, pipeline, expert, expert_tensor),
            transformer_layer_spec=spec,
            vocab_size=config["vocab_size"],
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=config["tie_word_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        counts = {"dense": 0, "experts": 0}
        for name, parameter in model.named_parameters():
            counts["experts" if "experts" in name else "dense"] += parameter.numel()
        return counts
    finally:
        parallel_state.destroy_model_parallel()


def main():
    """Reads ``{name: [config, [tensor, pipeline, expert, expert_tensor]]}`` from the command line."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    torch.manual_seed(0)
    found = {name: parameters(config, *layout) for name, (config, layout) in json.loads(sys.argv[1]).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
