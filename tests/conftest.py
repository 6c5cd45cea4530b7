"""Fixtures that several test modules use."""

import pytest


@pytest.fixture
def verifier(monkeypatch):
    """A worker of the test's own, in place of the shared one."""
    from sat_verl.grading import verify

    fresh = verify.Verifier()
    monkeypatch.setattr(verify, "_shared", fresh)
    yield fresh
    fresh.close()
