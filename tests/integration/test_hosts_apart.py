"""Hosts that do not see each other, nor this machine's other addresses: network namespaces, each
with a cable to this machine alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from tests.integration.test_two_nodes import ip
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts, far_away

import muster

Main = Callable[..., CompletedProcess[str]]

TARGET = """
import os, time
from pathlib import Path

def work(x: int, place: str) -> dict:
    host = os.environ["SSH_CONNECTION"].split()[2]
    Path(place, f"{host}-{x}").touch()
    while not Path(place, "go").exists():
        time.sleep(0.02)
    return {"y": x * x, "host": host}
"""


@pytest.fixture
def apart(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[SshHosts]:
    """The hosts p and q beside those of the fixture. They do not see the folder ``hidden``."""
    (tmp_path / "hidden").mkdir()
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2")
    mark, net = uuid.uuid4().hex[:5], os.getpid() % 100 + 100
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(("p", "q")):
            space, here, there = f"muster-{mark}-{name}", f"m{mark}{name}", f"n{mark}{name}"
            if ip("netns", "add", space, is_needed=False):
                pytest.skip("network namespaces may not be made here")
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", here, "type", "veth", "peer", there, "netns", space)
            # The space of the dead keeps it while a process is left, and with it the address.
            stack.callback(ip, "link", "del", here)
            ip("addr", "add", f"10.{net}.{number}.1/24", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", space, "addr", "add", f"10.{net}.{number}.2/24", "dev", there)
            for device in (there, "lo"):
                ip("-n", space, "link", "set", device, "up")
            there = (space, f"10.{net}.{number}.2")
            ssh_hosts.add(name, place=there, hidden=tmp_path / "hidden")
            stack.callback(ssh_hosts.remove, name)
        for name, value in ssh_hosts.environment.items():
            monkeypatch.setenv(name, value)
        yield ssh_hosts


def listeners(hosts: SshHosts, name: str) -> set[str]:
    """Addresses at which somebody listens in the namespace of a host, but for its sshd."""
    words = ["ip", "netns", "exec", hosts.namespaces[name], "ss", "-Hltn"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return {address for address, _, port in places if port != "2222"}


@pytest.mark.thorough
def test_a_sweep_over_hosts_that_do_not_see_each_other_goes_through_ssh(
    apart: SshHosts, muster_main: Main, tmp_path: Path
) -> None:
    """Its results are those of one machine, nothing of Ray listens on a network, and all is gone
    with the command, also by kill -9; a host that was cut off is taken back."""
    checked = muster_main("hosts", "check", "p,q", "--json")
    assert checked.returncode == 0
    ports = [
        one for row in json.loads(checked.stdout)["hosts"] for one in row["findings"]
        if one["what"] == "ports"
    ]  # fmt: skip
    assert {one["state"] for one in ports} == {"warning"}
    assert all("sweeps and maps go through SSH" in one["fix"] for one in ports)

    (tmp_path / "work.py").write_text(TARGET)
    place = tmp_path / "place"
    place.mkdir()
    words = (
        *("sweep", "work.py:work", "--grid", "x=1,2,3,4,5,6", f"place={place}"),
        *("--hosts", "p:cpu,q:cpu", "--run-dir", "run"),
    )

    def begin() -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "muster", *words], cwd=tmp_path, stdout=log, stderr=log
            )

    def said() -> str:
        return (tmp_path / "said").read_text()

    addresses = {apart.addresses["p"], apart.addresses["q"]}

    def both_work() -> bool:
        return {path.name.partition("-")[0] for path in place.iterdir()} == addresses

    driver = begin()
    try:
        wait_for(lambda: both_work() or driver.poll() is not None, 120)
        assert driver.poll() is None, said()
        assert "Ray's connections go through SSH, by way of this machine" in said()
        for name in ("p", "q"):
            assert listeners(apart, name) <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}
        driver.kill()
        driver.wait()
        wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 120)

        for path in place.iterdir():
            path.unlink()
        driver = begin()
        wait_for(lambda: both_work() or driver.poll() is not None, 120)
        assert driver.poll() is None, said()
        apart.cut("q")
        wait_for(lambda: "q is lost" in said() or driver.poll() is not None, 120)
        apart.start("q")
        wait_for(lambda: "q is back" in said() or driver.poll() is not None, 120)
        assert driver.poll() is None, said()
        (place / "go").touch()
        assert driver.wait(120) == 0, said()
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    told = muster_main("status", "run")
    assert "6 done" in told.stdout, told.stdout
    wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 120)


@pytest.mark.thorough
def test_what_keeps_connections_from_going_through_ssh_is_told(
    apart: SshHosts, muster_main: Main, tmp_path: Path
) -> None:
    (tmp_path / "work.py").write_text("def work(x: int): return {'x': x}\n")
    words = ("sweep", "work.py:work", "--grid", "x=1,2", "--run-dir", "run", "--through-ssh")
    done = muster_main(*words, "--hosts", "a:cpu,b:cpu")  # which are one machine, and this one
    assert done.returncode == 3, done.stderr
    assert "is the same machine as" in done.stderr and "name each machine once" in done.stderr
    config = apart.folder / "q" / "sshd_config"
    config.write_text(f"AllowTcpForwarding no\n{config.read_text()}")
    apart.cut("q")
    apart.start("q")
    done = muster_main(*words, "--hosts", "p:cpu,q:cpu")
    assert done.returncode == 3, done.stderr
    assert "q: Error: remote port forwarding failed" in done.stderr
    assert "AllowTcpForwarding yes" in done.stderr
    wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 120)


PORT_TAKER = Path(__file__).parents[1] / "programs" / "port_taker.py"
#: That Ray would look for a lost host in.
LOOPBACK_S = 14.0
_LIMIT_S = 300.0


@contextlib.contextmanager
def somebody_else(ports: list[int], *inside: str) -> Iterator[subprocess.Popen[str]]:
    """Another user, who takes each of these ports as soon as it is free."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    words = [*inside, *user, "-IS", "-", str(_LIMIT_S), *map(str, ports)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as one:
        try:
            assert one.stdin is not None and one.stdout is not None
            one.stdin.write(PORT_TAKER.read_text())
            one.stdin.close()
            assert one.stdout.readline() == "begun\n"
            yield one
        finally:
            one.kill()


