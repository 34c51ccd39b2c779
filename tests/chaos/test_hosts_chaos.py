"""What is lost with hosts over SSH: each kind of run, and each way to its host, through each loss.

One host is this machine, the other a network namespace with an sshd and a cable to it. The tasks
wait until all is over, so that every loss falls into the middle of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.test_two_nodes import ip, resumed_at, write_task
from tests.processes import command_line
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

import muster

BACK_S = 240.0
TASK = """
import os, sys, time
from pathlib import Path

PLACE = Path({place!r})

def work(x: float) -> dict:
    host = "far" if "SSH_CONNECTION" in os.environ else "here"
    Path(PLACE, f"{{host}}-{{os.getpid()}}").touch()
    # Of a search, where what a killed worker had goes to another one, those here do not wait.
    end = time.monotonic() + (2 if {is_search} and host == "here" else 9999)
    while not Path(PLACE, "go").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return {{"y": x * x}}

if __name__ == "__main__":
    print("y=" + repr(work(float(sys.argv[1]))["y"]))
"""
SCRIPT = """
import os, time
import torch, torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
host = "far" if "SSH_CONNECTION" in os.environ else "here"
Path({place!r}, f"{{host}}-{{os.getpid()}}").touch()
while not Path({place!r}, "go").exists():
    time.sleep(0.02)
