"""Trackers are verl's own; one that would fail is refused before anything starts."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes import guards, trackers
from recipes.errors import ConfigError


@pytest.fixture(scope="module")
def tracking():
    """verl's module, without the import of verl."""
    path = Path(importlib.util.find_spec("verl").origin).parent / "utils/tracking.py"
    spec = importlib.util.spec_from_file_location("tracking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(logger, run_dir="/tmp/run"):
    return OmegaConf.create({"trainer": {"logger": logger}, "run_dir": str(run_dir)})


def refusal(logger):
    with pytest.raises(ConfigError) as caught:
        trackers.check(config(logger))
    assert caught.value.setting == "trainer.logger"
    return caught.value


def test_the_names_are_verls(tracking):
    assert sorted(trackers.TRACKERS) == sorted(tracking.Tracking.supported_backend)


def test_what_is_imported_is_what_verl_imports(tracking):
    source = Path(tracking.__file__).read_text()
    for name, tracker in trackers.TRACKERS.items():
        for module in tracker.modules:
            if name != "tensorboard":  # imported by torch
                assert f"import {module}" in source or f"from {module}" in source
        for variable in (*tracker.needs, *(tracker.places or ())):
            assert variable in source or name == "wandb"


@pytest.mark.parametrize("logger", [["console", "file"], ["tensorboard"], "console"])
def test_those_that_are_here_pass(logger):
    trackers.check(config(logger))


@pytest.mark.parametrize(
    ("logger", "text"),
    [
        (["consle"], "choose among console"),
        (["console", "console"], "twice"),
        ([], "list of trackers"),
        (None, "list of trackers"),
        ([1], "list of trackers"),
    ],
)
def test_what_is_no_tracker_is_named(logger, text):
    assert text in str(refusal(logger))


def test_a_missing_package_comes_with_its_installation(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find(name))
    error = refusal(["console", "mlflow"])
    assert error.value == "mlflow"
    assert "pip install mlflow" in error.fix


def test_missing_credentials_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("VOLC_ACCESS_KEY_ID", "x")
    monkeypatch.delenv("VOLC_SECRET_ACCESS_KEY", raising=False)
    error = refusal(["vemlp_wandb"])
    assert "VOLC_SECRET_ACCESS_KEY" in error.problem
    assert "VOLC_ACCESS_KEY_ID" not in error.problem


def test_it_is_one_of_the_guard_rails():
    assert trackers.check in guards.CHECKS


def test_verls_trackers_write_into_the_run_folder(tracking, tmp_path, monkeypatch):
    cfg = config(["file", "tensorboard"], tmp_path)
    for value, step in ((1.5, 1), (2.5, 2)):  # the second one as after a resume
        for name, place in trackers.environment(cfg, {}).items():
            monkeypatch.setenv(name, place)
        logger = tracking.Tracking("project", "run", list(cfg.trainer.logger))
        logger.log({"actor/sat/q": value}, step=step)
        logger.finish()
    first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("verl_metrics.jsonl", "verl_metrics-2.jsonl")
    )
    assert (first["step"], first["data"]) == (1, {"actor/sat/q": 1.5})
    assert second["step"] == 2
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_the_users_own_places_stay():
    cfg = config(["file", "wandb"])
    assert trackers.environment(cfg, {**os.environ, "VERL_FILE_LOGGER_PATH": "/x", "WANDB_DIR": "/y"}) == {}
    assert trackers.environment(config(["console"]), {}) == {}
