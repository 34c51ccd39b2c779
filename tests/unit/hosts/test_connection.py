"""A connection to a host that prints, stops, or dies; a shell of this machine takes ssh's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.ray_cluster import wait_for

from muster.base.errors import SetupError
from muster.hosts import connection as connections
from muster.hosts import far_end
from muster.hosts.check import connected, open_all
from muster.hosts.connection import SSH, Connection, Way
from muster.hosts.names import LOCAL, Host

FACTS = {"python": "python3"}


@pytest.fixture
def greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login script of the host."""
    script = tmp_path / "greeting"
    script.touch()
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\n. {script}\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv(SSH, str(ssh))
    return script


def _far_end(connection: Connection) -> psutil.Process:
    """The Python that works, below the shell that has looked for it."""
    (found,) = psutil.Process(connection._process.pid).children()
    return found


def test_a_greeting_without_an_end_of_line_is_passed_over(greeting: Path) -> None:
    """As those are that set the title of a window."""
    greeting.write_text("printf 'hi\\nthere\\033]0;host\\a'\n")
    with Connection(Host("a"), facts=FACTS) as connection:
        assert connection.ask("echo", limit_s=120) is None


def test_a_far_end_that_stops_holds_nobody_up(
    greeting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HANG_UP_S", 0.2)
    much = 1 << 22
    with Connection(Host("a"), facts=FACTS) as connection:
        connection.ask("swallow", much, after=bytes(much), limit_s=120)
        _far_end(connection).suspend()
        began = time.monotonic()
        with pytest.raises(SetupError, match="a has accepted no data"):
            connection.ask("swallow", much, after=bytes(much), limit_s=0.3)
        connection.hang_up()
        with pytest.raises(SetupError, match="Cannot reach a"):
            connection.ask("echo")
    assert time.monotonic() - began < 60  # and not for ever


def test_what_was_started_ends_when_the_far_end_is_killed(greeting: Path) -> None:
    """By kill -9 or for want of memory; also what has a session of its own."""
    with Connection(Host("a"), facts=FACTS) as connection:
        script = "setsid sleep 999 & echo it is $!; sleep 999"
        folder = Path(connection.ask("start", ["sh", "-c", script], {}, {}))
        sleeper = psutil.Process(int(connection.ask("wait", "it is", 100, limit_s=120)["said"]))
        _far_end(connection).kill()
        wait_for(lambda: not sleeper.is_running(), 120)
        shutil.rmtree(folder)


def test_what_a_host_complains_of_at_length_holds_nobody_up(greeting: Path) -> None:
    """More than a pipe holds, before the far end is there and while it is asked."""
    complain = "head -c 300000 /dev/zero | tr '\\0' e >&2"
    greeting.write_text(f"{complain}\n({complain}) &\n")
    with Connection(Host("a"), facts=FACTS) as connection:
        assert connection.ask("echo", limit_s=120) is None
    greeting.write_text(f"{complain}\necho it is over >&2; exit 3\n")
    with pytest.raises(SetupError, match="eit is over"):
        Connection(Host("a"), facts=FACTS)


def test_a_line_without_an_end_is_not_waited_for(greeting: Path) -> None:
    """Behind its 30 s another sentence would be raised."""
    greeting.write_text("tr '\\0' x </dev/zero\n")
    with pytest.raises(SetupError, match="a sends a line without an end: 64 MiB"):
        Connection(Host("a"), facts=FACTS)


@pytest.mark.parametrize("answer", ["I am no JSON", "[1]", "7", '{"x": 1}', "[" * 100_000, "\\377"])
def test_what_is_no_answer_is_told_with_its_host(greeting: Path, answer: str) -> None:
    """As a login script may print behind everybody's back."""
    (greeting.parent / "answer").write_text(answer)
    greeting.write_text(
        f"printf '\\nmuster-far-end\\n'; printf \"$(cat {greeting.parent}/answer)\\n\"; sleep 99\n"
    )
    with Connection(Host("a"), facts=FACTS) as connection:
        with pytest.raises(SetupError, match="a answers with what is no answer") as caught:
            connection.ask("echo", limit_s=120)
        connection._kill()
    assert len(str(caught.value)) < 400


def test_a_lease_of_a_host_is_touched_as_long_as_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clears old files of /tmp away takes those that nobody has changed for days."""
    folder = tmp_path / "leases"
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(folder))
    # The far end is a text that is sent; times are shortened in a copy of the package's own.
    sent = (
        Path(far_end.__file__).read_text().replace("_TOUCH_EVERY_S = 20.0", "_TOUCH_EVERY_S = 0.1")
    )
    line = "import muster.devices.leases as of_leases; of_leases._TOUCH_EVERY_S = 0.0\n"
    at = sent.index("def main()")
    program = tmp_path / "far_end.py"
    program.write_text(sent[:at] + line + sent[at:])
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as far:
        assert far.stdin and far.stdout
        far.stdin.write(b'["lease", [["GPU-a"], "night"]]\n')
        far.stdin.flush()
        assert json.loads(far.stdout.readline()) == {"is": []}
        (lock,) = folder.glob("*.lock")
        os.utime(lock, (1.0, 1.0))
        wait_for(lambda: lock.stat().st_mtime > 1.0, 120)
        lock.unlink()
        wait_for(lock.exists, 120)  # it is made anew, and ours
        far.stdin.close()


def test_the_first_host_that_fails_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, which does not answer, was waited for: half a minute."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/bash\ncase " $* " in *" bad "*) echo no route >&2; exit 255;; esac\nexec sleep 99\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("MUSTER_SSH", str(ssh))
    begun = time.monotonic()
    with pytest.raises(SetupError, match="no route"):
        open_all([(Host("slow"), way := Way()), (Host("bad"), way)])
    assert time.monotonic() - begun < 25


def test_a_way_on_which_a_host_was_not_reached_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost hosts are: the failure of one attempt ended all that came after it."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/bash\necho no route >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("MUSTER_SSH", str(ssh))
    way = Way()
    with pytest.raises(SetupError, match="no route"), connected([Host("lost")], way):
        pass
    with connected([Host(LOCAL)], way) as [connection]:
        assert connection.is_open
    way.circle.end()
    with pytest.raises(SetupError), connected([Host(LOCAL)], way):
        pass
