"""Real machines over SSH, as far as one machine can be three: real sshd's on loopback addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from tests.processes import command_line, lives, name_of, ports_of
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

import muster
from muster.base.errors import SetupError
from muster.base.settings import Settings
from muster.devices.leases import Lease, LeaseHeld, acquire, held_by
from muster.farm.executors import ray_node
from muster.hosts.connection import Connection, Way
from muster.hosts.names import Host

Main = Callable[..., CompletedProcess[str]]

TARGET = """
import os, time
from pathlib import Path

def work(x: int, place: str) -> dict:
    host = os.environ["SSH_CONNECTION"].split()[2]
    Path(place, f"{host}-{x}-{os.getpid()}").touch()
    print("task", x)
    while not Path(place, "go").exists():
        time.sleep(0.02)
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
            "python", "muster", "ray", "torch", "GPUs", "clock", "disk", "cache", "latency",
            "bandwidth", "ports",
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
        (("check", "a;id"), "is not the name of a host"),
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
        folder = Path(connection.ask("start", ["sh", "-c", script], {}, {"secret": "x"}))
        assert connection.ask("wait", "beg", 100, limit_s=120) == {"said": "un"}
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "secret").stat().st_mode & 0o777 == 0o600
        wait_for(lambda: pids.exists() and pids.read_text().strip(), 120)
        sleeper = psutil.Process(int(pids.read_text()))
        if how == "the driver's ssh is killed":
            connection._process.kill()
        elif how == "the server is lost":
            hosts.cut("b")
    finally:
        if how == "closed":
            connection.close()
            assert not folder.exists()
        wait_for(lambda: not sleeper.is_running() and not folder.exists(), 120)
        connection.close()
        if how == "the server is lost":
            hosts.start("b")


def test_lines_of_setup_come_before_python_and_are_told_where_they_fail(hosts: SshHosts) -> None:
    way = Way(setup=("cat; export WORD='it is up'", "alias x=y"))
    with Connection(Host("a"), way) as connection:
        connection.ask("start", ["sh", "-c", "echo $WORD; sleep 99"], {}, {})
        assert connection.ask("wait", "it is", 100, limit_s=120) == {"said": "up"}
    with pytest.raises(SetupError, match="--setup has failed: module load no_such"):
        Connection(Host("a"), Way(setup=("module load no_such",)))
    much = "head -c 200000 /dev/zero | tr '\\0' s"  # more than a pipe holds
    with Connection(Host("a"), Way(setup=(much, f"{much} >&2"))) as connection:
        assert connection.ask("echo") is None


def test_a_ray_that_puts_its_files_where_others_read_them_is_refused(tmp_path: Path) -> None:
    """As Ray before its change 57735 does on nodes that join."""
    for name, text in {
        "__init__": "__version__ = '2.52.0'", "_raylet": "AuthenticationTokenLoader = None",
        "_private/__init__": "", "_private/node": "class Node:\n    def __init__(self): pass",
        "_private/parameter": "RayParams = None",
    }.items():  # fmt: skip
        path = tmp_path / "ray" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", ray_node.__name__, '{"join": "head"}'],
        capture_output=True, check=False, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(muster.__file__).parents[1]}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "Ray 2.52.0 gives a joining node no folder of its own" in done.stderr


def test_a_program_that_does_not_start_is_told(hosts: SshHosts) -> None:
    with Connection(Host("a")) as connection:
        connection.ask("start", ["sh", "-c", "echo no room; exit 3"], {}, {})
        assert connection.ask("wait", "up", 100, limit_s=120) == {"log": "no room\n", "code": 3}
    with Connection(Host("a")) as connection:
        with pytest.raises(SetupError, match="FileNotFoundError"):
            connection.ask("start", ["/no/such/program"], {}, {})


