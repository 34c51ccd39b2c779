"""What a run folder accepts a second time: more settings, changed code, and beginning anew.

The runs are made by the ledger itself, without a process, as a coordinator makes them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import MusterCli
from tests.examples import examples

from muster.api.slurm.array import make_ready, part_of, plan_array, send
from muster.api.start.earlier_work import move_aside
from muster.api.start.options import SweepOptions
from muster.api.sweeps.plans import renewal
from muster.api.sweeps.workload import Workload, of_command, of_target_text
from muster.base.code import code_id
from muster.base.errors import PlanMismatchError, SetupError, UsageError
from muster.base.settings import read_settings
from muster.farm.canonical import decode
from muster.farm.export import export
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.read import LedgerReader
from muster.farm.space import Space
from muster.farm.table import batches
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec, TaskState
from muster.run.folder import RunFolder
from muster.run.record import read_run, write_run
from muster.run.session import hold, open_run

SLOT = SlotSpec(slot_id=0, label="cpu:0", devices=())
TARGET = "import helper\ndef f(x: int = 0, y: int = 0, z: int = 0, seed: int = 0): return {}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(TARGET)
    (tmp_path / "helper.py").write_text("k = 1\n")
    return tmp_path


def workload(**space: Any) -> Workload:
    return of_target_text("t.py:f", Space.from_values(**space))


def workload_space(space: dict[str, Any]) -> list[dict[str, Any]]:
    return list(Space.from_values(**space))


def run(
    work: Workload, folder: Path, *, most: int | None = None, **options: Any
) -> list[dict[str, Any]]:
    """What a coordinator does with a plan; returns the parameters of what it executes."""
    place = RunFolder(folder)
    how = SweepOptions(run_dir=folder, **options)
    with open_run(place, renewal(work, how, place, ("muster", "sweep"))):
        pass
    ledger = open_ledger(place, read_settings())
    ledger.begin()
    numbers = {spec.name: ledger.target_id(spec.name) for spec in work.targets}
    ledger.add_tasks(work.feed(numbers))
    ledger.set_meta("enqueued", work.plan_id)
    worker = ledger.next_worker_id()
    ledger.worker_started(worker, SLOT, "host", "log", code_id(work.code))
    tasks = ledger.claim(10_000)[:most]
    done = [
        AttemptRecord(t.task_id, t.token, worker,
                      Finished(t.task_id, t.token, Outcome.OK, 1.0, 1.0, 0, 0, 1.0))
        for t in tasks
    ]  # fmt: skip
    ledger.record_done(done, [(b'{"m":1}', None)] * len(done))
    ledger.recover()
    ledger.commit()
    ledger.close()
    return [decode(task.payload) for task in tasks]


def state(folder: Path) -> tuple[bytes, Mapping[TaskState, int]]:
    with LedgerReader(folder / "ledger.sqlite") as ledger:
        return (folder / "run.json").read_bytes(), ledger.counts()


# ---------------------------------------------------------------------- more settings

_VALUES = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
_ROWS = st.lists(
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 1), min_size=1),
    min_size=1, max_size=4, unique_by=lambda row: json.dumps(row, sort_keys=True),
)  # fmt: skip
_SPACES = st.one_of(
    st.fixed_dictionaries({"grid": st.dictionaries(st.sampled_from("xyz"), _VALUES, min_size=1)}),
    st.fixed_dictionaries({"rows": _ROWS}),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4, unique=True)
    .map(lambda pairs: {"zipped": {"x": [a for a, _ in pairs], "y": [b for _, b in pairs]}}),
)  # fmt: skip
_SEEDS = st.none() | st.integers(1, 3)


def _wider(space: dict[str, Any], extra: list[int]) -> dict[str, Any]:
    """More values at the end or in front: a superset, whatever the space is."""
    if "grid" in space:
        return {"grid": {n: list(dict.fromkeys([*extra, *v])) for n, v in space["grid"].items()}}
    if "rows" in space:
        more = [{"x": 10 + value} for value in extra]
        return {"rows": [*more, *space["rows"]]}
    pairs = list(zip(*space["zipped"].values(), strict=True))
    pairs += [pair for pair in ((9, value) for value in extra) if pair not in pairs]
    names = list(space["zipped"])
    return {"zipped": dict(zip(names, map(list, zip(*pairs, strict=True)), strict=True))}


def _settings(space: dict[str, Any]) -> set[str]:
    return {json.dumps(s, sort_keys=True) for s in Space.from_values(**space)}


@examples(50)
@given(old=_SPACES, seeds=_SEEDS, more_seeds=_SEEDS, extra=_VALUES, other=_SPACES, data=st.data())
def test_a_superset_runs_exactly_what_is_new_and_anything_else_is_refused(
    old: dict[str, Any], seeds: int | None, more_seeds: int | None, extra: list[int],
    other: dict[str, Any], data: st.DataObject,
) -> None:  # fmt: skip
    new = data.draw(st.sampled_from([other, _wider(old, extra)]), label="new")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "t.py").write_text(TARGET.partition("\n")[2])
        folder, target = Path(place) / "r", f"{place}/t.py:f"

        def work(space: dict[str, Any], count: int | None) -> Workload:
            return of_target_text(target, Space.from_values(**space, seeds=count))

        first = run(work(old, seeds), folder)
        before = state(folder)
        if not _settings(old) <= _settings(new):
            with pytest.raises(PlanMismatchError, match="another plan"):
                run(work(new, more_seeds), folder)
            assert state(folder) == before
            return
        executed = run(work(new, more_seeds), folder)
        wanted = Space.from_values(**new, seeds=more_seeds)
        assert executed == [params for params in wanted if params not in first]


def test_a_command_and_a_list_file_grow_as_well(here: Path) -> None:
    def plan(*rows: str) -> Workload:
        (here / "list.csv").write_text("x\n" + "\n".join(rows) + "\n")
        space = Space.from_texts(list_file=here / "list.csv", grid=("y=a,b",))
        return of_command(["echo", "{x}", "{y}"], space, shell=False)

    assert len(run(plan("1", "1e-3"), here / "r")) == 4
    assert [p["x"] for p in run(plan("5", "1e-3", "1"), here / "r")] == ["5", "5"]
    with pytest.raises(PlanMismatchError, match=r"list\.csv"):
        run(plan("5", "1e-3"), here / "r")


def test_a_seed_that_is_a_value_of_the_grid_cannot_be_taken_away(here: Path) -> None:
    run(workload(grid={"seed": [1, 2]}), here / "r")
    with pytest.raises(PlanMismatchError):
        run(workload(grid={"seed": [3]}), here / "r")
    assert run(workload(grid={"seed": [1, 2, 3]}), here / "r") == [{"seed": 3}]


def _end_before_all_is_listed(folder: Path, num_listed: int) -> None:
    """As a kill leaves it: the first tasks are in the ledger, and nothing says that it has all."""
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        ledger.execute("DELETE FROM meta WHERE name = 'enqueued'")
        ledger.execute("DELETE FROM results WHERE task_id > ?", (num_listed,))
        ledger.execute("DELETE FROM tasks WHERE task_id > ?", (num_listed,))
    ledger.close()


@pytest.mark.parametrize(
    ("old", "wider", "other"),
    [
        ({"grid": {"x": [1, 2, 3]}}, {"grid": {"x": [4, 3, 2, 1]}}, {"grid": {"x": [1, 2, 4]}}),
        (
            {"grid": {"x": range(400)}, "seeds": 2},
            {"grid": {"x": range(-1, 401)}, "seeds": 2},
            {"grid": {"x": [*range(399), 500, 501]}, "seeds": 2},
        ),
        (
            {"zipped": {"x": [1, 2, 3], "y": [1, 2, 3]}},
            {"zipped": {"y": [0, 1, 2, 3], "x": [0, 1, 2, 3]}},
            {"zipped": {"x": [1, 2, 3], "y": [1, 2, 4]}},
        ),
        (
            {"rows": [{"x": 1}, {"x": 2}], "grid": {"y": [1]}},
            {"rows": [{"x": 1}, {"x": 2}], "grid": {"y": [1, 2]}},
            {"rows": [{"x": 1}, {"x": 3}], "grid": {"y": [1]}},
        ),
        (
            {"rows": [{"x": 1}, {"x": 2}], "seeds": 2},
            {"rows": [{"x": 1}, {"x": 2}, {"x": 3}], "seeds": 2},
            {"rows": [{"x": 1}, {"x": 3}, {"x": 4}], "seeds": 2},
        ),
    ],
)
@pytest.mark.parametrize("num_listed", [0, 1])
def test_a_run_that_was_killed_before_it_was_listed_grows(
    here: Path, old: dict[str, Any], wider: dict[str, Any], other: dict[str, Any], num_listed: int
) -> None:
    first = run(workload(**old), here / "r")[:num_listed]
    _end_before_all_is_listed(here / "r", num_listed)
    with pytest.raises(PlanMismatchError, match="another plan"):
        run(workload(**other), here / "r")  # it lacks settings that were never listed
    executed = run(workload(**wider), here / "r")
    assert executed == [p for p in workload_space(wider) if p not in first]
    with LedgerReader(here / "r/ledger.sqlite") as ledger:
        assert ledger.counts()[TaskState.DONE] == len(workload_space(wider))


def test_a_run_that_was_killed_before_it_had_a_ledger_grows(here: Path) -> None:
    run(workload(grid={"x": [1]}), here / "r")
    (here / "r/ledger.sqlite").unlink()
    assert len(run(workload(grid={"x": [1, 2]}), here / "r")) == 2


def test_parts_of_a_plan_do_not_grow(here: Path) -> None:
    run(part_of(workload(grid={"x": [1, 2, 3]}), "0/2"), here / "r")
    with pytest.raises(PlanMismatchError):
        run(part_of(workload(grid={"x": [1, 2, 3, 4]}), "0/2"), here / "r")


# ---------------------------------------------------------------------- changed code


def test_a_changed_helper_is_refused_by_name_until_it_is_allowed(here: Path) -> None:
    run(workload(grid={"x": [1, 2]}, seeds=1), here / "r", most=1)
    (here / "helper.py").write_text("k = 2\n")
    with pytest.raises(PlanMismatchError, match=r"helper\.py") as error:
        run(workload(grid={"x": [1, 2]}, seeds=1), here / "r")
    assert "t.py" not in str(error.value)
    assert "--allow-changed-code" in str(error.value)
    assert "--restart" in str(error.value)
    run(workload(grid={"x": [1, 2]}, seeds=1), here / "r", allow_changed_code=True)
    schema, stream = batches(RunFolder(here / "r"))
    codes = [row["code"] for batch in stream for row in batch.to_pylist()]
    assert len(set(codes)) == 2 and all(len(code) == 8 for code in codes)
    assert schema.names[-1] == "code"
    # What was accepted once is not accepted for good, also not by `muster resume`.
    assert read_run(RunFolder(here / "r")).options["allow_changed_code"] is False
    (here / "helper.py").write_text("k = 1\n")
    with pytest.raises(PlanMismatchError):
        run(workload(grid={"x": [1, 2]}, seeds=1), here / "r")


def test_a_run_without_results_takes_the_new_code(here: Path) -> None:
    run(workload(grid={"x": [1, 2]}), here / "r", most=0)
    (here / "t.py").write_text(TARGET + "# edited\n")
    run(workload(grid={"x": [1, 2]}), here / "r")


def test_a_table_of_one_code_has_no_column_for_it(here: Path) -> None:
    run(workload(grid={"x": [1]}), here / "r")
    schema, _ = batches(RunFolder(here / "r"))
    assert "code" not in schema.names
    export(RunFolder(here / "r"), here / "a.jsonl")
    assert "code" not in json.loads((here / "a.jsonl").read_text())


def test_a_parameter_called_code_keeps_its_name(here: Path) -> None:
    (here / "t.py").write_text("def f(code: str): return {}\n")
    run(workload(grid={"code": ["a", "b"]}), here / "r", most=1)
    (here / "t.py").write_text("def f(code: str): return {'m': 1}\n")
    run(workload(grid={"code": ["a", "b"]}), here / "r", allow_changed_code=True)
    schema, _ = batches(RunFolder(here / "r"))
    assert {"code", "system_code"} <= set(schema.names)
    export(RunFolder(here / "r"), here / "a.jsonl")
    lines = [json.loads(line) for line in (here / "a.jsonl").read_text().splitlines()]
    assert [line["code"] for line in lines] == ["a", "b"]
    assert len({line["system_code"] for line in lines}) == 2


@pytest.mark.parametrize("line", ["nice -19 ./train.sh", "perl -0777 ./train.pl", "python - 1"])
def test_a_commands_name_stays_the_same(line: str) -> None:
    """It is part of the run folder's: an interrupted run would not be found again."""
    command = [*line.split(), "{x}"]
    found = of_command(command, Space.from_values(grid={"x": [1]}), shell=True)
    assert found.name == command[0]


