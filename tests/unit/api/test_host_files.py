"""What a gang over SSH sends and brings, through the far end of this very machine."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_cluster import wait_for

from muster.api import gang_node
from muster.api.gangs import host_files
from muster.api.gangs.host_files import Shared
from muster.api.gangs.host_plan import Code, plan_hosts
from muster.base.errors import SetupError, UsageError
from muster.gang.spec import Entry, Script
from muster.hosts import far_program
from muster.hosts.connection import Connection
from muster.hosts.names import LOCAL, Host, parse_hosts
from muster.run.folder import RunFolder


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, Path]]:
    """A far end with a start's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Connection(Host(LOCAL)) as connection:
        connection.ask("use", "muster.hosts.far_program")
        connection.ask("use", "muster.hosts.far_files")
        yield connection, Path(connection.ask("make", "name"))


def begin(connection: Connection, *argv: str, silence_s: float = 99.0) -> None:
    connection.ask("begin", list(argv), {}, silence_s)


def step(folder: Path, number: int, text: str = "x") -> Path:
    place = folder / "checkpoints" / f"step-{number:08d}"
    place.mkdir(parents=True, exist_ok=True)
    for name in (".metadata", "__0_0.distcp", "manifest.json"):
        (place / name).write_text(text)
    return place


def test_code_is_sent_once_and_each_start_has_a_clean_copy(
    far: tuple[Connection, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, place = far
    home = tmp_path / "home"
    (home / "package").mkdir(parents=True)
    (home / "package" / "m.py").write_text("x = 1")
    (home / ".secret").write_text("no")
    monkeypatch.chdir(home)
    code = Code.of(Script(path="package.m", is_module=True))
    code.send(connection)
    assert (place / "code" / "0" / "package" / "m.py").read_text() == "x = 1"
    assert not (place / "code" / "0" / ".secret").exists()
    (place / "code" / "0" / "package" / "m.py").write_text("of the program")
    [kept] = (tmp_path / "cache" / "muster" / "code").iterdir()
    before = kept.stat().st_ino
    again = Path(connection.ask("make", "name"))
    Code.of(Script(path="package.m", is_module=True)).send(connection)
    assert kept.stat().st_ino == before
    assert (again / "code" / "0" / "package" / "m.py").read_text() == "x = 1"
    assert Code.of(Entry(target="m:f", params={"task": "muster_recipes.har.task:Har"})).roots == ()


def make_in(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a start says that has this cache folder; "" where it has begun."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with Connection(Host(LOCAL)) as connection:
        connection.ask("use", "muster.hosts.far_program")
        try:
            connection.ask("make", "name")
        except SetupError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("place", ["", "muster", "muster/code", "muster/gangs"])
def test_where_everybody_may_write_no_code_is_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others could put theirs in its place, with the hash that is asked for."""
    cache = tmp_path / "cache"
    (cache / place).mkdir(parents=True)
    (cache / place).chmod(0o777)
    said = make_in(cache, monkeypatch)
    assert f"{cache / place}, where code is kept" in said and "by everybody" in said
    assert "export XDG_CACHE_HOME" in said
    assert not list(cache.glob("muster/gangs/*"))
    if place:
        (cache / place).chmod(0o700)
    else:
        (cache / place).chmod(0o1777)  # as /tmp is, where nobody can replace what is another's
    assert make_in(cache, monkeypatch) == ""
    for name in ("code", "gangs"):
        assert (cache / "muster" / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="gives a group a folder")
@pytest.mark.parametrize("place", ["", "muster", "muster/code", "muster/gangs"])
def test_where_a_group_may_write_no_code_is_kept_unless_it_is_the_users_own(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems make a group for each user, and let it write what the user makes."""
    cache = tmp_path / "cache"
    (cache / place).mkdir(parents=True)
    os.chown(cache / place, -1, 65534)
    (cache / place).chmod(0o775)
    said = make_in(cache, monkeypatch)
    assert f"{cache / place}, where code is kept" in said and "by the group 65534" in said
    assert f"chmod go-w {cache / place}" in said
    assert not list(cache.glob("muster/gangs/*"))
    os.chown(cache / place, -1, os.getgid())
    assert make_in(cache, monkeypatch) == ""


def test_the_cache_folder_is_made_closed_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o002)
    try:
        assert make_in(tmp_path, monkeypatch) == ""
    finally:
        os.umask(before)
    assert (tmp_path / "muster").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="makes another's folder")
@pytest.mark.parametrize("place", ["", "muster", "muster/code", "muster/gangs"])
def test_in_the_folder_of_another_user_no_code_is_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (cache / place).mkdir(parents=True)
    os.chown(cache / place, 65534, -1)
    said = make_in(cache, monkeypatch)
    assert f"{cache / place}, where code is kept" in said and "belongs to user 65534" in said


def test_a_link_in_place_of_kept_code_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (cache / "muster").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (cache / "muster" / "code").symlink_to(tmp_path / "elsewhere")
    assert "is no folder of this user's own" in make_in(cache, monkeypatch)
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755


def test_what_is_written_there_is_brought_and_what_the_driver_writes_is_not(
    far: tuple[Connection, Path], tmp_path: Path
) -> None:
    connection, place = far
    folder, there = RunFolder(tmp_path / "run"), place / "run"
    folder.create()
    folder.metrics.write_text("1\n2\n3\n")
    folder.rank_log(0).write_text("before\n")
    shared = Shared(folder, connection, number=0)
    shared.send()
    assert (there / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (there / "logs" / "rank-0.log").read_text() == ""
    begin(connection, "sleep", "99")

    def bring() -> None:
        for _ in shared.bring():
            pass

    (there / "metrics.jsonl").write_text("1\n2\nthree\n4\n")  # cut, and grown beyond it
    (there / "logs" / "rank-0.log").write_text("one\n")
    (there / "run.json").write_text("{}")
    (there / "status.json").write_text("{}")
    (place / "code" / "0" / "made").mkdir()
    (place / "code" / "0" / "made" / "f.txt").write_text("f")
    bring()
    with (there / "logs" / "rank-0.log").open("a") as log:
        log.write("two\n")
    with (there / "metrics.jsonl").open("a") as metrics:
        metrics.write("5\n")
    bring()
    assert folder.status_json.read_text() == "{}"
    (there / "status.json").unlink()
    bring()
    assert not folder.status_json.exists()
    assert folder.metrics.read_text() == "1\n2\nthree\n4\n5\n"
    assert folder.rank_log(0).read_text() == "before\none\ntwo\n"
    assert not folder.run_json.exists()
    assert (folder.files_of(LOCAL) / "made" / "f.txt").read_text() == "f"


def test_a_checkpoint_comes_whole_and_old_ones_go_as_they_do_there(
    far: tuple[Connection, Path], tmp_path: Path
) -> None:
    connection, place = far
    folder, there = RunFolder(tmp_path / "run"), place / "run"
    folder.create()
    for number in (5, 10, 15, 20):
        step(folder.path, number)
    (folder.checkpoints / "best.json").write_text(json.dumps({"step": 5, "value": 1.0}))
    aside = folder.checkpoints / ".aside-step-00000020"
    (folder.checkpoints / "step-00000020").rename(aside)  # killed between two renames
    shared = Shared(folder, connection, number=0)
    shared.send()
    assert not aside.exists()
    sent = {path.name for path in (there / "checkpoints").glob("step-*")}
    assert sent == {"step-00000005", "step-00000015", "step-00000020"}
    begin(connection, "sleep", "99")
    step(there, 25, "y")
    (there / "checkpoints" / ".writing-00000030").mkdir()
    (there / "checkpoints" / ".writing-00000030" / "__0_0.distcp").write_text("half")
    for path in (there / "checkpoints" / "step-00000015").iterdir():
        path.unlink()
    for _ in shared.bring():
        pass
    here = {path.name for path in folder.checkpoints.iterdir()}
    names = [f"step-{number:08d}" for number in (5, 10, 20, 25)]  # 10 was not sent
    assert here == {*names, "best.json"}
    assert (folder.checkpoints / "step-00000025" / ".metadata").read_text() == "y"
    # Of another node only what it alone writes is wanted.
    other = Shared(RunFolder(tmp_path / "other"), connection, number=1)
    step(there, 35)
    (there / "logs").mkdir(exist_ok=True)
    (there / "logs" / "rank-1.log").write_text("one")
    for _ in other.bring():
        pass
    assert [path.name for path in (tmp_path / "other").rglob("*") if path.is_file()] == [
        "rank-1.log"
    ]


def test_old_checkpoints_here_stay_that_no_host_has_had(
    far: tuple[Connection, Path], tmp_path: Path
) -> None:
    connection, place = far
    folder, there = RunFolder(tmp_path / "run"), place / "run"
    folder.create()
    for number in (100, 200, 300, 400, 500):
        step(folder.path, number)
    shared = Shared(folder, connection, 0)
    shared.send()
    begin(connection, "sleep", "99")

    def steps() -> list[int]:
        for _ in shared.bring():
            pass
        return sorted(int(path.name[5:]) for path in folder.checkpoints.glob("step-*"))

    step(there, 600)
    assert steps() == [100, 200, 300, 400, 500, 600]
    shutil.rmtree(there / "checkpoints" / "step-00000400")
    assert steps() == [100, 200, 300, 500, 600]
    shutil.rmtree(there / "checkpoints" / "step-00000600")  # its newest is here
    assert steps() == [100, 200, 300, 500]


class _Host(Connection):
    """The far end of this machine, of which a test says what it has, as a hostile one may."""

    news: Any = None
    after: Any = None

    def ask(self, name: str, *arguments: Any, after: bytes = b"", limit_s: float = 30.0) -> Any:
        if name == "changed" and self.news is not None:
            return {"files": [], "gone": [], "steps": [], **self.news}
        return super().ask(name, *arguments, after=after, limit_s=limit_s)

    def fetch(
        self, name: str, place: str, position: int, most: int, limit_s: float = 120.0
    ) -> bytes:
        data = super().fetch(name, place, position, most, limit_s)
        if self.after is not None:
            self.after(name, place)
        return data


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Host, Path]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with _Host(Host(LOCAL)) as connection:
        connection.ask("use", "muster.hosts.far_program")
        connection.ask("use", "muster.hosts.far_files")
        yield connection, Path(connection.ask("make", "name"))


def test_a_host_names_only_what_is_its_own(host: tuple[_Host, Path], tmp_path: Path) -> None:
    connection, _ = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    before = sorted(tmp_path.rglob("*"))
    for place in (
        "code/0/../../../x", "run/logs/../../x", "run/x/../run.json", "/etc/x", "run//x", "run",
        "code/0", "code/x/y", "run/logs/./rank-0.log", "", "run/x\0y", "other/x",
    ):  # fmt: skip
        for news in ({"files": [[place, 1]]}, {"gone": [place]}):
            connection.news = news
            with pytest.raises(ValueError, match="not a file of its part"):
                list(Shared(folder, connection, 0).bring())
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_host_may_not_write_is_left(host: tuple[_Host, Path], tmp_path: Path) -> None:
    connection, there = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    names = [
        "run.json", "RUN.json", "files/b/x.py", "cells/x.py", ".aside-x", "checkpoints/.aside-1/x",
        "checkpoints/step-00000001/sub/.x",
    ]  # fmt: skip
    for name in names:
        (there / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (there / "run" / name).write_text("x")
    connection.news = {"files": [[f"run/{name}", 1] for name in names], "steps": ["../../x"]}
    list(Shared(folder, connection, 0).bring())
    assert [path for path in folder.path.rglob("*") if path.is_file()] == []
    (tmp_path / "elsewhere").mkdir()
    (folder.path / "tb").symlink_to(tmp_path / "elsewhere")
    connection.news = {"files": [["run/tb/x", 1]]}
    with pytest.raises(ValueError, match="is a symbolic link"):
        list(Shared(folder, connection, 0).bring())
    connection.news = {"files": [["run/x", -1]]}
    with pytest.raises(ValueError, match="size of a file"):
        list(Shared(folder, connection, 0).bring())
    with pytest.raises(SetupError, match="sends 9 bytes of a file, not 1"):
        connection.fetch = functools.partial(Connection.fetch, connection)  # type: ignore[method-assign]
        connection.ask = lambda *_, **__: 9  # type: ignore[method-assign]
        connection.fetch("get", "run/x", 0, 1)


def test_a_file_that_changes_while_it_comes_replaces_nothing(
    host: tuple[_Host, Path], tmp_path: Path
) -> None:
    connection, place = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    there, here = place / "code" / "0" / "model.pt", folder.files_of(LOCAL) / "model.pt"
    shared = Shared(folder, connection, 0)
    begin(connection, "sleep", "99")
    whole, size = b"whole", 5 << 20  # more than a piece
    there.write_bytes(whole)
    list(shared.bring())
    assert here.read_bytes() == whole

    def write_on(name: str, place: str) -> None:
        there.write_bytes(b"c" * size)  # as long as before

    there.write_bytes(b"b" * size)
    connection.after = write_on
    list(shared.bring())
    assert here.read_bytes() == whole and len(list(here.parent.iterdir())) == 1
    connection.after = None
    list(shared.bring())
    assert set(here.read_bytes()) == {ord("c")} and here.stat().st_size == size


def test_two_hosts_bring_files_of_one_name(host: tuple[_Host, Path], tmp_path: Path) -> None:
    connection, place = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (place / "run" / "memory.json").write_text("{}")
    connection.news = {"files": [["run/memory.json", 2]]}
    both = [Shared(folder, connection, number).bring() for number in (0, 1)]
    for one in both:
        next(one)
    assert len(list(folder.path.glob(".memory.json.*"))) == 2
    for one in both:
        list(one)
    assert folder.memory_json.read_text() == "{}"


def test_code_that_was_edited_here_is_not_covered_by_what_a_program_wrote(
    far: tuple[Connection, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, place = far
    home, folder = tmp_path / "home", RunFolder(tmp_path / "run")
    folder.create()
    home.mkdir()
    (home / "config.yaml").write_text("new")
    (home / "train.py").write_text("pass")
    monkeypatch.chdir(home)
    own = folder.files_of(LOCAL)
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("old")
    (own / "made.txt").write_text("made")
    code = Code.of(Script(path="train.py"))
    code.send(connection)
    assert Shared(folder, connection, 0, code).send() == [own / "config.yaml"]
    assert (place / "code" / "0" / "config.yaml").read_text() == "new"
    assert (place / "code" / "0" / "made.txt").read_text() == "made"


def test_the_newest_checkpoint_comes_first_and_whole_though_others_are_saved_meanwhile(
    host: tuple[_Host, Path], tmp_path: Path
) -> None:
    connection, place = host
    folder, there = RunFolder(tmp_path / "run"), place / "run"
    folder.create()
    said: list[str] = []
    shared = Shared(folder, connection, 0, warn=said.append)
    begin(connection, "sleep", "99")
    for number in (10, 20, 30):
        step(there, number)

    def save(name: str, place: str) -> None:
        shutil.rmtree(there / "checkpoints", ignore_errors=True)

    connection.after = save
    list(shared.bring())
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000030"]
    assert len(list((folder.checkpoints / "step-00000030").iterdir())) == 3
    connection.after = None
    shared._step_took_s = 60.0
    for number in (90, 100):
        step(there, number)
    list(shared.bring())
    assert "checkpoints are saved faster than the link brings them" in said[0]


def test_only_what_a_file_has_grown_by_is_brought_unless_it_has_changed_as_well(
    host: tuple[_Host, Path], tmp_path: Path
) -> None:
    connection, place = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    there, here = place / "code" / "0" / "loss.csv", folder.files_of(LOCAL) / "loss.csv"
    here.parent.mkdir(parents=True)
    here.write_bytes(b"1" * 50_000)  # of an earlier start
    shared = Shared(folder, connection, 0)
    shared.send()
    begin(connection, "sleep", "99")
    with there.open("ab") as file:
        file.write(b"2" * 1000)
    counted: list[str] = []
    connection.after = lambda name, place: counted.append(name)
    shared.left = 0
    list(shared.bring())
    assert here.read_bytes() == there.read_bytes() and counted == ["get", "get"]
    there.write_bytes(b"0" + there.read_bytes()[1:] + b"3")
    list(shared.bring())
    list(shared.check())
    assert here.read_bytes() == there.read_bytes()


def test_files_of_a_program_have_a_limit(
    host: tuple[_Host, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_files, "LIMIT_MADE_BYTES", 100)
    connection, place = host
    folder = RunFolder(tmp_path / "run")
    folder.create()
    said: list[str] = []
    shared = Shared(folder, connection, 0, warn=said.append)
    begin(connection, "sleep", "99")
    for name, size in (("a", 60), ("b", 60), ("c", 60)):
        (place / "code" / "0" / name).write_bytes(bytes(size))
        list(shared.bring())
    assert [path.name for path in folder.files_of(LOCAL).iterdir()] == ["a"]
    assert len(said) == 1 and "such as b with" in said[0]


def test_places_outside_of_the_folder_are_refused(far: tuple[Connection, Path]) -> None:
    connection, _ = far
    for place in ("../x", "/etc/passwd", "run/../../x", "other/x", ""):
        with pytest.raises(SetupError, match="is not below"):
            connection.ask("put", place, 0, 1, after=b"x")
        with pytest.raises(SetupError, match="is not below"):
            connection.fetch("get", place, 0, 1)
    assert connection.ask("echo") is None


def test_a_host_that_hears_nothing_ends_its_part(far: tuple[Connection, Path]) -> None:
    connection, place = far
    begin(connection, sys.executable, "-c", "import time; time.sleep(99)", silence_s=0.5)
    wait_for(lambda: not connection.is_open, 120)
    assert not place.exists()


@pytest.mark.parametrize("size", [3 << 20, 9 << 20])
def test_what_follows_a_long_line_is_heard(far: tuple[Connection, Path], size: int) -> None:
    """The position did not advance beyond a line of more than 1 MiB."""
    connection, place = far
    begin(connection, "true")
    (place / "out").write_bytes(b"first\n" + b"x" * size + b"\nlast\n")
    position, heard = 0, ""
    while (found := connection.ask("look", position, 0.0))["size"]:
        position += found["size"]
        heard += found["text"]
    lines = heard.splitlines()
    assert (lines[0], lines[-1]) == ("first", "last")
    assert lines[1] == ("x" * size if size < 8 << 20 else "")


def test_a_line_that_a_host_tells_of_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    gang_node._tell("line", rank=0, text="x" * 100_000)
    told = json.loads(capsys.readouterr().out)["text"]
    assert len(told) < 70_000 and told.endswith(
        f"({100_000 - 65_536} more characters are left out here)"
    )


def test_the_lock_of_a_living_start_stays_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock is seen by its own machine alone, others would remove the folder by its age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(far_program, "_TOUCH_S", -1.0)
    start = far_program._Place([""])
    place = Path(start.make("name"))
    for name in ("out", "err"):
        (place / name).touch()
    os.utime(place / ".lock", (1, 1))
    with subprocess.Popen(["true"]) as start._process:
        start.look(0, 0.0)
    os.close(start._lock)
    assert (place / ".lock").stat().st_mtime > 1


def test_ranks_of_unlike_hosts() -> None:
    gpus = [{"index": 0, "held": ""}, {"index": 1, "held": "of run x"}, {"index": 2}]
    facts = {"gpus": gpus, "cpus": 8}
    [free, named, cpu] = [plan_hosts([host], [facts])[0] for host in parse_hosts("a,b:0+2,c:cpu:4")]
    assert (free.gpus, named.gpus, cpu.gpus) == ((0, 2), (0, 2), ())
    assert (free.said, named.said, cpu.said) == ("a", "b:0+2", "c:cpu:4")
    assert cpu.labels[-1] == "c:cpu:3" and cpu.threads_per_rank == 2
    with pytest.raises(UsageError, match="c would work without a GPU"):
        plan_hosts(parse_hosts("a,c:cpu:4"), [facts, facts])


def test_a_killed_far_end_leaves_nothing_running_and_its_folder_goes_later(
    far: tuple[Connection, Path], tmp_path: Path
) -> None:
    connection, place = far
    pids = tmp_path / "pids"
    script = f"setsid sleep 999 & echo $! >> {pids}; echo $$ >> {pids}; sleep 999"
    begin(connection, "sh", "-c", script)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, 120)
    left = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    connection._process.kill()
    wait_for(lambda: not any(one.is_running() for one in left), 120)
    assert place.exists()
    os.utime(place / ".lock", (1, 1))
    with Connection(Host(LOCAL)) as other, Connection(Host(LOCAL)) as living:
        for one in (living, other):
            one.ask("use", "muster.hosts.far_program")
        lives = Path(living.ask("make", "name"))
        assert not place.exists()
        os.utime(lives / ".lock", (1, 1))
        other.ask("make", "name")
        assert lives.exists()


def test_code_that_is_damaged_on_the_host_is_sent_again(
    far: tuple[Connection, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it counted as the whole."""
    connection, place = far
    home = tmp_path / "home"
    home.mkdir()
    for name in ("a.py", "b.py"):
        (home / name).write_text(name)
    monkeypatch.chdir(home)
    code = Code.of(Script(path="m", is_module=True))
    code.send(connection)
    [kept] = (tmp_path / "cache" / "muster" / "code").iterdir()
    (kept / "0" / "a.py").unlink()
    for stray in (kept.with_name(".x-1.tar"), kept.with_name("old")):
        stray.touch()
        os.utime(stray, (1, 1))
    code.send(connection)
    assert (kept / "0" / "a.py").read_text() == (place / "code" / "0" / "a.py").read_text()
    assert list(kept.parent.iterdir()) == [kept]
    with pytest.raises(SetupError, match="not arrived as it was sent"):
        connection.ask("take_code", "0" * 32, 3, after=b"abc")
