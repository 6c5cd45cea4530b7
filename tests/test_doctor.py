"""The doctor says what is wrong and exits with 1."""

import json

import pytest

from sat_verl import __main__, doctor


def only(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "CHECKS", checks)


def test_a_missing_loss_is_found(monkeypatch, capsys):
    def check():
        yield doctor._verdict("plug-in, Ray worker", {"losses": ["sat_grpo"], "pid": 1})

    only(monkeypatch, check)
    assert __main__.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "wrong" in out
    assert "->" in out, "a problem comes with what to do about it"


def test_a_check_that_fails_itself_is_a_finding(monkeypatch, capsys):
    def in_ray_worker():
        raise ImportError("no module named nothing")
        yield

    only(monkeypatch, in_ray_worker, doctor.entry_points)
    assert __main__.main(["doctor", "--json"]) == 1
    findings = {entry["subject"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert "no module named nothing" in findings["in ray worker"]["detail"]
    assert findings["entry point verl.plugins"]["status"] == "ok", "the other checks still run"


def test_disabled_plugins_are_named(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    wrong = [finding for finding in doctor.entry_points() if finding.status == "wrong"]
    assert [finding.subject for finding in wrong] == ["VERL_USE_EXTERNAL_PLUGINS"]


def test_a_healthy_environment_exits_with_0(monkeypatch, capsys):
    only(monkeypatch, doctor.entry_points)
    assert __main__.main(["doctor"]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_every_loss_is_registered_here():
    pytest.importorskip("verl")
    assert [finding.status for finding in doctor.here()] == ["ok"]
