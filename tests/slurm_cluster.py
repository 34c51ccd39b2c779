"""A real SLURM on loopback for the tests that need one: the fixture ``slurm``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "slurm-loopback"
_NODES = ("n1", "n2")
_WAIT_S = 300.0
#: A mark of the suite's own (conftest), which would make daemons look like a test's.
_NOT_FOR_DAEMONS = "PYTEST_STARTED_BY"


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    """Nodes n1 and n2 with four cores and two pretended GPUs each; partitions main and urgent.

    ``variables`` are what a command needs to find it (``environment`` is os.environ with them).
    """

    root: Path
    grace_s: int

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Standard output of a SLURM command, which must succeed."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def squeue(self) -> list[dict[str, str]]:
        """Jobs (array elements one by one) that are queued or run: id, state, reason, name."""
        form = "%i|%T|%r|%j|%P|%N"
        names = ("id", "state", "reason", "name", "partition", "nodes")
        lines = self.run("squeue", "-h", "-r", "-o", form).splitlines()
        return [dict(zip(names, line.split("|"), strict=True)) for line in lines]

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of ``scontrol show job``, for ended jobs as well (for MinJobAge, 300 s)."""
        text = self.run("scontrol", "-o", "show", "job", job_id).split("\n")[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def scancel(self, *words: str) -> None:
        self.run("scancel", *words)

    def await_state(self, job_id: str, *states: str, timeout_s: float = _WAIT_S) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job_id)) not in states:
            assert time.monotonic() < deadline, f"{state}, not {states}: {self.job(job_id)}"
            time.sleep(0.1)
        return state

    def preempt(self, *, nodes: tuple[str, ...] = _NODES, seconds: float = 0.0) -> str:
        """Send the jobs of main on these nodes back to the queue; returns the urgent job's id.

        They run again once that job has ended, ``seconds`` after it began.
        """
        words = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--output=/dev/null"]
        where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--chdir=/"]
        return self.run(*words, *where, f"--wrap=sleep {seconds:g}").strip()

    def node_down(self, node: str) -> None:
        """The node loses power: everything on it is killed, and SLURM knows."""
        loopback("node-down", self.root, node)

    def node_up(self, node: str) -> None:
        loopback("node-up", self.root, node)

    def processes(self, job_id: str) -> list[int]:
        """What runs on the nodes for this job: pids."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                values = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"SLURM_CONF={self.conf}".encode() in values and (
                f"SLURM_JOB_ID={job_id}".encode() in values
            ):
                found.append(int(entry.name))
        return found

    def clear(self) -> None:
        """No job is left, and all nodes are up."""
        for partition in ("main", "urgent"):  # scancel takes one at a time
            self.run("scancel", "--quiet", f"--partition={partition}", "--user=root")
        down = self.run("sinfo", "-h", "-N", "-p", "main", "-t", "down,drain", "-o", "%N").split()
        for node in sorted(set(down)):
            self.node_up(node)
        deadline = time.monotonic() + _WAIT_S
        while self.squeue():
            assert time.monotonic() < deadline, f"jobs that do not end: {self.squeue()}"
            time.sleep(0.1)


def loopback(command: str, root: Path, *words: str) -> None:
    """Run scripts/slurm-loopback; fails the test with what it says."""
    environment = {k: v for k, v in os.environ.items() if k != _NOT_FOR_DAEMONS}
    line = [sys.executable, str(SCRIPT), command, str(root), *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.fail(f"slurm-loopback {command}: {done.stderr}", pytrace=False)


def _why_not() -> str:
    if sys.platform != "linux":
        return "SLURM is for Linux"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    folders = [Path(folder) for folder in path.split(os.pathsep)]
    if not any((folder / "slurmctld").exists() for folder in folders):
        return "slurmctld is not installed: scripts/slurm-loopback install"
    if os.geteuid() != 0:
        return "scripts/slurm-loopback needs root rights"
    return ""


@pytest.fixture(scope="session")
def slurm_session() -> Iterator[SlurmCluster]:
    """The cluster itself, once per process of the suite; it dies with that process."""
    if reason := _why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(root=Path(folder) / "c", grace_s=10)
        loopback("up", cluster.root, "--with-pid", str(os.getpid()))
        try:
            yield cluster
        finally:
            loopback("down", cluster.root)


@pytest.fixture
def slurm(slurm_session: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A cluster with nothing on it, which commands of the test find; cleared again afterwards."""
    for name, value in slurm_session.variables.items():
        monkeypatch.setenv(name, value)
    try:
        yield slurm_session
    finally:
        slurm_session.clear()
