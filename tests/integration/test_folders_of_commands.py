"""A worker renames empty folders from command to command: no command may notice."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import muster
from muster.base.processes import IS_LINUX
from muster.farm.worker.files import Folders, remove_kept

#: Each command says what it finds, in a file beside the run.
LOOK = """
import json, os, pathlib, stat, sys
places = [pathlib.Path(os.environ[n]) for n in ("MUSTER_TASK_DIR", "MUSTER_CHECKPOINT_DIR")]
found = [[str(p), sorted(os.listdir(p)), stat.filemode(os.lstat(p).st_mode), os.lstat(p).st_ino]
         for p in places]
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.environ["MUSTER_TASK"], os.environ["MUSTER_ATTEMPT"], found]) + "\\n")
"""


def looks(tmp_path: Path, more: str, seeds: int = 6, **options: object) -> tuple[muster.Run, list]:
    (tmp_path / "look.py").write_text(LOOK + more)
    words = [sys.executable, "-S", str(tmp_path / "look.py"), str(tmp_path / "seen"), "{seed}"]
    options = {"devices": "cpu:1", "monitor_interval_s": 0, "keep_going": True, **options}
    done = muster.sweep(words, seeds=seeds, run_dir=tmp_path / "run", **options)
    return done, [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]


def left_in(run: Path) -> list[str]:
    """What lies in the folders of attempts and in those that workers keep."""
    places = [run / "attempts", run / "spare", run / "checkpoints"]
    return sorted(str(path.relative_to(run)) for place in places for path in place.rglob("*"))


@pytest.mark.skipif(not IS_LINUX, reason="only Linux tells a process of its orphans")
def test_empty_folders_are_used_again_and_none_is_left(tmp_path: Path) -> None:
    done, seen = looks(tmp_path, "")
    assert done.exit_code == 0
    for task, attempt, ((own, *rest), (saved, *more)) in seen:
        assert Path(own).name.startswith(task)
        assert own.endswith(f".{attempt}")
        assert Path(saved).name.startswith(task)
        assert rest[:2] == more[:2] == [[], "drwxr-xr-x"]
    assert len({found[0][0] for _, _, found in seen}) == 6  # each has a place of its own
    assert len({found[0][-1] for _, _, found in seen}) == 1  # where one folder goes round
    assert left_in(done.path) == []


@pytest.mark.thorough
def test_what_a_command_leaves_in_its_folders_is_its_own(tmp_path: Path) -> None:
    more = """
which = int(sys.argv[2]) % 3
if which < 2:
    (places[which] / "kept").write_text(sys.argv[2])
"""
    done, seen = looks(tmp_path, more)
    assert all(names == [] for _, _, found in seen for _, names, *_ in found)
    for row in done.results().to_pylist():
        files = {
            str(path.relative_to(done.path / row["folder"])): path.read_text()
            for path in (done.path / row["folder"]).rglob("kept")
        } if row["folder"] else {}  # fmt: skip
        wanted = {0: ["kept"], 1: ["checkpoint/kept"], 2: []}[row["seed"] % 3]
        assert files == dict.fromkeys(wanted, str(row["seed"]))
    assert left_in(done.path) == []


CHANGES = {
    "its mode": "places[0].chmod(0o700); places[1].chmod(0o711)",
    "a link": """
for place in places:
    place.rmdir()
    place.symlink_to(sys.argv[1] + ".d")
""",
    "gone": "[place.rmdir() for place in places]",
    "a failure": "sys.exit(3)",
    "a signal": "os.kill(os.getpid(), 9)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_that_was_changed_is_not_handed_on(tmp_path: Path, what: str) -> None:
    (tmp_path / "seen.d").mkdir()
    _, seen = looks(tmp_path, CHANGES[what], retries=0)
    assert len(seen) == 6
    for _, _, found in seen:
        assert [rest[:2] for _, *rest in found] == [[[], "drwxr-xr-x"]] * 2


#: A program that stays behind in its folder, and writes into it when others are at work.
STAYS = """
import subprocess, time
if sys.argv[2] == "0":
    subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(1.0); open('late', 'w').close()"],
        cwd=places[0], start_new_session=True, stdout=subprocess.DEVNULL,
    )
else:
    time.sleep(0.4)
    found = [sorted(os.listdir(place)) for place in places]
    assert found == [[], []], found
