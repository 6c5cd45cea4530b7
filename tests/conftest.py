"""Fixtures that several test modules use."""

import functools

import hypothesis
import pytest

# No example fails for the time that a busy machine took over it.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def verifier(monkeypatch):
    """A worker of the test's own, in place of the shared one."""
    from sat_verl.grading import verify

    fresh = verify.Verifier()
    monkeypatch.setattr(verify, "_shared", fresh)
    yield fresh
    fresh.close()


@pytest.fixture(scope="session")
def _lab_folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lab-cache"))


@pytest.fixture(scope="module")
def lab_cache(_lab_folder):
    """The laboratory's cache, one for all modules, with models that learn for a second only, in this module."""
    from benchmarks.lab import rollout
    from recipes.models.store import ensure_model
    from recipes.models.warm_start import WarmStart

    brief = WarmStart(target=0.3, max_steps=30, eval_every=15, eval_samples=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "ensure_model", functools.partial(ensure_model, settings=brief))
        yield _lab_folder
