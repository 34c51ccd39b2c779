"""What the driver of a gang over SSH decides before and between starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.api.gangs.host_code import Code
from muster.api.gangs.host_parts import Outcome
from muster.api.gangs.host_plan import HostRanks
from muster.api.gangs.hosts import _Drive
from muster.api.gangs.work import GangAudience, GangEnding, GangWork
from muster.api.start.options import GangOptions
from muster.gang.spec import Entry, Script
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
