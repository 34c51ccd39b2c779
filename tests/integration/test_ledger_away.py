"""A run folder on a network file system: the ledger works on a local disk and is shipped home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import muster
from muster.base.atomic_files import file_system_of
from muster.base.errors import LedgerError
from muster.base.settings import Settings
from muster.farm.ledger.away import AwayLedger
from muster.farm.ledger.home import choose_place
from muster.farm.task import TaskState
from muster.run.folder import RunFolder

TARGET = """
import os, time

def f(i: int):
    time.sleep(0.05)
    while i >= 20 and os.path.exists("held"):
        time.sleep(0.01)
    with open("executions", "a") as file:
        file.write(f"{i}\\n")
    if i == 13:
        raise ValueError("unlucky")
    return {"square": i * i}
"""

MOUNTS = """\
22 1 0:20 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /home rw,relatime - nfs4 server:/home rw
31 30 0:31 / /home/local rw,relatime - xfs /dev/vdb rw
32 22 0:32 / /mnt/with\\040space rw - fuse.sshfs host:/ rw
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", "ext4"),
        ("/home/ann/runs", "nfs4"),
        ("/home/local/runs", "xfs"),
        ("/homes", "ext4"),
        ("/mnt/with space/x", "fuse.sshfs"),
    ],
)
def test_the_nearest_mount_decides(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_local_folder_keeps_its_ledger(tmp_path: Path) -> None:
    place = choose_place(RunFolder(tmp_path), "id", Settings())
    assert place.path == tmp_path / "ledger.sqlite"
    assert not place.is_away


@pytest.mark.quick
def test_what_was_shipped_survives_the_loss_of_the_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = tmp_path / "local"
    monkeypatch.setenv("MUSTER_LEDGER_DIR", str(local))
    Path("target.py").write_text(TARGET)
    Path("held").touch()  # so that it is at work when it is killed
    call = (
        "import muster; muster.sweep('target.py:f', grid={'i': range(40)}, devices='cpu:2', "
        "run_dir='run')"
    )
    first = subprocess.Popen([sys.executable, "-c", call])
    segment = Path("run/ledger.segment")
    while not segment.exists() or segment.read_bytes().count(b'["done"') < 8:
        assert first.poll() is None
        time.sleep(0.02)
    below = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(below, timeout=120)
    assert not alive, "they end with their coordinator"
    with segment.open("ab") as file:
        file.write(b"0123 a torn line")
    shipped = segment.read_bytes().count(b'["done"')
    assert muster.Run("run").counts()[TaskState.DONE] >= 8, "looking sees what was shipped"
    shutil.rmtree(local)
    Path("held").unlink()
    before = len(Path("executions").read_text().split())

    run = muster.sweep("target.py:f", grid={"i": range(40)}, devices="cpu:2", run_dir="run")

    rows = run.results().to_pylist()
    assert {row["i"]: row["square"] for row in rows if row["i"] != 13} == {
        i: i * i for i in range(40) if i != 13
    }
    assert run.counts()[TaskState.FAILED] == 1
    again = len(Path("executions").read_text().split()) - before
    assert again <= 40 - shipped
    assert not segment.exists()
    assert os.listdir(local)


def test_the_shipped_ledger_is_readable_while_the_local_one_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_LEDGER_DIR", str(tmp_path / "local"))
    Path("target.py").write_text(TARGET)
    muster.sweep("target.py:f", grid={"i": range(4)}, devices="cpu:1", run_dir="run")
    monkeypatch.delenv("MUSTER_LEDGER_DIR")
    assert muster.Run("run").counts()[TaskState.DONE] == 4


SLOW_STAGE = """
import time

def stage(record):
    time.sleep(0.004)
    return {"n2": record["n"] * 2}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, -1, 2, -2, 3])
def test_a_map_whose_host_dies_while_a_chunk_is_divided_loses_no_row(
    tmp_path: Path, number: int
) -> None:
    rows = 1200
    (tmp_path / "stage.py").write_text(SLOW_STAGE)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(rows)))
    words = [
        "map", "stage.py:stage", "--input", "in.jsonl", "--output", "out.jsonl", "--run-dir", "run",
        "--devices", "cpu:2", "--chunk-rows", str(rows), "--batch-size", "10", "--quiet",
        "--monitor-interval", "0",
    ]  # fmt: skip
    program = Path(__file__).parents[1] / "programs" / "dies_at.py"
    first = subprocess.run(
        [sys.executable, str(program), str(number), *words],
        cwd=tmp_path, env={**os.environ, "MUSTER_LEDGER_DIR": str(tmp_path / "a")}, check=False,
    )  # fmt: skip
    # On a slow machine the second worker may come too late for so many divisions.
    assert first.returncode in (0, -signal.SIGKILL)
    if first.returncode:
        assert not (tmp_path / "out.jsonl").exists()
        shutil.rmtree(tmp_path / "a")
        subprocess.run(
            [sys.executable, "-m", "muster", *words],
            cwd=tmp_path, env={**os.environ, "MUSTER_LEDGER_DIR": str(tmp_path / "b")}, check=True,
        )  # fmt: skip
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["n2"] for line in lines] == [2 * n for n in range(rows)]


HELD = """
import os, time
from contextlib import suppress
from pathlib import Path

def f(i: int, ctx):
    Path(os.environ["STARTED"]).touch()
    while not os.path.exists("go"):
        time.sleep(0.02)
    return {"attempt": ctx.attempt}
"""


@pytest.mark.parametrize("away", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_copy_of_a_running_folder_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if away:
        monkeypatch.setenv("MUSTER_LEDGER_DIR", str(tmp_path / "local"))
    Path("target.py").write_text(HELD)

    def start(folder: str) -> subprocess.Popen[bytes]:
        call = (
            "import muster; muster.sweep('target.py:f', grid={'i': range(3)}, devices='cpu:1', "
            f"run_dir='{folder}')"
        )
        return subprocess.Popen(
            [sys.executable, "-c", call], env={**os.environ, "STARTED": f"{folder}-started"}
        )

    def wait_for(path: str, process: subprocess.Popen[bytes]) -> None:
        while not Path(path).exists():
            assert process.poll() is None
            time.sleep(0.02)

    original = start("run")
    wait_for("run-started", original)
    # What is written beside its place is gone by the time that it would be copied.
    with suppress(shutil.Error):
        shutil.copytree("run", "copy")
    copy = start("copy")
    wait_for("copy-started", copy)
    Path("go").touch()

    assert original.wait() == 0
    assert copy.wait() == 0
    for folder in ("run", "copy"):
        rows = muster.Run(folder).results().to_pylist()
        assert len(rows) == 3 and {row["state"] for row in rows} == {"done"}
    assert {row["attempt"] for row in muster.Run("run").results().to_pylist()} == {1}
    if away:
        [mine] = (tmp_path / "local").iterdir()
        assert mine.stat().st_mode & 0o777 == 0o700
        assert len(list(mine.iterdir())) == 2, "each has a ledger of its own"


def _place(base: Path, user: int) -> int:
    """In a process of another user: 0 when the ledger can be there, 3 when that is refused."""
    pid = os.fork()
    if not pid:
        os.setgid(user)
        os.setuid(user)
        try:
            place = choose_place(RunFolder(base), "id", Settings(ledger_folder=base))
            AwayLedger(place.path, base / "home" / "ledger.sqlite").close()
        except LedgerError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="becomes other users")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_every_user_has_a_place_of_his_own_and_nobody_takes_it_away() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o1777)
        (base / "home").mkdir()
        (base / "home").chmod(0o777)
        assert _place(base, 2001) == 0
        assert _place(base, 2002) == 0, "the second user of one home"
        assert _place(base, 2001) == 0
        (base / "muster-2003").mkdir()  # by another, in advance
        assert _place(base, 2003) == 3
        (base / "muster-2004").symlink_to(base / "muster-2001")
        assert _place(base, 2004) == 3
