"""SGLang: verl's server makes the ``ServerArgs``, and SGLang checks them."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.engines import FIRST_REPLICA, NotInstalledError, model_of, nodes_of, refusals
from recipes.errors import ConfigError

_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.sglang"


class _MadeError(Exception):
    """Carries the arguments out of verl's ``launch_server``, which would go on to start processes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def arguments(cfg: DictConfig, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SGLang's ``ServerArgs`` of the run's first engine, as verl's server makes them.

    Nothing is started, and the ``ServerArgs`` are not made, since that looks at the GPU and the model's files: their
    names are checked against its fields, and SGLang's command-line parser reads their values.

    Args:
        cfg: the derived config.
        numbers: the model's own config.

    Raises:
        NotInstalledError: SGLang is not here, or does not import.
        ConfigError: what verl or SGLang says of the arguments.
    """
    with refusals("SGLang"):
        from recipes.upstream import dataclasses_of

        module = _module()
        server = module.SGLangHttpServer.__new__(module.SGLangHttpServer)
        server.config = dataclasses_of(cfg)["rollout"]
        server.model_config = model_of(cfg, numbers)
        server.nnodes, server.base_gpu_id = nodes_of(cfg), 0
        server.__dict__.update(FIRST_REPLICA)
        server.rollout_mode = module.RolloutMode.STANDALONE
        server._master_address, server._master_port = "127.0.0.1", 29500
        server._disaggregation_role, server._disaggregation_bootstrap_port = "null", None
        made = _made_by(server, module)
        check(made, module.ServerArgs, cfg)
        return made


def _made_by(server: Any, module: Any) -> dict[str, Any]:
    real = module.ServerArgs

    @dataclasses.dataclass
    class Recorder:
        # verl looks up the names of its fields, to see what this SGLang has.
        enable_weights_cpu_backup: bool = False

        def __new__(cls, **given: Any) -> Any:
            raise _MadeError(given)

    module.ServerArgs = Recorder
    try:
        asyncio.run(server.launch_server())
    except _MadeError as made:
        return made.arguments
    finally:
        module.ServerArgs = real
    raise AssertionError("verl's SGLang server has started without ServerArgs")


def check(made: Mapping[str, Any], server_args: Any, cfg: DictConfig) -> None:
    """Every argument is one of SGLang's, and its parser takes the value.

    Args:
        made: the arguments.
        server_args: SGLang's class of that name.
        cfg: the derived config.

    Raises:
        ConfigError: an argument that SGLang does not have.
    """
    import argparse

    known = {field.name for field in dataclasses.fields(server_args)}
    own = OmegaConf.select(cfg, _KWARGS) or {}
    for name in made:
        if name not in known:
            key = f"{_KWARGS}.{name}" if name in own else name
            raise ConfigError(key, made[name], "SGLang has no such argument", "leave it out")
    parser = argparse.ArgumentParser(exit_on_error=True)
    server_args.add_cli_args(parser)
    flags = {action.dest: action for action in parser._actions if action.option_strings}
    # verl's names are those of the fields; some of the parser's are older.
    old = {"tp_size": "tensor_parallel_size", "dp_size": "data_parallel_size", "ep_size": "expert_parallel_size"}
    words: list[str] = []
    for name, value in made.items():
        action = flags.get(name) or flags.get(old.get(name, name))
        if action is None or value is None or value is False:
            continue
        words.append(action.option_strings[0])
        if value is not True:
            words += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    parser.parse_args(words)


def _module() -> Any:
    if importlib.util.find_spec("sglang") is None:
        raise NotInstalledError("SGLang: it is not installed")
    try:
        from verl.workers.rollout.sglang_rollout import async_sglang_server
    except ImportError as error:
        raise NotInstalledError(f"SGLang: {error}") from error
    return async_sglang_server