def told(one: subprocess.Popen[str]) -> dict[str, Any]:
    assert one.stdout is not None
    one.terminate()
    found: dict[str, Any] = json.loads(one.stdout.read())
    return found


@pytest.mark.thorough
def test_nobody_else_is_sent_the_token_while_a_host_is_lost(
    apart: SshHosts, tmp_path: Path
) -> None:
    """Another user of each machine waits for the ports of the other hosts to be free. One of
    the lost host's own is taken there too, and it is not taken back until that is over."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user needs root and setpriv")
    (tmp_path / "work.py").write_text(TARGET)
    place = tmp_path / "place"
    place.mkdir()
    log = tmp_path / "said"
    words = ["sweep", "work.py:work", "--grid", "x=1,2,3", f"place={place}", "--run-dir", "run"]
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "muster", *words, "--hosts", "p:cpu,q:cpu", "--through-ssh"],
            cwd=tmp_path, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        addresses = {apart.addresses["p"], apart.addresses["q"]}
        wait_for(
            lambda: {path.name.partition("-")[0] for path in place.iterdir()} == addresses
            or driver.poll() is not None, 120,
        )  # fmt: skip
        assert driver.poll() is None, log.read_text()
        lines = forwarding(driver.pid)
        line = next(words for words in lines if "q" in words)
        pairs = list(itertools.pairwise(line))
        own = [int(word.rpartition(":")[2]) for flag, word in pairs if flag == "-L"]
        others = [int(word.rpartition(":")[2]) for flag, word in pairs if flag == "-R"]
        inside = ("ip", "netns", "exec", apart.namespaces["q"])
        taken = [*others, own[0]]
        with somebody_else(own) as here, somebody_else(taken, *inside) as there:
            apart.cut("q")
            apart.start("q")
            begun = time.monotonic()
            wait_for(
                lambda: time.monotonic() > begun + LOOPBACK_S
                and "q is still lost: " in log.read_text(), 120,
            )  # fmt: skip
            assert told(here) == {"got": [], "heard": 0}
            assert told(there) == {"got": sorted(taken), "heard": 0}
        assert "a port was taken there meanwhile" in log.read_text()
        wait_for(lambda: "q is back" in log.read_text() or driver.poll() is not None, 120)
        assert driver.poll() is None, log.read_text()
        lines += forwarding(driver.pid)
        (place / "go").touch()
        assert driver.wait(120) == 0, log.read_text()
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 120)
    # Its own: other tests have theirs beside it.
    sockets = {word.partition(":")[0] for line in lines for word in line if "/muster-port-" in word}
    assert len(sockets) > 10 and not [name for name in sockets if Path(name).exists()]


def forwarding(driver: int) -> list[list[str]]:
    """What each ssh of a driver that forwards ports was told."""
    lines = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(process.cmdline())
    return [words for words in lines if "-R" in words]


STEPS = """
import time

