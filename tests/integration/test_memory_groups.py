"""``--memory`` where the kernel keeps it: control groups that are ours to divide.

Most machines on which tests run have none. Those tests are done under a kernel of their own, by the
last one, where there is such a kernel (`tests/own_kernel.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests import own_kernel
from tests.processes import is_gone

from muster import Run
from muster.base.control_group import own_group
from muster.doctor.gather_host import own_limit_counts
from muster.farm.executors.memory_limits import MemoryGroups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups of Linux")

Main = Callable[..., subprocess.CompletedProcess[str]]
FLAGS = ("--quiet", "--devices", "cpu:1", "--monitor-interval", "0", "--run-dir", "r")
LIMIT = ("--memory", "200M")
ALL = "took all of 200 MiB allowed (--memory), and asked for more"

SOURCE = '''
import mmap, os, pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parent
DAEMON = """
import os, pathlib, time
os.setsid()
if os.fork():
    os._exit(0)
pathlib.Path("daemon.txt").write_text(str(os.getpid()))
held = bytearray(120 << 20)
time.sleep(600)
"""

def takes(x: int):
    held = bytearray(x << 20)
    time.sleep(0.2)
    return {"y": x}

def daemon(x: int):
    """Half of it is in a process that has left the session and every mark of us."""
    held = bytearray(20 << 20)
    subprocess.run([sys.executable, "-c", DAEMON], cwd=HERE, env={}, check=True)
    while not (HERE / "daemon.txt").exists():
        time.sleep(0.01)
    if x:
        more = bytearray(x << 20)
        time.sleep(60)
    return {"y": x}

def maps(file: str):
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as seen:
        total = sum(seen[at] for at in range(0, len(seen), mmap.PAGESIZE))
        return {"y": total, "mib": len(seen) >> 20}

def holds(x: int):
    (HERE / "began.txt").write_text(str(os.getpid()))
    time.sleep(600)

def sweeps(x: int):
    """A sweep inside a task, whose own limit is within that of the task."""
    import muster
    run = muster.sweep(takes, rows=[{"x": 150}, {"x": 10}], run_dir=HERE / "inner", devices="cpu:1",
                       memory_mib=100, monitor_interval_s=0)
    return {"done": run.status().counts["done"]}
'''


@pytest.fixture
def home() -> Iterator[Path]:
    """The group of this process, where it is ours to divide."""
    groups = MemoryGroups.open()
    if groups is None:
        pytest.skip("no control group is ours to divide here")
    groups.close()
    found = own_group(Path("/"))
    assert found is not None
    yield found
    assert os.getpid() in _inside(found), "this process is not back in its group"
    assert [path.name for path in found.iterdir() if path.is_dir()] == []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "t.py").write_text(SOURCE)
    return tmp_path


def _inside(group: Path) -> list[int]:
    return [int(word) for word in (group / "cgroup.procs").read_text().split()]


def _outcomes(folder: Path) -> Counter[str]:
    with closing(sqlite3.connect(Run(folder).folder.ledger)) as database:
        return Counter(outcome for (outcome,) in database.execute("SELECT outcome FROM attempts"))


def test_the_kernel_ends_what_comes_to_its_limit(
    home: Path, place: Path, muster_main: Main
) -> None:
    words = ("sweep", *FLAGS, *LIMIT, "t.py:takes", "--grid", "x=300,10")
    assert muster_main(*words).returncode == 1
    assert _outcomes(place / "r") == {"ok": 1, "memory_limit": 1}
    for looking in ("why", "errors"):
        assert ALL in muster_main(looking, "r").stdout, looking
    assert muster_main("retry", "r", "--memory", "600M").returncode == 0


def test_a_program_is_ended_with_the_worker_that_started_it(
    home: Path, place: Path, muster_main: Main
) -> None:
    line = ("--", sys.executable, "-c", "held = bytearray({x} << 20)")
    words = ("sweep", *FLAGS, *LIMIT, "--grid", "x=1,300", *line)
    assert muster_main(*words).returncode == 1
    assert _outcomes(place / "r") == {"ok": 1, "memory_limit": 2}, "the second time as the first"


def test_what_a_command_has_left_in_memory_is_not_charged_to_the_next(
    home: Path, place: Path, muster_main: Main
) -> None:
    """Files in /dev/shm stay with the group of whoever wrote them, as long as that is there."""
    left = Path("/dev/shm") / f"muster-{os.getpid()}"
    code = (
        "import sys; from pathlib import Path\n"
        f"if sys.argv[1] == '0': Path({str(left)!r}).write_bytes(bytes(120 << 20))\n"
        "else: held = bytearray(100 << 20)"
    )
    words = ("sweep", *FLAGS, *LIMIT, "--grid", "x=0,1,2", "--", sys.executable, "-c", code, "{x}")
    try:
        done = muster_main(*words)
    finally:
        left.unlink(missing_ok=True)
    assert done.returncode == 0, done
    assert _outcomes(place / "r") == {"ok": 3, "memory_limit": 1}


def test_what_has_left_its_session_counts(home: Path, place: Path, muster_main: Main) -> None:
    words = ("sweep", *FLAGS, *LIMIT, "t.py:daemon", "--grid", "x=100")
    assert muster_main(*words).returncode == 1
    assert ALL in muster_main("why", "r").stdout
    assert is_gone(int((place / "daemon.txt").read_text()))


def test_what_has_left_its_session_ends_with_its_worker(
    home: Path, place: Path, muster_main: Main
) -> None:
    words = ("sweep", *FLAGS, *LIMIT, "t.py:daemon", "--grid", "x=0")
    assert muster_main(*words).returncode == 0
    assert is_gone(int((place / "daemon.txt").read_text()))


def test_pages_of_files_end_nobody(home: Path, place: Path, muster_main: Main) -> None:
    found = importlib.util.find_spec("torch")
    files = [] if found is None else [*Path(str(found.origin)).parent.glob("lib/libtorch_*.so")]
    large = max(files, key=lambda path: path.stat().st_size, default=None)
    if large is None or large.stat().st_size < 300 << 20:
        pytest.skip("there is no large file that is sure not to lie in memory")
    words = ("sweep", *FLAGS, *LIMIT, "t.py:maps", "--grid", f"file={large}")
    done = muster_main(*words)
    assert done.returncode == 0, done
    [row] = Run(place / "r").results().to_pylist()
    assert row["mib"] >= 300


def test_a_sweep_in_a_task_has_a_limit_in_its_limit(
    home: Path, place: Path, muster_main: Main
) -> None:
    done = muster_main("sweep", *FLAGS, "--memory", "400M", "t.py:sweeps", "--grid", "x=1")
    assert done.returncode == 0, done
    [row] = Run(place / "r").results().to_pylist()
    assert row["done"] == 1
    assert _outcomes(place / "inner") == {"ok": 1, "memory_limit": 1}


def test_nothing_is_left_by_a_coordinator_that_is_killed(home: Path, place: Path) -> None:
    groups = MemoryGroups.open()  # so that there is a group beside ours for the command
    assert groups is not None
    given = home / "given"
    given.mkdir()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "sweep", *FLAGS, *LIMIT, "t.py:holds",
             "--grid", "x=1"],
            cwd=place, preexec_fn=lambda: (given / "cgroup.procs").write_text(str(os.getpid())),
        )  # fmt: skip
        until = time.monotonic() + 120
        began = place / "began.txt"
        while not (began.exists() and began.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        worker = int(began.read_text())
        [its] = [path for path in given.iterdir() if path.is_dir() and worker in _inside(path)]
        assert (its / "memory.max").read_text().strip() == str(200 << 20)
        assert (its / "memory.oom.group").read_text().strip() == "1"
        process.kill()
        process.wait()
        while not is_gone(worker):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        for path in (*given.glob("*/"), given):
            until = time.monotonic() + 10
            while path.exists() and time.monotonic() < until:
                with suppress(OSError):
                    path.rmdir()
        groups.close()


def test_of_two_at_once_the_last_one_puts_things_back(home: Path) -> None:
    first, second = MemoryGroups.open(), MemoryGroups.open()
    assert first is second is not None
    second.close()
    assert _inside(home) == []
    first.close()


def test_where_somebody_elses_process_is_in_it_nothing_is_moved(
    home: Path, place: Path, muster_main: Main
) -> None:
    other = subprocess.run(  # its parent ends at once, so it is nobody's here
        [sys.executable, "-c", "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
         "    print(os.getpid(), flush=True)\n    os.close(1)\n    time.sleep(600)"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    pid = int(other)
    try:
        assert MemoryGroups.open() is None
        assert {pid, os.getpid()} <= set(_inside(home))
        words = ("sweep", *FLAGS, *LIMIT, "t.py:takes", "--grid", "x=300")
        (place / "t.py").write_text(SOURCE.replace("sleep(0.2)", "sleep(60)"))
        assert muster_main(*words).returncode == 1
        said = muster_main("why", "r").stdout
        assert "of 200 MiB allowed (--memory)" in said and ALL not in said, "it was watched"
    finally:
        os.kill(pid, signal.SIGKILL)
        while pid in _inside(home):
            time.sleep(0.01)


# ---------------------------------------------------------------------- where it would be

MOUNTS = {
    "version 2": ("0::/user.slice/run-1.scope", "/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
                  "sys/fs/cgroup/user.slice/run-1.scope"),
    "beside version 1": ("4:memory:/a\n0::/b", "/ /sys/fs/cgroup/unified rw - cgroup2 none rw",
                         "sys/fs/cgroup/unified/b"),
    "a part is mounted": ("0::/a/b/c", "/a/b /sys/fs/cgroup rw - cgroup2 none rw",
                          "sys/fs/cgroup/c"),
    "all of it is ours": ("0::/a/b", "/a/b /sys/fs/cgroup rw - cgroup2 none rw", "sys/fs/cgroup"),
    "another part": ("0::/ab", "/a /sys/fs/cgroup rw - cgroup2 none rw", None),
    "outside of the container": ("0::/../a", "/ /sys/fs/cgroup rw - cgroup2 none rw", None),
    "version 1 alone": ("4:memory:/a", "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw", None),
    "nothing is said": ("", "", None),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("has_events", [True, False])
def test_a_kernel_that_does_not_count_each_groups_limit_gets_no_groups(
    has_events: bool, tmp_path: Path
) -> None:
    """Linux 4.19 to 5.1: nobody could say whether a worker was killed for its own limit."""
    group, mount, place = MOUNTS["version 2"]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    (tmp_path / "proc/self/mountinfo").write_text(f"30 25 0:26 {mount}\n")
    home = tmp_path / str(place)
    home.mkdir(parents=True)
    for name, text in (("cgroup.controllers", "memory"), ("cgroup.procs", "")):
        (home / name).write_text(text)
    (home / "memory.events").write_text("oom 0\n")
    assert own_limit_counts(tmp_path / "nowhere") is None
    if has_events:
        (home / "memory.events.local").write_text("oom 0\n")
    assert own_limit_counts(tmp_path) is has_events
    groups = MemoryGroups.open(tmp_path)
    assert (groups is not None) is has_events
    if groups is not None:
        groups.close()


@pytest.mark.quick
@pytest.mark.parametrize("what", MOUNTS)
def test_where_our_group_is(what: str, tmp_path: Path) -> None:
    group, mount, expected = MOUNTS[what]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    (tmp_path / "proc/self/mountinfo").write_text(f"22 26 0:5 / /proc rw - proc proc rw\n{mount}\n")
    if mount:
        (tmp_path / "proc/self/mountinfo").write_text(f"30 25 0:26 {mount}\n")
    found = own_group(tmp_path)
    assert found == (None if expected is None else tmp_path / expected)
    assert MemoryGroups.open(tmp_path) is None, "its memory is not handed on to us"


# ---------------------------------------------------------------------- under its own kernel


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not own_kernel.has_kernel(), reason="needs user-mode Linux (linux.uml)")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("uid", "name"),
    [(0, "test_memory_groups.py"), (4001, "test_memory_groups.py"), (0, "test_task_memory.py")],
)
def test_all_of_it_under_a_kernel_of_its_own(uid: int, name: str) -> None:
    done = own_kernel.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
         f"tests/integration/{name}"], uid=uid,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "No test was skipped." in done.stdout
    assert "Memory cgroup out of memory" in done.stdout, "nobody but the kernel has ended anything"


UNDER_SYSTEMD = """
set -e
cat > t.py <<'SOURCE'
import time
def takes(x: int):
    held = bytearray(x << 20)
    time.sleep(5)
    return {"y": x}