def test_a_changed_script_of_a_command_is_refused(here: Path) -> None:
    (here / "c.py").write_text("import helper\n")
    work: Callable[[], Workload] = lambda: of_command(  # noqa: E731
        ["python", "c.py", "{x}"], Space.from_values(grid={"x": [1]}), shell=False
    )
    run(work(), here / "r")
    (here / "helper.py").write_text("k = 2\n")
    with pytest.raises(PlanMismatchError, match=r"helper\.py"):
        run(work(), here / "r")


def test_a_moved_project_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "one").mkdir()
    for name in ("t.py", "helper.py"):
        (here / name).rename(here / "one" / name)
    monkeypatch.chdir(here / "one")
    run(workload(grid={"x": [1, 2]}), here / "one/r", most=1)
    monkeypatch.chdir(here)
    (here / "one").rename(here / "two")
    monkeypatch.chdir(here / "two")
    assert len(run(workload(grid={"x": [1, 2]}), here / "two/r")) == 1


def test_a_folder_of_an_older_muster_goes_on_and_is_checked_by_its_own_file(here: Path) -> None:
    import hashlib
    from dataclasses import replace

    run(workload(grid={"x": [1, 2]}), here / "r", most=1)
    folder = RunFolder(here / "r")
    digest = hashlib.sha256((here / "t.py").read_bytes()).hexdigest()
    write_run(folder, replace(read_run(folder), code={"t.py:f": digest}))
    with sqlite3.connect(folder.ledger) as ledger:
        ledger.execute("ALTER TABLE workers DROP COLUMN code")
    ledger.close()
    assert "code" not in batches(folder)[0].names  # looked at without being changed
    assert len(run(workload(grid={"x": [1, 2]}), here / "r")) == 1
    write_run(folder, replace(read_run(folder), code={"t.py:f": "0" * 64}))
    with pytest.raises(PlanMismatchError):
        run(workload(grid={"x": [1, 2]}), here / "r")


