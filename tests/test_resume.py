"""Going on with a run: its own settings, its last whole checkpoint, its records up to there."""

import json

import pytest
from omegaconf import OmegaConf

from recipes import resume
from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from sat_verl import checkpoints
from sat_verl.records import METRICS_FILE, SAMPLES_FILE, VALIDATION_FILE, read_rows


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return derive(compose(["algorithm=grpo", "lag=2", "seed=3", f"run_dir={folder}"]))


@pytest.fixture
def run(tmp_path, config):
    text = OmegaConf.to_yaml(config, resolve=True).replace(config.run_dir, str(tmp_path))
    (tmp_path / "config.yaml").write_text(text)
    cfg = OmegaConf.create(text)
    for name in (METRICS_FILE, SAMPLES_FILE, VALIDATION_FILE):
        rows = [{"step": step, "global_step": (step + 1) // 2} for step in range(1, 9)]
        if name == VALIDATION_FILE:
            rows.insert(0, {"step": 0, "global_step": 0})
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "glo')
    for step in (1, 3):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        folder.mkdir(parents=True)
        checkpoints.mark(folder, {"global_step": step, "optimizer_step": 2 * step})
    (tmp_path / "checkpoints" / "global_step_4").mkdir()  # killed while it was saved
    return cfg


def test_the_earlier_overrides_come_first_and_the_folder_last(run):
    found = resume.with_earlier([f"resume={run.run_dir}", "steps=60"])
    assert found[:4] == ["algorithm=grpo", "lag=broadcast", "lag.steps=2", "seed=3"]
    assert found[4:] == [f"cache_dir={run.cache_dir}", "steps=60", f"run_dir={run.run_dir}", f"resume={run.run_dir}"]
    assert resume.own_overrides(found) == [*found[:4], "steps=60"], "a second resume starts from the same"


def test_a_command_without_resume_is_left_alone():
    assert resume.with_earlier(["seed=1", "resume=null"]) == ["seed=1", "resume=null"]


def test_there_must_be_a_run(tmp_path):
    with pytest.raises(ConfigError, match="there is no run"):
        resume.with_earlier([f"resume={tmp_path}"])


def test_two_folders_are_one_too_many(run, tmp_path):
    with pytest.raises(ConfigError, match="leave run_dir out"):
        resume.with_earlier([f"resume={run.run_dir}", "run_dir=/elsewhere"])


def test_it_goes_back_to_the_last_whole_checkpoint(run, tmp_path):
    assert resume.last_step(tmp_path) == 6
    resume.go_back(run)
    assert run.trainer.resume_mode == "resume_path"
    assert run.trainer.resume_from_path == str(tmp_path / "checkpoints" / "global_step_3")
    assert run.trainer.val_before_train is False
    for name in (METRICS_FILE, SAMPLES_FILE):
        assert [row["step"] for row in read_rows(tmp_path / name)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_rows(tmp_path / VALIDATION_FILE)] == [0, 1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "checkpoints" / "global_step_4").exists()


def test_without_a_checkpoint_it_begins_anew(run, tmp_path):
    for folder in checkpoints.complete(tmp_path / "checkpoints"):
        checkpoints.remove(folder)
    resume.go_back(run)
    assert run.trainer.resume_mode == "disable"
    assert run.trainer.val_before_train is True
    assert read_rows(tmp_path / METRICS_FILE) == []
    assert read_rows(tmp_path / VALIDATION_FILE) == [], "the validation before training will be done again"


def test_more_steps_are_the_same_run(run):
    run.steps, run.trainer.total_training_steps, run.checkpoint.keep = 60, 30, 5
    resume.check_same(run)


@pytest.mark.parametrize(("key", "value"), [("lr_scheduler_type", "cosine"), ("lr_warmup_steps_ratio", 0.1)])
def test_more_steps_are_another_run_where_the_learning_rate_depends_on_them(run, tmp_path, key, value):
    optim = run.actor_rollout_ref.actor.optim
    optim[key], optim.lr_warmup_steps = value, -1
    OmegaConf.save(run, tmp_path / "config.yaml", resolve=True)
    resume.check_same(run)
    run.steps = 60
    with pytest.raises(ConfigError, match="depends on their number"):
        resume.check_same(run)


def test_steps_may_only_grow(run):
    run.steps = 20
    with pytest.raises(ConfigError, match="set more than 40"):
        resume.check_same(run)


def test_a_finished_run_is_not_done_again(run, tmp_path):
    folder = tmp_path / "checkpoints" / "global_step_20"
    folder.mkdir()
    checkpoints.mark(folder, {"global_step": 20, "optimizer_step": 40})
    with pytest.raises(ConfigError, match="40 steps are done"):
        resume.check_same(run)


def test_a_run_may_be_moved(run, tmp_path, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "here"
    tmp_path.rename(moved)
    cfg = derive(compose(resume.with_earlier([f"resume={moved}"])))
    resume.check_same(cfg)


@pytest.mark.parametrize("name", ["lr=0.1", "x,y", "run (1)", "it's"])
def test_a_folder_may_have_any_name(run, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.yaml").write_text((tmp_path / "config.yaml").read_text())
    cfg = compose(resume.with_earlier([f"resume={folder}"]))
    assert cfg.run_dir == cfg.resume == str(folder)


@pytest.mark.parametrize("content", [b"", b"a: [", b"- 1\n", b"\xff\xfe", b"seed: 3\n"])
def test_a_config_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="not that of a run of these recipes"):
        resume.with_earlier([f"resume={tmp_path}"])


@pytest.mark.parametrize("argument", ["resume=", "+resume=", "resume=''"])
def test_an_empty_resume_is_not_a_new_run(argument):
    with pytest.raises(ConfigError, match="names no folder"):
        resume.with_earlier([argument])


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 4), ("lag.steps", 4), ("actor_rollout_ref.actor.optim.lr", 1e-3), ("prompts_per_step", 4)],
)
def test_other_settings_are_another_run(run, key, value):
    OmegaConf.update(run, key, value)
    with pytest.raises(ConfigError) as caught:
        resume.check_same(run)
    assert "would not be one run" in caught.value.problem


def test_data_and_model_are_compared_once_they_are_built(config, tmp_path):
    """Other settings repeat the model's path; before it is known they still have verl's defaults."""
    now = config.copy()
    now.run_dir = now.sat_verl.run_dir = str(tmp_path)
    now.trainer.default_local_dir = f"{tmp_path}/checkpoints"
    built = now.copy()
    built.actor_rollout_ref.model.path = "/models/one"
    OmegaConf.save(built, tmp_path / "config.yaml", resolve=True)
    resume.check_same(now, prepared=False)
    resume.check_same(built)
    built.actor_rollout_ref.model.path = "/models/other"
    with pytest.raises(ConfigError, match="/models/other"):
        resume.check_same(built)