SOURCE
muster() { PYTHON -B -m muster "$@"; }
flags="--grid x=300,10 --memory 200M --devices cpu:1 --monitor-interval 0"
muster sweep t.py:takes $flags --run-dir detached --detach
until pgrep -u $(id -u) -f '[f]arm.worker' > /dev/null; do sleep 0.2; done
sleep 1
cat /proc/$(pgrep -u $(id -u) -f -o '[f]arm.worker')/cgroup
muster wait detached || echo "wait $?"
muster why detached
systemd-run --user --scope --quiet -p Delegate=yes \\
    PYTHON -B -m muster sweep t.py:takes $flags --run-dir typed || echo "typed $?"
muster why typed
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not own_kernel.has_kernel(), reason="needs user-mode Linux (linux.uml)")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.skipif(shutil.which("loginctl") is None, reason="needs a systemd")
def test_a_detached_run_has_a_group_from_systemd() -> None:
    script = UNDER_SYSTEMD.replace("PYTHON", sys.executable)
    done = own_kernel.run(["bash", "-c", script], uid=4001, with_systemd=True)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.replace("\r", "").splitlines()
    assert any("goes on after a logout, in a scope of systemd" in line for line in lines), lines
    [group] = [line for line in lines if line.startswith("0::/user.slice")]
    assert "user@4001.service" in group and ".scope/muster-" in group
    assert "wait 1" in lines and "typed 1" in lines
    assert sum(ALL in line for line in lines) >= 2, lines
    assert not any(line.startswith("/sys/fs/cgroup") for line in lines), "a group is left"
