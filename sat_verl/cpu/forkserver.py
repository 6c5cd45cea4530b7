"""One process imports the stack, and the processes of a CPU run are forked from it.

A run has a dozen Python processes, and each would import torch, verl, Ray and vLLM for 5 to 15 seconds of CPU time: on
two cores that is most of the start. Ray starts its workers with the command ``py_executable`` of the runtime
environment, and ``multiprocessing`` (vLLM's engine) with its executable: both get :func:`command`, a small program
(:mod:`sat_verl.cpu.fork_client`) that asks for a fork and stands for it. On accelerators nothing is forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from sat_verl.cpu import fork_client

MODULES = (
    "verl.trainer.ppo.v1",
    "sat_verl.trainer",
    "sat_verl.worker",
    "sat_verl.rollout",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)
"""What the processes of a run import, but for models and tokenizers."""

PROGRAM, SOCKET = "python", "fork"
FIRST_JOB = "01000000"


@dataclass
class Request:
    """What a process shall run: ``arguments`` are those of ``python``; ``fds`` maps its descriptors to ours."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: dict[int, int]


@dataclass
class _Child:
    connection: socket.socket
    pid: int
    pidfd: int


@dataclass
class Server:
    """Forks a process for every request on ``listener``, and ends its child when the client is gone."""

    listener: socket.socket
    starter: int
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    children: list[_Child] = field(default_factory=list)

    def serve(self) -> Request:
        """Serve as long as the starter lives; returns only in a forked process, with what it shall run."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        while os.getppid() == self.starter:
            for key, _ in self.selector.select(timeout=5.0):
                if key.fileobj is self.listener:
                    if (request := self._accept()) is not None:
                        return request
                else:
                    self._end(key.data)
        for child in list(self.children):
            self._end(child)
        sys.exit()

    def _accept(self) -> Request | None:
        connection, _ = self.listener.accept()
        try:
            request = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        if (pid := os.fork()) == 0:
            self._forget(connection)
            return request
        for descriptor in request.fds.values():
            os.close(descriptor)
        child = _Child(connection, pid, os.pidfd_open(pid))
        self.children.append(child)
        for source in (connection, child.pidfd):
            self.selector.register(source, selectors.EVENT_READ, child)
        with contextlib.suppress(OSError):
            connection.sendall(pid.to_bytes(4, "big"))
        return None

    def _end(self, child: _Child) -> None:
        """The child has ended, or its client has."""
        if child not in self.children:
            return
        ended, status = os.waitpid(child.pid, os.WNOHANG)
        if not ended:
            os.kill(child.pid, 9)
            _, status = os.waitpid(child.pid, 0)
        with contextlib.suppress(OSError):
            child.connection.sendall(status.to_bytes(4, "big"))
        self.children.remove(child)
        for source in (child.connection, child.pidfd):
            self.selector.unregister(source)
        child.connection.close()
        os.close(child.pidfd)

    def _forget(self, connection: socket.socket) -> None:
        """In a fork: the server's descriptors are not its own."""
        self.selector.close()
        self.listener.close()
        connection.close()
        for child in self.children:
            child.connection.close()
            os.close(child.pidfd)


def _receive(connection: socket.socket) -> Request:
    head, fds, _, _ = socket.recv_fds(connection, 4, 250)
    length, body = int.from_bytes(head, "big"), b""
    while len(body) < length:
        if not (part := connection.recv(length - len(body))):
            raise OSError("the client is gone")
        body += part
    asked = json.loads(body)
    return Request(asked["arguments"], asked["environment"], asked["folder"], dict(zip(asked["fds"], fds, strict=True)))


