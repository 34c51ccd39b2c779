"""Ports that the far end holds and leads to sockets of ssh, and to nobody else's."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from muster.base.errors import SetupError
from muster.hosts import far_relay
from muster.hosts.connection import Connection
from muster.hosts.names import LOCAL, Host

HOME = "127.0.0.1"
#: Of another user: waits at a socket and says what comes.
WAITS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("up", flush=True)
while True:
    line = server.accept()[0]
    print(line.recv(100), flush=True)
"""


@pytest.fixture
def here() -> Iterator[Connection]:
    with Connection(Host(LOCAL)) as connection:
        connection.ask("use", far_relay.__name__)
        yield connection


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, as a socket needs."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_what_ray_takes_for_taken_is_not_free_for_it() -> None:
    """What was let go of less than a minute ago, and what somebody has at another address."""
    port = free_port(HOME)
    with socket.create_server((HOME, port)) as server:
        with socket.create_connection((HOME, port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert far_relay.are_free(HOME, port, 1)
    assert not far_relay.are_free(HOME, port, 1, is_for_ray=True)
    if sys.platform == "darwin":
        return  # where 127.0.0.2 is nobody's
    with socket.create_server(("127.0.0.2", 0)) as server:
        elsewhere = server.getsockname()[1]
        assert far_relay.are_free(HOME, elsewhere, 1)
        assert not far_relay.are_free(HOME, elsewhere, 1, is_for_ray=True)


def answers(place: Path, word: bytes) -> socket.socket:
    """Turns around what comes to the socket, and says a word first."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place))
    server.listen()

    def serve() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            with line:
                line.sendall(word)
                while data := line.recv(1 << 16):
                    line.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return server


def through(port: int, data: bytes) -> bytes:
    """What comes back where this is sent; nothing where the other end hangs up."""
    found = b""
    with socket.create_connection((HOME, port), timeout=120) as line:

        def send() -> None:
            with suppress(OSError):
                line.sendall(data)
                line.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        with suppress(ConnectionResetError):
            while more := line.recv(1 << 16):
                found += more
    return found


def test_a_port_leads_to_its_socket_and_to_another_one_later(
    here: Connection, folder: Path
) -> None:
    port, much = free_port(HOME), os.urandom(3 << 20)
    assert here.ask("lead", HOME, {port: ""}) == []
    assert through(port, b"lost") == b""  # held, and nobody is there yet
    for word in (b"one", b"two"):
        server = answers(folder / word.decode(), word)
        assert here.ask("lead", HOME, {port: str(folder / word.decode())}) == []
        assert through(port, much) == word + much
        server.shutdown(socket.SHUT_RDWR)  # close alone would not end its accept
        server.close()
    assert through(port, b"lost") == b""  # and the port is held still
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOME, port))


def test_a_port_that_another_has_is_told(here: Connection) -> None:
    with socket.create_server((HOME, 0)) as other:
        port = other.getsockname()[1]
        assert here.ask("lead", HOME, {port: ""}) == [port]


def test_nothing_is_handed_to_a_socket_of_another_user(here: Connection, folder: Path) -> None:
    """Who may take the name of a socket that is gone, as in /tmp, is sent nothing."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user needs root and setpriv")
    folder.chmod(0o777)
    place, port = folder / "taken", free_port(HOME)
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    with subprocess.Popen(
        [*words, "-IS", "-c", WAITS, str(place)], stdout=subprocess.PIPE, cwd="/"
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"up\n"
            assert here.ask("lead", HOME, {port: str(place)}) == []
            assert through(port, b"the token") == b""
            assert other.stdout.readline() == b"b''\n"  # it was connected to, and told nothing
        finally:
            other.kill()


def test_whether_a_port_leads_on_is_heard(here: Connection) -> None:
    port = free_port(HOME)
    assert here.ask("hear", HOME, port) is False
    here.ask("answer", HOME, port)
    assert here.ask("hear", HOME, port) is True
    until_free(lambda: here.ask("are_free", HOME, port, 1))


def until_free(is_free: Callable[[], Any]) -> None:
    """A thread lets go of the port once it sees that the other end has closed."""
    due_s = time.monotonic() + 120
    while not is_free():
        assert time.monotonic() < due_s, "it is held still"
        time.sleep(0.02)


def test_who_answers_waits_until_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long other hosts are heard before."""
    port = free_port(HOME)
    with monkeypatch.context() as patch:
        patch.setattr(far_relay, "_LIMIT_S", 0.05)
        far_relay.answer(HOME, port)
        time.sleep(0.15)
    assert far_relay.hear(HOME, port)


def test_a_port_is_free_for_ray_also_where_what_was_heard_is_told_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port(HOME)
    monkeypatch.setattr(far_relay, "_ONE_LIMIT_S", 0.1)
    far_relay.answer(HOME, port)
    with socket.create_server((HOME, 0)) as cable:

        def carry(delay_s: float) -> None:
            line, _ = cable.accept()
            with line, socket.create_connection((HOME, port)) as on, suppress(OSError):
                line.sendall(on.recv(100))
                time.sleep(delay_s)
                on.sendall(line.recv(1))
                line.sendall(on.recv(1))

        def carry_twice() -> None:
            carry(0.3)
            carry(0.0)

        threading.Thread(target=carry_twice, daemon=True).start()
        assert far_relay.hear(HOME, cable.getsockname()[1])
    until_free(lambda: far_relay.are_free(HOME, port, 1))


def test_sockets_go_with_the_start_and_those_of_a_killed_one_with_the_next(folder: Path) -> None:
    left, own = (Path(f"/tmp/muster-port-{os.getpid():x}-{name}") for name in ("left", "own"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with Connection(Host(LOCAL)) as connection:
        connection.ask("use", far_relay.__name__)
        assert not left.exists()
        server = answers(own, b"")
        connection.ask("lead", HOME, {free_port(HOME): str(own)})
        with Connection(Host(LOCAL)) as another:
            another.ask("use", far_relay.__name__)
        assert own.exists()
    assert not own.exists()
    server.close()


def test_a_socket_at_which_somebody_listens_a_moment_later_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ssh makes its sockets and listens then; where it cannot be seen, in a network namespace."""
    dead, new = (Path(f"/tmp/muster-port-{os.getpid():x}-{name}") for name in ("dead", "new"))
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        one.bind(str(dead))
        two.bind(str(new))
        monkeypatch.setattr(far_relay, "Path", lambda _: new.parent / "none")  # of /proc
        monkeypatch.setattr(far_relay, "_LISTENS_S", 2.0)
        timer = threading.Timer(0.1, two.listen)
        timer.start()
        far_relay._remove_dead()
        timer.join()
        assert new.exists() and not dead.exists()
    new.unlink()


def free_row(here: Connection, num: int) -> list[int]:
    for first in range(20_000, 30_000, num):
        if here.ask("are_free", HOME, first, num):
            return [*range(first, first + num)]
    raise AssertionError("no ports are free")


@pytest.mark.parametrize("hard", [4096, 200])
def test_as_many_ports_are_held_as_the_hard_limit_allows(here: Connection, hard: int) -> None:
    """The soft limit is 1,024 on most systems, and eight hosts of 64 workers take more ports."""
    resource.prlimit(here._process.pid, resource.RLIMIT_NOFILE, (128, hard))
    places = dict.fromkeys(free_row(here, 300), "")
    if hard > 300:
        assert here.ask("lead", HOME, places) == []
        assert through(min(places), b"lost") == b""
        return
    with pytest.raises(SetupError) as caught:
        here.ask("lead", HOME, places)
    assert str(caught.value).splitlines()[0] == (
        "localhost: 300 ports of other hosts are to be held here, and a process may have 200 files "
        "open (ulimit -Hn)."
    )
    assert "fewer hosts or workers" in str(caught.value)


def test_a_process_without_a_file_left_does_not_say_that_ports_are_taken(here: Connection) -> None:
    resource.prlimit(here._process.pid, resource.RLIMIT_NOFILE, (3, 3))
    with pytest.raises(SetupError, match=r"Port \d+ .* cannot be held: Too many open files"):
        here.ask("are_free", HOME, free_port(HOME), 1)
