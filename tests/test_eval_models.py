"""Which weights python -m eval scores, what it knows them by, and which it refuses."""

import json
import os
import shutil
import subprocess

import eval_runs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eval import models, weights
from eval.__main__ import main
from eval.storage import read_plan, read_results, read_samples
from recipes.errors import ConfigError
from sat_verl import checkpoints


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return eval_runs.save_random_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def copied(random_model, tmp_path):
    """A model that a test may spoil."""
    return shutil.copytree(random_model, tmp_path / "copy")


def words(model, out, *more):
    own = f"cache_dir={out.parent / 'cache'}"
    return [f"model={model}", f"out={out}", own, "engine=hf", "benchmark=chain", "data.size=6", "n=2", *more]


def run(model, out, *more):
    """Texts and key of a run."""
    assert main(words(model, out, *more)) == 0
    return {place: one.response for place, one in read_samples(out).items()}, read_plan(out).key


def rewrite(path, change):
    """Change what a JSON file holds."""
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


# --- where they are --------------------------------------------------------------------------------------------------


def test_a_run_folder_means_its_newest_whole_checkpoint(random_model, tmp_path):
    for step in (2, 4, 6):
        target = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        shutil.copytree(random_model, target / "actor" / "huggingface")
        if step < 6:
            checkpoints.mark(target, {"global_step": step})
    found = models.resolve(str(tmp_path / "run"), tmp_path / "cache")
    assert found == tmp_path / "run" / "checkpoints" / "global_step_4" / "actor" / "huggingface"
    named = tmp_path / "run" / "checkpoints" / "global_step_2"
    assert models.resolve(str(named), tmp_path / "cache") == named / "actor" / "huggingface"
    assert models.resolve(str(named / "actor"), tmp_path / "cache") == named / "actor" / "huggingface"


