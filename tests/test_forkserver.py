"""The processes that are forked from one that has imported the stack are as good as new ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sat_verl.cpu import fork_client, forkserver

pytestmark = pytest.mark.skipif(not forkserver.available(), reason="no pidfd here")

START = """
import sys
from pathlib import Path
from sat_verl.cpu import forkserver
print(forkserver.start(Path(sys.argv[1]), sys.argv[2:]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The program that stands in for Python; its server has loaded Ray, numpy, torch, and classes that are actors."""
    folder = tmp_path_factory.mktemp("fork")
    words = [sys.executable, "-c", START, folder, "ray", "torch", "transfer_queue"]
    starter = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield starter.stdout.readline().decode().strip()
    servers = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait()
    assert psutil.wait_procs(servers, timeout=10)[1] == [], "it ends with whoever started it"


def run(python, *arguments, **options):
    return subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def test_a_script_has_its_arguments_folder_environment_and_exit_code(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import helper, json, os, sys\n"
        "if __name__ == '__main__':\n"
        "    facts = [sys.argv, os.getcwd(), os.environ['A'], 'B' in os.environ, __file__, 'ray' in sys.modules]\n"
        "    print(json.dumps(facts))\n"
        "    print('to stderr', file=sys.stderr)\n"
        "    sys.exit(7)\n"
    )
    (tmp_path / "helper.py").write_text("")
    env = {"A": "ä b\n", "PATH": os.environ["PATH"]}
    done = run(python, "-u", script, "x", "y z", cwd=tmp_path, env=env)
    assert json.loads(done.stdout) == [[str(script), "x", "y z"], str(tmp_path), "ä b\n", False, str(script), True]
    assert (done.stderr, done.returncode) == ("to stderr\n", 7)


def test_code_and_modules_run_as_usual_and_an_error_shows(python):
    done = run(python, "-c", "import sys; print(sys.argv, sys.stdin.read())", "a", input="text")
    assert (done.stdout, done.returncode) == ("['-c', 'a'] text\n", 0)
    assert run(python, "-m", "json.tool", "--compact", input='{"a": 1}').stdout == '{"a":1}\n'
    done = run(python, "-c", "1 / 0")
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 1


def test_it_draws_random_numbers_of_its_own(python):
    code = (
        "import random, uuid, numpy as np, ray; from ray import JobID, PlacementGroupID, WorkerID;"
        "print(random.random(), np.random.rand(), uuid.uuid4(), WorkerID.from_random().hex(),"
        "PlacementGroupID.of(JobID.from_int(1)).hex())"  # of Ray's own source in C++, as ids of tasks are
    )
    first, second = (run(python, "-c", code).stdout.split() for _ in range(2))
    assert len(first) == len(second) == 5
    assert not set(first) & set(second)


def test_rays_own_source_still_goes_on_alike_in_every_fork():
    code = (
        "import os, ray\n"
        "from ray import JobID, PlacementGroupID\n"
        "@ray.remote\nclass Actor: pass\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n"
        "        os.write(1, PlacementGroupID.of(JobID.from_int(1)).hex().encode() + b' ')\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    first, second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert first == second, "_ids_from_the_system can go: importing an actor class draws nothing of Ray's any more"


@pytest.mark.parametrize(("script", "module"), [("default_worker.py", "ray._raylet"), ("other.py", "setproctitle")])
def test_it_can_name_itself(python, tmp_path, script, module):
    """As Ray's workers and vLLM's processes do."""
    code = f"import {module} as module\nmodule.setproctitle('a::title')\nprint(open('/proc/self/cmdline').read())"
    (tmp_path / script).write_text(code)
    assert run(python, tmp_path / script).stdout.startswith("a::title\0")


def test_it_counts_the_threads_it_was_told(python):
    env = os.environ | {"OMP_NUM_THREADS": "3"}
    assert run(python, "-c", "import torch; print(torch.get_num_threads())", env=env).stdout == "3\n"


def test_signals_reach_it_and_its_end_by_one_shows(python):
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    shadow = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE)
    process = psutil.Process(int(shadow.stdout.readline()))
    assert process.pid != shadow.pid
    shadow.send_signal(signal.SIGTERM)
    assert shadow.wait(10) == -signal.SIGTERM
    assert not process.is_running()


def test_a_signal_for_a_process_that_has_just_ended_is_no_error(tmp_path):
    """vLLM signals its dead engine's shadow before the server has told it: a traceback there hid what had happened."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        words = [sys.executable, "-IS", fork_client.__file__, tmp_path / "s", sys.executable, "-c", "pass"]
        shadow = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        with connection:
            connection.recv(4)
            connection.sendall(ended.pid.to_bytes(4, "big"))
            mask = Path(f"/proc/{shadow.pid}/status")
            while "SigBlk:\t0000000000000000" not in mask.read_text():
                time.sleep(0.01)
            shadow.send_signal(signal.SIGTERM)
            while f"SigPnd:\t{0:016x}\nShdPnd:\t{0:016x}" not in mask.read_text():
                time.sleep(0.01)
            connection.sendall((9).to_bytes(4, "big"))
            assert (shadow.communicate(timeout=10)[1], shadow.returncode) == ("", -signal.SIGKILL)


def test_it_does_not_outlive_its_shadow(python):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    shadow = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE)
    process = psutil.Process(int(shadow.stdout.readline()))
    shadow.kill()
    shadow.wait()
    process.wait(timeout=10)


def test_a_process_that_it_spawns_is_forked_from_the_server_too(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "def child(queue):\n"
        "    queue.put((os.getppid(), 'ray' in sys.modules))\n"
        "    sys.exit(5)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    print(*queue.get(timeout=20), os.getppid(), process.join() or process.exitcode)\n"
    )
    server, loaded, own, code = run(python, script).stdout.split()
    assert server == own
    assert (loaded, code) == ("True", "5")


def test_file_descriptors_keep_their_numbers(python):
    """Also where the server has others under these numbers."""
    code = "import os; os.write(3, b'three '); os.write(9, b'nine')"
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 3>&1 9>&1', python, code], capture_output=True, check=True)
    assert done.stdout == b"three nine"


def test_what_the_server_cannot_do_is_left_to_python(python, tmp_path):
    done = run(python, "-X", "utf8", "-c", "import sys; print('ray' in sys.modules, sys.argv)", "a")
    assert done.stdout == "False ['-c', 'a']\n"
    tracker = "from multiprocessing.resource_tracker import main;main(5)"
    assert not fork_client.understood(["-B", "-c", tracker])
    assert fork_client.understood(["-B", "-u", "-c", "pass"])
    nobody = [sys.executable, "-IS", fork_client.__file__, str(tmp_path / "none"), sys.executable, "-c", "print(1)"]
    assert subprocess.run(nobody, capture_output=True, text=True, check=True).stdout == "1\n"


def test_a_system_without_pidfd_is_told_apart(monkeypatch):
    assert forkserver.available()
    monkeypatch.delattr(os, "pidfd_open")
    assert not forkserver.available()


def test_every_module_that_is_loaded_before_is_there():
    """A name that is gone upstream would only show in the time that a run takes to start."""
    from importlib.util import find_spec

    for name in forkserver.MODULES:
        *parents, _ = name.split(".")
        package = Path(find_spec(parents[0]).origin).parent.joinpath(*parents[1:], *name.split(".")[-1:])
        assert package.with_suffix(".py").is_file() or (package / "__init__.py").is_file(), name


def test_a_server_without_starter_ends(tmp_path):
    words = [sys.executable, "-c", START, tmp_path]
    starter = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    starter.stdout.readline()
    server = psutil.Process(starter.pid).children()[0]
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 30
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
