"""The commit beside a number: which, and whether the code was that."""

import subprocess

from recipes import provenance


def test_a_result_that_was_written_does_not_make_the_code_another(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *words], check=True)

    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "speed.json"
    assert provenance.commit(tmp_path) == {"commit": None, "dirty": None}
    result.parent.mkdir(parents=True)
    code.write_text("1")
    result.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert provenance.commit(tmp_path)["dirty"] is False
    result.write_text("2")
    assert provenance.commit(tmp_path)["dirty"] is False
    code.write_text("2")
    found = provenance.commit(tmp_path)
    assert found["dirty"] is True
    assert len(found["commit"]) == 40
