"""How the trainer's ranks hold the model: read from a composed and derived config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes import megatron

ACTOR = "actor_rollout_ref.actor."
_BYTES = {"32": 4, "16": 2, "8": 1}


def select(cfg: DictConfig, key: str, default: Any = None) -> Any:
    """A setting, or ``default`` where it is null or missing."""
    value = OmegaConf.select(cfg, key, default=None)
    return default if value is None else value


def dtype_bytes(name: Any, default: int = 2) -> int:
    """Bytes of a number type by its name: ``bf16``, ``float32``, ``torch.float8_e4m3fn``; ``default`` for ``auto``."""
    return next((size for bits, size in _BYTES.items() if bits in str(name)), default)


@dataclass(frozen=True)
class Recompute:
    """What of a layer's activations is computed again in the backward pass.

    Attributes:
        kind: ``none``; ``layers``, of whole layers only inputs are kept; ``parts``, the named parts are not kept.
        every: layers between two kept inputs.
        layers: of a pipeline stage that are treated so, None for all; the others keep everything.
        parts: Megatron's names of the parts.
    """

    kind: str = "none"
    every: int = 1
    layers: int | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """Bytes per parameter of the optimizer, and where they stand.

    Attributes:
        master: of the copy in high precision; 0 where the weights themselves are that.
        moments: of both moments together.
        on_gpu: share that stands on the GPU while it steps.
        scratch: bytes per parameter that a step takes for a moment.
    """

    master: int
    moments: int
    on_gpu: float = 1.0
    scratch: int = 0


@dataclass(frozen=True)
class Trainer:
    """The trainer's ranks.

    Attributes:
        engine: ``megatron`` or ``fsdp``.
        ranks: GPUs that train.
        tensor, pipeline, context, expert, expert_tensor: sizes of Megatron's splits; 1 for FSDP. ``context`` is also
            FSDP's split of sequences (Ulysses).
        shards: ranks that share one copy of the weights (FSDP), or of the optimizer's state (Megatron's distributed
            optimizer, of weights that are no experts).
        expert_shards: the same for experts.
        data: parts that a batch is divided into.
        sequence_parallel: whether norms, too, see a part of the tokens only (Megatron).
        weights, compute, gradients: bytes per parameter as it stands, as it is computed with, of its gradient.
        reshard: whether FSDP gives layers back after the forward pass.
        optimizer, recompute: see there.
        tokens: most tokens of a micro-batch on one rank; by how a micro-batch is given.
        tokens_formula: the same in words.
        longest: tokens of one whole sequence on one rank.
        micro_batches: of one optimizer step on a rank, at least and at most.
        fused_logits: whether log-probs are computed without ever holding all logits.
        reference, critic: whether a reference model and a critic stand beside the policy.
        reference_on_gpu: whether the reference model's weights stay on the GPU.
        returned: what verl takes off the GPU between two updates.
        unsharded_gradients: whether FSDP keeps whole gradients until the last micro-batch.
    """

    engine: str
    ranks: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    shards: int
    expert_shards: int
    data: int
    sequence_parallel: bool
    weights: int
    compute: int
    gradients: int
    reshard: bool
    optimizer: Optimizer
    recompute: Recompute
    tokens: int
    tokens_formula: str
    longest: int
    micro_batches: tuple[int, int]
    fused_logits: bool
    reference: bool
    reference_on_gpu: bool
    critic: bool
    returned: tuple[str, ...] = ()
    unsharded_gradients: bool = False

    def sizes(self) -> str:
        """The split in words."""
        if self.engine == "fsdp":
            split = f", sequences over {self.context}" if self.context > 1 else ""
            return f"FSDP: weights over {self.shards} of {self.ranks} ranks, data over {self.data}{split}"
        return (
            f"Megatron: TP {self.tensor}, PP {self.pipeline}, CP {self.context}, EP {self.expert}, "
            f"ETP {self.expert_tensor}, DP {self.data} on {self.ranks} ranks"
            + (", sequence parallel" if self.sequence_parallel else "")
        )


def trainer_of(cfg: DictConfig) -> Trainer:
    """The trainer's layout.

    Raises:
        ConfigError: ranks that cannot be split as the config says.
    """
    ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    parts = _megatron(cfg, ranks) if megatron.chosen(cfg) else _fsdp(cfg, ranks)
    tokens, words = _tokens(cfg, parts["context"])
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    share = max(1, cfg.prompts_per_step * cfg.responses_per_prompt // parts["data"])
    return Trainer(
        ranks=ranks, tokens=tokens, tokens_formula=words, longest=-(-length // parts["context"]),
        micro_batches=_micro_batches(cfg, share, tokens, parts),
        fused_logits=bool(select(cfg, "actor_rollout_ref.model.use_fused_kernels", False)),
        reference=bool(select(cfg, ACTOR + "use_kl_loss") or select(cfg, "algorithm.use_kl_in_reward")),
        reference_on_gpu=parts["engine"] == "megatron"
        and not select(cfg, "actor_rollout_ref.ref.megatron.param_offload", False),
        critic=bool(select(cfg, "critic.enable", cfg.algorithm.adv_estimator == "gae")),
        **parts,
    )  # fmt: skip


def _tokens(cfg: DictConfig, context: int) -> tuple[int, str]:
    """Most tokens of a micro-batch on one rank, and why."""
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    if select(cfg, ACTOR + "use_dynamic_bsz", False):
        cap = select(cfg, ACTOR + "ppo_max_token_len_per_gpu", 16384)
        longest = -(-length // context)
        if longest > cap:
            return longest, f"one whole sequence: {length} tokens over {context}, above the cap of {cap}"
        return cap, f"ppo_max_token_len_per_gpu = {cap}"
    micro = select(cfg, ACTOR + "ppo_micro_batch_size_per_gpu", 1)
    return -(-micro * length // context), f"{micro} sequences x {length} tokens / {context}"


def _micro_batches(cfg: DictConfig, share: int, tokens: int, parts: dict[str, Any]) -> tuple[int, int]:
    if not select(cfg, ACTOR + "use_dynamic_bsz", False):
        number = -(-share // select(cfg, ACTOR + "ppo_micro_batch_size_per_gpu", 1))
        return number, number
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    return 1, max(1, -(-share * length // (tokens * parts["context"])))


def _megatron(cfg: DictConfig, ranks: int) -> dict[str, Any]:
    """The part of :class:`Trainer` that Megatron's settings decide."""

    def of(name: str, default: Any = 1) -> Any:
        return select(cfg, ACTOR + "megatron." + name, default)

    data = megatron.data_parallel(cfg)
    tensor, pipeline, context = (of(f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context"))
    expert = of("expert_model_parallel_size")
    expert_tensor = of("expert_tensor_parallel_size", tensor)
    distributed = bool(of("use_distributed_optimizer", True))
    weights = dtype_bytes(of("dtype", "bfloat16"))
    returned = [what for what in ("param", "optimizer") if of(f"{what}_offload", False)]
    return {
        "engine": "megatron", "tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert,
        "expert_tensor": expert_tensor, "data": data, "shards": data * context if distributed else 1,
        "expert_shards": ranks // (pipeline * expert * expert_tensor) if distributed else 1,
        "sequence_parallel": bool(of("sequence_parallel", True)) and tensor > 1, "weights": weights,
        "compute": weights, "gradients": _megatron_gradients(cfg), "reshard": False,
        "optimizer": _megatron_optimizer(cfg, weights), "recompute": _megatron_recompute(cfg),
        "returned": tuple(returned),
    }  # fmt: skip


def _megatron_gradients(cfg: DictConfig) -> int:
    """Megatron keeps one gradient buffer; verl makes it float32 unless a precision-aware optimizer says otherwise."""
    in_fp32 = select(cfg, ACTOR + "megatron.override_ddp_config.grad_reduce_in_fp32")
    aware = select(cfg, ACTOR + "optim.use_precision_aware_optimizer", False)
    if in_fp32 is not None:
        return 4 if in_fp32 else 2
    return dtype_bytes(select(cfg, ACTOR + "optim.main_grads_dtype", "fp32")) if aware else 4


def _megatron_optimizer(cfg: DictConfig, weights: int) -> Optimizer:
    optim, override = ACTOR + "optim.", ACTOR + "optim.override_optimizer_config."
    moments = 8
    if select(cfg, optim + "use_precision_aware_optimizer", False):
        names = ("exp_avg_dtype", "exp_avg_sq_dtype")
        moments = sum(dtype_bytes(select(cfg, optim + name, "fp32")) for name in names)
    away = 0.0
    if select(cfg, override + "optimizer_cpu_offload", False):
        away = float(select(cfg, override + "optimizer_offload_fraction", 1.0))
    return Optimizer(master=0 if weights == 4 else 4, moments=moments, on_gpu=1.0 - away)


def _megatron_recompute(cfg: DictConfig) -> Recompute:
    """``recompute_*`` of the transformer config; verl's ``enable_gradient_checkpointing`` does not reach Megatron."""
    of = ACTOR + "megatron.override_transformer_config.recompute_"
    granularity = select(cfg, of + "granularity")
    if granularity == "full":
        number = select(cfg, of + "num_layers", 1)
        if select(cfg, of + "method", "uniform") == "uniform":
            return Recompute("layers", every=number)
        return Recompute("layers", layers=number)
    if granularity == "selective":
        return Recompute("parts", parts=tuple(select(cfg, of + "modules", ["core_attn"])))
    return Recompute()


def _fsdp(cfg: DictConfig, ranks: int) -> dict[str, Any]:
    """The part of :class:`Trainer` that FSDP's settings decide."""

    def of(name: str, default: Any = None) -> Any:
        return select(cfg, ACTOR + "fsdp_config." + name, default)

    shards = of("fsdp_size", -1)
    shards = ranks if shards < 1 else min(shards, ranks)
    weights = dtype_bytes(of("model_dtype", "fp32"), 4)
    away = bool(of("offload_policy", False))
    checkpointed = bool(select(cfg, "actor_rollout_ref.model.enable_gradient_checkpointing", True))
    returned = [what for what in ("param", "optimizer") if of(f"{what}_offload", False) and not away]
    return {
        "engine": "fsdp", "tensor": 1, "pipeline": 1, "context": megatron.sequence_split(cfg), "expert": 1,
        "expert_tensor": 1,
        "data": megatron.data_parallel(cfg), "shards": shards, "expert_shards": shards, "sequence_parallel": False,
        "weights": weights, "compute": dtype_bytes(of("mixed_precision.param_dtype", "bf16")), "gradients": weights,
        "reshard": bool(of("reshard_after_forward", True)),
        "optimizer": Optimizer(master=0, moments=2 * weights, on_gpu=0.0 if away else 1.0, scratch=weights),
        "recompute": Recompute("layers") if checkpointed else Recompute(), "returned": tuple(returned),
        "unsharded_gradients": bool(of("use_no_sync_for_gradient_accumulation", False)),
    }  # fmt: skip