def score(x: int, seed: int) -> dict:
    return {"y": x * x + seed / 7, "begun": time.time()}

def double(record):
    return {"n": 2 * record["n"]}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("delay_s", [0.005, 0.1])
def test_results_through_ssh_over_slow_links_are_those_of_one_machine(
    ssh_hosts: SshHosts, muster_cli: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    delay_s: float,
) -> None:  # fmt: skip
    """All that passes between this machine and the hosts takes so long in each direction."""
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(500)))
    sweep = ("sweep", "steps.py:score", "--grid", "x=1,2,3,4,5,6", "--seeds", "20")
    map_ = ("map", "steps.py:double", "--input", "in.jsonl", "--run-dir")
    with far_away(ssh_hosts, {"u": delay_s, "v": delay_s}):
        far = ("--hosts", "u:cpu,v:cpu:2", "--through-ssh")
        begun = time.time()
        done = muster_cli(*sweep, *far, "--run-dir", "far")
        assert done.returncode == 0, done.stdout + done.stderr
        mapped = muster_cli(*map_, "far-map", "--output", "far.jsonl", *far)
        assert mapped.returncode == 0, mapped.stdout + mapped.stderr
        wait_for(lambda: not ssh_hosts.processes("u") and not ssh_hosts.processes("v"), 120)
    assert muster_cli(*sweep, "--devices", "cpu:2", "--run-dir", "near").returncode == 0
    near = muster_cli(*map_, "near-map", "--output", "near.jsonl", "--devices", "cpu:2")
    assert near.returncode == 0
    tables = [muster.Run(tmp_path / name).results().to_pylist() for name in ("far", "near")]
    rows = [sorted((row["x"], row["seed"], row["y"]) for row in table) for table in tables]
    assert len(rows[0]) == 120 and rows[0] == rows[1]
    assert (tmp_path / "far.jsonl").read_bytes() == (tmp_path / "near.jsonl").read_bytes()
    first = min(row["begun"] for row in tables[0]) - begun
    print(f"the first task began after {first:.1f} s")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sweep", "run"])
def test_a_second_start_sends_no_code(apart: SshHosts, kind: str, tmp_path: Path) -> None:
    """By what the cable has carried; the host does not see the folder of the code."""
    if "p" not in apart.hidden:
        pytest.skip("a folder cannot be hidden here")
    home = tmp_path / "hidden"
    words = {
        "sweep": ("sweep", "t.py:work", "--grid", "x=1,2", "--hosts", "p:cpu", "--run-dir"),
        "run": ("run", "--hosts", "p:cpu:1", "--run-dir"),
    }[kind]
    (home / "t.py").write_text("def work(x: int):\n    return {'y': x}\n")
    (home / "p.py").write_text("print('hello')\n")
    (home / "much").write_bytes(os.urandom(8 << 20))
    device = apart.namespaces["p"].replace("muster-", "m").replace("-", "")
    counter = Path(f"/sys/class/net/{device}/statistics/tx_bytes")

    def sent(name: str) -> float:
        before = int(counter.read_text())
        line = [sys.executable, "-m", "muster", *words, name, *["p.py"] * (kind == "run")]
        done = subprocess.run(line, cwd=home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return (int(counter.read_text()) - before) / 2**20

    first, second = sent("one"), sent("two")
    (home / "t.py").write_text("def work(x: int):\n    return {'y': -x}\n")
    third = sent("three")
    print(f"MiB sent: {first:.2f}, {second:.2f}, and with changed code {third:.2f}")
    assert first > 8 and third > 8 and second < 1
    if kind == "sweep":
        rows = muster.Run(home / "three").results().to_pylist()
        assert sorted(row["y"] for row in rows) == [-2, -1]