def test_elements_of_an_array_have_the_code_that_it_was_sent_with(here: Path) -> None:
    options = SweepOptions(run_dir=here / "r", executor="slurm")
    work = workload(grid={"x": [1, 2, 3, 4]})
    make_ready(plan_array(work, options, 2, None), work, options, [])
    element = here / "r/elements/0"
    assert len(run(part_of(workload(grid={"x": [1, 2, 3, 4]}), "0/2"), element, most=1)) == 1
    (here / "helper.py").write_text("k = 2\n")
    for number in (0, 1):  # one that has begun, and one that waited in the queue meanwhile
        part = part_of(workload(grid={"x": [1, 2, 3, 4]}), f"{number}/2")
        with pytest.raises(PlanMismatchError, match=r"helper\.py"):
            run(part, here / f"r/elements/{number}")
    work = workload(grid={"x": [1, 2, 3, 4]})
    with pytest.raises(PlanMismatchError, match=r"helper\.py"):  # nothing is collected yet
        make_ready(plan_array(work, options, 2, None), work, options, [])
    allowed = SweepOptions(run_dir=here / "r", executor="slurm", allow_changed_code=True)
    make_ready(plan_array(work, allowed, 2, None), work, allowed, [])
    assert len(run(part_of(work, "0/2"), element)) == 1
    grown = workload(grid={"x": [1, 2, 3, 4, 5]})
    with pytest.raises(PlanMismatchError):
        make_ready(plan_array(grown, options, 2, None), grown, options, [])


