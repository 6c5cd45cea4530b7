"""Nothing of a run survives it, and nothing else is touched."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the supervisor adopts orphans on Linux only"
)

# A run in small: a child in a session of its own, whose own child is an orphan at once, holding shared memory.
RUN = """
import os, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
name, pids, mode = sys.argv[1:]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        segment = shared_memory.SharedMemory(name=name, create=True, size=4096)
        resource_tracker.unregister(segment._name, "shared_memory")
        open(pids, "a").write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
while not os.path.exists(pids):
    time.sleep(0.01)
open(pids, "a").write(f"{os.getpid()}\\n")
print("started", flush=True)
if mode == "exit":
    time.sleep(1.5)
    sys.exit(3)
time.sleep(600)
"""


class Run:
    def __init__(self, folder, mode):
        self.name = f"sat-verl-test-{os.getpid()}-{folder.name}"
        self.runtime, self.log, self.pids = folder / "runtime", folder / "log", folder / "pids"
        self.runtime.mkdir()
        command = [sys.executable, "-c", RUN, self.name, str(self.pids), mode]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recipes.supervisor", str(self.runtime), str(self.log), *command],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        self._wait(lambda: self.pids.exists() and len(self.pids.read_text().split()) == 2)

    @staticmethod
    def _wait(condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.05)

    def running(self):
        pids = [int(pid) for pid in self.pids.read_text().split()]
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def assert_gone(self):
        code = self.process.wait(30)
        self._wait(lambda: not self.running())
        assert not Path("/dev/shm", self.name).exists()
        assert not self.runtime.exists()
        return code


def test_a_command_that_ends_takes_its_orphans_along(tmp_path):
    run = Run(tmp_path, "exit")
    assert len(run.running()) == 2
    assert run.assert_gone() == 3
    assert "started" in run.log.read_text()


def test_the_death_of_the_starter_ends_the_run(tmp_path):
    run = Run(tmp_path, "stay")
    assert Path("/dev/shm", run.name).exists()
    run.process.stdin.close()  # what the kernel does when the starter is killed with -9
    assert run.assert_gone() != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run(tmp_path, number):
    run = Run(tmp_path, "stay")
    run.process.send_signal(number)
    assert run.assert_gone() == 128 + number


def test_other_processes_and_segments_are_left_alone(tmp_path):
    mine = shared_memory.SharedMemory(create=True, size=4096)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run = Run(tmp_path, "stay")
        run.process.stdin.close()
        run.assert_gone()
        assert other.poll() is None
        assert Path("/dev/shm", mine.name).exists()
    finally:
        other.kill()
        other.wait()
        mine.close()
        mine.unlink()
