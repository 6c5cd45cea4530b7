"""Which weights are scored: finds them, merges a trainer's shards once, and says what they are by digests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eval.storage import write_atomically
from recipes.errors import ConfigError
from sat_verl import checkpoints

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_CHUNK = 1 << 22


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
    stamp = hashlib.sha256()
    for path in sorted(actor.rglob("*")):
        if path.is_file() and not path.name.startswith("optim_"):
            facts = path.stat()
            stamp.update(f"{path.relative_to(actor)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    target = cache_dir / "merged" / stamp.hexdigest()[:16]
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


def _tensors(path: Path) -> dict[str, tuple[str, int, int]]:
    """Of a safetensors file: name -> (dtype and shape, first byte, end)."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: (f"{entry['dtype']} {entry['shape']}", *(8 + length + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _digest(path: Path, begin: int = 0, end: int | None = None) -> str:
    found, left = hashlib.sha256(), (path.stat().st_size if end is None else end) - begin
    with open(path, "rb") as file:
        file.seek(begin)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over the tensors of a model by name, dtype, shape and content, however they are spread over files."""
    files = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        if files:
            parts = {
                f"{name} {kind}": pool.submit(_digest, path, begin, end)
                for path in files
                for name, (kind, begin, end) in _tensors(path).items()
            }
        else:
            parts = {path.name: pool.submit(_digest, path) for path in sorted(folder.glob("pytorch_model*.bin"))}
        lines = [f"{name} {part.result()}\n" for name, part in sorted(parts.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _remembered(folder: Path, cache_dir: Path) -> str:
    """:func:`weights_digest`, computed again only if a file of the folder has changed (60 GB take a minute)."""
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    stamp = " ".join(f"{path.resolve()}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in paths)
    name = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    memory = cache_dir / "digests" / name
    if memory.is_file() and len(known := memory.read_text().strip()) == 64:
        return known
    memory.parent.mkdir(parents=True, exist_ok=True)
    found = weights_digest(folder)
    write_atomically(memory, found + "\n")
    return found


def identity(folder: Path, cache_dir: Path) -> dict[str, Any]:
    """What the samples of a model depend on: digests of weights, config, tokenizer and chat template."""
    tokenizer = [_digest(folder / name) for name in _TOKENIZER_FILES if (folder / name).is_file()]
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    return {
        "weights_sha256": _remembered(folder, cache_dir),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256("".join(tokenizer).encode()).hexdigest(),
    }


def context_length(folder: Path) -> int | None:
    """Tokens that the model can take in all, by its config; None if that does not say."""
    config = json.loads((folder / "config.json").read_text())
    length = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return int(length) if length else None
