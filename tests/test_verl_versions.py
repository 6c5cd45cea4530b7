"""The losses in each supported verl, installed with this package into an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.versions import check_verl
from sat_verl import versions

REPOSITORY = Path(__file__).parent.parent
CASES = [
    ("0.7.1", "external_lib"),
    ("0.7.1", "environment"),
    ("0.8.0", "external_lib"),
    ("0.8.0", "environment"),
    ("0.9.0", "entry_point"),
    ("0.9.1", "entry_point"),
]


def environment():
    """This process's, without what leads to packages outside an environment: pip would call those installed."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "PYTHONPATH"))}


def pip(*arguments, python=sys.executable):
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """This package, built from a copy: a build leaves files beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "sat_verl", source / "sat_verl", ignore=shutil.ignore_patterns("__pycache__"))
    done = pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(source / "dist"), str(source))
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environments(tmp_path_factory, wheel):
    """Makes an environment with a release of verl and this package; torch and the rest come from the one at hand."""
    made = {}

    def make(version):
        if version in made:
            return made[version]
        folder = tmp_path_factory.mktemp(f"verl-{version}")
        venv.create(folder, with_pip=False)
        python = folder / "bin/python"
        done = pip("install", "--no-deps", f"verl=={version}", python=python)
        if done.returncode != 0:
            if any(text in done.stderr for text in ("No matching distribution", "onnection", "resolve", "imed out")):
                pytest.skip(f"the package index is not reachable, or has no verl {version}")
            pytest.fail(done.stderr)
        done = pip("install", "--no-deps", "--no-index", str(wheel), python=python)
        assert done.returncode == 0, done.stderr
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        # Behind its own packages; this file's environment counts for what they lack alone.
        (own / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        made[version] = python
        return python

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("version", "switch"), CASES)
def test_losses_in_a_release_of_verl(version, switch, environments, tmp_path):
    python = environments(version)
    extra = {"VERL_USE_EXTERNAL_MODULES": "sat_verl.plugin"} if switch == "environment" else {}
    script = Path(__file__).with_name("verl_version_checks.py")
    done = subprocess.run(
        [python, script, version, switch],
        cwd=tmp_path,
        env=environment() | extra,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "checked"


def test_every_release_that_is_called_tested_is():
    called = {release for support in versions.SUPPORT.values() for release in support.tested}
    assert called == {version for version, _ in CASES}
    for version, switch in CASES:
        by_itself = versions.support(version).switch == versions.ENTRY_POINT
        assert by_itself == (switch == "entry_point")


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.1.dev0", "0.9.1+cu128"])
def test_the_asynchronous_mode_is_for_0_9_1_and_later(version):
    versions.require_asynchronous(version)


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0", "0.9.0", "0.9", "0.10.0", "1.0", "main"])
def test_elsewhere_it_says_where_it_is(version):
    with pytest.raises(versions.UnsupportedVerlError, match=r"0\.9\.1.*pip install verl==0\.9\.1"):
        versions.require_asynchronous(version)
    with pytest.raises(ConfigError, match=f"verl={version}: .*Fix: pip install"):
        check_verl(version)


def test_series_are_found_by_their_first_two_numbers():
    assert versions.support("0.8.3") is versions.SUPPORT[0, 8]
    assert versions.support("0.6.1") is None
    assert versions.release("nothing") == ()
