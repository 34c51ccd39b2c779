"""Real SSH servers on loopback addresses, a host each: the fixture ``ssh_hosts``."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port
from tests.processes import lives
from tests.ray_cluster import cable, may_mount, wait_for

import muster

_NET = f"127.1.{os.getpid() % 250 + 1}"
_SOURCES = Path(muster.__file__).parents[1]
#: What nvidia-smi prints on a host with two GPUs.
_SMI = "".join(f"{n}, NVIDIA H100, 81559, 4, 570.86, GPU-{{host}}-{n}\\n" for n in (0, 1))


@dataclass
class SshHosts:
    """The hosts ``a``, ``b`` and ``c``; ``c`` has two GPUs on paper. ``ssh`` knows them."""

    folder: Path
    sshd: str
    addresses: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    namespaces: dict[str, str] = field(default_factory=dict)
    hidden: dict[str, Path] = field(default_factory=dict)

    @property
    def leases(self) -> Path:
        """The lease folder of all the hosts."""
        return self.folder / "leases"

    @property
    def environment(self) -> dict[str, str]:
        """For programs that are to find the hosts."""
        return {**os.environ, "MUSTER_SSH": self.ssh, "PYTHONPATH": str(_SOURCES)}

    @property
    def ssh(self) -> str:
        return shlex.join(["ssh", "-F", str(self.folder / "config")])

    def processes(self, name: str) -> list[psutil.Process]:
        """The server of the host and everything below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pids[name]).children(recursive=True)
        return []

    def add(
        self, name: str, *, gpus: bool = False, ahead_s: float = 0.0, sources: Path = _SOURCES,
        place: tuple[str, str] | None = None, hidden: Path | None = None,
    ) -> None:  # fmt: skip
        """``ahead_s``: how far the clock that its Python reads is ahead; ``sources``: where it has
        Muster; ``place``: a network namespace, and its address there; ``hidden``: a folder that
        it does not see, where this user may hide one."""
        if hidden is not None and may_mount():
            self.hidden[name] = hidden
        if place is not None:
            self.namespaces[name], address = place
            port = 2222
        else:
            address = f"{_NET}.{len(self.addresses) + 2}"
            port = free_port(address)
        folder = self.folder / name
        (folder / "bin").mkdir(parents=True)
        if gpus:
            smi = folder / "bin" / "nvidia-smi"
            smi.write_text(f"#!/bin/sh\nprintf '{_SMI.format(host=name)}'\n")
            smi.chmod(0o755)
        if ahead_s:
            clock = f"import time\nours = time.time\ntime.time = lambda: ours() + {ahead_s}\n"
            (folder / "bin" / "sitecustomize.py").write_text(clock)
        _key(folder / "host_key")
        path = f"{folder}/bin:{os.environ['PATH']}"
        (folder / "sshd_config").write_text(
            f"ListenAddress {address}:{port}\nHostKey {folder}/host_key\n"
            f"PidFile {folder}/pid\nAuthorizedKeysFile {self.folder}/key.pub\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nMaxStartups 50\n"
            f"SetEnv PATH={path} PYTHONPATH={folder}/bin:{sources} CI=true "
            f"MUSTER_LEASE_DIR={self.leases} XDG_CACHE_HOME={folder}/cache "
            "SHLVL=2\n"  # no .bashrc, which hosts have not in common
        )
        kind, key = (folder / "host_key.pub").read_text().split()[:2]
        with (self.folder / "known_hosts").open("a") as known:
            known.write(f"[{address}]:{port} {kind} {key}\n")
        with (self.folder / "config").open("a") as config:
            config.write(
                f"Host {name}\n HostName {address}\n Port {port}\n User {getpass.getuser()}\n"
                f" IdentityFile {self.folder}/key\n IdentitiesOnly yes\n"
                f" UserKnownHostsFile {self.folder}/known_hosts\n"
            )
        self.addresses[name] = address
        self.start(name)

    def also(self, name: str, host: str, command: str) -> None:
        """Let ``host`` also be reached under this name, by a ProxyCommand of ssh."""
        lines = (self.folder / "config").read_text().split(f"Host {host}\n")[1].split("Host ")[0]
        with (self.folder / "config").open("a") as config:
            config.write(f"Host {name}\n{lines} ProxyCommand {command}\n")

    def start(self, name: str) -> None:
        """Start its server, at first or again."""
        place = self.folder / name
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_STARTED_BY"}
        inside = ["ip", "netns", "exec", self.namespaces[name]] if name in self.namespaces else []
        if name in self.hidden:
            script = f'mount -t tmpfs none {self.hidden[name]}; exec "$@"'
            inside += ["unshare", "--mount", "sh", "-c", script, "sh"]
        server = [self.sshd, "-D", "-e", "-f", str(place / "sshd_config")]
        (place / "pid").unlink(missing_ok=True)
        with (place / "log").open("ab") as log:
            subprocess.run(
                [*inside, "setsid", "--fork", *server],
                env=environment, check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip
        pid = place / "pid"
        wait_for(lambda: pid.exists() and pid.read_text().strip(), 120)
        self.pids[name] = int(pid.read_text())

    def cut(self, name: str) -> None:
        """End its server and all connections to it at once."""
        server = psutil.Process(self.pids[name])
        # Not what is below a connection: whether that ends is what a test is about.
        doomed = [p for p in server.children(recursive=True) if p.name().startswith("sshd")]
        for process in [server, *doomed]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # One that has not gone yet has its port still, of which the next server would end.
        wait_for(lambda: not any(map(lives, [server, *doomed])), 120)
        (self.folder / name / "pid").unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """End its server for good."""
        self.cut(name)
        del self.pids[name], self.addresses[name]
        shutil.rmtree(self.folder / name)
        whole = (self.folder / "config").read_text()
        own = whole.split(f"Host {name}\n")[1].split("Host ")[0]
        (self.folder / "config").write_text(whole.replace(f"Host {name}\n{own}", ""))

    def stop(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def far_away(hosts: SshHosts, delays: dict[str, float]) -> Iterator[None]:
    """A further host for each name, behind a cable to this machine alone that takes so many seconds
    in each direction."""
    with contextlib.ExitStack() as stack:
        for number, (name, delay_s) in enumerate(delays.items()):
            space = f"muster-{uuid.uuid4().hex[:6]}-{name}"
            net = f"10.59.{os.getpid() % 250 + 1}"
            near, far = (f"{net}.{4 * number + end}" for end in (1, 2))
            stack.enter_context(cable(space, delay_s, near, far))
            hosts.add(name, place=(space, far))
            stack.callback(hosts.remove, name)
        yield


def _key(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def ssh_servers() -> Iterator[SshHosts]:
    """Servers for a, b and c. Raises LookupError where one cannot be had, with what to install."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None or not (shutil.which("ssh") and shutil.which("ssh-keygen")):
        raise LookupError("there is no sshd: apt-get install openssh-server openssh-client")
    if find_spec("ray") is None:
        raise LookupError("Ray is not installed: pip install 'muster-gpu[ray]'")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where there is no service manager to make it
    hosts = SshHosts(Path(tempfile.mkdtemp(prefix="ssh-test-", dir="/tmp")), sshd)
    try:
        _key(hosts.folder / "key")
        hosts.add("a")
        hosts.add("b")
        hosts.add("c", gpus=True)
        yield hosts
    finally:
        hosts.stop()


@pytest.fixture(scope="module")
def ssh_hosts() -> Iterator[SshHosts]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(ssh_servers())
        except LookupError as error:
            pytest.skip(str(error))
        yield hosts
