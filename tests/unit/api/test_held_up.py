"""What keeps a run from going on that its own files do not say: its process is stopped (Ctrl-Z), or
a start of it waits for GPUs. Every command that looks at runs tells so, for every kind of run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.fixtures.old_runs.old_runs import unpack
from tests.json_schemas import check_printed

from muster.api.experiments.watching import is_at_work, says_more
from muster.api.look.listing import held_up
from muster.api.runs import Run
from muster.api.start.queued_starts import waiting_process
from muster.devices.tickets import Note
from muster.run.folder import RunFolder, id_of
from muster.run.session import hold
from muster.web.content import runs
from muster.web.folder import Folders
from muster.web.query import Query

OLD = Path(__file__).parents[2] / "fixtures/old_runs/0.1.0"
KINDS = (
    "sweep", "train",
    *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("map", "agent", "run")),
)  # fmt: skip


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "leases"
    place.mkdir()
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(place))
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is said to be the run's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def killed(kind: str, place: Path) -> RunFolder:
    """A run of this kind that has been cut off, in ``runs``."""
    name = f"{kind}-{'done' if kind == 'run' else 'stopped'}"
    unpack(OLD / f"{name}.tar.xz", place)
    folder = RunFolder(place / "runs" / name)
    lines = folder.events.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] in ("start", "enqueued")]
    folder.events.write_text("".join(kept))
    return folder


@contextmanager
def queued(leases: Path, path: Path, pid: int) -> Iterator[None]:
    """A start of the run with this folder waits for GPUs, in that process."""
    ticket = Note(leases, "ticket", {"run": path.name, "place": id_of(path), "pid": pid})
    try:
        yield
    finally:
        ticket.remove()


@contextmanager
def suspended(folder: RunFolder, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process that works on it is stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with hold(folder):
        folder.lock.with_suffix(".pid").write_text(f"{process.pid} {socket.gethostname()}")
        yield


@contextmanager
def interrupted_once_told() -> Iterator[None]:
    """Ctrl-C as soon as something was said on standard error, which is a file here."""
    until = time.monotonic() + 20.0

    def interrupt(*_: object) -> None:
        if os.fstat(2).st_size or time.monotonic() > until:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_all_tell(
    folder: RunFolder, muster: MusterCli, word: str, sentence: str, command: str
) -> None:
    name, path = folder.name, str(folder.path)
    assert f"  {sentence}" in muster("status", path).stdout
    status = check_printed("status", muster("status", path, "--json").stdout)
    assert (status["held_up"]["word"], status["held_up"]["sentence"]) == (word, sentence)

    said = muster("why", path).stdout
    assert f"  {sentence[0].upper()}{sentence[1:]}." in said
    assert f"  what to try:\n    {command}\n" in said, "and not what would be a second start"
    assert "resume" not in said.partition("what to try")[2]

    [row] = [line for line in muster("list").stdout.splitlines() if line.startswith(name)]
    assert f", {word} " in row
    [record] = check_printed("list", muster("list", "--json").stdout)
    assert record["held_up"]["sentence"] == sentence

    done = muster("wait", path, "--timeout", "0.1s")
    assert (done.returncode, "not over after" in done.stderr) == (124, True)
    assert sentence in done.stderr, "or nobody knows for what it waits"
    for words in (("attach", path), ("logs", path, "-f", "-n", "0")):
        with interrupted_once_told():
            done = muster(*words)
        assert done.returncode == 130, done.stderr
        assert sentence in done.stderr
        assert "has stopped" not in done.stderr

    [row] = runs.content(Folders([folder.path.parent]), Query())["runs"]
    assert row["level"] == "paused" and sentence in row["verdict"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_a_run_up_is_told_wherever_one_looks(
    kind: str, tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    folder = killed(kind, tmp_path)
    Hold = AbstractContextManager[None]
    holds: list[tuple[Callable[[], Hold], str, str, str]] = [
        (
            lambda: queued(leases, folder.path, other.pid), "queued",
            f"a run of this name waits for GPUs, in process {other.pid} (muster queue)",
            "muster queue",
        ),
        (
            lambda: suspended(folder, other), "suspended",
            f"its process is stopped (Ctrl-Z); to let it go on: kill -CONT {other.pid}",
            f"kill -CONT {other.pid}",
        ),
    ]  # fmt: skip
    for held, word, sentence, command in holds:
        with held():
            check_all_tell(folder, muster_main, word, sentence, command)
    # Where nothing holds it up, nothing is told, and nobody waits for it.
    said = muster_main("status", str(folder.path)).stdout + muster_main("list").stdout
    assert "waits for GPUs" not in said and "Ctrl-Z" not in said and "queued" not in said
    other.kill()
    other.wait()
    assert muster_main("wait", str(folder.path)).returncode == 1


@pytest.mark.parametrize(
    "command",
    ["status", "why", "attach", "logs", "monitor", "errors", "cancel", "report", "metrics",
     "export", "best", "resume", "retry"],
)  # fmt: skip
def test_a_first_start_that_waits_is_no_unknown_run(
    command: str, tmp_path: Path, leases: Path, muster_main: MusterCli
) -> None:
    with queued(leases, tmp_path / "runs" / "later", 4711):
        for name in ("later", "runs/later"):
            refused = muster_main(command, name, *["--to", "x.csv"] * (command == "export"))
            assert refused.returncode == 2
            assert "to take it out of the queue: kill 4711" in refused.stderr
            waits = "has not begun: a run of this name waits for GPUs, in process 4711."
            assert f"{name} {waits}" in refused.stderr


def test_a_first_start_that_waits_is_waited_for(
    tmp_path: Path, leases: Path, muster_main: MusterCli
) -> None:
    with queued(leases, tmp_path / "runs" / "later", 4711):
        for name in ("later", "runs/later"):
            done = muster_main("wait", name, "--timeout", "0.1s")
            assert done.returncode == 124
            assert "a run of this name waits for GPUs, in process 4711" in done.stderr
            assert "later: not over after" in done.stderr


#: Works on the run at ``sys.argv[1]``, and says later what came of it, as a command does.
WORKING = """
import sys, time
from pathlib import Path
from muster.run.folder import RunFolder
from muster.run.session import hold
folder = RunFolder(Path(sys.argv[1]))
with hold(folder):
    print("holds", flush=True)
    time.sleep(0.8)
