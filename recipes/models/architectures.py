"""The tiny models: a dense Qwen3 and a Qwen3-MoE, small enough to train by RL on two CPU cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError
from recipes.models.limits import MAX_POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention has no kernel for 16
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.05,  # 0.02 is for wide models; a narrow one starts to learn much later with it
    "tie_word_embeddings": False,
    "bos_token_id": None,
    # With a padding id torch keeps that embedding row at zero; Megatron does not, and its first gradient explodes.
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny": {**_COMMON, "intermediate_size": 384},
    "tiny_moe": {
        **_COMMON,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,  # Megatron's bridge always renormalises
        "output_router_logits": False,  # no auxiliary loss
        "router_aux_loss_coef": 0.0,
    },
}


def check_name(name: str) -> None:
    """Refuse a model that does not exist.

    Args:
        name: the name to look up.

    Raises:
        ConfigError: if it is none of :data:`ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise ConfigError("model", name, "there is no such model", f"choose one of {', '.join(ARCHITECTURES)}")


def build_model(name: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Build a model with random weights in float32.

    Args:
        name: one of :data:`ARCHITECTURES`.
        tokenizer: gives the size of the vocabulary and the end-of-turn token.
        seed: fixes the weights; torch's global generator is left as it was.

    Returns:
        The model, with a generation config that samples at temperature 1 without truncation.

    Raises:
        ConfigError: for an unknown name.
    """
    # Not above: every run reads the sizes before it starts, and transformers' models take seconds to import.
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    check_name(name)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "tiny_moe":
            model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**ARCHITECTURES[name], **ids))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**ARCHITECTURES[name], **ids))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model.float()
