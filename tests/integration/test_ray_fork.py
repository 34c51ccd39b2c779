"""Ray's workers, forked from a process that has imported what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.farm.executors import ray_fork

#: Stands for what Ray starts: it says who it is, with which words, and where.
WORKER = """
import os, sys
print("worker", sys.argv[1:], os.environ["MARK"], os.getcwd(), "json" in sys.modules, flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""
#: What forks, for as long as its stdin is open.
SERVER = """
import sys
from muster.farm.executors.ray_fork import Forks
Forks(sys.argv[1], ("json",))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "forks")


def ask(place: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """As Ray would start a worker: by way of a program that sets it up, which says so."""
    setup = folder / "setup.py"
    setup.write_text("import os, sys\nprint('set up')\nos.execv(sys.executable, sys.argv[1:])")
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, str(setup), str(worker), "--one=1", "--language=PYTHON"]
    return subprocess.run(
        [sys.executable, "-I", "-S", ray_fork.__file__, place, *command], cwd=folder, check=False,
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_worker_is_forked_with_the_words_the_environment_and_the_folder_of_its_start(
    place: str, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout and server.stdout.readline() == b"ready\n"
        for number in range(2):
            done = ask(place, tmp_path, MARK=f"m{number}")
            assert done.stdout == f"worker ['--one=1'] m{number} {tmp_path} True\n", done
        # One that dies at once, as where Ray does not bear it: the next is started as Ray does it.
        ask(place, tmp_path, MARK="dies", CODE="3")
        for _ in range(100):
            done = ask(place, tmp_path, MARK="m")
            if "set up" in done.stdout or done.returncode:
                break
        assert "set up" in done.stdout
        server.kill()


def test_a_worker_that_exits_ends_with_its_code_and_what_it_has_registered(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "setup.py").touch()
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import atexit, sys, time\n"
        "atexit.register(lambda: print('said at the end'))\n"
        f"atexit.register(lambda: open({str(tmp_path / 'done')!r}, 'w').close())\n"
        "time.sleep(3.2)\n"  # one that dies at once is another case
        "sys.exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout and server.stdout.readline() == b"ready\n"
        command = [sys.executable, str(tmp_path / "setup.py"), str(worker), "--language=PYTHON"]
        done = subprocess.run(  # its output is open until the worker has ended
            [sys.executable, "-I", "-S", ray_fork.__file__, place, *command], cwd=tmp_path,
            check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.stdout == "said at the end\n" and not done.stderr, done
        assert (tmp_path / "done").exists()
        server.kill()


def test_without_anybody_who_forks_it_becomes_what_was_meant_to_start(
    place: str, tmp_path: Path
) -> None:
    done = ask(place, tmp_path, MARK="m")
    assert "set up" in done.stdout
