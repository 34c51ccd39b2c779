"""The lock of a run folder: one holder, and looking at it disturbs nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from muster.base.errors import SetupError
from muster.run.folder import RunFolder
from muster.run.session import hold, is_held

HOLD = """
import sys, time
from pathlib import Path
from muster.run.session import hold
from muster.run.folder import RunFolder

with hold(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    """Not in ``tmp_path``, which other users may not enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = RunFolder(Path(name) / "run")
        folder.create()
        yield folder


@pytest.fixture
def holder(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_nobody_has_worked_on_is_free_and_stays_as_it_is(folder: RunFolder) -> None:
    assert not is_held(folder)
    assert not folder.lock.exists()


def test_the_second_is_refused_and_told_who_the_first_is(
    folder: RunFolder, holder: subprocess.Popen[str]
) -> None:
    assert is_held(folder)
    with pytest.raises(SetupError, match=f"worked on by process {holder.pid}"), hold(folder):
        pass


def test_after_kill_9_it_is_free(folder: RunFolder, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not is_held(folder)
    with hold(folder):
        assert is_held(folder)
    assert not is_held(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="an open file keeps its folder in place")
def test_the_name_of_who_begins_anew_in_a_folder_moved_aside_stays(folder: RunFolder) -> None:
    name = folder.lock.with_suffix(".pid")
    with hold(folder):
        folder.path.rename(folder.path.with_name("aside"))
        folder.create()
        name.write_text(f"{os.getpid() + 1} {socket.gethostname()}")
    assert name.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the other lock is tried here as well")
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_lock_of_a_folder_that_was_moved_meanwhile_is_not_held(
    folder: RunFolder, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody opens the lock, the folder is moved and begun anew, and only then it is locked."""
    import fcntl

    real, gone = fcntl.flock, folder.path.with_name("gone")

    def late(descriptor: int, operation: int) -> None:
        if not gone.exists():
            folder.path.rename(gone)
            folder.create()
        real(descriptor, operation)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(SetupError, match="worked on"), hold(folder):
        pass
    assert gone.exists()
    with hold(folder):
        assert is_held(folder)


def test_the_lock_of_an_earlier_muster_counts(folder: RunFolder) -> None:
    with FileLock(folder.lock), pytest.raises(SetupError, match="worked on"), hold(folder):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere looking takes the lock")
def test_no_start_fails_because_somebody_looks(folder: RunFolder) -> None:
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            is_held(folder)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            with hold(folder):
                assert is_held(folder)
    finally:
        ended.set()
        for looker in lookers:
            looker.join()


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="becomes another user")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_another_user_sees_whether_it_is_held(folder: RunFolder, mode: int) -> None:
    with hold(folder):
        folder.lock.chmod(mode)
        assert _as_nobody(folder) is True
    assert _as_nobody(folder) is False


def _as_nobody(folder: RunFolder) -> bool:
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(3 + is_held(folder))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (3, 4)
    return code == 4


def test_a_holder_that_has_not_said_its_number_is_another_process(folder: RunFolder) -> None:
    """It said: by process unknown."""
    with hold(folder):
        folder.lock.with_suffix(".pid").unlink()
        with pytest.raises(SetupError, match="is being worked on by another process"), hold(folder):
            pass