"""


@pytest.mark.thorough
def test_a_process_that_stays_behind_writes_into_no_other_tasks_folder(tmp_path: Path) -> None:
    done, seen = looks(tmp_path, STAYS)
    assert done.exit_code == 0, done.errors()
    assert len(seen) == 6
    assert not list(done.path.rglob("late"))


@pytest.mark.thorough
def test_a_later_attempt_finds_what_an_earlier_one_has_saved(tmp_path: Path) -> None:
    more = """
if sys.argv[2] == "2" and os.environ["MUSTER_ATTEMPT"] == "1":
    (places[1] / "state").write_text("half")
    (places[0] / "junk").write_text("of a failure")
    sys.exit(1)
"""
    done, seen = looks(tmp_path, more, retry_exceptions=1)
    assert done.exit_code == 0
    again = [found for _, attempt, found in seen if attempt != "1"]
    assert [[names for _, names, *_ in found] for found in again] == [[[], ["state"]]]
    [row] = [row for row in done.results().to_pylist() if row["seed"] == 2]
    assert (done.path / row["folder"] / "checkpoint" / "state").read_text() == "half"


#: Refuses PR_SET_CHILD_SUBREAPER, as a sandbox may, to itself and all that it starts.
REFUSES = """
import ctypes, os, platform, struct, sys
NUMBER = {"x86_64": 157, "aarch64": 167}[platform.machine()]
def step(code, yes, no, value):
    return struct.pack("HBBI", code, yes, no, value)
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
filters = (step(LOAD, 0, 0, 0) + step(EQUAL, 0, 3, NUMBER) + step(LOAD, 0, 0, 16)
           + step(EQUAL, 0, 1, 36) + step(RETURN, 0, 0, 0x50001) + step(RETURN, 0, 0, 0x7FFF0000))
kept = ctypes.create_string_buffer(filters)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(filters) // 8, ctypes.addressof(kept))
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit(77)
assert libc.prctl(36, 1, 0, 0, 0) == -1
os.execv(sys.executable, [sys.executable, "-m", "muster", *sys.argv[1:]])
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    not IS_LINUX or platform.machine() not in ("x86_64", "aarch64"), reason="a filter of Linux"
)
def test_where_orphans_are_refused_no_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK + STAYS)
    line = [sys.executable, "-S", str(tmp_path / "look.py"), str(tmp_path / "seen"), "{seed}"]
    done = subprocess.run(
        [sys.executable, "-c", REFUSES, "sweep", "--seeds", "6", "--devices", "cpu:1", "--run-dir",
         "run", "--quiet", "--monitor-interval", "0", "--", *line],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("no filter of system calls can be set here")
    run = muster.Run(tmp_path / "run")
    assert done.returncode == 0, (done.stderr, run.errors())
    seen = [json.loads(text) for text in (tmp_path / "seen").read_text().splitlines()]
    assert [names for _, _, found in seen for _, names, *_ in found] == [[]] * 12
    assert not (run.path / "spare").exists(), "nobody knows what a command has left"
    assert left_in(run.path) == [] and not list(run.path.rglob("late"))


# ------------------------------------------------------------------ the folders alone


def test_a_folder_goes_round(tmp_path: Path) -> None:
    spare = tmp_path / "spare" / "worker-0"
    spare.parent.mkdir()
    folders = Folders(spare)
    numbers = set()
    for i in range(5):
        folders.make(str(tmp_path / f"a{i}"))
        numbers.add((tmp_path / f"a{i}").stat().st_ino)
        assert folders.drop(str(tmp_path / f"a{i}"), is_quiet=True)
    assert len(numbers) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["spare"]
    remove_kept(spare)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_an_empty_folder_is_not_handed_on(tmp_path: Path) -> None:
    spare = tmp_path / "spare" / "worker-0"
    spare.parent.mkdir()
    (tmp_path / "users").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "users")
    folders = Folders(spare)
    folders.make(str(tmp_path / "link"))
    folders.drop(str(tmp_path / "link"), is_quiet=True)
    folders.make(str(tmp_path / "next"))
    assert not (tmp_path / "next").is_symlink()


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    spare = tmp_path / "spare" / "worker-0"
    spare.parent.mkdir()
    folders = Folders(spare)
    folders.make(str(tmp_path / "first"))
    assert folders.drop(str(tmp_path / "first"), is_quiet=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    folders.make(str(tmp_path / "there"))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
    assert not folders.drop(str(tmp_path / "there"), is_quiet=True)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda spare: shutil.rmtree(spare.parent),
        lambda spare: shutil.rmtree(f"{spare}.0"),
        lambda spare: (Path(f"{spare}.0").rmdir(), Path(f"{spare}.0").write_text("a file")),
    ],
)  # fmt: skip
def test_kept_folders_that_are_lost_are_made_again(
    tmp_path: Path, disturb: Callable[[Path], object]
) -> None:
    spare = tmp_path / "spare" / "worker-0"
    spare.parent.mkdir()
    folders = Folders(spare)
    for i in range(4):
        place = str(tmp_path / f"a{i}")
        folders.make(place)
        assert os.listdir(place) == []
        assert folders.drop(place, is_quiet=True)
        if i == 1:
            disturb(spare)