dist.all_reduce(number)
print("sum", number.item())
"""
KINDS = {
    "functions": ("sweep", "task.py:work", "--grid", "x=1.0,2.0,3.0,4.0,5.0", "--retries", "9"),
    "commands": (
        *("sweep", "--grid", "x=1.0,2.0,3.0,4.0,5.0", "--retries", "9"),
        *("--metrics-from", r"stdout:y=(?P<y>\S+)"),
    ),
    "search": (
        *("sweep", "task.py:work", "--space", "x=uniform(0,1)", "--trials", "200"),
        *("--minimize", "y", "--retries", "9"),
    ),
}


class Far:
    """The host q, and what can happen to it."""

    def __init__(self, hosts: SshHosts, cable: str, folder: Path, words: tuple[str, ...]) -> None:
        self.hosts, self.cable, self.folder, self.words = hosts, cable, folder, words
        self.place = folder / "place"
        self.place.mkdir()
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "said").open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "muster", *self.words], cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def begun(self) -> set[str]:
        return {path.name for path in self.place.glob("far-*")}

    def until(self, condition: Any, limit_s: float = BACK_S) -> None:
        assert self.driver is not None
        wait_for(lambda: condition() or self.driver.poll() is not None, limit_s)
        assert self.driver.poll() is None, self.said

    def end(self) -> None:
        if self.driver is not None:
            self.driver.kill()
            self.driver.wait()

    def nothing_is_left(self) -> None:
        wait_for(lambda: not self.hosts.processes("q"), 120)

    # ---- losses

    def worker(self) -> None:
        workers = [
            process for process in self.hosts.processes("q")
            if "muster.farm.worker.main" in command_line(process)
        ]  # fmt: skip
        workers[-1].kill()

    def sshd(self) -> None:
        self.hosts.cut("q")
        self.hosts.start("q")

    def link(self) -> None:
        def told() -> int:
            return self.said.count("q is lost") + self.said.count("q was lost")

        before = told()
        ip("link", "set", self.cable, "down")
        self.until(lambda: told() > before, 120)
        ip("link", "set", self.cable, "up")

    def coordinator(self) -> None:
        self.end()
        self.nothing_is_left()
        self.start()

    def reboot(self) -> None:
        """All of it at once, as when both machines lose their power."""
        assert self.driver is not None
        doomed = [*psutil.Process(self.driver.pid).children(recursive=True)]
        doomed += [psutil.Process(self.driver.pid), *self.hosts.processes("q")]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.end()
        self.hosts.cut("q")
        self.hosts.start("q")
        self.start()


@pytest.fixture
def far(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[SshHosts, str]]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2")
    mark, net = uuid.uuid4().hex[:5], os.getpid() % 50 + 200
    space, here, there = f"muster-{mark}-q", f"m{mark}q", f"n{mark}q"
    if ip("netns", "add", space, is_needed=False):
        pytest.skip("network namespaces may not be made here")
    with contextlib.ExitStack() as stack:
        stack.callback(ip, "netns", "del", space)
        ip("link", "add", here, "type", "veth", "peer", there, "netns", space)
        # The space of the dead keeps it while a process is left, and with it the address.
        stack.callback(ip, "link", "del", here)
        ip("addr", "add", f"10.{net}.9.1/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", space, "addr", "add", f"10.{net}.9.2/24", "dev", there)
        for device in (there, "lo"):
            ip("-n", space, "link", "set", device, "up")
        ssh_hosts.add("q", place=(space, f"10.{net}.9.2"))
        stack.callback(ssh_hosts.remove, "q")
        for name, value in ssh_hosts.environment.items():
            monkeypatch.setenv(name, value)
        yield ssh_hosts, here


LOSSES = ("worker", "sshd", "link", "coordinator", "reboot")


#: What the way to the host has a part in comes with both; all with each is for test-slow.
FEWER = {"direct": ("worker", "link", "coordinator"), "through ssh": ("sshd", "reboot")}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", FEWER)
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [
        pytest.param("functions", False, id="fewer"),
        *(pytest.param(kind, True, id=kind, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_a_sweep_through_every_loss(
    far: tuple[SshHosts, str], tmp_path: Path, kind: str, is_whole: bool, way: str
) -> None:
    """After each the host works again; at the end the results are those of no loss at all."""
    words = (*KINDS[kind], "--hosts", "localhost:cpu,q:cpu", "--run-dir", "run")
    words += ("--through-ssh",) if way == "through ssh" else ()
    words += ("--", sys.executable, "task.py", "{x}") if kind == "commands" else ()
    one = Far(*far, tmp_path, words)
    (tmp_path / "task.py").write_text(TASK.format(place=str(one.place), is_search=kind == "search"))
    try:
        one.start()
        one.until(one.begun)
        for loss in LOSSES if is_whole else FEWER[way]:
            before = one.begun()
            getattr(one, loss)()
            one.until(lambda before=before: one.begun() - before)
            print(f"{kind}, {way}: goes on after the loss of: {loss}", flush=True)
        (one.place / "go").touch()
        assert one.driver is not None and one.driver.wait(300) == 0, one.said
    finally:
        one.end()
    assert "Traceback" not in one.said
    rows = muster.Run(tmp_path / "run").results().to_pylist()
    assert len(rows) == (200 if kind == "search" else 5)
    assert {row["state"] for row in rows} == {"done"}
    assert all(row["y"] == row["x"] ** 2 for row in rows)
    if kind != "search":
        assert sorted(row["x"] for row in rows) == [1.0, 2.0, 3.0, 4.0, 5.0]
    one.nothing_is_left()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("losses", "num_steps"),
    [
        pytest.param(("sshd",), 600, id="one"),
        pytest.param(LOSSES, 1500, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_training_through_losses(
    far: tuple[SshHosts, str], tmp_path: Path, losses: tuple[str, ...], num_steps: int
) -> None:
    """After each the host is one of two again, and no step is left out or counted twice."""
    words = (
        *("train", "task.py:Slow", "--global-batch", "12", "--batch-size", "4", "--epochs", "999"),
        *("--max-steps", str(num_steps), "--checkpoint-interval", "5steps", "--no-tensorboard"),
        *("--monitor-interval", "0", "--run-dir", "run", "--min-nodes", "1"),
        *("--max-restarts", "9", "--hosts", "localhost:cpu:1,q:cpu:1"),
    )
    one = Far(*far, tmp_path, words)
    write_task(tmp_path, seconds=0.2)

    def rank() -> psutil.Process | None:
        """Of the processes there that have started no other, the one that works most."""
        found: list[tuple[float, psutil.Process]] = []
        for process in one.hosts.processes("q"):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not process.children():
                    found.append((process.cpu_times().user, process))
        most = max(found, key=lambda pair: pair[0], default=(0.0, None))
        return most[1] if most[0] > 1.0 else None

    def goes_on() -> None:
        one.until(rank)
        step = newest(tmp_path)
        one.until(lambda: newest(tmp_path) >= step + 10)
        one.until(rank)

    def worker() -> None:
        victim = rank()
        assert victim is not None
        victim.kill()
        one.until(lambda: "restart 1 of 9" in one.said)

    try:
        one.start()
        goes_on()
        for loss in losses:
            begun = one.said.count("begins again on")
            worker() if loss == "worker" else getattr(one, loss)()
            if loss in ("sshd", "link"):
                told = one.said.count("back again; the ranks save")
                one.until(lambda told=told: one.said.count("back again; the ranks save") > told)
                one.until(lambda begun=begun: one.said.count("begins again on") > begun)
                saved = newest(tmp_path)
            goes_on()
            if loss in ("sshd", "link"):  # it is done again where all was saved before
                assert resumed_at(one.said) == saved
            print(
                f"train: at step {newest(tmp_path)} it goes on after the loss of: {loss}",
                flush=True,
            )
        write_task(tmp_path, seconds=0)
        one.coordinator()  # hosts are sent the new pace with a start
        assert one.driver is not None and one.driver.wait(600) == 0, one.said
    finally:
        one.end()
    # That of a rank whose neighbour was killed may be shown, behind the rank's number.
    assert not [line for line in one.said.splitlines() if line.startswith("Traceback")], one.said
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [told["step"] for told in map(json.loads, lines) if told["kind"] == "train"]
    assert steps == list(range(1, num_steps + 1))
    one.nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_program_through_every_loss(far: tuple[SshHosts, str], tmp_path: Path) -> None:
    """It begins again: on both hosts, or on the one that is left."""
    words = (
        *("run", "--hosts", "localhost:cpu:1,q:cpu:1", "--min-nodes", "1", "--max-restarts", "9"),
        *("--run-dir", "run", "task.py"),
    )
    one = Far(*far, tmp_path, words)
    (tmp_path / "task.py").write_text(SCRIPT.format(place=str(one.place)))

    def all_begun() -> set[str]:
        return {path.name for path in one.place.iterdir()}

    def worker() -> None:
        os.kill(int(min(one.begun()).partition("-")[2]), signal.SIGKILL)

    try:
        for loss in LOSSES:
            one.end()
            one.nothing_is_left()
            for path in one.place.iterdir():
                path.unlink()
            one.start()
            one.until(lambda: one.begun() and len(all_begun()) == 2)
            before = all_begun()
            worker() if loss == "worker" else getattr(one, loss)()
            other = "here-" if loss in ("sshd", "link") else "far-"
            one.until(
                lambda before=before, other=other: any(
                    name.startswith(other) for name in all_begun() - before
                )
            )
            print(f"run: goes on after the loss of: {loss}", flush=True)
        (one.place / "go").touch()
        assert one.driver is not None and one.driver.wait(300) == 0, one.said
    finally:
        one.end()
    assert "Traceback" not in one.said and "sum 4.0" in one.said
    one.nothing_is_left()


def newest(folder: Path) -> int:
    steps = (folder / "run" / "checkpoints").glob("step-*")
    return max((int(path.name[5:]) for path in steps), default=0)
