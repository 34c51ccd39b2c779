"""Several nodes by hand: two network namespaces with a cable between them, and a node that dies."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tests.conftest import MusterCli
from tests.ports import free_port
from tests.programs import slow_task
from tests.unit.train.rank_jobs import last_weights

from muster.run.folder import RunFolder

WORDS = (
    *("train", "task.py:Slow", "--global-batch", "8", "--batch-size", "4", "--epochs", "99"),
    *("--max-steps", "40", "--checkpoint-interval", "5steps", "--no-tensorboard"),
    *("--monitor-interval", "0"),
)
NODES = ("--devices", "cpu:1", "--nodes", "2")


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.57.0.1 and 10.57.0.2, that see each other and nothing else."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and iproute2")
    mark = uuid.uuid4().hex[:6]
    first, second = names = (f"muster-{mark}-a", f"muster-{mark}-b")
    with ExitStack() as stack:
        for name in names:
            if ip("netns", "add", name, is_needed=False):
                pytest.skip("network namespaces may not be made here")
            stack.callback(ip, "netns", "del", name)
        ends = (f"m{mark}a", f"m{mark}b")
        ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", ends[1], "netns", second)
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.57.0.{number}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield first, second


def test_two_machines_train_as_two_ranks_of_one(
    namespaces: tuple[str, str], muster_cli: MusterCli, tmp_path: Path
) -> None:
    """The host's name resolves to loopback in both, so gloo must be told another interface."""
    write_task(tmp_path, seconds=0)
    meet = ("--master-addr", "10.57.0.1", "--master-port", "29400", "--run-dir", "run")
    places = [("ip", "netns", "exec", namespace) for namespace in namespaces]
    with nodes(tmp_path, *WORDS, *NODES, *meet, places=places) as both:
        said = [node.communicate(timeout=300)[0] for node in both]
    assert [node.returncode for node in both] == [0, 0], "".join(said)
    here = muster_cli(*WORDS, "--devices", "cpu:2", "--run-dir", "here", timeout_s=300)
    assert here.returncode == 0, here.stderr
    check_same_weights(tmp_path / "run", tmp_path / "here")


@pytest.mark.slow
def test_nodes_without_a_common_folder_keep_whole_checkpoints_on_the_first(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    """A sharded one is put together there, and brought to a node that lacks it."""
    write_task(tmp_path, seconds=0)
    meet = ("--strategy", "fsdp", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    own = [("--run-dir", "zero"), ("--run-dir", "one")]
    with nodes(tmp_path, *WORDS, *NODES, *meet, own=own) as both:
        said = [node.communicate(timeout=300)[0] for node in both]
    assert [node.returncode for node in both] == [0, 0], "".join(said)
    assert not any((tmp_path / "one" / "checkpoints").iterdir())
    here = muster_cli(*WORDS, *meet[:2], "--devices", "cpu:2", "--run-dir", "here", timeout_s=300)
    assert here.returncode == 0, here.stderr
    check_same_weights(tmp_path / "zero", tmp_path / "here")
    shutil.rmtree(tmp_path / "one")
    with nodes(tmp_path, *WORDS, *NODES, *meet, own=own) as both:
        said = [node.communicate(timeout=300)[0] for node in both]
    assert [node.returncode for node in both] == [0, 0], "".join(said)
    check_same_weights(tmp_path / "one", tmp_path / "here")


@pytest.mark.slow
def test_a_lost_node_is_gone_without_and_the_rest_goes_on_exactly(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    """Same global batch on fewer ranks: what one rank makes of the same checkpoint."""
    write_task(tmp_path, seconds=0.05)
    meet = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--run-dir", "run")
    with nodes(tmp_path, *WORDS, *NODES, *meet, "--min-nodes", "1", "--max-restarts", "3") as both:
        await_steps(tmp_path / "run", 12, both)
        kill_all_of(both[1])
        await_words(tmp_path / "run" / "logs" / "agent.log", "failed")
        shutil.copytree(tmp_path / "run", tmp_path / "there")  # as the loss has left it
        write_task(tmp_path, seconds=0)
        said = both[0].communicate(timeout=300)[0]
    assert both[0].returncode == 0, said
    assert "restart 1 of 3" in said and "global batch 8" in said
    one = muster_cli(*WORDS, "--devices", "cpu:1", "--run-dir", "there", timeout_s=300)
    assert one.returncode == 0, one.stderr
    assert resumed_at(said) == resumed_at(one.stdout) >= 10
    check_same_weights(tmp_path / "run", tmp_path / "there")


# ----------------------------------------------------------------------------------------


def write_task(folder: Path, *, seconds: float) -> None:
    """The pace is no code, so it may change while the training goes on."""
    (folder / "task.py").write_text(slow_task(0.05))
    (folder / "pace").write_text(repr(seconds))


@contextmanager
def nodes(
    folder: Path,
    *words: str,
    places: list[tuple[str, ...]] | None = None,
    own: list[tuple[str, ...]] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on each node, with its number; ``places``: words before it; ``own``: after
    it."""
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, place in enumerate(places or [(), ()]):
            command = [sys.executable, "-m", "muster", *words, "--node-rank", str(rank)]
            command += own[rank] if own else ()
            started.append(
                subprocess.Popen(
                    [*place, *command],
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            kill_all_of(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def kill_all_of(process: subprocess.Popen[str]) -> None:
    """What a node that loses power does: everything on it at once, reaper and all."""
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        one.suspend()  # none of them may notice the end of another
    for one in family:
        one.send_signal(signal.SIGKILL)


def ip(*words: str, is_needed: bool = True) -> int:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not (is_needed and done.returncode), f"ip {' '.join(words)}: {done.stderr}"
    return done.returncode


def await_steps(run: Path, count: int, both: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 300
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"train"') < count:
        assert time.monotonic() < deadline and all(node.poll() is None for node in both)
        time.sleep(0.05)


def await_words(path: Path, words: str) -> None:
    deadline = time.monotonic() + 300
    while words not in path.read_text():
        assert time.monotonic() < deadline, f"{path} never said {words!r}"
        time.sleep(0.05)


def resumed_at(said: str) -> int:
    line = next(line for line in said.splitlines()[::-1] if "resume     from step" in line)
    return int(line.partition("from step ")[2].split()[0])


def check_same_weights(one: Path, other: Path) -> None:
    found, wanted = last_weights(RunFolder(one)), last_weights(RunFolder(other))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