#: Mounts a disk for this process alone on which so many files are left, and works there.
ON_A_SMALL_DISK = """
import ctypes, errno, os, sys
from pathlib import Path
from muster.farm.worker.files import Folders, remove_kept
place, libc = Path(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
def mounts(*words):
    if libc.mount(*words):
        print(os.strerror(ctypes.get_errno()))
        sys.exit(77)
if libc.unshare(0x00020000):
    sys.exit(77)
mounts(b"none", b"/", None, 0x44000, None)
def fill():
    for number in range(1000):
        try:
            (place / f"full-{number}").touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return
    raise AssertionError("it takes all")
def is_full(call):
    try:
        call()
    except OSError as error:
        return error.errno == errno.ENOSPC
mounts(b"none", os.fsencode(place), b"tmpfs", 0, b"nr_inodes=16,size=1m")
spare = place / "spare" / "worker-0"
"""


@pytest.mark.skipif(not IS_LINUX or os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize(
    "what",
    [
        # The place for kept folders could not be made: they are made and removed one by one.
        """
for number in range(11):
    (place / f"half-{number}").touch()
assert not spare.parent.exists()
folders = Folders(spare)
for number in range(3):
    folders.make(str(place / f"a{number}"))
    assert folders.drop(str(place / f"a{number}"), is_quiet=True)
    assert not (place / f"a{number}").exists()
""",
        # It is full by the time that the folder goes round: a kept one costs nothing.
        """
spare.parent.mkdir()
folders = Folders(spare)
folders.make(str(place / "a"))
fill()
assert folders.drop(str(place / "a"), is_quiet=True)
for number in range(3):
    folders.make(str(place / f"a{number}"))
    assert os.listdir(place / f"a{number}") == []
    assert folders.drop(str(place / f"a{number}"), is_quiet=True)
""",
        # The kept one stays with a command, and there is no room for another: that is an error.
        """
spare.parent.mkdir()
folders = Folders(spare)
folders.make(str(place / "a"))
(place / "a" / "result").touch()
fill()
assert not folders.drop(str(place / "a"), is_quiet=True)
assert is_full(lambda: folders.make(str(place / "b")))
assert not (place / "b").exists() and (place / "a" / "result").exists()
(place / "full-0").unlink()
folders.make(str(place / "b"))
assert folders.drop(str(place / "b"), is_quiet=True)
remove_kept(spare)
assert not spare.parent.exists()
""",
    ],
    ids=["from the beginning", "later", "with a result"],
)
def test_on_a_full_disk_no_folder_is_lost_or_mixed_up(what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SMALL_DISK + what, str(tmp_path)], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(f"no disk can be mounted here: {done.stdout}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not IS_LINUX, reason="only Linux hands orphans on")
def test_children_are_counted_and_the_dead_collected() -> None:
    """In a process of its own: this one has children of others."""
    code = """
import os, signal, subprocess, sys, time
from muster.base.processes import reap_orphans, set_subreaper
set_subreaper(True)
assert reap_orphans() is False
line = (
    "import subprocess; "
    "print(subprocess.Popen(['sleep', '600'], stdout=-3, start_new_session=True).pid)"
)
done = subprocess.run([sys.executable, "-S", "-c", line], check=True, stdout=subprocess.PIPE)
assert reap_orphans() is True
os.kill(int(done.stdout), signal.SIGKILL)
deadline = time.monotonic() + 120
while reap_orphans():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
