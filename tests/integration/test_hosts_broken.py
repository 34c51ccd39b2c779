"""Hosts that are broken, or unlike others, in the ways that hosts are: real sshd's on loopback.

``muster hosts check`` says of each what repairs it, and what would begin there does not begin with
something else.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.ssh_hosts import SshHosts

from muster.hosts.connection import Connection, Way
from muster.hosts.names import Host

Main = Callable[..., CompletedProcess[str]]

#: What the Python of a host is made to say of itself.
OLD = "import sys\nsys.version_info = type('V', (tuple,), {})((3, 9, 1, 'final', 0))\n"
WITHOUT = """
from importlib import metadata
ours = metadata.version
def version(name):
    if name == {name!r}:
        raise metadata.PackageNotFoundError(name)
    return ours(name)
metadata.version = version
"""
OTHER = """
from importlib import metadata
ours = metadata.version
metadata.version = lambda name: {version!r} if name == "muster-gpu" else ours(name)
"""


@pytest.fixture
def host(ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Adds a host with this text in what its Python reads first, and these lines of sshd's."""
    added = []

    def add(name: str, python: str = "", sshd: str = "", **variables: str) -> SshHosts:
        ssh_hosts.add(name)
        added.append(name)
        place = ssh_hosts.folder / name
        (place / "bin" / "sitecustomize.py").write_text(python)
        config = (place / "sshd_config").read_text()
        for key, value in variables.items():
            config = config.replace("SetEnv ", f"SetEnv {key}={value} ", 1)
        (place / "sshd_config").write_text(f"{sshd}\n{config}")
        ssh_hosts.cut(name)
        ssh_hosts.start(name)
        return ssh_hosts

    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    yield add
    for name in added:
        ssh_hosts.remove(name)


def checked(muster_main: Main, name: str, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = muster_main("hosts", "check", name, "--json", *words)
    assert "Traceback" not in done.stderr
    findings = json.loads(done.stdout)["hosts"][0]["findings"]
    return done.returncode, {one["what"]: one for one in findings}


@pytest.mark.parametrize(
    ("python", "what", "code", "state", "found", "fix"),
    [
        (OLD, "python", 3, "failure", "3.9.1", "use Python 3."),
        (WITHOUT.format(name="torch"), "torch", 0, "warning", "not installed", "install torch"),
        (WITHOUT.format(name="ray"), "ray", 3, "failure", "not installed", "pip install 'ray=="),
        (OTHER.format(version="0.0.9"), "muster", 3, "failure", "0.0.9", "pip install 'muster-gpu"),
        (OTHER.format(version="9.9"), "muster", 3, "failure", "9.9", "pip install 'muster-gpu"),
    ],
    ids=["old python", "no torch", "no ray", "older muster", "newer muster"],
)
def test_what_a_host_lacks_is_told_with_what_repairs_it(
    host: Any, muster_main: Main, python: str, what: str, code: int, state: str, found: str,
    fix: str, tmp_path: Path,
) -> None:  # fmt: skip
    """A sweep and a training refuse such a host with the same words, and nothing is begun."""
    name = f"odd-{secrets.token_hex(3)}"  # a host is asked once by a process
    host(name, python)
    exit_code, findings = checked(muster_main, f"{name}:cpu")
    assert exit_code == code
    assert findings[what]["state"] == state and found in findings[what]["found"]
    assert fix in findings[what]["fix"]
    (tmp_path / "t.py").write_text("def f(x):\n    return {'x': x}\n")
    sweep = muster_main("sweep", "t.py:f", "--grid", "x=1", "--hosts", f"{name}:cpu", "--dry-run")
    train = muster_main("train", "digits", "--hosts", f"{name}:cpu:1", "--dry-run")
    assert sweep.returncode == code
    if code:
        assert f"{name} cannot be used ({what}" in sweep.stderr and found in sweep.stderr
    if what == "ray":
        assert train.returncode == 0
    else:
        assert train.returncode == 3 and f"{name} cannot be used" in train.stderr


def test_a_host_without_python_is_told(host: Any, muster_main: Main) -> None:
    """Nor with one that is too old to say what it has."""
    there = host("bare")
    code, findings = checked(muster_main, "bare", "--hosts-python", "/no/such/python")
    assert code == 3 and "there is no python3" in findings["ssh"]["found"]
    assert "install Python 3.11 there with Muster" in findings["ssh"]["fix"]
    old = there.folder / "bare" / "bin" / "python"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"$(printf %b '{_too_old()}')\"\n")
    old.chmod(0o755)
    code, findings = checked(muster_main, "bare", "--hosts-python", str(old))
    assert code == 3 and "this Python is too old: 2.7" in findings["ssh"]["found"]
    assert "install Python 3.11 there with Muster" in findings["ssh"]["fix"]


def _too_old() -> str:
    """The program for the far end in a Python that says it is 2.7."""
    from muster.hosts import far_start

    text = "import sys\nsys.version_info, sys.version = (2, 7), '2.7.18 (default)'\n"
    program = text + far_start.PROGRAM.format(size=0)
    return "".join(f"\\0{byte:03o}" for byte in program.encode())


def test_a_disk_that_is_full_is_told(
    host: Any, muster_main: Main, tmp_path: Path, mounted: Callable[[str, str], Path]
) -> None:
    full = mounted("full", "size=1m")
    host("full", TMPDIR=str(full))
    code, findings = checked(muster_main, "full:cpu")
    assert code == 3 and findings["disk"]["state"] == "failure"
    assert "0.0 GiB free" in findings["disk"]["found"] and "make room" in findings["disk"]["fix"]


