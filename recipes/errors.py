"""The one error that a user's own input causes."""

from __future__ import annotations


class ConfigError(Exception):
    """Bad input, found before anything starts: what is wrong with which setting, and how to mend it."""

    def __init__(self, setting: str, value: object, problem: str, fix: str) -> None:
        self.setting, self.value, self.problem, self.fix = setting, value, problem, fix
        subject = setting if value == "" else f"{setting}={value}"
        super().__init__(f"{subject}: {problem}. Fix: {fix}.")