time.sleep(0.5)
(folder.path / "said").touch()
"""


def test_whoever_waits_finds_what_the_command_says_at_the_end(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    folder = killed("sweep", tmp_path)
    words = [sys.executable, "-c", WORKING, str(folder.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
        try:
            assert command.stdout is not None and command.stdout.readline() == b"holds\n"
            assert muster_main("wait", str(folder.path)).returncode == 1
            assert (folder.path / "said").exists()
        finally:
            command.kill()
    # A program that called Muster is not waited for: it may go on for days.
    assert says_more(Run(folder.path), other.pid)
    record = json.loads(folder.run_json.read_text())
    folder.run_json.write_text(json.dumps({**record, "argv": []}))
    assert not says_more(Run(folder.path), other.pid)


def test_the_list_names_first_starts_that_wait(
    tmp_path: Path, leases: Path, muster_main: MusterCli
) -> None:
    with (
        queued(leases, tmp_path / "runs" / "later", 4711),
        queued(leases, tmp_path / "elsewhere" / "other", 4712),
        queued(leases, tmp_path / "runs" / "two  spaces", 4713),
    ):
        listed = muster_main("list")
        one = muster_main("status", "two spaces")  # which is another name, shown alike
        two = muster_main("status", "two  spaces")
    waits = "has not begun: it waits for GPUs, in process"
    lines = [f"later {waits} 4711 (muster queue)", f"two spaces {waits} 4713 (muster queue)"]
    assert listed.stderr.splitlines() == lines
    assert muster_main("list").stderr == ""
    assert "in process 4713" in two.stderr and "waits" not in one.stderr


def test_a_first_start_whose_process_is_stopped_is_told_so(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    """It would stay in the queue for ever, and not hear that it shall end."""
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    stopped = f"its process is stopped (Ctrl-Z); to let it go on: kill -CONT {other.pid}\n"
    with queued(leases, tmp_path / "runs" / "later", other.pid):
        for words in (("status", "later"), ("why", "later"), ("list",)):
            assert stopped in muster_main(*words).stderr, words


def test_a_run_of_the_same_name_elsewhere_holds_up_nobody(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    folder = killed("sweep", tmp_path)
    with queued(leases, tmp_path / "elsewhere" / folder.name, other.pid):
        assert "waits for GPUs" not in muster_main("status", str(folder.path)).stdout
        assert muster_main("wait", str(folder.path)).returncode == 1
    with queued(leases, tmp_path / "runs" / "." / folder.name, other.pid):
        assert "waits for GPUs" in muster_main("status", str(folder.path)).stdout


def test_a_start_that_has_just_left_the_queue_is_waited_for(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    """Until it has the run's lock nothing but its process tells of it."""
    from muster.api.experiments.watching import is_at_work, open_watched

    folder = killed("sweep", tmp_path)
    run = open_watched(str(folder.path))
    assert not is_at_work(run)
    with queued(leases, folder.path, other.pid):
        assert is_at_work(run)
    assert is_at_work(run)
    with hold(folder):
        assert is_at_work(run)
    assert not is_at_work(run), "it has been at work, and has ended"
    with queued(leases, folder.path, other.pid):
        assert is_at_work(run)
    other.kill()
    other.wait()
    assert not is_at_work(run), "it was killed in the queue"