def test_the_first_python_that_has_muster_is_taken(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past one that is broken, and one without Muster."""
    real, other = sys.executable, tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(other))
    for script in ("exit 1", f'exec {real} -I -S "$@"'):
        other.write_text(f"#!/bin/sh\n{script}\n")
        other.chmod(0o755)
        with Connection(Host("a")) as connection:
            assert connection.ask("facts")["muster_code"]


def test_what_a_killed_far_end_leaves_goes_with_the_next_start(hosts: SshHosts) -> None:
    def begin(connection: Connection) -> tuple[Path, int]:
        script = ["sh", "-c", "echo pid $PPID; sleep 999"]
        folder = Path(connection.ask("start", script, {}, {"secret": "x"}))
        return folder, int(connection.ask("wait", "pid", 100, limit_s=120)["said"])

    with Connection(Host("a")) as first, Connection(Host("b")) as second:
        (doomed, pid), (other, _) = begin(first), begin(second)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not first.is_open, 120)
        assert doomed.exists()
        with Connection(Host("a")) as third:
            third.ask("start", ["sleep", "999"], {}, {})
            assert not doomed.exists()
            assert (other / "secret").exists()  # that one works


@pytest.mark.parametrize("argv", [["/no/such/program"], ["sh", "-c", "exit 3"], ["sleep", "999"]])
def test_gpus_are_free_as_soon_as_a_start_is_refused(hosts: SshHosts, argv: list[str]) -> None:
    there = Settings(lease_folder=hosts.leases)
    with Connection(Host("c")) as connection:
        assert connection.ask("lease", ["GPU-c-0"], "mine") == []
        assert held_by("GPU-c-0", there)
        with contextlib.suppress(SetupError):
            connection.ask("start", argv, {}, {})
            assert "log" in connection.ask("wait", "it is up", 0.2)
        assert held_by("GPU-c-0", there) is None


def test_gpus_are_free_where_one_of_them_cannot_be_leased(hosts: SshHosts) -> None:
    there = Settings(lease_folder=hosts.leases)
    with Connection(Host("c")) as connection:
        (hosts.leases / "GPU-c-1.lock").mkdir()
        try:
            with pytest.raises(SetupError, match="Cannot lease GPU GPU-c-1"):
                connection.ask("lease", ["GPU-c-0", "GPU-c-1"], "mine")
        finally:
            (hosts.leases / "GPU-c-1.lock").rmdir()
        assert held_by("GPU-c-0", there) is None


# ---------------------------------------------------------------------- a sweep


def test_a_dry_run_says_what_would_be_started_where(
    hosts: SshHosts, muster_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("target.py").write_text(TARGET)
    line = ("sweep", "target.py:work", "--grid", "x=1,2", "place=.", "--dry-run", "--hosts")
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


def _start(folder: Path, *words: str, log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "muster", *words], cwd=folder, stdout=log, stderr=log
    )


def _driver(folder: Path, hosts: str, log: Any, tasks: int = 8) -> subprocess.Popen[bytes]:
    """A sweep whose tasks end when there is a file ``go``."""
    folder.joinpath("target.py").write_text(TARGET)
    folder.joinpath("place").mkdir(exist_ok=True)
    numbers = ",".join(map(str, range(1, tasks + 1)))
    words = ["--grid", f"x={numbers}", f"place={folder}/place", "--hosts", hosts]
    return _start(folder, "sweep", "target.py:work", *words, "--run-dir", "run", log=log)


def _begun(folder: Path, host: str) -> list[Path]:
    return list(folder.joinpath("place").glob(f"{host}-*"))


def _below(driver: subprocess.Popen[bytes], hosts: SshHosts, *names: str) -> list[psutil.Process]:
    found = [process for name in names for process in hosts.processes(name)]
    return found + psutil.Process(driver.pid).children(recursive=True)


@pytest.mark.thorough
def test_what_becomes_of_a_run_when_its_driver_and_a_host_are_lost(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """The first driver is killed in the middle of its tasks; the second loses a host, which comes
    back; the third has nothing to do, and asks no host.
    """
    log = tmp_path / "log"
    with log.open("wb") as file:
        driver = _driver(tmp_path, "a:cpu,b:cpu", file)
        try:
            for name in ("a", "b"):
                wait_for(lambda n=name: _begun(tmp_path, hosts.addresses[n]) or driver.poll(), 300)
            assert driver.poll() is None, log.read_text()
            begun = _below(driver, hosts, "a", "b")
            assert {"raylet", "gcs_server"} <= {name_of(process) for process in begun}
            ports = {port for process in begun for port in ports_of(process)}
            # Where Ray listens by itself, which two users of a machine cannot both have.
            assert ports and not ports & {8265, 10001, 52365} and min(ports) > 10020, ports
            homes = {
                Path(process.environ()["RAY_AUTH_TOKEN_PATH"]).parent
                for process in begun if name_of(process) in ("raylet", "gcs_server")
            }  # fmt: skip
            assert len(homes) == 3
            assert not [p for p in begun if "agent.py" in str(command_line(p).split()[1:3])]
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        wait_for(lambda: not [one for one in begun if lives(one)], 120)
        wait_for(lambda: not [home for home in homes if home.exists()], 120)

        for path in tmp_path.joinpath("place").iterdir():
            path.unlink()
        (tmp_path / "run").rename(tmp_path / "before")
        driver = _driver(tmp_path, "a:cpu,b:cpu", file)
        try:
            wait_for(lambda: _begun(tmp_path, hosts.addresses["b"]) or driver.poll(), 300)
            seen = set(_begun(tmp_path, hosts.addresses["b"]))
            hosts.cut("b")
            wait_for(lambda: "b is lost" in log.read_text(), 120)
            hosts.start("b")
            wait_for(lambda: "b is back" in log.read_text() or driver.poll() is not None, 120)
            wait_for(lambda: set(_begun(tmp_path, hosts.addresses["b"])) - seen, 120)
            tmp_path.joinpath("place", "go").touch()
            assert driver.wait(300) == 0, log.read_text()
        finally:
            driver.kill()
    rows = muster.Run(tmp_path / "run").results().to_pylist()
    assert sorted((row["x"], row["y"]) for row in rows) == [(x, x * x) for x in range(1, 9)]
    assert {row["host"] for row in rows} == {hosts.addresses[name] for name in ("a", "b")}
    wait_for(lambda: not [p for n in ("a", "b") for p in hosts.processes(n)], 120)

    with log.open("wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_SSH", "/bin/false")
        assert _driver(tmp_path, "a:cpu,b:cpu", file).wait(120) == 0, log.read_text()
    assert "8 done" in log.read_text()


@pytest.mark.thorough
def test_the_first_task_begins_on_the_host_that_is_up_first(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """The other one holds its Ray back until it may go on, and works then."""
    hosts.add("held")
    go = tmp_path / "held-may-start"
    (hosts.folder / "held" / "bin" / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"while {ray_node.__name__!r} in sys.orig_argv and not os.path.exists({str(go)!r}):\n"
        "    time.sleep(0.02)\n"
    )
    with (tmp_path / "log").open("wb") as log:
        driver = _driver(tmp_path, "held:cpu,a:cpu", log, tasks=3)
    try:
        wait_for(lambda: _begun(tmp_path, hosts.addresses["a"]) or driver.poll() is not None, 100)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        assert not _begun(tmp_path, hosts.addresses["held"])
        go.touch()
        wait_for(lambda: _begun(tmp_path, hosts.addresses["held"]) or driver.poll() is not None)
        for process in [*hosts.processes("a"), psutil.Process(driver.pid)]:
            mapped = "".join(each.path for each in process.memory_maps())
            for name in ("numpy", "pyarrow", "pydantic"):
                assert name not in mapped, (name, process)  # what Ray imports for nothing of ours
        (tmp_path / "place" / "go").touch()
        assert driver.wait(300) == 0, (tmp_path / "log").read_text()
    finally:
        driver.kill()
        driver.wait()
        hosts.remove("held")
    rows = muster.Run(tmp_path / "run").results().to_pylist()
    assert sorted((row["x"], row["y"]) for row in rows) == [(1, 1), (2, 4), (3, 9)]


@pytest.mark.thorough
def test_a_host_on_which_ray_fails_is_named_while_others_work(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """It fails when the command has joined the other one: Ray would end that process itself."""
    hosts.add("broken")
    go = tmp_path / "may-fail"
    (hosts.folder / "broken" / "bin" / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"if {ray_node.__name__!r} in sys.orig_argv:\n"
        f"    while not os.path.exists({str(go)!r}):\n"
        "        time.sleep(0.02)\n"
        "    sys.exit('there is no Ray here')\n"
    )
    with (tmp_path / "log").open("wb") as log:
        driver = _driver(tmp_path, "broken:cpu,a:cpu", log, tasks=3)
    try:
        wait_for(lambda: _begun(tmp_path, hosts.addresses["a"]) or driver.poll() is not None, 100)
        go.touch()
        assert driver.wait(120) == 3, (tmp_path / "log").read_text()
    finally:
        driver.kill()
        driver.wait()
        hosts.remove("broken")
    said = (tmp_path / "log").read_text()
    assert "there is no Ray here" in said and "muster hosts check broken" in said
    wait_for(lambda: not hosts.processes("a"), 120)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("when", "later_s"),
    [("ssh connects", 0.0), ("Ray starts", 0.0), ("Ray starts", 0.3),
     *(pytest.param("Ray starts", later, marks=pytest.mark.slow) for later in (0.6, 1.0, 2.0))],
)  # fmt: skip
def test_ctrl_c_before_there_are_workers_ends_all_that_was_begun(
    hosts: SshHosts, tmp_path: Path, when: str, later_s: float
) -> None:
    """Also while this process joins its head, for which Ray holds the interpreter's lock."""
    if when == "ssh connects":
        hosts.also("mute", "a", "sleep 999")
    log_of = tmp_path / "log"
    with log_of.open("wb") as log:
        driver = _driver(tmp_path, "a:cpu,mute:cpu" if when == "ssh connects" else "a:cpu", log)
        mark = "sleep 999" if when == "ssh connects" else "ray_node"

        def has_begun() -> bool:
            return any(mark in command_line(p) for p in _below(driver, hosts))

        try:
            wait_for(has_begun, 120)
            begun = _below(driver, hosts, "a")
            time.sleep(later_s)
            driver.send_signal(signal.SIGINT)
            # Where Ray was up sooner, the first task has begun: it is waited for, no other begins.
            wait_for(lambda: driver.poll() is not None or "draining" in log_of.read_text(), 120)
            (tmp_path / "place" / "go").touch()
            assert driver.wait(120) == 130, log_of.read_text()
        finally:
            driver.kill()
    wait_for(lambda: not [one for one in begun if lives(one)], 120)
    number, said = len(_begun(tmp_path, hosts.addresses["a"])), log_of.read_text()
    assert number <= (later_s > 0.3)
    told = f"8 tasks: {number} done, {8 - number} not run"
    assert told in said or when == "ssh connects", said
    assert "Traceback" not in said


@pytest.mark.thorough
def test_gpus_are_leased_on_their_host_until_the_driver_is_gone(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """For all who use Muster there: another run with --hosts, and one of the host itself."""
    there = Settings(lease_folder=hosts.leases)
    with (tmp_path / "log").open("wb") as log:
        driver = _driver(tmp_path, "c:1", log)
        try:
            wait_for(lambda: _begun(tmp_path, hosts.addresses["c"]) or driver.poll(), 300)
            assert driver.poll() is None, (tmp_path / "log").read_text()
            assert "leased by run run of" in str(held_by("GPU-c-1", there))
            assert isinstance(acquire("GPU-c-1", "mine", there), LeaseHeld)
            assert held_by("GPU-c-0", there) is None
            line = ("sweep", "target.py:work", "--grid", "x=1", "place=.", "--hosts")
            for words, code, says in (
                (("c:1", "--run-dir", "other"), 3, b"GPU 1 is leased by run run of"),
                (("c", "--dry-run"), 0, b"c: 1 worker on GPU 0"),
            ):
                done = subprocess.run(
                    [sys.executable, "-m", "muster", *line, *words], cwd=tmp_path,
                    capture_output=True, check=False,
                )  # fmt: skip
                assert done.returncode == code and says in done.stdout + done.stderr, done
        finally:
            driver.kill()
            driver.wait()
    wait_for(lambda: held_by("GPU-c-1", there) is None, 120)
    lease = acquire("GPU-c-1", "mine", there)
    assert isinstance(lease, Lease)
    lease.release()


@pytest.mark.thorough
def test_maps_and_searches_go_over_slow_links_with_exact_results(
    hosts: SshHosts, tmp_path: Path
) -> None:
    """SSH takes 5 ms longer to a and 100 ms longer to b, in each direction."""
    proxy = Path(__file__).parents[1] / "programs" / "delaying_proxy.py"
    for name, host, delay_s in (("near", "a", 0.005), ("remote", "b", 0.1)):
        hosts.also(name, host, f"{sys.executable} {proxy} %h %p {delay_s}")
    lines = "".join(f'{{"n": {n}}}\n' for n in range(1000))
    (tmp_path / "in.jsonl").write_text(lines)
    (tmp_path / "steps.py").write_text(
        "def double(record):\n    return {'n': 2 * record['n']}\n"
        "def score(lr):\n    return {'loss': (lr - 0.5) ** 2}\n"
    )
    both = ("--hosts", "near:cpu,remote:cpu")
    runs = (
        ("map", "steps.py:double", "--input", "in.jsonl", "--output", "out.jsonl", *both),
        ("sweep", "steps.py:score", "--space", "lr=uniform(0,1)", "--minimize", "loss",
         "--trials", "6", "--run-dir", "search", *both),
    )  # fmt: skip
    for number, words in enumerate(runs):
        log = tmp_path / f"log{number}"
        with log.open("wb") as file:
            assert _start(tmp_path, *words, log=file).wait(300) == 0, log.read_text()
    out = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in out] == [2 * n for n in range(1000)]
    with (tmp_path / "again").open("wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_SSH", "/bin/false")  # what is done is found without the hosts
        assert all(_start(tmp_path, *words, log=file).wait(120) == 0 for words in runs)
    rows = muster.Run(tmp_path / "search").results().to_pylist()
    assert len(rows) == 6 and all(row["loss"] == (row["lr"] - 0.5) ** 2 for row in rows)


@pytest.mark.thorough
def test_nobody_else_runs_a_task_on_the_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    """Neither without authentication nor with a guess; with the token of the run it would work."""
    program = Path(__file__).parents[1] / "programs" / "ray_intruder.py"
    with (tmp_path / "log").open("wb") as log:
        driver = _driver(tmp_path, "a:cpu", log, tasks=1)
        try:
            wait_for(lambda: _begun(tmp_path, hosts.addresses["a"]) or driver.poll(), 300)
            assert driver.poll() is None, (tmp_path / "log").read_text()
            shown = [command_line(p) for p in _below(driver, hosts, "a")]
            head = next(filter(None, (re.search(r"--gcs-address=(\S+)", w) for w in shown)))[1]
            (path,) = {
                Path(p.environ()["RAY_AUTH_TOKEN_PATH"]) for p in hosts.processes("a")
                if name_of(p) == "raylet"
            }  # fmt: skip
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            token = path.read_text()
            assert not [words for words in shown if token in words]  # anybody may read them
            guesses = [("nobody", "disabled", ""), ("guess", "token", "0" * 64),
                       ("owner", "token", token)]  # fmt: skip
            intruders = [
                subprocess.Popen(
                    [sys.executable, str(program), head, mode, guess, str(tmp_path / f"by-{who}")],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
                for who, mode, guess in guesses
            ]  # fmt: skip
            codes = [intruder.wait(300) for intruder in intruders]
            assert codes[0] != 0 and codes[1] != 0 and codes[2] == 0
            assert [path.name for path in tmp_path.glob("by-*")] == ["by-owner"]
        finally:
            driver.kill()
            driver.wait()
    wait_for(lambda: not hosts.processes("a"), 120)
