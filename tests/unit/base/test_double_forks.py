"""A double fork: who began a session and ended by itself is collected with what it left there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from muster.base import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")

#: A process that ends without waiting for the one that began a session and ended before it.
FORKS = """
import os, pathlib, sys, time
if os.fork():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    os._exit(0)
os.setsid()
if not os.fork():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
os._exit(0)
"""


@pytest.fixture
def subreaper() -> Iterator[None]:
    before = processes.set_subreaper(True)
    yield
    processes.set_subreaper(before)


def end_orphans(mark: str, session: int) -> list[int]:
    return processes.end_orphans(mark, session, set())


def end_marked(mark: str, session: int) -> list[int]:
    return processes.end_marked(mark, [session])


@pytest.mark.usefixtures("subreaper")
@pytest.mark.parametrize("lists_children", [True, False])
@pytest.mark.parametrize("end", [end_orphans, end_marked])
def test_no_zombie_of_a_double_fork_stays(
    end: Callable[[str, int], list[int]], lists_children: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if lists_children and not processes._LISTS_CHILDREN:
        pytest.skip("the kernel lists no children")
    monkeypatch.setattr(processes, "_LISTS_CHILDREN", lists_children)
    before = {child.pid for child in psutil.Process().children()}
    mark = f"mark-{time.time_ns()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / "forked")],
        env={"PATH": "/usr/bin", processes.RUN_MARKER: mark},
        start_new_session=True,
    )
    parent.wait(300)
    assert end(mark, parent.pid) == []
    assert {child.pid for child in psutil.Process().children()} == before


#: What clears its environment and leaves a process of the first session in a session of its own.
HIDES = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1])
if os.fork():
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    os._exit(0)
child = os.fork()
if child:
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
file.write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.usefixtures("subreaper")
def test_an_orphan_is_found_below_one_that_nothing_marks(tmp_path: Path) -> None:
    mark, file = f"mark-{time.time_ns()}", tmp_path / "pid"
    with (
        subprocess.Popen(
            [sys.executable, "-c", HIDES, str(file)],
            env={"PATH": "/usr/bin", processes.RUN_MARKER: mark},
            start_new_session=True,
        ) as leader,
        subprocess.Popen(["sleep", "600"], start_new_session=True) as spared,
    ):
        leader.wait(300)
        orphan = psutil.Process(int(file.read_text()))
        hidden = orphan.parent()
        assert hidden is not None
        while processes.RUN_MARKER in hidden.environ():  # until its exec
            time.sleep(0.01)
        assert processes.end_orphans(mark, leader.pid, {spared.pid}) == []
        assert not processes.is_alive(orphan.pid)
        assert spared.poll() is None
        spared.kill()
    hidden.kill()
    hidden.wait(300)


def test_an_orphan_that_init_has_got_is_found_by_its_session() -> None:
    """Where orphans do not come here: a run of this program has ended, or a sandbox refuses."""
    before = processes.set_subreaper(False)
    try:
        text = "import os, time\nif not os.fork(): time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", text], start_new_session=True) as leader:
            leader.wait(300)
        assert processes.end_orphans(f"mark-{time.time_ns()}", leader.pid, set()) == []
        left = [one for one in psutil.process_iter() if _session(one.pid) == leader.pid]
        assert not [one for one in left if processes.is_alive(one.pid)]
    finally:
        processes.set_subreaper(before)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


HIGH = """
import os
from muster.base.processes import allow_files
from muster.base.reaper import Reaper
if allow_files(1100) < 1100:
    raise SystemExit(77)
held = [os.dup(0) for _ in range(1050)]
reaper = Reaper("mark")
reaper.start()
process = reaper._process
reaper.dismiss()
raise SystemExit(process.returncode)
"""


def test_a_reaper_waits_for_a_pipe_whatever_its_number() -> None:
    done = subprocess.run([sys.executable, "-c", HIGH], check=False)
    if done.returncode == 77:
        pytest.skip("no more than 1,024 files may be open here")
    assert done.returncode == 0


def test_a_process_and_what_it_has_started_are_a_family() -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])\n"
        "print(child.pid, flush=True)\n"
        "sys.exit(child.wait())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.family(parent.pid) == {parent.pid, child}
        parent.stdin.close()
        parent.wait(300)
    assert processes.family(parent.pid) == {parent.pid}
    assert processes.resident_mib() > 5
