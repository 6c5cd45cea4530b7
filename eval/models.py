"""Which weights are scored: finds them, merges a trainer's shards once, and says what they are by digests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eval import weights
from recipes.errors import ConfigError
from sat_verl import checkpoints

_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "*.tiktoken",
)  # fmt: skip
_TOKENIZER_FILES = (
    *_VOCABULARIES, "tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin")
    )


def resolve(name: str, cache_dir: Path, revision: str | None = None) -> Path:
    """The Hugging Face folder of a model.

    Args:
        name: a folder in Hugging Face format; a run folder of ``recipes.train`` (its newest whole checkpoint is
            taken); a checkpoint of verl (``global_step_N`` or ``global_step_N/actor``, FSDP or Megatron); or an id on
            the Hugging Face hub.
        cache_dir: where merged checkpoints are kept.
        revision: branch, tag or commit of a hub id.

    Raises:
        ConfigError: nothing usable is there, or the merge or the download failed.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        return _from_hub(name, revision)
    if revision is not None:
        raise ConfigError("revision", revision, "model is a local folder, which has none", "leave revision out")
    if _has_weights(folder):
        return folder
    if (folder / "checkpoints").is_dir():
        newest = checkpoints.newest(folder / "checkpoints")
        if newest is None:
            raise ConfigError(
                "model", name, "the run has no whole checkpoint", "name one, or the model it started from"
            )
        folder = newest
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    for exported in (actor / "huggingface", actor / "model" / "huggingface"):
        if _has_weights(exported):
            return exported
    if (actor / "fsdp_config.json").is_file():
        return _merged(actor, "fsdp", cache_dir)
    if (actor / "model" / "dist_ckpt").is_dir():
        return _merged(actor, "megatron", cache_dir)
    raise ConfigError(
        "model", name, "it holds neither a Hugging Face model (config.json and weights) nor a checkpoint of verl",
        "name a model folder, a run folder, or a checkpoint's global_step_N folder",
    )  # fmt: skip


def _from_hub(name: str, revision: str | None) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError("model", name, "there is no such folder", "check the path")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, ignore_patterns=["*.pt", "*.gguf", "original/*", "*.md"])
    except Exception as error:
        # Offline, not found, gated or malformed: the library has a dozen errors for it, all of which mean this.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "model", name, f"no such folder, and the Hugging Face hub did not give it either ({reason})",
            "check the path or the id; a private model needs HF_TOKEN",
        ) from error  # fmt: skip
    return Path(found)


def _merged(actor: Path, backend: str, cache_dir: Path) -> Path:
    """The checkpoint as a Hugging Face folder, made by verl's own merger and kept under the shards' identity."""
    parts = [path for path in actor.rglob("*") if path.is_file() and not path.name.startswith("optim_")]
    target = cache_dir / "merged" / weights.stamp(parts)
    if _has_weights(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".merge-", dir=target.parent))
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", backend]
    try:
        done = subprocess.run(
            [*command, "--local_dir", str(actor), "--target_dir", str(staged)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not _has_weights(staged):
            last = (done.stderr.strip().splitlines() or ["it wrote no model"])[-1]
            raise ConfigError(
                "model", actor, f"verl.model_merger could not merge it: {last}",
                f"run it by hand to see all it says: {' '.join(command[1:])} --local_dir {actor} --target_dir OUT",
            )  # fmt: skip
        staged.chmod(0o755)
        os.replace(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return target


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", path, "there is no such file", "a model in Hugging Face format has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise weights.damaged(path, error) from error
    if not isinstance(found, dict):
        raise weights.damaged(path, "it holds no JSON object")
    return found


def identity(folder: Path, cache_dir: Path) -> dict[str, Any]:
    """What the samples of a model depend on: digests of weights, config and tokenizer, and the tokens that end a turn.

    Of ``generation_config.json`` nothing but those tokens counts: how samples are drawn is a setting of the run.

    Raises:
        ConfigError: a file is damaged, or a weight is no finite number.
    """
    config = _read_json(folder / "config.json")
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    tokenizer = [
        f"{path.name} {weights.file_digest(path)}\n" for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)
    ]
    return {
        "weights_sha256": weights.remembered_digest(folder, cache_dir),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256("".join(sorted(tokenizer)).encode()).hexdigest(),
        "stop_ids": stop_ids(folder),
    }


def stop_ids(folder: Path) -> list[int]:
    """The tokens that end a response, beside the tokenizer's own: of ``generation_config.json``, else of the config.

    vLLM and transformers look there too.

    Raises:
        ConfigError: a file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        path = folder / "config.json"
    found = _read_json(path).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in ids):
        raise weights.damaged(path, f"eos_token_id is {found!r}")
    return sorted(set(ids))


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    # transformers makes one without a vocabulary up where there is none.
    if not trust_remote_code and not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise ConfigError("model", folder, "it has no tokenizer", "copy the tokenizer's files of the model into it")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The library of tokenizers raises Exception itself, and transformers whatever a broken file leads to.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            "model", folder, f"its tokenizer or chat template cannot be loaded ({reason})",
            "copy the tokenizer's files and the chat template of the model into it again",
        ) from error  # fmt: skip


def context_length(folder: Path) -> int | None:
    """Tokens that the model can take in all, by its config; None if that does not say.

    Raises:
        ConfigError: the config is damaged.
    """
    path = folder / "config.json"
    config = _read_json(path)
    inner = config.get("text_config")
    length = config.get("max_position_embeddings") or (inner if isinstance(inner, dict) else {}).get(
        "max_position_embeddings"
    )
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise weights.damaged(path, f"max_position_embeddings is {length!r}")
    return length