@pytest.mark.slow
def test_shards_of_fsdp_are_merged_once_by_verl(random_model, tmp_path):
    actor = tmp_path / "global_step_1" / "actor"
    shutil.copytree(random_model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    held = AutoModelForCausalLM.from_pretrained(random_model).state_dict()
    torch.save(held, actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    merged = models.resolve(str(tmp_path / "global_step_1"), tmp_path / "cache")
    found = AutoModelForCausalLM.from_pretrained(merged, dtype="auto").state_dict()
    assert set(found) == set(held)
    for name, tensor in held.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=1e-2, atol=1e-2)
    stamp = (merged / "config.json").stat().st_mtime_ns
    assert models.resolve(str(tmp_path / "global_step_1"), tmp_path / "cache") == merged
    assert (merged / "config.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("name", "part"),
    [("/no/such/folder", "no such folder"), (".", "neither a Hugging Face model"), ("a/b/c", "no such folder")],
)
def test_a_model_that_is_none_is_refused(name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=part):
        models.resolve(name, tmp_path / "cache")


def test_shards_that_were_replaced_are_merged_again(random_model, tmp_path):
    """Also if the new ones have the size and the time of the old ones."""
    actor = tmp_path / "global_step_1" / "actor"
    shutil.copytree(random_model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    shard = actor / "model_world_size_1_rank_0.pt"
    shard.write_bytes(b"x" * 100)
    before, facts = weights.stamp(actor.rglob("*")), shard.stat()
    shard.write_bytes(b"y" * 100)
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert weights.stamp(actor.rglob("*")) != before
    other = shutil.copytree(actor, tmp_path / "other" / "actor", copy_function=shutil.copy2)
    assert weights.stamp(other.rglob("*")) != weights.stamp(actor.rglob("*"))


# --- what they are known by ------------------------------------------------------------------------------------------


def test_the_digest_of_weights_is_of_the_tensors_not_of_the_files(random_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert weights.digest(tmp_path / "sharded") == weights.digest(random_model)
    next(iter(model.parameters())).data[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "changed")
    assert weights.digest(tmp_path / "changed") != weights.digest(random_model)


def test_the_identity_follows_every_file_that_matters(random_model, tmp_path):
    shutil.copytree(random_model, tmp_path / "copy")
    before = models.identity(random_model, tmp_path / "cache")
    assert models.identity(tmp_path / "copy", tmp_path / "cache") == before
    tokenizer = tmp_path / "copy" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"aa"', 1))
    rewrite(tmp_path / "copy" / "generation_config.json", lambda held: held.update(eos_token_id=[1, 9]))
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    after = models.identity(tmp_path / "copy", tmp_path / "cache")
    assert {name for name in before if before[name] != after[name]} == {
        "tokenizer_sha256", "config_sha256", "stop_ids",
    }  # fmt: skip


def test_a_changed_file_is_digested_again(random_model, tmp_path):
    folder, cache = shutil.copytree(random_model, tmp_path / "copy"), tmp_path / "cache"
    before = models.identity(folder, cache)["weights_sha256"]
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert models.identity(folder, cache)["weights_sha256"] != before


def test_weights_that_keep_size_and_time_are_digested_again(copied, tmp_path):
    path, cache = copied / "model.safetensors", tmp_path / "cache"
    before, facts = models.identity(copied, cache)["weights_sha256"], path.stat()
    assert models.identity(copied, cache)["weights_sha256"] == before
    tensors = load_file(path)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, tmp_path / "new.safetensors", metadata={"format": "pt"})
    os.utime(tmp_path / "new.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    subprocess.run(["cp", "-p", tmp_path / "new.safetensors", path], check=True)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (facts.st_size, facts.st_mtime_ns)
    assert models.identity(copied, cache)["weights_sha256"] != before


def test_the_sampling_of_a_run_is_what_its_settings_say(random_model, copied, tmp_path):
    """Penalties, beams and temperatures of generation_config.json change neither samples nor key."""
    told = {
        "repetition_penalty": 5.0, "num_beams": 4, "temperature": 0.1, "top_k": 2, "top_p": 0.5, "do_sample": True,
        "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6, 7], "min_new_tokens": 9, "max_length": 3,
        "forced_eos_token_id": 4, "num_return_sequences": 2,
    }  # fmt: skip
    rewrite(copied / "generation_config.json", lambda held: held.update(told))
    assert run(copied, tmp_path / "told") == run(random_model, tmp_path / "plain")


def test_the_tokens_that_end_a_response_count_and_are_part_of_the_key(random_model, copied, tmp_path):
    texts, key = run(random_model, tmp_path / "plain")
    rewrite(copied / "generation_config.json", lambda held: held.update(eos_token_id=[1, *range(20, 60)]))
    sooner, other = run(copied, tmp_path / "more")
    assert sum(map(len, sooner.values())) < sum(map(len, texts.values()))
    assert key["model"]["stop_ids"] == [1]
    assert other["model"].pop("stop_ids") == [1, *range(20, 60)]
    del key["model"]["stop_ids"]
    assert other == key
    rewrite(copied / "generation_config.json", lambda held: held.update(eos_token_id=9))
    assert models.stop_ids(copied) == [9]
    (copied / "generation_config.json").unlink()
    assert models.stop_ids(copied) == [1], "of config.json"


def test_a_lost_chat_template_is_warned_of(random_model, copied, tmp_path):
    (copied / "chat_template.jinja").unlink()
    assert main(words(copied, tmp_path / "lost")) == 0
    assert any("no chat template" in warning for warning in read_results(tmp_path / "lost").warnings)
    for model, out, more in ((copied, "meant", ["prompt.chat=false"]), (random_model, "there", [])):
        assert main(words(model, tmp_path / out, *more)) == 0
        assert not any("chat template" in warning for warning in read_results(tmp_path / out).warnings)


# --- what is refused -------------------------------------------------------------------------------------------------


def rewritten(folder, change):
    """The weights of a folder with a change."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_finite_number_is_refused(copied, tmp_path, dtype, value):
    def spoil(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
        weights.digest(copied)
        tensors["lm_head.weight"][-1, -1] = value

    rewritten(copied, spoil)
    for _ in range(2):  # and is not remembered
        with pytest.raises(ConfigError, match=r"lm_head.weight holds numbers that are infinite or none") as caught:
            models.identity(copied, tmp_path / "cache")
    assert caught.value.value == copied / "model.safetensors"


def test_a_missing_tensor_is_refused_not_drawn_at_random(copied, tmp_path, capsys):
    rewritten(copied, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert main(words(copied, tmp_path / "run")) == 2
    assert "1 tensors are missing, the first model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err


def test_a_tensor_of_another_shape_is_refused(copied, tmp_path, capsys):
    rewritten(copied, lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 3)}))
    assert main(words(copied, tmp_path / "run")) == 2
    assert "transformers cannot load it" in capsys.readouterr().err


def test_an_output_layer_that_is_tied_is_not_missing(copied, tmp_path):
    rewrite(copied / "config.json", lambda held: held.update(tie_word_embeddings=True))
    rewritten(copied, lambda tensors: tensors.pop("lm_head.weight"))
    run(copied, tmp_path / "run")


def test_files_of_weights_that_lack_or_repeat_a_tensor_are_refused(random_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ConfigError, match=f"tensors are missing.*{shards[1].name}"):
        weights.digest(tmp_path / "sharded")
    shards[1].write_bytes(kept)
    (tmp_path / "sharded" / "model.safetensors").write_bytes(kept)
    with pytest.raises(ConfigError, match="is both in"):
        weights.digest(tmp_path / "sharded")


def test_pickled_weights_are_checked_too(copied):
    held = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    path = copied / "pytorch_model.bin"
    torch.save(held, path)
    assert len(weights.digest(copied)) == 64
    held["lm_head.weight"][0, 0] = float("nan")
    torch.save(held, path)
    with pytest.raises(ConfigError, match="infinite or none"):
        weights.digest(copied)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"pytorch_model.bin: the file is damaged"):
        weights.digest(copied)


JUNK = {"empty": b"", "binary": bytes(range(256)) * 4, "cut": None, "list": b"[1, 2]", "deep": b"[" * 100_000}


DAMAGED = [
    (name, kind)
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
    for kind in JUNK
    # For the rest is a template like any other.
    if name != "chat_template.jinja" or kind in ("binary", "cut")
]


@pytest.mark.parametrize(("name", "kind"), DAMAGED)
def test_a_damaged_file_is_named_in_one_line(copied, tmp_path, capsys, name, kind):
    path, content = copied / name, JUNK[kind]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    assert main(words(copied, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error "), said
    assert said.count("\n") == 1
    assert str(copied) in said or "chat template" in said


def test_a_model_without_a_tokenizer_is_refused(copied, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    assert main(words(copied, tmp_path / "run")) == 2
    assert "it has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("ids", ["9", [1, "x"], True, -1])
def test_tokens_that_end_a_response_and_are_none_are_refused(copied, ids):
    rewrite(copied / "generation_config.json", lambda held: held.update(eos_token_id=ids))
    with pytest.raises(ConfigError, match=r"generation_config.json: the file is damaged \(eos_token_id is"):
        models.stop_ids(copied)


@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_refused(random_model, tmp_path, device, capsys):
    assert main(words(random_model, tmp_path / "run", f"engine.device={device}")) == 2
    assert f"engine.device={device}: there is no such device here" in capsys.readouterr().err


def test_a_chat_template_that_fails_is_named(random_model, copied, tmp_path, capsys):
    (copied / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    assert main(words(copied, tmp_path / "run")) == 2
    assert "the chat template fails: no system turn" in capsys.readouterr().err
    assert main(words(random_model, tmp_path / "run", "prompt.chat_template_options={tokenize:true}")) == 2
    assert "multiple values" in capsys.readouterr().err
