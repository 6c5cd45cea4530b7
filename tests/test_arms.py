"""Every arm of the lag sweep starts: it composes, derives and passes all guards, at lag 1 and 8."""

import copy
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from benchmarks.arms import ARMS, BASE_MODEL_SCORE, PaperRow, matched
from recipes import guards
from recipes.compose import GROUPS, choices, compose, expand_short_forms
from recipes.derive import derive

MISSING = object()
CONTROLS = [matched(ARMS["grpo"], 0.031, 0.04), matched(ARMS["gspo"], 0.031, 0.04)]


@functools.cache  # composing is what takes time
def composed(presets):
    return compose([*presets, "model=tiny_moe"])


def config_of(arm, folder, lag):
    """As composed from the arm's words: the presets by Hydra, settings (which must exist) set on a copy."""
    presets = tuple(word for word in arm.words if word.partition("=")[0] in GROUPS)
    cfg = copy.deepcopy(composed(presets))
    settings = expand_short_forms([word for word in arm.words if word not in presets])
    for key, value in (word.split("=") for word in settings):
        assert OmegaConf.select(cfg, key, default=MISSING) is not MISSING, key
        OmegaConf.update(cfg, key, yaml.safe_load(value))
    cfg.run_dir, cfg.cache_dir, cfg.lag.steps = f"{folder}/run", str(folder), lag
    return derive(cfg)


@pytest.mark.parametrize("arm", [*ARMS.values(), *CONTROLS], ids=lambda arm: arm.name)
def test_every_arm_passes_the_guards_at_lag_1_and_8(arm, tmp_path):
    for lag in (1, 8):
        cfg = config_of(arm, tmp_path, lag)
        guards.check(cfg)
        assert cfg.trainer.v1.separate_async.parameter_sync_step == lag
    if len(arm.words) == 1:
        guards.upstream(cfg)  # verl's own validation, once a loss
    assert ("recompute" in arm.needs) == (not cfg.algorithm.rollout_correction.bypass_mode)
    assert ("critic" in arm.needs) == (cfg.algorithm.adv_estimator == "gae")
    assert ("experts" in arm.needs) == (cfg.routing_replay.mode == "r3")


def test_the_arms_are_the_papers_rows_and_all_presets():
    rows = {arm.label: arm.paper for arm in ARMS.values() if arm.paper}
    assert len(rows) == 13
    assert rows["SAT-GSPO + R3"] == PaperRow(35.83, 34.79, 0.0056, 0.0076)
    assert [label for label, row in rows.items() if row.collapses_lag8] == ["GRPO", "GSPO"]
    # Sums of the table's columns: no figure is mistyped unseen.
    names = ("score_lag1", "score_lag8", "dbar_lag1", "dbar_lag8")
    sums = [round(sum(getattr(row, name) for row in rows.values()), 4) for name in names]
    assert sums == [427.92, 417.14, 0.1126, 0.1609]
    assert all(BASE_MODEL_SCORE < row.score_lag8 < 36 for row in rows.values())
    used = {word.partition("=")[2] for arm in ARMS.values() for word in arm.words if word.startswith("algorithm=")}
    assert used == set(choices("algorithm"))


def test_an_arm_is_paired_with_one_that_runs_wherever_it_does():
    for arm in ARMS.values():
        assert re.fullmatch(r"[a-z0-9_]+", arm.name)
        if arm.base is not None:
            assert set(ARMS[arm.base].needs) <= set(arm.needs), arm.name
        if set(arm.needs) - {"experts"}:
            assert arm.note, f"{arm.name} must say what it does not share"
    assert len({arm.label for arm in ARMS.values()}) == len({arm.words for arm in ARMS.values()}) == len(ARMS)


def test_a_matched_control_is_its_base_at_other_radii():
    arm = CONTROLS[0]
    assert arm.words == ("algorithm=grpo", "clip_ratio_low=0.031", "clip_ratio_high=0.04")
    assert (arm.base, arm.paper) == ("grpo", None)
    again = matched(arm, 0.1, 1e-5)
    assert again.words == ("algorithm=grpo", "clip_ratio_low=0.1", "clip_ratio_high=1e-05")
    assert OmegaConf.from_dotlist([again.words[2]]).clip_ratio_high == 1e-5
    for low, high in [(0, 0.1), (1, 0.1), (0.1, 0), (math.nan, 0.1), (0.1, math.inf)]:
        with pytest.raises(ValueError, match="matched radii"):
            matched(ARMS["grpo"], low, high)


@pytest.mark.slow
def test_the_critic_of_the_ppo_arm_takes_a_step_on_the_cpu(tmp_path):
    env = os.environ | {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    script = Path(__file__).with_name("critic_step.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(value) for value in done.stdout.split("losses")[1].split()]
    assert losses[-1] < 0.9 * losses[0]
