"""Stands in for ``python``: asks the run's fork server for a process that runs what it was given, and is its shadow.

``python -IS fork_client.py SOCKET PYTHON [python's own arguments]``, of the standard library alone, because it is what
starts fast. It passes on its environment, folder and file descriptors, forwards signals, and ends as the process does;
when it is killed, the server kills the process. What the server cannot do is left to a real interpreter.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

FLAGS = ("-u", "-B")


def understood(arguments: list) -> bool:
    """Whether to ask for a fork: for a script, ``-c`` or ``-m``, after flags that the server has from its environment.

    A resource tracker of multiprocessing needs none of the stack, and the supervisor knows it by its command line.
    """
    while arguments and arguments[0] in FLAGS:
        arguments = arguments[1:]
    if not arguments or any("multiprocessing.resource_tracker" in argument for argument in arguments[:2]):
        return False
    return arguments[0] in ("-c", "-m") or not arguments[0].startswith("-")


def open_descriptors() -> list:
    """Of this process, but for the one that lists them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue
        found.append(int(name))
    return sorted(found)


def main(address: str, python: str, arguments: list) -> None:
    descriptors = open_descriptors()
    server = socket.socket(socket.AF_UNIX)
    try:
        if not understood(arguments):
            raise OSError
        server.connect(address)
    except OSError:
        os.execv(python, [python, *arguments])
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "fds": descriptors}
    body = json.dumps(request).encode()
    # Until the answer is here, a signal waits: it is for a process that does not exist yet.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(server, [len(body).to_bytes(4, "big")], descriptors)
    server.sendall(body)
    for descriptor in descriptors:
        if descriptor > 2:  # or a reader would never see the end of a pipe
            os.close(descriptor)
    process = int.from_bytes(server.recv(4), "big")

    def forward(received: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the server is about to say how
            os.kill(process, received)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = server.recv(4)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if len(status) == 4 else 1
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