# ---------------------------------------------------------------------- beginning anew


def test_a_refused_growth_of_an_array_adds_no_task(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed in the ledger: ``collect`` waited for tasks that no element had."""
    sbatch = here / "bin" / "sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    options = SweepOptions(run_dir=here / "run")

    def sent(answer: str, seeds: int) -> None:
        sbatch.write_text(f"#!/bin/sh\n{answer}\n")
        sbatch.chmod(0o755)
        work = workload(grid={"x": [1, 2]}, seeds=seeds)
        send(plan_array(work, options, seeds, 0), work, options, [])

    def listed() -> tuple[int, list[object]]:
        with LedgerReader(here / "run" / "ledger.sqlite") as ledger:
            count = sum(ledger.counts().values())
        database = sqlite3.connect(here / "run" / "ledger.sqlite")
        try:
            return count, database.execute("SELECT * FROM meta ORDER BY name").fetchall()
        finally:
            database.close()

    sent("echo 7", 2)
    before = listed()
    assert before[0] == 4
    with pytest.raises(SetupError, match="has refused the job"):
        sent("echo 'invalid partition specified: gpu' >&2; exit 1", 3)
    assert listed() == before
    sent("echo 8", 3)
    assert listed()[0] == 6


def test_restart_keeps_the_old_run_under_another_name(here: Path) -> None:
    run(workload(grid={"x": [1, 2]}), here / "r")
    before = state(here / "r")
    aside = move_aside(RunFolder(here / "r"), "sweep")
    assert aside is not None and aside.name.startswith("r.before-")
    assert not (here / "r").exists()
    assert state(aside) == before
    assert len(run(workload(grid={"x": [7]}), here / "r")) == 1
    again = move_aside(RunFolder(here / "r"), "sweep")
    assert again is not None and again != aside
    assert state(aside) == before


def test_restart_of_nothing_is_an_ordinary_start(here: Path) -> None:
    assert move_aside(RunFolder(here / "r"), "sweep") is None
    RunFolder(here / "r").create()
    (here / "r/notes.txt").write_text("mine")
    assert move_aside(RunFolder(here / "r"), "sweep") is None
    assert (here / "r/notes.txt").exists()


def test_restart_leaves_a_run_alone_that_is_at_work(here: Path) -> None:
    run(workload(grid={"x": [1]}), here / "r")
    with hold(RunFolder(here / "r")), pytest.raises(SetupError, match=str(os.getpid())):
        move_aside(RunFolder(here / "r"), "sweep")
    (here / "r/elements/3").mkdir(parents=True)
    with hold(RunFolder(here / "r/elements/3")), pytest.raises(SetupError, match="element 3"):
        move_aside(RunFolder(here / "r"), "sweep")
    assert (here / "r/run.json").exists()
    assert not list(here.glob("r.before-*"))


def test_restart_leaves_a_run_of_another_kind_alone(here: Path) -> None:
    run(workload(grid={"x": [1]}), here / "r")
    with pytest.raises(PlanMismatchError, match="a sweep, not of a map"):
        move_aside(RunFolder(here / "r"), "map")


def test_restart_from_inside_the_folder_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workload(grid={"x": [1]}), here / "r")
    monkeypatch.chdir(here / "r")
    with pytest.raises(UsageError, match="you are in it"):
        move_aside(RunFolder(Path()), "sweep")


def test_restart_of_a_linked_folder_stays_on_its_disk(here: Path) -> None:
    run(workload(grid={"x": [1]}), here / "disk/data")
    (here / "r").symlink_to(here / "disk/data")
    aside = move_aside(RunFolder(here / "r"), "sweep")
    assert aside is not None and aside.parent == here / "disk"
    run(workload(grid={"x": [1, 2]}), here / "r")
    assert (here / "disk/data/run.json").exists()


def test_the_command_of_the_last_start_is_read_where_it_was_typed(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    """The same command from two folders: its relative words mean the second one then."""
    words = ["--grid", "x=1,2", "--on", "inline", "--run-dir", str(tmp_path / "r")]
    command = ["--", "python", "prog.py", "{x}"]
    for name, code in (("one", 3), ("two", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prog.py").write_text(f"import sys\nsys.exit({code})\n")
        muster_main("sweep", *words, *command, folder=tmp_path / name)
    record = read_run(RunFolder(tmp_path / "r"))
    assert Path(record.cwd) == tmp_path / "two"
    assert "prog.py" in record.argv


def test_the_list_begins_with_what_worked_last(tmp_path: Path, muster_main: MusterCli) -> None:
    words = ["sweep", "--grid", "x=1", "--on", "inline", "--run-dir"]
    for name in ("one", "two", "one"):
        muster_main(*words, f"runs/{name}", "--", "false", "{x}")
        time.sleep(0.02)
    listed = json.loads(muster_main("list", "--json").stdout)
    assert [run["name"] for run in listed] == ["one", "two"]