def test_a_home_that_cannot_be_written_to_is_told(
    host: Any, muster_main: Main, tmp_path: Path, mounted: Callable[[str, str], Path]
) -> None:
    """And is no matter for a sweep, nor where another place is named."""
    home = mounted("home", "ro")
    host("fixed", XDG_CACHE_HOME=str(home / ".cache"))
    code, findings = checked(muster_main, "fixed:cpu")
    assert code == 0 and findings["cache"]["state"] == "warning"
    assert f"{home} cannot be written to" in findings["cache"]["found"]
    (tmp_path / "p.py").write_text("print('hello')\n")
    words = ("run", "--hosts", "fixed:cpu:1", "--run-dir", "run", "p.py")
    done = muster_main(*words)
    assert done.returncode == 3, done.stdout + done.stderr
    assert str(home) in done.stderr and "XDG_CACHE_HOME" in done.stderr
    setup = f"export XDG_CACHE_HOME={tmp_path / 'cache'}"
    assert checked(muster_main, "fixed:cpu", "--setup", setup)[1]["cache"]["state"] == "ok"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    made: list[Path] = []

    def mount(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if os.getuid() or subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("file systems may not be mounted here")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_key_that_has_changed_is_told(host: Any, muster_main: Main) -> None:
    there = host("anew")
    known = there.folder / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    kind, key = (there.folder / "a" / "host_key.pub").read_text().split()[:2]
    place = lines[-1].split()[0]
    known.write_text("".join([*lines[:-1], f"{place} {kind} {key}\n"]))
    try:
        code, findings = checked(muster_main, "anew")
    finally:
        known.write_text("".join(lines))
    assert code == 3
    assert "ssh-keygen -R" in findings["ssh"]["fix"] and "ssh anew" in findings["ssh"]["fix"]


def test_a_host_that_wants_a_password_is_told(host: Any, muster_main: Main) -> None:
    host("asks", sshd="PubkeyAuthentication no\nPasswordAuthentication yes")
    code, findings = checked(muster_main, "asks")
    assert code == 3 and "ssh-copy-id asks" in findings["ssh"]["fix"]


PROFILE = "echo welcome; echo 'no end of line\\c'; printf 'and more'; echo oops >&2\n"


def test_greetings_and_what_login_scripts_print_are_no_matter(
    host: Any, muster_main: Main, tmp_path: Path
) -> None:
    banner, home = tmp_path / "banner", tmp_path / "home"
    banner.write_text("Authorised users only! {'is': 1}\nmuster\n")
    home.mkdir()
    for name in (".bash_profile", ".bashrc", ".profile"):
        (home / name).write_text(PROFILE)
    host("greets", sshd=f"Banner {banner}", HOME=str(home))
    code, findings = checked(muster_main, "greets:cpu", "--setup", "echo set; printf up")
    assert code == 0, findings


SHELLS = ("bash", "dash", "zsh", "ksh", "mksh", "csh", "tcsh", "fish")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_host_is_reached_whichever_its_login_shell_is(
    host: Any, ssh_hosts: SshHosts, shell: str, tmp_path: Path
) -> None:
    """sshd hands the command to the login shell as this program does: SHELL -c COMMAND."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    host("other", sshd=f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"')
    odd = "export ODD='a\"b'\\''!c\\n$HOME `x` é'; (exit 0)"
    for setup in ((), ('# it\'s "here"! `no` \\n $0', odd)):
        with Connection(Host("other"), Way(setup=setup)) as connection:
            assert connection.facts["muster_code"]
            if setup:
                connection.ask("start", [sys.executable, "-c", SHOW], {}, {})
                told = connection.ask("wait", "ODD is", 100, limit_s=120)
                assert told == {"said": ascii(ODD)}


SHOW = "import os, time; print('ODD is', ascii(os.environ['ODD']), flush=True); time.sleep(99)"
ODD = "a\"b'!c\\n$HOME `x` é"


NO_RAY = "import sys\nsys.modules['ray'] = None\n"
SLOW_RAY = """
import sys, time
if any(word.endswith("ray_node") for word in sys.orig_argv):
    time.sleep(300)
"""


@pytest.mark.thorough
def test_the_first_host_whose_ray_fails_is_told_at_once_in_a_sentence(
    host: Any, muster_cli: Main, tmp_path: Path
) -> None:
    """And not when it is its turn, behind one that does not come up within two minutes. What Ray
    has said is kept in the run folder, as it goes on the host."""
    host("slow", SLOW_RAY)
    host("none", NO_RAY)
    (tmp_path / "t.py").write_text("def f(x):\n    return {'x': x}\n")
    began = time.monotonic()
    done = muster_cli(
        "sweep", "t.py:f", "--grid", "x=1", "--hosts", "slow:cpu,none:cpu", "--run-dir", "run"
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr, done.stderr
    assert (
        "Ray could not be started on none: ModuleNotFoundError: import of ray halted; None in "
        "sys.modules. Its log is run/logs/ray-none.log.\n"
    ) in done.stderr
    assert "muster hosts check none" in done.stderr
    assert "Traceback (most recent call last)" in (tmp_path / "run/logs/ray-none.log").read_text()
    assert time.monotonic() - began < 100
