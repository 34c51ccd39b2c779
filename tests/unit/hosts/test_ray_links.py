"""Which of Ray's ports are forwarded where, when its connections go through SSH."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.ssh_hosts import SshHosts

from muster.base.errors import SetupError
from muster.farm.executors.ray_links import Forwards, find_ports, share_out
from muster.hosts import far_relay
from muster.hosts.connection import SSH, Connection, Way, ssh_command
from muster.hosts.names import Host

WORKERS = {"localhost": 0, "a": 2, "b": 3}


def test_no_two_hosts_have_a_port_in_common_and_the_head_alone_has_a_store() -> None:
    ports = share_out(21_000, WORKERS, "localhost")
    every = [port for one in ports.values() for port in one.all]
    assert len(every) == len(set(every)) and min(every) == 21_000
    assert {name for name, one in ports.items() if one.store is not None} == {"localhost"}
    for name, count in WORKERS.items():
        assert len(ports[name].workers) > count  # one that follows another, and the driver
    settings = ports["a"].settings()
    assert settings["worker_port_list"] == ",".join(map(str, ports["a"].workers))
    assert "gcs_server_port" not in settings


def test_each_port_of_another_host_leads_here_and_its_own_from_here() -> None:
    """By sockets that are never those of an earlier connection."""
    ports = share_out(21_000, WORKERS, "localhost")
    one, other = Forwards("a", ports), Forwards("a", ports)
    assert [*one.near] == [*ports["a"].all]
    assert {*one.far} == {*ports["localhost"].all, *ports["b"].all}
    places = [*one.near.values(), *one.far.values()]
    assert len({*places, *other.near.values(), *other.far.values()}) == 2 * len(places)
    assert max(map(len, places)) < 80  # of the 107 that a socket's name may have
    pairs = list(zip(one.words[::2], one.words[1::2], strict=True))
    for flag, side in (("-L", one.near), ("-R", one.far)):
        for port, place in side.items():
            assert (flag, f"{place}:127.0.0.1:{port}") in pairs
    assert len(pairs) == len(places)


def test_ssh_forwards_what_it_is_told_and_else_nothing() -> None:
    plain = ssh_command(Host("a"), "true")
    assert "ClearAllForwardings=yes" in plain and not {"-L", "-R"} & set(plain)
    words = Forwards("a", share_out(21_000, WORKERS, "localhost")).words
    told = ssh_command(Host("a"), "true", words)
    assert "ClearAllForwardings=yes" not in told  # which would take them away as well
    assert "ExitOnForwardFailure=yes" in told
    assert set(words) <= set(told) and told.index("--") > told.index(words[-1])


def test_a_port_that_somebody_listens_on_is_not_taken() -> None:
    with Connection(Host("localhost")) as here:
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = server.getsockname()[1]
            here.ask("use", far_relay.__name__)
            assert here.ask("are_free", "127.0.0.1", taken, 1) is False
        ports = find_ports([here], WORKERS, "localhost")
        every = [port for one in ports.values() for port in one.all]
        assert here.ask("are_free", "127.0.0.1", min(every), len(every)) is True


def test_more_ports_than_there_are_is_told_with_the_numbers() -> None:
    with Connection(Host("localhost")) as here:
        with pytest.raises(SetupError, match="have 12,000") as caught:
            find_ports([here], {"localhost": 0, "a": 3000, "b": 3000}, "localhost")
        assert str(caught.value).startswith("6,000 workers on 3 machines take 12,0")
        whole = find_ports([here], {"localhost": 0, "a": 50}, "localhost")
    assert len(whole) == 2


FORWARDS = ("-L", "127.0.0.1:21000:127.0.0.1:21000")


@pytest.mark.parametrize(
    "line", ["LocalForward 9 x:1", "RemoteForward 9 x:1", "DynamicForward 9", "LocalForward 9 /s"]
)
def test_what_the_user_forwards_to_a_host_is_not_mixed_with_rays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host a\n {line}\nHost *\n HostName 127.0.0.1\n Port 1\n")
    monkeypatch.setenv(SSH, f"ssh -F {config}")
    with pytest.raises(SetupError, match="Your configuration of ssh forwards ports for a"):
        Connection(Host("a"), Way(forwards=FORWARDS))
    with pytest.raises(SetupError, match="Cannot reach b"):
        Connection(Host("b"), Way(forwards=FORWARDS))


def test_a_forwarded_port_that_another_has_ends_the_connection(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either side."""
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    for flag in ("-L", "-R"):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            words = (flag, f"127.0.0.1:{port}:127.0.0.1:{port}")
            with pytest.raises(SetupError, match=r"forwarding.*\n.*allow it in sshd_config"):
                Connection(Host("a"), Way(forwards=words))


@pytest.mark.thorough
def test_many_ports_are_forwarded_as_far_as_both_ends_may_open_files(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ssh the soft limit is raised; that of an sshd is its own, and is named."""
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)

    def way(flag: str) -> Way:
        places = [f"{tmp_path}/{flag[1]}{port}:127.0.0.1:{port}" for port in range(20_000, 20_600)]
        return Way(forwards=[word for place in places for word in (flag, place)])

    kind = resource.RLIMIT_NOFILE
    before = resource.getrlimit(kind)
    sshd = ssh_hosts.pids["a"]
    of_sshd = resource.prlimit(sshd, kind)
    resource.setrlimit(kind, (300, before[1]))
    try:
        with Connection(Host("a"), way("-L")) as connection:
            assert connection.ask("echo") is None
        resource.prlimit(sshd, kind, (300, of_sshd[1]))
        with pytest.raises(SetupError, match=r"600 ports were to be forwarded.*LimitNOFILE"):
            Connection(Host("a"), way("-R"))
    finally:
        resource.setrlimit(kind, before)
        resource.prlimit(sshd, kind, of_sshd)


@pytest.mark.parametrize("words", [(), ("--on", "ray")])
def test_through_ssh_without_hosts_is_refused(
    muster_main: Callable[..., CompletedProcess[str]], words: tuple[str, ...]
) -> None:
    done = muster_main("sweep", "--grid", "x=1", "--through-ssh", *words, "--", "echo", "{x}")
    assert done.returncode == 2 and "--through-ssh" in done.stderr
