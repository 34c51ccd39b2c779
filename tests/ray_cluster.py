"""A real Ray cluster of several nodes on loopback addresses: the fixture ``ray_cluster``."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ports import free_port

from muster.base.settings import kept_environment
from muster.farm.executors.ray_lean import at_loopback
from muster.farm.executors.ray_links import ADDRESS

_WAIT_S = 300.0
#: Of this process alone, so that clusters of tests that run beside each other share no port.
_NET = f"127.0.{os.getpid() % 250 + 1}"
#: In the environment: seconds that whatever goes between the two nodes takes in each direction.
LINK_DELAY_S = "MUSTER_TEST_LINK_DELAY_S"
#: In the environment: where the head of a Ray is whose connections go through SSH. Its token is in
#: RAY_AUTH_TOKEN.
THROUGH_SSH = "MUSTER_TEST_THROUGH_SSH"
#: A mark of the suite's own (conftest), which would make Ray's processes look like a test's.
_NOT_FOR_DAEMONS = "PYTEST_STARTED_BY"
#: Nodes that die are noticed within seconds and not within half a minute.
_CONFIG = (
    '{"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, '
    '"health_check_failure_threshold": 4}'
)


@dataclass
class RayCluster:
    """Nodes 127.0.x.2 (the head), 127.0.x.3, …; each is the tree of one ``ray start --block``."""

    folder: Path
    port: int
    net: str = _NET
    nodes: dict[str, psutil.Process] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.net}.2:{self.port}"

    @property
    def hidden(self) -> Path:
        """A folder that some nodes do not see."""
        return self.folder / "hidden"

    @property
    def scratch(self) -> Path:
        """The temporary folder of all nodes."""
        return self.folder / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """For programs that join it as drivers. Its nodes are not guarded."""
        return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

    def add(
        self, *, cpus: int, gpus: int = 0, hidden: Path | None = None, namespace: str = ""
    ) -> str:
        """Start a node and return its address. ``hidden``: a folder that it does not see;
        ``namespace``: of the network, where it is not that of the others."""
        ip = f"{self.net}.{len(self.nodes) + 2}"
        words = [str(Path(sys.executable).with_name("ray")), "start", "--block",
                 f"--node-ip-address={ip}", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
                 f"--object-store-memory={128 << 20}"]  # fmt: skip
        if self.nodes:
            words += [f"--address={self.address}"]
        else:
            words += ["--head", f"--port={self.port}", "--include-dashboard=false",
                      f"--temp-dir={self.folder}", f"--system-config={_CONFIG}"]  # fmt: skip
        pid_file = self.folder / f"{ip}.pid"
        # Forked off, or pytest would take Ray's workers for something that a test has left.
        script = f'echo $$ > {pid_file}; exec "$@"'
        start = ["setsid", "--fork"]
        if namespace:
            start += ["ip", "netns", "exec", namespace]
        if hidden is not None:
            start += ["unshare", "--mount"]
            script = f"mount -t tmpfs none {hidden}; {script}"
        log = (self.folder / f"{ip}.log").open("wb")
        with log:
            subprocess.run(
                [*start, "sh", "-c", script, "sh", *words],
                env={**_without_mark(self.environment), "TMPDIR": str(self.scratch)},
                check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
        self.nodes[ip] = psutil.Process(int(pid_file.read_text()))
        started = "Ray runtime started"
        wait_for(lambda: started in (self.folder / f"{ip}.log").read_text())
        return ip

    def processes(self, ip: str) -> list[psutil.Process]:
        """All of a node that live: Ray's own, its workers, and what these have started."""
        root = self.nodes[ip]
        with contextlib.suppress(psutil.NoSuchProcess):
            return [root, *root.children(recursive=True)]
        return []

    def kill(self, ip: str) -> None:
        """What the loss of a machine looks like to the others."""
        processes = self.processes(ip)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=300)

    def stop(self) -> None:
        for ip in reversed(self.nodes):
            self.kill(ip)
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(condition: object, limit_s: float = _WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing within the time limit"
        time.sleep(0.05)


def may_mount() -> bool:
    """Whether this user may hide a folder from a process."""
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _without_mark(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _NOT_FOR_DAEMONS}


def new_cluster(net: str = _NET) -> RayCluster:
    """Without nodes; the first that is added is the head."""
    # Sockets are made in there, whose names may not be long.
    folder = Path(tempfile.mkdtemp(prefix="ray-test-", dir="/tmp"))
    cluster = RayCluster(folder, free_port(f"{net}.2"), net)
    cluster.scratch.mkdir()
    return cluster


@contextlib.contextmanager
def far_cluster(delay_s: float) -> Iterator[RayCluster]:
    """A head here, where drivers are, and a node with two cores behind a cable with this delay."""
    namespace, net = f"muster-far-{os.getpid()}", f"10.58.{os.getpid() % 250 + 1}"
    with cable(namespace, delay_s, f"{net}.2", f"{net}.3"):
        cluster = new_cluster(net)
        try:
            cluster.add(cpus=0)
            cluster.add(cpus=2, namespace=namespace)
            yield cluster
        finally:
            cluster.stop()


@contextlib.contextmanager
def cable(namespace: str, delay_s: float, near: str, far: str) -> Iterator[None]:
    """A new network namespace behind a cable with this delay; the addresses of its ends."""
    if os.getuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("a cable with a delay needs root, iproute2 and /dev/net/tun")
    program = Path(__file__).parent / "programs" / "delaying_cable.py"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    words = [sys.executable, str(program), namespace, str(delay_s), near, far]
    process = subprocess.Popen(  # forked off as the nodes are
        ["setsid", "--fork", *words], env=_without_mark(os.environ), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield
    finally:
        process.communicate()  # until it has ended
        subprocess.run(["ip", "netns", "del", namespace], check=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes with two cores each. The second has two pretended GPUs, and ``hidden`` is empty
    there: a run folder in it is not shared.
    """
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'muster-gpu[ray]'")
    if shutil.which("setsid") is None:
        pytest.skip("setsid is needed to start a cluster that is no descendant of pytest")
    if delay_s := float(os.environ.get(LINK_DELAY_S, 0)):
        with far_cluster(delay_s) as far:
            yield far
        return
    cluster = new_cluster()
    try:
        cluster.add(cpus=2)
        cluster.hidden.mkdir()
        cluster.add(cpus=2, gpus=2, hidden=cluster.hidden if may_mount() else None)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def ray_driver(request: pytest.FixtureRequest) -> Iterator[RayCluster | None]:
    """This very process is a driver of the cluster; executors use its connection."""
    address, cluster, near = os.environ.get(THROUGH_SSH), None, contextlib.nullcontext()
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        cluster = request.getfixturevalue("ray_cluster")
        address = cluster.address
    with kept_environment():
        import ray

        if cluster is None:
            settings["_node_ip_address"], near = ADDRESS, at_loopback(ray)
        with near:
            ray.init(address=address, **settings)
    yield cluster
    ray.shutdown()
