"""What the driver of a gang over SSH decides before and between starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.ray_cluster import wait_for

from muster.api.gangs import host_plan, hosts
from muster.api.gangs.host_parts import Outcome
from muster.api.gangs.host_plan import Code, HostRanks
from muster.api.gangs.hosts import _Drive
from muster.api.gangs.work import GangAudience, GangEnding, GangWork
from muster.api.start.options import GangOptions
from muster.base.errors import SetupError
from muster.gang.spec import Entry, Script
from muster.hosts.check import _gpus
from muster.hosts.connection import SSH, Way
from muster.hosts.names import parse_hosts
from muster.run.folder import RunFolder


class _Told(_Drive):
    """The first start loses the first host."""

    addresses: list[str | None]

    def _start(self, nodes: Sequence[HostRanks], back: Any) -> Outcome:
        self.addresses.append(self._options.master_addr)
        lost = {"a": "gone"} if len(self.addresses) == 1 else {}
        return Outcome(ending=GangEnding(exit_code=0), lost=lost)


def test_an_address_goes_with_its_host(tmp_path: Path) -> None:
    said: list[str] = []
    work = GangWork(folder=RunFolder(tmp_path), program=Script(path="x.py"))
    options = GangOptions(
        hosts="a,b", master_addr="10.0.0.1", min_nodes=1, max_restarts=1, hosts_setup=()
    )
    nodes = [HostRanks(host=host, gpus=(), num_ranks=1, cpus=1) for host in parse_hosts("a,b")]
    nobody: Any = None
    drive = _Told(work, options, GangAudience(warn=said.append), nobody, nobody, Code(()))
    drive.addresses = []
    assert drive.run(nodes).exit_code == 0
    assert drive.addresses == ["10.0.0.1", None]
    assert "restart 1 of 1, on b" in said[0]
    assert "--master-addr 10.0.0.1 belonged to a" in said[1]


class _Played(_Drive):
    """Two hosts: the first start loses b, and so often as ``fails`` says a start with b fails."""

    fails: int
    starts: list[tuple[str, ...]]
    error_of, rank_fails = "b", False

    def _start(self, nodes: Sequence[HostRanks], back: Any) -> Outcome:
        names = tuple(node.host.name for node in nodes)
        self.starts.append(names)
        if len(self.starts) == 1:
            return Outcome(ending=GangEnding(exit_code=75), lost={"b": "gone"})
        if names == ("a", "b"):
            if self.rank_fails:
                report = (f"rank 2 failed on {self.error_of}",)
                ending = GangEnding(exit_code=1, report=report)
                return Outcome(ending=ending, lost={}, culprit=self.error_of)
            if self.fails:
                self.fails -= 1
                error = SetupError("b: GPU 1 is not there.")
                error.host = self.error_of
                raise error
            return Outcome(ending=GangEnding(exit_code=0), lost={})
        deadline = time.monotonic() + 2.0
        while not back():
            if time.monotonic() > deadline:  # it is not tried any more, and the others are done
                return Outcome(ending=GangEnding(exit_code=0), lost={})
            time.sleep(0.01)
        return Outcome(ending=GangEnding(exit_code=75), lost={}, back=back())


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[_Played, list[str]]:
    monkeypatch.setattr(host_plan, "BACK_OFF_S", (0.05, 0.1, 0.2))
    monkeypatch.setattr(host_plan, "_LOOK_S", 0.01)

    @contextmanager
    def connected(hosts: Any, way: Any = None) -> Iterator[list[Any]]:
        yield []

    monkeypatch.setattr(host_plan, "connected", connected)  # a host that always answers
    monkeypatch.setattr(hosts, "checked", lambda found, is_forced: [])
    said: list[str] = []
    work = GangWork(folder=RunFolder(tmp_path), program=Script(path="x.py"), kind="train")
    options = GangOptions(hosts="a,b", min_nodes=1, max_restarts=1, hosts_setup=())
    nobody: Any = None
    drive = _Played(work, options, GangAudience(warn=said.append), nobody, nobody, Code(()))
    drive.fails, drive.starts = 99, []
    return drive, said


AB = [HostRanks(host=host, gpus=(0, 1), num_ranks=2, cpus=1) for host in parse_hosts("a,b")]


def test_a_host_with_which_no_start_begins_does_not_interrupt_for_ever(
    played: tuple[_Played, list[str]],
) -> None:
    drive, said = played
    assert drive.run(AB).exit_code == 0
    assert drive.starts.count(("a", "b")) == 4  # the first, and three with b back
    told = [text for text in said if text.startswith("goes on without b")]
    assert all("b: GPU 1 is not there." in text for text in told)
    assert "is tried again" in told[0] and "not tried again" in told[-1] and len(told) == 3


def test_a_host_that_begins_after_all_is_kept(played: tuple[_Played, list[str]]) -> None:
    drive, _ = played
    drive.fails = 2
    assert drive.run(AB).exit_code == 0 and drive.starts[-1] == ("a", "b")


def test_what_is_the_fault_of_another_is_not_put_on_the_host_that_is_back(
    played: tuple[_Played, list[str]],
) -> None:
    drive, _ = played
    drive.error_of = "a"
    with pytest.raises(SetupError):
        drive.run(AB)


def test_a_host_whose_gpu_is_broken_when_it_is_back_does_not_end_the_training(
    played: tuple[_Played, list[str]],
) -> None:
    """It passes all checks, and a rank there fails."""
    drive, said = played
    drive.rank_fails = True
    assert drive.run(AB).exit_code == 0
    assert drive.starts.count(("a", "b")) == 4
    assert sum("rank 2 failed on b" in text for text in said) == 3


def test_a_rank_that_fails_on_a_host_that_was_always_there_ends_the_training(
    played: tuple[_Played, list[str]],
) -> None:
    drive, _ = played
    drive.rank_fails, drive.error_of = True, "a"
    assert drive.run(AB).exit_code == 1 and drive.starts.count(("a", "b")) == 2


@pytest.mark.parametrize("at_first", [True, False])
def test_a_host_that_is_not_there_at_a_later_start_is_lost_and_at_the_first_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first: bool
) -> None:
    monkeypatch.setenv(SSH, "false")  # nobody can be reached
    work = GangWork(folder=RunFolder(tmp_path), program=Script(path="x.py"), kind="train")
    options = GangOptions(hosts="localhost,b,c", min_nodes=1, max_restarts=1, hosts_setup=())
    nobody: Any = None
    drive = _Drive(work, options, GangAudience(), nobody, nobody, Code(()))
    nodes = [
        HostRanks(host=host, gpus=(), num_ranks=1, cpus=1)
        for host in parse_hosts("localhost:cpu:1,b:cpu:1,c:cpu:1")
    ]
    if at_first:
        with pytest.raises(SetupError, match="Cannot reach b"):
            drive._start(nodes, tuple)
        return
    drive._has_begun, drive._returned = True, {"b"}
    outcome = drive._start(nodes, tuple)
    assert [*outcome.lost] == ["c"] and "Cannot reach c" in outcome.lost["c"]
    assert [*outcome.failed] == ["b"] and not outcome.has_run


def test_a_host_has_to_have_the_gpus_that_were_its() -> None:
    """Also where ``--hosts`` names none of them."""
    host = AB[1].as_planned
    facts = {"gpus": [{"index": 0, "name": "x"}], "driver": "1", "gpu_problem": ""}
    assert "no GPU 1" in _gpus(host, facts).found and _gpus(host, facts).state == "failure"
    both = [{"index": n, "name": "x", "held": "leased by c" * n} for n in range(2)]
    assert _gpus(host, {**facts, "gpus": both}).state == "failure"
    (cpu,) = parse_hosts("b:cpu:2")
    assert HostRanks(host=cpu, gpus=(), num_ranks=2, cpus=1).as_planned == cpu


@pytest.mark.usefixtures("played")
def test_whatever_goes_wrong_at_a_try_does_not_end_the_tries() -> None:
    number = iter(range(9))
    tries = host_plan.Tries()
    tries.lost("b")

    def check(found: Any) -> None:
        if next(number) < 2:
            raise KeyError("peer")

    said: list[str] = []
    with host_plan.tried_again([AB[1].host], Way(), check, said.append, tries) as returns:
        wait_for(returns.names, 120)
    assert "'peer'" in said[0]


def test_a_program_beside_the_working_folder_is_where_the_host_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "train.py").write_text("class Task: ...")
    monkeypatch.chdir(home)
    nobody: Any = None

    def place(program: Script | Entry) -> Any:
        work, code = GangWork(folder=RunFolder(tmp_path / "run"), program=program), Code.of(program)
        assert code.roots == (home, tmp_path)
        drive = _Drive(work, GangOptions(), GangAudience(), nobody, nobody, code)
        return drive._program_there("/there")

    assert place(Script(path="../train.py"))["path"] == "/there/code/1/train.py"
    entry = Entry(target="m:f", params={"task": "../train.py:Task"})
    assert place(entry)["params"]["task"] == "/there/code/1/train.py:Task"
