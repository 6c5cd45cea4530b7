"""From a command line to verl's config: short forms, composition, and errors that a user can act on."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipes.errors import ConfigError
from recipes.resume import own_overrides

CONFIG_NAME = "train"
GROUPS = ("algorithm", "backend", "correction", "lag", "model", "recipe", "task")
CONFIG_RESOLVER = "verl_config"
_LAG = re.compile(r"(broadcast|constant|bounded)?(\d+)")


@dataclass(frozen=True)
class Source:
    """Where Hydra finds a command's config.

    Attributes:
        module: of the config files.
        name: of the main file.
        groups: of presets.
        folder: that the files are in.
        open_sections: beginnings of the settings that may be added with ``+``; by default any.
    """

    module: str
    name: str
    groups: tuple[str, ...]
    folder: Path
    open_sections: tuple[str, ...] = ("",)

    def choices(self, group: str) -> list[str]:
        """Names of the presets of a config group."""
        return sorted(path.stem for path in (self.folder / group).glob("*.yaml"))


TRAIN = Source("recipes.config", CONFIG_NAME, GROUPS, Path(__file__).parent / "config")


def choices(group: str) -> list[str]:
    """Names of the presets of a config group of the recipes."""
    return TRAIN.choices(group)


def verl_config() -> str:
    """Where Hydra finds verl's config files: their folder, since ``pkg://`` imports verl, which takes seconds."""
    spec = importlib.util.find_spec("verl")
    folders = [Path(one) / "trainer" / "config" for one in (spec and spec.submodule_search_locations) or ()]
    found = next((folder for folder in folders if folder.is_dir()), None)
    return f"file://{found}" if found else "pkg://verl.trainer.config"


OmegaConf.register_new_resolver(CONFIG_RESOLVER, verl_config, replace=True)


def expand_short_forms(arguments: Sequence[str]) -> list[str]:
    """``model=PATH``, ``task=FILE.parquet``, ``lag=8``, ``routing_replay=r3`` written out; everything else as it is.

    Raises:
        ConfigError: a ``lag`` that is none.
    """
    expanded: list[str] = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key == "model" and value not in choices("model") and ("/" in value or Path(value).exists()):
            expanded += ["model=hf", f"model.path={value}"]
        elif separator and key == "task" and value.endswith(".parquet"):
            expanded += ["task=parquet", f"task.train_file={value}"]
        elif key == "lag" and not set(value.split(",")) <= set(choices("lag")):
            expanded += _lag(value)
        elif key == "routing_replay" and separator and not value.startswith("{"):
            expanded.append(f"routing_replay.mode={value}")
        else:
            expanded.append(argument)
    return expanded


def _lag(value: str) -> list[str]:
    lag = _LAG.fullmatch(value)
    if lag is None:
        raise ConfigError(
            "lag", value, "it is neither a number of steps nor a schedule",
            "write lag=8, lag=constant8 or lag=bounded8 (several: --multirun lag=broadcast lag.steps=1,8)",
        )  # fmt: skip
    return [f"lag={lag[1] or 'broadcast'}", f"lag.steps={lag[2]}"]


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the config of a run; ``cfg.choices`` holds the chosen preset of each group.

    Raises:
        ConfigError: an unknown key or preset, or an override that cannot be parsed.
    """
    overrides = expand_short_forms(overrides)
    cfg, found = compose_from(TRAIN, overrides)
    _read_by_nothing(overrides)
    return with_choices(cfg, found, overrides)


def _read_by_nothing(overrides: Sequence[str]) -> None:
    """Refuse ``+NAME=VALUE`` beside the groups that verl and the recipes have: nothing reads it.

    Raises:
        ConfigError: the first such override.
    """
    added = [item.lstrip("+").partition("=") for item in overrides if item.startswith("+") and "@" not in item]
    if not added:
        return
    known = _plain_keys()
    for key, _, value in added:
        if key.partition(".")[0] not in (*known, *GROUPS):
            close = _closest(key, known)
            fix = f"set {' or '.join(close)} without +, or leave it out" if close else "leave it out"
            raise ConfigError(key, value, "nothing reads it", fix)


@functools.cache
def _plain_keys() -> list[str]:
    """All settings of a run without overrides."""
    with initialize_config_module(TRAIN.module, version_base=None):
        return _keys(OmegaConf.to_container(hydra_compose(TRAIN.name)))


def compose_from(source: Source, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[str, str]]:
    """Compose a command's config; returns it with the chosen preset of each group.

    Raises:
        ConfigError: as :func:`compose`.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module(source.module, version_base=None):
        try:
            full = hydra_compose(source.name, overrides=list(overrides), return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise explain(error, overrides, source) from error
    found = full.hydra.runtime.choices
    with open_dict(full):
        full.pop("hydra")
    return full, found


def with_choices(cfg: DictConfig, found: Mapping[str, str], overrides: Sequence[str]) -> DictConfig:
    """Write the chosen preset of each group and the overrides into the config; returns ``cfg``."""
    with open_dict(cfg):
        cfg.choices = {group: found[group] for group in GROUPS}
        cfg.overrides = own_overrides(overrides)
    return cfg


def _keys(config: object, prefix: str = "") -> list[str]:
    if not isinstance(config, dict):
        return []
    found: list[str] = []
    for key, value in config.items():
        found.append(f"{prefix}{key}")
        found += _keys(value, f"{prefix}{key}.")
    return found


def _closest(name: str, names: list[str]) -> list[str]:
    """Settings that the user may have meant: similar as a whole, or with the same last part."""
    last = name.rsplit(".", 1)[-1]
    same_end = sorted((key for key in names if key.rsplit(".", 1)[-1] == last), key=len)
    similar_end = difflib.get_close_matches(last, sorted({key.rsplit(".", 1)[-1] for key in names}), n=1, cutoff=0.8)
    by_end = same_end or sorted((key for key in names if key.rsplit(".", 1)[-1] in similar_end), key=len)
    return list(dict.fromkeys(difflib.get_close_matches(name, names, n=2, cutoff=0.8) + by_end))[:3]


def explain(error: Exception, overrides: Sequence[str], source: Source = TRAIN) -> ConfigError:
    """A :class:`ConfigError` for what Hydra or OmegaConf said of ``overrides`` (while Hydra is initialised)."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        match = re.search(r"Could not find '(\w+)/([^']*)'", text)
        if match and match[1] in source.groups:
            problem = "there is no such preset" if match[2] else "it names no preset"
            return ConfigError(match[1], match[2], problem, f"choose one of {', '.join(source.choices(match[1]))}")
    match = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text)
    if match is None:
        match = re.search(r"Key '([^']+)' (?:is not in struct|not in)", text)
    if isinstance(error, ConfigCompositionException | OmegaConfBaseException) and match:
        key = match[1].lstrip("+")
        value = next((item.partition("=")[2] for item in overrides if item.lstrip("+~").startswith(f"{key}=")), "")
        chosen = [item for item in overrides if item.partition("=")[0] in source.groups]
        known = _keys(OmegaConf.to_container(hydra_compose(source.name, overrides=chosen)))
        if key in _keys(OmegaConf.to_container(hydra_compose(source.name))):
            return ConfigError(
                key, value, f"{' '.join(chosen)} has no such setting", "leave it out, or choose another preset"
            )
        close = _closest(key, known)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        other = "prefix it with + to add a new setting" if key.startswith(source.open_sections) else "leave it out"
        return ConfigError(key, value, "there is no such setting", f"{meant}{other}")
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return ConfigError(
        "command line", " ".join(overrides), first, "write KEY=VALUE, quote values with spaces or commas"
    )
