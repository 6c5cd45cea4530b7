"""A checkpoint counts when it is whole, and only then."""

import os

import pytest

from sat_verl import checkpoints


def make(root, step, whole=True, size=100):
    folder = root / f"global_step_{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * size)
    if whole:
        checkpoints.mark(folder, {"global_step": step})
    return folder


def names(folders):
    return [folder.name for folder in folders]


def test_the_newest_is_the_last_whole_one(tmp_path):
    for step in (2, 10, 9):
        make(tmp_path, step)
    make(tmp_path, 11, whole=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")  # verl, killed while it wrote it
    assert checkpoints.newest(tmp_path).name == "global_step_10"
    assert checkpoints.read_marker(checkpoints.newest(tmp_path)) == {"global_step": 10}
    assert names(checkpoints.remove_broken(tmp_path)) == ["global_step_11"]
    assert names(checkpoints.complete(tmp_path)) == ["global_step_2", "global_step_9", "global_step_10"]


def test_no_folder_no_checkpoint(tmp_path):
    assert checkpoints.newest(tmp_path / "none") is None
    assert checkpoints.remove_broken(tmp_path / "none") == []


def test_a_half_written_marker_is_none(tmp_path):
    folder = make(tmp_path, 1, whole=False)
    (folder / "complete.json.partial").write_text("{")
    assert checkpoints.newest(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"global_step": 9}'])
def test_a_marker_of_something_else_is_none(tmp_path, content):
    (make(tmp_path, 1, whole=False) / "complete.json").write_text(content)
    assert checkpoints.newest(tmp_path) is None


def test_a_users_own_copies_are_left_alone(tmp_path):
    make(tmp_path, 1)
    for name in ("global_step_1.bak", "global_step_abc"):
        (tmp_path / name).mkdir()
    checkpoints.remove_broken(tmp_path)
    checkpoints.prune(tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", "global_step_1.bak", "global_step_abc"]


def test_pruning_keeps_the_last_ones_and_what_is_being_written(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    make(tmp_path, 5, whole=False)
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["global_step_3", "global_step_4", "global_step_5"]


def test_a_removal_that_is_killed_leaves_no_whole_checkpoint(tmp_path, monkeypatch):
    folder = make(tmp_path, 1)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda _folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(folder)
    assert checkpoints.newest(tmp_path) is None


def test_a_save_that_cannot_fit_is_refused(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100 * 2**20})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _path: usage)
    model = tmp_path / "model"
    model.mkdir()
    checkpoints.check_space(tmp_path, model)
    (model / "a.safetensors").write_bytes(b"x" * 26 * 2**20)
    with pytest.raises(checkpoints.NoSpaceError, match="the last whole one is none"):
        checkpoints.check_space(tmp_path, model)
    make(tmp_path, 1, size=80 * 2**20)
    checkpoints.check_space(tmp_path, model)  # known, no guess needed
    make(tmp_path, 2, size=95 * 2**20)
    with pytest.raises(checkpoints.NoSpaceError, match=r"global_step_2.*checkpoint\.keep"):
        checkpoints.check_space(tmp_path, model)
