"""Which verl versions the losses and the asynchronous mode are for, and how the losses are switched on in each.

Importing this module loads neither torch nor verl. ``sat_verl/VERSIONS.md`` says what was tested and how.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

__all__ = ["SUPPORT", "Support", "UnsupportedVerlError", "installed", "release", "require_asynchronous", "support"]

PLUGIN = "sat_verl.plugin"
ENTRY_POINT = "verl's entry point: nothing to do"
EXTERNAL = f"actor_rollout_ref.model.external_lib={PLUGIN}, or VERL_USE_EXTERNAL_MODULES={PLUGIN}"
ASYNCHRONOUS_FROM, ASYNCHRONOUS_BELOW = (0, 9, 1), (0, 10)


class UnsupportedVerlError(ImportError):
    """This verl lacks what the asynchronous mode is built on."""


@dataclass(frozen=True)
class Support:
    """What works in a series of verl releases.

    Attributes:
        tested: the releases that the losses are tested in, against the release's own.
        switch: what makes verl load the losses.
    """

    tested: tuple[str, ...]
    switch: str


SUPPORT: dict[tuple[int, ...], Support] = {
    (0, 7): Support(("0.7.1",), EXTERNAL),
    (0, 8): Support(("0.8.0",), EXTERNAL),
    (0, 9): Support(("0.9.0", "0.9.1"), ENTRY_POINT),
}
"""By the first two numbers of the version."""


def installed() -> str | None:
    """Version of the installed verl; None without one."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: ``0.9.1.dev0`` is ``(0, 9, 1)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def support(version: str) -> Support | None:
    """What is known of a version's series; None: nothing."""
    return SUPPORT.get(release(version)[:2])


def require_asynchronous(version: str | None = None) -> None:
    """Refuse a verl that the asynchronous mode (``trainer_mode=sat_async``) does not run on.

    Args:
        version: of verl; None: the installed one.

    Raises:
        UnsupportedVerlError: not 0.9.1 or a later 0.9. Older ones have no V1 trainer (0.7, 0.8), or one that cannot
            keep the rollout off the trainer's devices (0.9.0).
    """
    version = version or installed()
    if version is not None and ASYNCHRONOUS_FROM <= release(version) < ASYNCHRONOUS_BELOW:
        return
    raise UnsupportedVerlError(
        "the asynchronous mode of sat_verl (trainer.v1.trainer_mode=sat_async) is for verl 0.9.1 and later 0.9, this "
        f"is {'no verl' if version is None else f'verl {version}'}: pip install verl==0.9.1, or train with verl's "
        "own trainer, in which the losses (policy_loss.loss_mode=sat_gspo) work in 0.7.1, 0.8.0 and 0.9"
    )