def available() -> bool:
    """Whether this system can do it (Linux 5.3); where it cannot, processes start as usual."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return os.path.isdir("/proc/self/fd")


def start(folder: Path, modules: Iterable[str] = MODULES) -> Path:
    """Start the server of this process's Ray cluster-to-be; returns the program that stands in for ``python``.

    Args:
        folder: for a socket and that program; only its owner may enter it.
        modules: that it imports.
    """
    program = folder / PROGRAM
    words = [sys.executable, "-IS", fork_client.__file__, str(folder / SOCKET), sys.executable]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET))
    listener.listen(64)
    # Ray's library takes these from the environment when it is loaded, and refuses to be a worker without them. The job
    # is the first of a new cluster; what a worker watches and does not outlive is its raylet, here this process.
    environment = os.environ | {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    words = [sys.executable, "-m", __name__, str(listener.fileno()), str(os.getpid()), str(program), *modules]
    subprocess.Popen(words, env=environment, pass_fds=[listener.fileno()])
    listener.close()
    return program


def preload(modules: Iterable[str]) -> None:
    """Import them; what cannot be imported is left to the process that needs it, and its error."""
    with _ids_from_the_system():
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in every fork would copy all of it


@contextlib.contextmanager
def _ids_from_the_system() -> Iterator[None]:
    """Keep Ray's own source of random ids unused: it would go on alike in every fork.

    A class that is made an actor draws one when it is imported. Then two agent loop workers have the same ids for their
    tasks, and an actor that both call ends itself (``core_worker.cc``: ``Check failed: erased == 1``).
    """
    actor: Any = None
    with contextlib.suppress(ImportError):
        actor = importlib.import_module("ray.actor")
    of_ray = getattr(actor, "ActorClassID", None)
    if of_ray is None:  # no Ray, or another one, whose forks tests/test_forkserver.py compares
        yield
        return
    actor.ActorClassID = SimpleNamespace(from_random=lambda: of_ray(os.urandom(of_ray.size())))
    try:
        yield
    finally:
        actor.ActorClassID = of_ray


def become(request: Request, program: Path) -> None:
    """Run a request in this forked process, as ``python`` would; its children are forked from the server too."""
    _take_descriptors(request.fds)
    _find_title(request.arguments)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _refresh()
    import multiprocessing

    multiprocessing.set_executable(str(program))
    arguments = list(request.arguments)
    while arguments[0] in fork_client.FLAGS:
        arguments.pop(0)
    what, *rest = arguments
    if what == "-m":
        sys.argv = rest
        sys.path[0] = request.folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if what == "-c":
        code, sys.argv, sys.path[0] = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]], ""
    else:
        code, sys.argv, sys.path[0] = (
            compile(Path(what).read_bytes(), what, "exec"),
            [what, *rest],
            str(Path(what).parent),
        )
        main.__file__ = what
    exec(code, main.__dict__)


def _take_descriptors(fds: dict[int, int]) -> None:
    import fcntl

    clear = max(fds, default=2) + 1  # above all numbers that are asked for
    moved = {}
    for number, received in fds.items():
        moved[number] = fcntl.fcntl(received, fcntl.F_DUPFD, clear)
        os.close(received)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def _find_title(arguments: list[str]) -> None:
    """Let the process name itself later: the place of its title is found by the environment, as long as that is new.

    Ray's workers do it by Ray's own copy of setproctitle, vLLM's processes by the package; the first one shuts the
    other out.
    """
    of_ray = any(argument.endswith("default_worker.py") for argument in arguments)
    with contextlib.suppress(ImportError):
        module = importlib.import_module("ray._raylet" if of_ray else "setproctitle")
        module.setproctitle(module.getproctitle())


def _refresh() -> None:
    """What a fresh interpreter would have read from the environment, or drawn."""
    import numpy as np
    import torch

    raylet = importlib.import_module("ray._raylet")  # compiled, without type hints
    raylet.Config.initialize("")  # whether Ray's servers want a token: read when it was imported, before there was one
    np.random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS", "").strip():
        torch.set_num_threads(int(threads))


def main(listener: int, starter: int, program: str, *modules: str) -> None:
    preload(modules)
    become(Server(socket.socket(fileno=listener), starter).serve(), Path(program))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
