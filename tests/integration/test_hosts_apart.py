"""Hosts that do not see each other, nor this machine's other addresses: network namespaces, each
with a cable to this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.integration.test_two_nodes import ip
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

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
def apart(ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHosts]:
    """The hosts p and q beside those of the fixture."""
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
            ip("addr", "add", f"10.{net}.{number}.1/24", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", space, "addr", "add", f"10.{net}.{number}.2/24", "dev", there)
            for device in (there, "lo"):
                ip("-n", space, "link", "set", device, "up")
            ssh_hosts.add(name, place=(space, f"10.{net}.{number}.2"))
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
        wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 60)

        for path in place.iterdir():
            path.unlink()
        driver = begin()
        wait_for(lambda: both_work() or driver.poll() is not None, 120)
        assert driver.poll() is None, said()
        apart.cut("q")
        wait_for(lambda: "q is lost" in said() or driver.poll() is not None, 60)
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
    wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 60)


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
    wait_for(lambda: not apart.processes("p") and not apart.processes("q"), 60)
