"""Real machines over SSH, as far as one machine can be three: real sshd's on loopback addresses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

import muster
from muster.base.errors import SetupError
from muster.hosts.connection import Connection
from muster.hosts.names import Host

Main = Callable[..., CompletedProcess[str]]

TARGET = """
import os, time
from pathlib import Path

def work(x: int, s: float, place: str) -> dict:
    host = os.environ["SSH_CONNECTION"].split()[2]
    Path(place, f"{host}-{x}").touch()
    print("task", x)
    time.sleep(s)
    return {"y": x * x, "host": host}
"""


@pytest.fixture
def hosts(ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    return ssh_hosts


# ---------------------------------------------------------------------- check


def test_hosts_that_are_well_are_said_to_be(hosts: SshHosts, muster_main: Main) -> None:
    done = muster_main("hosts", "check", "a,c:0-1,localhost", "--json")
    told = json.loads(done.stdout)
    assert told["is_fit"] == (done.returncode == 0)
    assert [row["host"] for row in told["hosts"]] == ["a", "c", "localhost"]
    for row in told["hosts"]:
        found = {one["what"]: one for one in row["findings"]}
        assert set(found) == {
            "python", "muster", "ray", "torch", "GPUs", "clock", "disk", "latency", "bandwidth",
            "ports",
        }  # fmt: skip
        assert not [one for one in row["findings"] if one["state"] == "failure"]
    assert told["hosts"][1]["findings"][4]["found"] == (
        "0: NVIDIA H100, 1: NVIDIA H100; driver 570.86"
    )


@pytest.mark.parametrize(
    ("names", "says", "repairs"),
    [
        ("nowhere.invalid", "Could not resolve", "~/.ssh/config"),
        ("a,c:2", "no GPU 2", "c alone for all"),
        ("stranger", "Host key verification failed", "compare the key: ssh stranger"),
        ("closed", "Permission denied", "ssh-copy-id closed"),
        ("silent", "Connection refused", "ssh -v silent"),
    ],
)
def test_what_keeps_a_host_from_being_used_is_told(
    hosts: SshHosts, muster_main: Main, names: str, says: str, repairs: str
) -> None:
    config, known = hosts.folder / "config", hosts.folder / "known_hosts"
    if f"Host {names}\n" not in config.read_text():
        a = config.read_text().split("Host b\n")[0].removeprefix("Host a\n")
        other = {
            "stranger": a.replace(str(known), "/dev/null") + " StrictHostKeyChecking yes\n",
            "closed": a.replace(f"{hosts.folder}/key", f"{hosts.folder}/a/host_key"),
            "silent": a.replace("Port ", "Port 1 #"),
        }.get(names, "")
        with config.open("a") as file:
            file.write(f"Host {names}\n{other}" if other else "")
    done = muster_main("hosts", "check", names)
    assert done.returncode == 3
    assert says in done.stdout and repairs in done.stdout
    assert "Not all of them can be used." in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "write muster hosts check a,b"),
        (("start", "a"), "write muster hosts check a,b"),
        (("check",), "write muster hosts check a,b"),
        (("check", "a;id"), "is no name of a host"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    muster_main: Main, words: tuple[str, ...], says: str
) -> None:
    done = muster_main("hosts", *words)
    assert done.returncode == 2
    assert says in done.stderr


# ---------------------------------------------------------------------- the far end


@pytest.mark.parametrize("how", ["closed", "the driver's ssh is killed", "the server is lost"])
def test_what_was_started_ends_with_the_connection(
    hosts: SshHosts, how: str, tmp_path: Path
) -> None:
    """Also what has a session of its own, and what has lost its parent."""
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'sleep 999 & echo $! >> {pids}; sleep 999' & echo begun; sleep 999"
    connection = Connection(Host("b"))
    try:
        made = connection.ask("start", ["sh", "-c", script], {}, {"secret": "x"}, "begun", 20)
        folder = Path(made["folder"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "secret").stat().st_mode & 0o777 == 0o600
        wait_for(lambda: pids.exists() and pids.read_text().strip(), 20)
        sleeper = psutil.Process(int(pids.read_text()))
        if how == "the driver's ssh is killed":
            connection._process.kill()
        elif how == "the server is lost":
            hosts.cut("b")
    finally:
        if how == "closed":
            connection.close()
            assert not folder.exists()
        wait_for(lambda: not sleeper.is_running() and not folder.exists(), 30)
        connection.close()
        if how == "the server is lost":
            hosts.start("b")


def test_a_program_that_does_not_start_is_told(hosts: SshHosts) -> None:
    with Connection(Host("a")) as connection:
        answer = connection.ask("start", ["sh", "-c", "echo no room; exit 3"], {}, {}, "up", 20)
        assert answer == {"error": "no room", "code": 3}
    with Connection(Host("a")) as connection:
        with pytest.raises(SetupError, match="FileNotFoundError"):
            connection.ask("start", ["/no/such/program"], {}, {}, "up", 20)


# ---------------------------------------------------------------------- a sweep


def test_a_dry_run_says_what_would_be_started_where(
    hosts: SshHosts, muster_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("target.py").write_text(TARGET)
    line = ("sweep", "target.py:work", "--grid", "x=1,2", "s=0", "place=.", "--dry-run", "--hosts")
    done = muster_main(*line, "a:cpu:2,b")
    assert done.returncode == 0, done.stderr
    assert "a: 2 workers on its CPU" in done.stdout and "b: 1 worker on its CPU" in done.stdout
    assert "c: 2 workers on GPUs 0, 1" in muster_main(*line, "c").stdout
    for words, code, says in (
        (("a,c",), 2, "a would work without a GPU"),
        (("c:0-2",), 3, "no GPU 2"),
        (("a", "--workers", "2"), 2, "--workers has no effect with --hosts"),
        (("a", "--devices", "cpu:2"), 2, "no effect with --on ray"),
        (("nowhere.invalid",), 3, "Could not resolve"),
    ):
        done = muster_main(*line, *words)
        assert done.returncode == code and says in done.stderr, done.stderr
    assert not Path("runs").exists()


def _driver(folder: Path, s: float, log: Any) -> subprocess.Popen[bytes]:
    folder.joinpath("target.py").write_text(TARGET)
    folder.joinpath("place").mkdir(exist_ok=True)
    words = [
        "sweep", "target.py:work", "--grid", "x=1,2,3,4,5,6,7,8", f"s={s}",
        f"place={folder}/place", "--hosts", "a:cpu,b:cpu", "--run-dir", "run",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "muster", *words], cwd=folder, stdout=log, stderr=log
    )


def _begun(folder: Path, host: str) -> list[Path]:
    return list(folder.joinpath("place").glob(f"{host}-*"))


def test_a_lost_host_is_a_lost_node_and_nothing_outlives_the_driver(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """The first driver is killed in the middle of its tasks; the second loses a host."""
    with (tmp_path / "log").open("wb") as log:
        driver = _driver(tmp_path, 600.0, log)
        try:
            for name in ("a", "b"):
                wait_for(lambda n=name: _begun(tmp_path, hosts.addresses[n]) or driver.poll(), 300)
            assert driver.poll() is None, (tmp_path / "log").read_text()
            begun = [*hosts.processes("a"), *hosts.processes("b")]
            begun += psutil.Process(driver.pid).children(recursive=True)
            assert {"raylet", "gcs_server"} <= {process.name() for process in begun}
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        wait_for(lambda: not [one for one in begun if _lives(one)], 60)

        for path in tmp_path.joinpath("place").iterdir():
            path.unlink()
        (tmp_path / "run").rename(tmp_path / "before")
        driver = _driver(tmp_path, 1.0, log)
        wait_for(lambda: _begun(tmp_path, hosts.addresses["b"]) or driver.poll() is not None, 300)
        hosts.cut("b")
        try:
            assert driver.wait(300) == 0, (tmp_path / "log").read_text()
        finally:
            driver.kill()
            hosts.start("b")
    rows = muster.Run(tmp_path / "run").results().to_pylist()
    assert sorted((row["x"], row["y"]) for row in rows) == [(x, x * x) for x in range(1, 9)]
    assert {row["host"] for row in rows} >= {hosts.addresses["a"]}
    wait_for(lambda: not [p for n in ("a", "b") for p in hosts.processes(n)], 30)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