def test_a_stopped_process_in_the_queue_is_told_too(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    folder = killed("sweep", tmp_path)
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    with queued(leases, folder.path, other.pid):
        said = muster_main("status", str(folder.path)).stdout
    assert "(muster queue); its process is stopped (Ctrl-Z); to let it go on: kill -CONT" in said


@pytest.mark.parametrize("name", ["r", "two  spaces", "long" * 60])
def test_a_waiting_start_is_found_however_its_folder_is_reached(
    name: str, leases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    with queued(leases, folder, os.getpid()):
        assert waiting_process(folder) == os.getpid(), "before it has a folder"
        folder.mkdir()
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "other" / name).mkdir(parents=True)
        assert waiting_process(Path("link")) == os.getpid()
        assert waiting_process(tmp_path / "other" / name) is None
        monkeypatch.chdir(folder)
        assert waiting_process(Path()) == os.getpid()


#: Waits in the queue, as a start of the run at ``sys.argv[2]`` does.
WAITING = """
import os, sys, time
from pathlib import Path
from muster.devices.tickets import Note
from muster.run.folder import id_of
path = Path(sys.argv[2])
place = id_of(path)
Note(Path(sys.argv[1]), "ticket", {"run": path.name, "place": place, "pid": os.getpid()})
print("waits", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_takes_a_start_that_waits_out_of_the_queue(
    kind: str, tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    folder = killed(kind, tmp_path)
    with queued(leases, folder.path, other.pid):  # the ticket of another process than it says
        muster_main("cancel", str(folder.path))
        assert other.poll() is None
    words = [sys.executable, "-c", WAITING, str(leases), str(folder.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as start:
        try:
            assert start.stdout is not None and start.stdout.readline() == b"waits\n"
            cancelled = muster_main("cancel", str(folder.path), "--json")
            assert start.wait(timeout=10) == -signal.SIGTERM
        finally:
            start.kill()
    assert json.loads(cancelled.stdout)["changed"]
    time.sleep(0.25)  # what waits is looked up five times a second
    assert "waits for GPUs" not in muster_main("status", str(folder.path)).stdout
    assert "nothing to cancel" in muster_main("cancel", str(folder.path)).stdout


def test_cancel_takes_a_first_start_out_of_the_queue(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes], muster_main: MusterCli
) -> None:
    """It was refused with the hint to kill the process."""
    path = tmp_path / "runs" / "later"
    with queued(leases, path, other.pid):  # a number that another process has by now
        refused = muster_main("cancel", "later")
        assert (refused.returncode, other.poll()) == (2, None)
        assert "has not begun: a run of this name waits for GPUs" in refused.stderr
    words = [sys.executable, "-c", WAITING, str(leases), str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as start:
        try:
            assert start.stdout is not None and start.stdout.readline() == b"waits\n"
            time.sleep(0.25)  # what waits is looked up five times a second
            assert "of the queue: muster cancel later\n" in muster_main("status", "later").stderr
            refused = muster_main("cancel", "later", "--task", "1")
            assert refused.returncode == 2 and "has not begun" in refused.stderr
            start.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, start.pid, os.WSTOPPED)
            cancelled = muster_main("cancel", "runs/later")
            start.send_signal(signal.SIGCONT)
            assert start.wait(timeout=10) == -signal.SIGTERM
        finally:
            start.kill()
    assert cancelled.stdout == (
        f"later: told its first start to end, which waited for GPUs in process {start.pid}; its "
        f"process is stopped (Ctrl-Z); to let it go on: kill -CONT {start.pid}\n"
    )
    time.sleep(0.25)
    assert "Unknown run" in muster_main("cancel", "later").stderr


def test_a_start_by_an_earlier_version_is_told_of_but_not_waited_for(
    leases: Path, tmp_path: Path, muster_main: MusterCli
) -> None:
    """It says only the name of its run, which may be another's."""
    folder = killed("sweep", tmp_path)
    ticket = Note(leases, "ticket", {"run": folder.name, "pid": os.getpid()})
    try:
        assert "waits for GPUs" in muster_main("status", str(folder.path)).stdout
        done = muster_main("wait", str(folder.path), "--timeout", "20s")
        assert done.returncode not in (0, 124), done.stderr
    finally:
        ticket.remove()


def test_a_stage_is_held_up_by_the_start_of_its_map(
    tmp_path: Path, leases: Path, other: subprocess.Popen[bytes]
) -> None:
    whole = tmp_path / "r"
    first = killed("map", whole / "stages")
    folder = RunFolder(first.path.rename(whole / "stages" / "0"))
    assert held_up(folder, is_running=False) is None
    with queued(leases, whole, other.pid):
        found = held_up(folder, is_running=False)
        assert found is not None and (found.word, found.pid) == ("queued", other.pid)
        assert is_at_work(Run(folder.path))
