"""GPU recipes on a machine without GPUs: what composes, validates and is parsed, and what is refused beforehand."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from benchmarks.arms import ARMS
from recipes import compose as composing
from recipes import divisibility, dry_run, file_guards, guards, launch, megatron, table, upstream
from recipes.compose import choices
from recipes.derive import derive
from recipes.environment import environment
from recipes.errors import ConfigError
from recipes.models.published import PUBLISHED, describe
from sat_verl import sglang_routes

ROOT = Path(__file__).parents[1]
RECIPES = [
    "qwen2.5_0.5b_fsdp_vllm_1gpu", "qwen2.5_1.5b_fsdp_vllm", "qwen3_30b_a3b_megatron_sglang",
    "qwen3_30b_a3b_megatron_vllm", "qwen3_4b_fsdp_vllm",
]  # fmt: skip
ONE, SMALL, PAPER, PAPER_VLLM, DENSE = RECIPES
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref"))
ENGINE = ACTOR + "megatron."
DISPATCHER = ENGINE + "override_transformer_config.moe_token_dispatcher_type"
ARM_OF = dict(zip(RECIPES, ["gspo_tis", "sat_grpo", "sat_gspo_r3", "sat_gspo_r3", "dppo"], strict=True))
"""Composing takes most of the time: here every recipe has one arm, and every pair is in the slow test."""


def changed(recipe, settings=None, lag=1):
    cfg = table.config_of(recipe, ARMS[ARM_OF[recipe]], lag)
    for key, value in (settings or {}).items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


def checked(recipe, settings=None, lag=1):
    cfg = derive(changed(recipe, settings, lag))
    guards.check_config(cfg)
    return cfg


def test_the_recipes_are_the_documented_ones():
    assert choices("recipe") == RECIPES
    text = (ROOT / "recipes" / "README.md").read_text()
    assert all(f"recipe={name}" in text for name in RECIPES)


def test_verls_config_is_found_without_importing_verl(monkeypatch):
    folder = Path(composing.verl_config().removeprefix("file://"))
    assert (folder / "ppo_trainer.yaml").is_file()
    monkeypatch.setattr(composing.importlib.util, "find_spec", lambda name: None)
    assert composing.verl_config() == "pkg://verl.trainer.config"  # which Hydra says is not there


@pytest.mark.parametrize("lag", table.LAGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_passes_verls_validation(recipe, lag):
    cfg = checked(recipe, lag=lag)
    upstream.upstream(cfg)
    made = upstream.dataclasses_of(cfg)
    assert set(made) == {"actor", "rollout", "ref"}  # all have a KL loss
    assert made["ref"].engine.forward_only
    assert made["actor"].policy_loss.loss_mode == cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    assert cfg.choices.recipe == recipe
    assert cfg.trainer.v1.sat_async.parameter_sync_step == lag


def test_the_papers_setting():
    cfg = checked(PAPER, lag=8)
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    assert (cfg.prompts_per_step, cfg.responses_per_prompt, cfg.steps) == (256, 16, 544)
    assert (cfg.trainer.n_gpus_per_node, rollout.n_gpus_per_node, rollout.name) == (4, 4, "sglang")
    splits = ("tensor", "pipeline", "expert")
    sizes = [actor.megatron[f"{name}_model_parallel_size"] for name in splits]
    assert [*sizes, actor.megatron.context_parallel_size, actor.megatron.expert_tensor_parallel_size] == [4, 1, 4, 1, 1]
    assert actor.megatron.sequence_parallel
    assert megatron.data_parallel(cfg) == 1
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.optim.lr) == (0.2, 0.2, 1e-6)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 1e-3, "low_var_kl")
    assert actor.entropy_coeff == 0
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1, 1, -1)
    assert (rollout.gpu_memory_utilization, actor.ppo_max_token_len_per_gpu) == (0.85, 32768)
    assert (cfg.benchmark, rollout.val_kwargs.n) == ("aime24", 8)
    # The model has 32,768 positions, of which SGLang under verl leaves one unused.
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    assert longest + 1 == rollout.max_model_len == PUBLISHED[cfg.model.path]["max_position_embeddings"]


def test_megatrons_adam_gets_the_betas_that_verl_does_not_pass_on():
    given = checked(PAPER).actor_rollout_ref.actor.optim.override_optimizer_config
    assert (given.adam_beta1, given.adam_beta2) == (0.9, 0.98)
    refused(ACTOR + "optim.override_optimizer_config.adam_beta2", PAPER,
            {ACTOR + "optim.override_optimizer_config.adam_beta2": 0.95})  # fmt: skip
    default = checked(PAPER, {ACTOR + "optim.betas": [0.9, 0.999]}).actor_rollout_ref.actor.optim
    assert "adam_beta1" not in default.override_optimizer_config


def test_the_rollout_engine_is_all_that_its_two_recipes_differ_in():
    def flat(node, prefix=""):
        if not isinstance(node, dict) or not node:
            return {prefix.removesuffix("."): node}
        return {key: leaf for name, one in node.items() for key, leaf in flat(one, f"{prefix}{name}.").items()}

    one, other = (flat(OmegaConf.to_container(changed(name))) for name in (PAPER, PAPER_VLLM))
    found = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    assert found == {"choices.recipe", "overrides", ROLLOUT + "name"}


def refused(setting, recipe, settings, lag=1):
    with pytest.raises(ConfigError) as caught:
        checked(recipe, settings, lag)
    assert caught.value.setting == setting
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "setting", "settings"),
    [
        # The trainer's engine.
        (SMALL, ACTOR + "strategy", {ACTOR + "strategy": "megatron"}),
        (PAPER, ACTOR + "strategy", {ACTOR + "strategy": "fsdp2"}),
        (SMALL, REF + "strategy", {REF + "strategy": "fsdp"}),
        (PAPER, ENGINE + "use_mbridge", {ENGINE + "use_mbridge": False}),
        (PAPER, ENGINE + "use_megatron_fsdp", {ENGINE + "use_megatron_fsdp": True}),
        (PAPER, ENGINE + "use_dist_checkpointing", {ENGINE + "use_dist_checkpointing": True}),
        (PAPER, ENGINE + "use_distributed_optimizer", {ENGINE + "use_distributed_optimizer": False}),
        (PAPER, ACTOR + "optim.optimizer", {ACTOR + "optim.optimizer": "sgd"}),
        (
            PAPER,
            ACTOR + "optim.override_optimizer_config.use_precision_aware_optimizer",
            {ACTOR + "optim.override_optimizer_config.use_precision_aware_optimizer": False},
        ),
        *(
            (PAPER, DISPATCHER, {DISPATCHER: dispatcher})
            for dispatcher in ("flex", "allgather")
        ),
        # Its splits.
        (PAPER, "trainer_ranks", {"trainer_ranks": 6}),
        (PAPER, ENGINE + "tensor_model_parallel_size", {ENGINE + "tensor_model_parallel_size": 8, "trainer_ranks": 8}),
        (PAPER, ENGINE + "expert_model_parallel_size", {ENGINE + "expert_model_parallel_size": 3}),
        (PAPER, ENGINE + "pipeline_model_parallel_size",
         {ENGINE + "pipeline_model_parallel_size": 5, "trainer_ranks": 20, "prompts_per_step": 320}),
        (DENSE, "trainer_ranks", {"trainer_ranks": 3}),
        (DENSE, "trainer_ranks", {ACTOR + "ulysses_sequence_parallel_size": 3}),
        (SMALL, ACTOR + "ulysses_sequence_parallel_size",
         {ACTOR + "ulysses_sequence_parallel_size": 8, "trainer_ranks": 8, ACTOR + "ppo_max_token_len_per_gpu": 2048}),
        # Micro-batches.
        (PAPER, ACTOR + "ppo_max_token_len_per_gpu", {ACTOR + "ppo_max_token_len_per_gpu": 16384}),
        (PAPER, REF + "log_prob_max_token_len_per_gpu", {REF + "log_prob_max_token_len_per_gpu": 16384}),
        (SMALL, ROLLOUT + "log_prob_use_dynamic_bsz", {ROLLOUT + "log_prob_use_dynamic_bsz": False}),
        (SMALL, REF + "log_prob_micro_batch_size_per_gpu",
         {ACTOR + "use_dynamic_bsz": False, REF + "log_prob_micro_batch_size_per_gpu": 7}),
        # The rollout.
        (PAPER, "data.max_response_length", {"data.max_response_length": 31744}),
        (PAPER_VLLM, "data.max_response_length",
         {"data.max_response_length": 31745, ACTOR + "ppo_max_token_len_per_gpu": 40000}),
        (SMALL, ROLLOUT + "max_model_len", {ROLLOUT + "max_model_len": 40000}),
        (PAPER, ROLLOUT + "max_model_len", {ROLLOUT + "max_model_len": 32767}),
        (PAPER, ROLLOUT + "tensor_model_parallel_size", {ROLLOUT + "tensor_model_parallel_size": 3}),
        (SMALL, ROLLOUT + "tensor_model_parallel_size", {ROLLOUT + "tensor_model_parallel_size": 8}),
        (PAPER, ROLLOUT + "expert_parallel_size", {ROLLOUT + "expert_parallel_size": 2}),
        (SMALL, ROLLOUT + "expert_parallel_size",
         {ROLLOUT + "expert_parallel_size": 2, ROLLOUT + "tensor_model_parallel_size": 2}),
        (PAPER, ROLLOUT + "n_gpus_per_node", {ROLLOUT + "n_gpus_per_node": 8}),
        (PAPER, "rollout_replicas", {ROLLOUT + "nnodes": 3}),
        (PAPER, ROLLOUT + "name", {ROLLOUT + "name": "trtllm"}),
        # One GPU for both.
        (ONE, "trainer_ranks", {"trainer_ranks": 2}),
        (ONE, ROLLOUT + "n_gpus_per_node", {"rollout_replicas": 2}),
        # Replay without experts, in a model that is not here.
        (DENSE, "model", {"routing_replay.mode": "r3"}),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(recipe, setting, settings):
    refused(setting, recipe, settings)


def test_another_engine_names_the_backend_to_take():
    assert "backend=cuda_megatron" in refused(ACTOR + "strategy", SMALL, {ACTOR + "strategy": "megatron"})


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (PAPER, {"routing_replay.mode": "none", DISPATCHER: "flex"}),
        (PAPER, {ROLLOUT + "expert_parallel_size": 4}),
        (PAPER, {ROLLOUT + "tensor_model_parallel_size": 1, "rollout_replicas": 4}),
        (DENSE, {ACTOR + "ulysses_sequence_parallel_size": 2, ACTOR + "ppo_max_token_len_per_gpu": 4608}),
        (DENSE, {"trainer_ranks": 8, ROLLOUT + "tensor_model_parallel_size": 2}),
    ],
)  # fmt: skip
def test_what_works_is_not(recipe, settings):
    upstream.dataclasses_of(checked(recipe, settings))


def test_more_nodes():
    settings = {"trainer.nnodes": 2, "trainer_ranks": 8, ROLLOUT + "nnodes": 2, "rollout_replicas": 4}
    cfg = checked(PAPER, settings, lag=8)
    assert megatron.data_parallel(cfg) == 4
    assert (divisibility.engine_size(cfg), cfg.actor_rollout_ref.rollout.n_gpus_per_node) == (4, 8)
    across = checked(PAPER, {ROLLOUT + "nnodes": 2, ROLLOUT + "tensor_model_parallel_size": 4})
    assert across.actor_rollout_ref.rollout.n_gpus_per_node == 2  # one engine on two nodes


def test_a_cluster_that_is_there_needs_no_gpu_here(monkeypatch):
    cfg = checked(SMALL)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    guards.device(cfg)
    monkeypatch.delenv("RAY_ADDRESS")
    assert guards.cluster(cfg) is None
    assert guards.cluster(checked(ONE)) is None  # its own cluster, whatever RAY_ADDRESS says


def test_sglangs_routes_are_asked_for_as_text():
    cfg = checked(PAPER)
    assert cfg.routing_replay.mode == "r3"
    assert cfg.actor_rollout_ref.rollout.skip_tokenizer_init is False
    assert checked(PAPER_VLLM).actor_rollout_ref.rollout.skip_tokenizer_init is True


@pytest.mark.parametrize("moved", [True, False])
def test_verl_finds_sglangs_reader_of_routes_where_it_is(tmp_path, moved):
    """In a process of its own, with packages that are laid out as SGLang's (0.5.12 and 0.5.11)."""
    name = sglang_routes.NOW if moved else sglang_routes.BEFORE
    file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "layers" / "moe").mkdir(parents=True, exist_ok=True)
    file.write_text(f"def {sglang_routes.READER}(data):\n    return data\n")
    program = (
        "from sat_verl import sglang_routes; sglang_routes.install(); sglang_routes.install()\n"
        f"from {sglang_routes.BEFORE} import {sglang_routes.READER} as read\n"
        "print(read.__module__)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == name


def test_one_gpu_is_two_for_ray(tmp_path, monkeypatch):
    """Ray gives each of verl's two pools a whole GPU; a card that is named twice is two, and both are it."""
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    monkeypatch.setattr("sat_verl.cpu.paths.shm_root", lambda: tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    cfg = checked(ONE)
    assert cfg.ray_kwargs.ray_init.num_gpus == 2
    assert cfg.actor_rollout_ref.rollout.checkpoint_engine.backend == "shm"
    for before, expected in ((None, "0,0"), ("3", "3,3"), ("GPU-5e,1", "GPU-5e,GPU-5e")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if before:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        runtime = tmp_path / f"run-{expected}"
        runtime.mkdir()
        env = environment(cfg, runtime)
        assert env["CUDA_VISIBLE_DEVICES"] == expected
        assert Path(env["SAT_VERL_SHM_DIR"]).is_dir()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", expected)
        assert ResourceAndLabelSpec(num_cpus=1, num_gpus=2).resolve(is_head=True).num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="2"):
        ResourceAndLabelSpec(num_cpus=1, num_gpus=2).resolve(is_head=True)


def test_a_models_own_config_wins_over_the_published_numbers(tmp_path, monkeypatch):
    assert describe(checked(SMALL)).source.startswith("the published numbers")
    # As a model in the hub's cache.
    numbers = {**PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"], "num_hidden_layers": 29}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(numbers))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(file))
    found = describe(checked(SMALL))
    assert (found.source, found.differing) == (str(file), ("num_hidden_layers 29 (published: 28)",))


def test_published_numbers_give_the_sizes_in_the_models_names():
    """Parameters from the numbers, in billions: a mistyped one is far off."""

    def parameters(one):
        width, layers, heads = one["hidden_size"], one["num_hidden_layers"], one["num_attention_heads"]
        size = one.get("head_dim") or width // heads
        attention = 2 * width * heads * size + 2 * width * one["num_key_value_heads"] * size
        wide, experts = one["intermediate_size"], one.get("num_experts")
        forward = 3 * width * (one["moe_intermediate_size"] * experts if experts else wide)
        vocabulary = one["vocab_size"] * width * (1 if one["tie_word_embeddings"] else 2)
        return (layers * (attention + forward) + vocabulary) / 1e9

    assert {name: round(parameters(one), 1) for name, one in PUBLISHED.items()} == {
        "Qwen/Qwen3-30B-A3B-Base": 30.5,
        "Qwen/Qwen3-4B-Base": 4.0,
        "Qwen/Qwen2.5-1.5B-Instruct": 1.5,
        "Qwen/Qwen2.5-0.5B-Instruct": 0.5,
    }


def test_a_dry_run_says_what_is_not_there(tmp_path):
    cfg = checked(SMALL, {"task.train_file": str(tmp_path / "absent.parquet")})
    found = {one.name: one for one in dry_run._data(cfg)}
    assert (found["data"].state, found["benchmark"].state) == ("note", "not checked")
    assert "absent.parquet" in found["data"].text
    model = next(dry_run._model(cfg, None))
    assert (model.name, model.state) == ("model", "not checked")
    with pytest.raises(ConfigError, match="dry_run=1"):
        launch.run(changed(SMALL, {"dry_run": 1}))


def test_sglangs_names_are_checked():
    """With a class that has what is used of SGLang's; the real one is read below, where it is installed."""
    import argparse
    import dataclasses

    @dataclasses.dataclass
    class ServerArgs:
        tp_size: int = 1
        dtype: str = "auto"
        trust_remote_code: bool = False

        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--tensor-parallel-size", "--tp-size", type=int)
            parser.add_argument("--dtype", choices=["auto", "bfloat16"])
            parser.add_argument("--trust-remote-code", action="store_true")

    from recipes.engines import refusals, sglang

    cfg = OmegaConf.create({"actor_rollout_ref": {"rollout": {"engine_kwargs": {"sglang": {"dtyp": "auto"}}}}})
    good = {"tp_size": 4, "dtype": "bfloat16", "trust_remote_code": True}
    sglang.check(good, ServerArgs, cfg)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.sglang\.dtyp=auto"):
        sglang.check({**good, "dtyp": "auto"}, ServerArgs, cfg)
    with pytest.raises(ConfigError, match="invalid choice: 'bfloat17'"), refusals("SGLang"):
        sglang.check({**good, "dtype": "bfloat17"}, ServerArgs, cfg)


def test_sglangs_own_arguments_are_read():
    pytest.importorskip("sglang")
    cfg = checked(PAPER)
    from recipes.engines import sglang

    made = sglang.arguments(cfg, describe(cfg).numbers)
    assert (made["tp_size"], made["mem_fraction_static"], made["enable_return_routed_experts"]) == (4, 0.85, True)


def test_cluster_templates_name_what_there_is(tmp_path):
    folder = ROOT / "recipes" / "cluster"
    scripts = [folder / "ray_job.sh", folder / "slurm.sbatch"]
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    job = yaml.safe_load((folder / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    for pod in [job["spec"]["rayClusterSpec"]["headGroupSpec"], *groups]:
        spec = pod["template"]["spec"]
        mounts = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}
    limits = groups[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits["nvidia.com/gpu"]) * groups[0]["replicas"]
    for text in [job["spec"]["entrypoint"], *(script.read_text() for script in scripts)]:
        words = dict(word.split("=", 1) for word in re.findall(r"(?<=\s)[\w.]+=[\w./-]+", text.replace("\\\n", " ")))
        cfg = checked(words["recipe"], {key: int(words[key]) for key in words if words[key].isdigit()})
        rollout = cfg.actor_rollout_ref.rollout
        assert cfg.trainer_ranks * cfg.trainer.nnodes + rollout.n_gpus_per_node * rollout.nnodes == gpus
        assert Path(words["run_dir"]).is_absolute()


def test_a_job_on_a_cluster_wants_a_shared_folder():
    script = ROOT / "recipes" / "cluster" / "ray_job.sh"
    for env, part in (({}, "dashboard"), ({"RAY_ADDRESS": "http://head:8265"}, "every node sees")):
        env["PATH"] = os.environ["PATH"]
        done = subprocess.run(["bash", script, "steps=1"], capture_output=True, text=True, check=False, env=env)
        assert done.returncode
        assert part in done.stderr


def test_rows_that_say_the_same_are_one():
    rows = [table.Row("r", (arm,), (lag,), "yes") for arm in ("a", "b") for lag in (1, 8)]
    rows.append(table.Row("r", ("c",), (1,), "no"))
    assert table.together(rows) == [table.Row("r", ("a", "b"), (1, 8), "yes"), table.Row("r", ("c",), (1,), "no")]


@functools.cache
def whole_table():
    return list(table.rows())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_recipe_and_every_row_of_the_paper_composes_validates_and_is_parsed():
    rows = whole_table()
    assert len(rows) == len(RECIPES) * 13 * 2
    for row in rows:
        arm = next(one for one in ARMS.values() if one.label == row.arms[0])
        if "experts" in arm.needs and "a3b" not in row.recipe:
            assert row.composes == table.DENSE
            continue
        assert (row.composes, row.validates) == ("yes", "yes"), row
        assert row.trainer == ("yes" if "megatron" in row.recipe else "FSDP2"), row
        assert row.engine == "yes" or ("sglang" in row.recipe and row.engine.startswith("not here")), row


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_readmes_table_is_the_one_that_is_made():
    import importlib.util

    if importlib.util.find_spec("sglang"):
        pytest.skip("the table of the README was made where SGLang is not installed")
    assert table.markdown(whole_table()) in (ROOT / "recipes" / "README.md").read_text()


@pytest.mark.slow
def test_arguments_that_the_engines_refuse_are_said_in_one_line():
    from recipes.engines import vllm

    cfg = checked(PAPER_VLLM, {ROLLOUT + "engine_kwargs.vllm.no_such_argument": 1})
    numbers = describe(cfg).numbers
    with pytest.raises(ConfigError, match="no-such-argument") as caught:
        vllm.arguments(cfg, numbers)
    assert "\n" not in str(caught.value)
    made = vllm.arguments(checked(PAPER_VLLM), numbers)
    assert (made.tensor_parallel_size, made.max_model_len, made.enable_return_routed_experts) == (4, 32767, True)
    model, optimizer = upstream.megatron_arguments(checked(PAPER), numbers)
    assert (model.num_moe_experts, model.expert_model_parallel_size, model.recompute_granularity) == (128, 4, "full")
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.optimizer_cpu_offload) == (0.9, 0.98, True)
    cfg = checked(PAPER, {ENGINE + "override_transformer_config.recompute_granularty": "full"})
    with pytest.raises(ConfigError, match="no such setting"):
        upstream.megatron_arguments(cfg, numbers)


@pytest.mark.slow
def test_a_dry_run_starts_nothing_and_ends_well(tmp_path):
    words = [f"recipe={ONE}", "lag=8", "dry_run=true", f"run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "recipes.train", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    states = dict(re.findall(r"^(ok|note|not checked) +([\w ]+):", done.stdout, re.MULTILINE)[::-1])
    assert states["ok"]
    assert "vllm arguments: made by verl" in done.stdout
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {file_guards.PLAN_FILE}
    bad = subprocess.run(
        [*command, "trainer_ranks=2"], capture_output=True, text=True, check=False, cwd=tmp_path, env=env
    )
    assert bad.returncode == 2
    assert "trainer_ranks=2" in bad.stderr
