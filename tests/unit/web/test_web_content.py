"""What the pages hold, of every kind of run: whole, damaged, or with texts that mean harm."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.old_runs.old_runs import unpack
from tests.hostile_texts import HOSTILE, orders_in
from tests.made_runs import hostile_sweep, hostile_training, made_sweep
from tests.tracked import add_lines, gang_folder

from muster.base.errors import MusterError, UsageError
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.monitor.files import csv_header
from muster.monitor.sample import COLUMNS
from muster.run.folder import RunFolder
from muster.run.session import hold
from muster.web.content import curves, kinds, overview, runs, task
from muster.web.content.index import PAGES, data_of
from muster.web.folder import Folder, Folders, id_of
from muster.web.query import Query
from muster.web.watch import RunPoll

OLD = Path(__file__).parents[2] / "fixtures/old_runs"
RUNS = sorted(OLD.glob("*/*.tar.xz"))


def kind(archive: Path) -> str:
    return archive.name.removesuffix(".tar.xz")


def opened(name: str, place: Path) -> Folder:
    [archive] = [path for path in RUNS if kind(path) == name]
    unpack(archive, place)
    return Folder(next(path.parent for path in sorted(place.rglob("run.json"))))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


@pytest.mark.parametrize("archive", RUNS, ids=kind)
def test_every_page_of_every_kind_is_json_or_a_sentence(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path)
    for path in sorted(tmp_path.rglob("run.json")):
        folder = Folder(path.parent)
        shown = set()
        for name, page in PAGES.items():
            try:
                json.dumps(page(folder, Query()), allow_nan=False)
                shown.add(name)
            except UsageError as error:
                assert str(error).endswith((".", "?")) or "\nHint: " in str(error)
        stored = folder.run.stored
        assert shown >= {"overview", "errors", "about", "curves"}
        assert ("training" in shown) == stored.is_gang
        assert ("map" in shown) == stored.is_map
        json.dumps(overview.head(folder), allow_nan=False)


#: A kind of run, a file of it, and the pages that can still be read when it holds nonsense.
DAMAGED = [
    ("sweep-failed", "events.jsonl", ("overview", "tasks", "errors", "about")),
    ("sweep-failed", "monitor.csv", ("overview", "errors")),
    ("sweep-failed", "status.json", ("overview", "tasks")),
    ("map-done", "errors.jsonl", ("overview", "map", "errors")),
    ("map-done", "events.jsonl", ("overview", "map", "about")),
    ("train-done", "metrics.jsonl", ("overview", "training", "curves")),
    ("train-done", "training_results.json", ("overview", "training", "about")),
    ("train-done", "checkpoints/best.json", ("training",)),
    ("train-done", "plan_error.json", ("about",)),
    ("train-done", "verify.json", ("about",)),
    ("agent-done", "metrics.jsonl", ("training", "overview")),
    ("run-failed", "logs/rank-1.error.json", ("training", "errors")),
    ("run-failed", "logs/phases.json", ("training",)),
    ("run-failed", "events.jsonl", ("overview", "training", "errors", "about")),
]  # fmt: skip
NONSENSE = {
    "empty": b"",
    "torn": b'{"event": "end", "stall": {"a": [1, 2',
    "another type": b'[1, {"event": 5, "lines": 7}]\n',
    "other fields": b'{"event": "start", "ranks": 5, "lines": [5, {}], "step": "x"}\n',
    "bytes": bytes(range(256)) * 40,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "file", "pages"), DAMAGED)
def test_a_damaged_file_costs_no_page_that_can_do_without_it(
    name: str, file: str, pages: tuple[str, ...], tmp_path: Path
) -> None:
    folder = opened(name, tmp_path)
    path = folder.path / file
    path.parent.mkdir(exist_ok=True)
    for content in NONSENSE.values():
        path.write_bytes(content)
        for page in pages:
            json.dumps(PAGES[page](folder, Query()), allow_nan=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sweep-failed", "map-done", "train-done", "run-failed"])
def test_a_folder_that_loses_its_files_is_told_in_sentences(name: str, tmp_path: Path) -> None:
    folder = opened(name, tmp_path)
    folders = Folders([folder.path.parent])
    for path in sorted(folder.path.iterdir(), key=lambda path: path.name == "run.json"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        for page in PAGES:
            try:
                json.dumps(data_of(folders, page, folder.id, Query()), allow_nan=False)
            except MusterError as error:
                assert "cannot be made" not in str(error), (path.name, page)


def test_hostile_texts_of_tasks_are_cleaned_and_cut(tmp_path: Path) -> None:
    run = hostile_sweep(tmp_path / "run")
    folder = Folder(run.path)
    folders = Folders([tmp_path])
    made = [
        overview.errors(folder, Query()),
        overview.about(folder, Query()),
        overview.content(folder, Query()),
        curves.compared(folders, Query([("run", id_of(run.path)), ("task", "1")])),
    ]
    assert len(made[0]["groups"]) == len(HOSTILE)
    for one in made:
        assert len(json.dumps(one, allow_nan=False)) < 100_000
        found = [order for text in texts(one) for order in orders_in(text.replace("\t", ""))]
        assert [order for order in found if order != "\n"] == []


def test_hostile_texts_of_ranks_are_cleaned_and_cut(tmp_path: Path) -> None:
    folder = hostile_training(tmp_path / "run")
    for page in ("overview", "training", "errors", "about"):
        one = PAGES[page](Folder(folder.path), Query())
        assert len(json.dumps(one, allow_nan=False)) < 300_000
        found = [order for text in texts(one) for order in orders_in(text.replace("\t", ""))]
        assert [order for order in found if order != "\n"] == [], page


def test_what_is_not_finite_is_a_gap_in_a_curve_and_a_word_in_a_table(tmp_path: Path) -> None:
    folder = gang_folder(tmp_path / "run")
    values = (0.5, float("nan"), float("inf"), 0.25)
    add_lines(folder, [{"kind": "train", "step": n, "loss": v} for n, v in enumerate(values)])
    [series] = PAGES["curves"](Folder(folder.path), Query.of(name="train/loss"))["series"]
    assert (series["y"], series["not_finite"]) == ([0.5, None, None, 0.25], 2)


def test_a_hundred_attempts_or_thousands_are_a_bounded_number_of_bars(tmp_path: Path) -> None:
    for name, num in (("few", 60), ("many", 6000)):
        run = made_sweep(tmp_path / name, num)
        with LedgerReader(run.ledger) as ledger:
            spans = ledger.work_spans(overview.MOST_BARS)
            rows = overview.slots(ledger, {}, 0.0)
        assert sum(span.num for span in spans) == num
        bars = [bar for row in rows for bar in row["bars"]]
        assert len(rows) == 8 and len(bars) <= overview.MOST_BARS
        assert {bar[2] for bar in bars} == {"done", "failed"}
        assert min(bar[0] for bar in bars) == min(span.begin_s for span in spans)
        assert max(bar[1] for bar in bars) == max(span.end_s for span in spans)
        if name == "few":
            assert all(bar[3] for bar in bars), "each bar leads to its task"


def test_a_task_that_runs_has_a_bar_that_ends_now(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 4)
    workers = [{"slot": "cpu:1", "state": "running", "task": "9", "elapsed_s": 5.0},
               {"slot": "cpu:99", "state": "idle", "task": "", "elapsed_s": None}]  # fmt: skip
    with LedgerReader(run.ledger) as ledger:
        rows = overview.slots(ledger, {"workers": workers}, 1000.0)
    [row] = [row for row in rows if row["label"] == "cpu:1"]
    assert row["bars"][-1] == [995.0, 1000.0, "running", ""]


def test_no_task_of_a_run_that_was_killed_runs_for_ever(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 4)
    worker = {"slot": "cpu:1", "state": "running", "task": "9", "elapsed_s": 5.0, "progress": ""}
    run.status_json.write_text(json.dumps({"num_running": 1, "workers": [worker]}))
    rows = overview.content(Folder(run.path), Query())["slots"]
    assert "running" not in [bar[2] for row in rows for bar in row["bars"]]


def test_a_task_shows_what_is_no_number_and_a_command_that_runs_nothing_else(
    tmp_path: Path,
) -> None:
    run = made_sweep(tmp_path / "$(touch stolen)", 1)
    with closing(Ledger(run.ledger)) as ledger:
        ledger.begin()
        value = canonical.encode({"loss": float("nan")})
        ledger._db.execute("UPDATE results SET value = ?", (value,))
        ledger.commit()
    found = task.content(Folder(run.path), Query.of(task="1"))
    assert found["result"]["loss"] == "nan"
    assert shlex.split(found["command"]) == ["muster", "logs", str(run.path), "1"]
    assert f"'{run.path}'" in found["command"]


def test_a_file_of_any_name_can_be_fetched(tmp_path: Path) -> None:
    place = tmp_path / "artifacts/ab"
    place.mkdir(parents=True)
    (place / "50 % of #1?.txt").touch()
    [file] = task._files(RunFolder(tmp_path), place, "/run/x/file/")
    assert file["href"] == "/run/x/file/artifacts/ab/50%20%25%20of%20%231%3F.txt"


def test_a_log_goes_on_where_it_was_whatever_bytes_are_in_it(tmp_path: Path) -> None:
    folder = gang_folder(tmp_path / "run")
    log = folder.rank_log(0)
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"one\n")
    look = RunPoll(Folder(folder.path))
    assert look._log("0") == []
    for at, data in ((4, b"\xff two\n"), (10, b"three\n")):
        with log.open("ab") as file:
            file.write(data)
        [told] = look._log("0")
        assert (told.data["offset"], told.data["end"]) == (at, at + len(data))


def test_causes_say_how_often_and_from_when_to_when(tmp_path: Path) -> None:
    found = overview.errors(Folder(made_sweep(tmp_path / "run", 400).path), Query())
    assert [(one["text"], one["count"], one["failed"]) for one in found["groups"]] == [
        ("KeyError: 'x'", 4, 4), ("ValueError: the loss is not finite", 4, 4),
    ]  # fmt: skip
    assert all(1_790_000_000 < one["first"] < one["last"] for one in found["groups"])
    assert all(len(key) == 12 for one in found["groups"] for key in one["tasks"])


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 1)
    record = json.loads(run.run_json.read_bytes())
    record["argv"] += ["--retries", "1", "--timeout=5m", "--gpus", "4", "--workers", "3"]
    record["options"] |= {"timeout_s": 300.0, "keep_going": True, "api_key": "secret-value"}
    record["options"] |= {"devices": "4", "cluster": {"num_workers": 3}}
    run.run_json.write_text(json.dumps(record))
    found = {one["name"]: one for one in overview.about(Folder(run.path), Query())["options"]}
    assert found["retries"]["origin"] == found["timeout_s"]["origin"] == "command line"
    assert found["devices"]["origin"] == "command line", "by an alias of the flag"
    assert found["cluster.num_workers"]["origin"] == "command line", "by a flag with another name"
    assert found["keep_going"]["origin"] == "call or recipe"
    assert found["per_gpu"]["origin"] == "default"
    assert "secret-value" not in json.dumps(found)


def test_tasks_and_runs_are_compared_and_what_differs_is_first(tmp_path: Path) -> None:
    one, two = (made_sweep(tmp_path / name, 20, num_curves=3) for name in ("one", "two"))
    folders = Folders([tmp_path])
    ids = [("run", id_of(run.path)) for run in (one, two)]

    found = curves.compared(folders, Query([ids[0], ("task", "1"), ("task", "2")]))
    assert [row["name"] for row in found["settings"] if row["differs"]] == ["opt"]
    assert found["settings"][0]["values"] == ["adam", "sgd"]
    assert found["metrics"] == ["loss", "score"]
    across = curves.compared(folders, Query([*ids, ("task", "1"), ("task", "3")]))
    assert [column["run"] for column in across["columns"]] == ["one", "two"]
    runs = curves.compared(folders, Query(ids))
    assert "run_dir" in [row["name"] for row in runs["settings"] if row["differs"]]
    assert curves.compared(folders, Query())["columns"] == []
    with pytest.raises(UsageError):
        curves.compared(folders, Query([*ids, ("task", "1"), ("task", "2"), ("task", "3")]))


def test_records_of_a_map_add_up(tmp_path: Path) -> None:
    found = kinds.of_map(opened("map-done", tmp_path), Query())
    [stage] = found["stages"]
    parts = ("out", "rejected", "dropped", "lost", "waiting")
    assert stage["in"] == sum(stage[name] for name in parts)
    assert sum(chunk["count"] for chunk in found["chunks"]) == len(found["chunks"])
    assert {chunk["state"] for chunk in found["chunks"]} == {"done"}
    assert sum(one["count"] for one in found["rejects"]) == stage["rejected"]


def test_a_map_shows_the_curves_of_its_progress(tmp_path: Path) -> None:
    folder = opened("map-done", tmp_path)
    assert kinds.of_map(folder, Query())["curves"] == []
    add_lines(folder.folder, [{"step": n, "_time": 5.0, "rows_per_s": 2.0} for n in (3, 9)])
    assert kinds.of_map(folder, Query())["curves"] == ["rows_per_s"]
    [one] = curves.content(folder, Query.of(name="rows_per_s"))["series"]
    assert (one["task"], one["x"], one["y"]) == ("", [3, 9], [2.0, 2.0])


@pytest.mark.parametrize(
    ("rejected", "is_written", "level", "text"),
    [(900, True, "bad", "Finished with failures: "), (0, False, "paused", "Unfinished: "),
     (0, True, "good", "Finished: ")],
)  # fmt: skip
def test_a_map_is_finished_as_its_report_says(
    rejected: int, is_written: bool, level: str, text: str, tmp_path: Path
) -> None:
    folder = opened("map-done", tmp_path)
    with closing(sqlite3.connect(folder.folder.ledger)) as ledger:
        changed = f"json_set(CAST(value AS TEXT), '$.rejected', {rejected})"
        ledger.execute(f"UPDATE results SET value = CAST({changed} AS BLOB)")
        ledger.commit()
    if not is_written:
        folder.folder.published_json.unlink()
    found = overview.head(folder)["verdict"]
    assert found["level"] == level
    assert found["text"].startswith(text) and "records" in found["text"]
    [row] = runs.content(Folders([folder.path]), Query())["runs"]
    assert (row["level"], row["verdict"]) == (found["level"], found["text"])


def test_a_map_that_runs_counts_records_and_not_chunks(tmp_path: Path) -> None:
    folder = opened("map-done", tmp_path)
    with hold(folder.folder):
        found = overview.head(folder)
        [row] = runs.content(Folders([folder.path]), Query())["runs"]
    [first, *_] = kinds.of_map(folder, Query())["stages"]
    assert found["verdict"]["text"].startswith("Still running: ")
    assert f"of {first['in']:,} records" in found["verdict"]["text"] == row["verdict"]
    assert found["counts"]["total"] == found["counts"]["done"] == first["in"]
    assert row["counts"] == found["counts"] and row["progress"] == 1.0


def test_what_has_ended_is_read_again_at_once(tmp_path: Path) -> None:
    """Nothing changes any more, so no page would ask again."""
    folder = Folder(made_sweep(tmp_path / "run", 1).path)

    def seen(stamp: int) -> int:
        return folder.remembered("name", stamp, lambda: stamp, 600.0)

    with hold(folder.folder):
        assert [seen(1), seen(2)] == [1, 1]
    assert seen(2) == 2


def test_the_bytes_of_all_runs_are_counted_once_somebody_has_asked(tmp_path: Path) -> None:
    for name in "abc":
        made_sweep(tmp_path / name, 1)
    folders = Folders([tmp_path])
    runs.content(folders, Query())
    deadline = time.monotonic() + 60
    while None in [folder._size[-1] for folder in folders.all()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_page_says_what_a_run_took(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 1)
    events = [
        {"event": "start", "time": "2026-01-01T00:00:00+00:00", "workers": ["cuda:0", "cuda:0/1"]},
        {"event": "end", "time": "2026-01-01T01:00:00+00:00"},
        {"event": "start", "time": "2026-01-02T00:00:00+00:00"},  # killed
        {"event": "start", "time": "2026-01-03T00:00:00+00:00", "workers": ["cuda:0+1", "cuda:2"]},
        {"event": "end", "time": "2026-01-03T00:30:00+00:00"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    folders = Folders([run.path])
    [row] = runs.content(folders, Query())["runs"]
    assert row["gpu_hours"] == pytest.approx(2.5) and row["devices"] == ["cuda:0+1", "cuda:2"]
    deadline = time.monotonic() + 60
    while (size := runs.content(folders, Query())["runs"][0]["bytes"]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert size >= run.ledger.stat().st_size + run.events.stat().st_size
    other = Folders([opened("train-done", tmp_path / "other").path])
    best = runs.content(other, Query())["runs"][0]["best"]
    assert best["name"] == "loss" and best["value"] > 0


def test_what_was_planned_and_verified_is_on_the_page_about_a_run(tmp_path: Path) -> None:
    folder = opened("train-done", tmp_path)
    folder.folder.plan_error_json.unlink(missing_ok=True)
    folder.folder.plan_json.write_text(
        json.dumps({"predictions": [{"num_devices": 2, "step": {"value": 0.5, "low": None}}, 3]})
    )
    folder.folder.verify_json.write_text(
        json.dumps([{"what": "gradients", "is_good": True, "token": "abc"}, "no finding"])
    )
    found = overview.about(folder, Query())
    assert found["plan"] == [{"devices": 2, "name": "step.value", "predicted": 0.5}]
    [finding] = found["doctor"]
    assert finding["what"] == "gradients" and finding["is_good"] is True
    assert finding["token"] != "abc"


def test_the_page_about_a_run_says_which_code_has_changed_since(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 1)
    record = json.loads(run.run_json.read_bytes())
    for name in ("same.py", "other.py"):
        (tmp_path / name).write_text("x = 1")
    digest = sha256(b"x = 1").hexdigest()
    names = ("same.py", "other.py", "gone.py", "run/../same.py", str(tmp_path / "same.py"), "a\0b")
    record |= {"cwd": str(tmp_path), "code": dict.fromkeys(names, digest) | {"torch": ""}}
    run.run_json.write_text(json.dumps(record))
    (tmp_path / "other.py").write_text("x = 2")
    code = overview.about(Folder(run.path), Query())["code"]
    assert [one["since"] for one in code] == ["unchanged", "changed since", "", "", "unchanged", ""]


def test_a_search_that_has_not_begun_has_its_page(tmp_path: Path) -> None:
    run = made_sweep(tmp_path / "run", 1)
    record = json.loads(run.run_json.read_bytes())
    record["spec"]["search"] = {"objectives": []}
    run.run_json.write_text(json.dumps(record))
    folder = Folder(run.path)
    assert overview.head(folder)["kind"] == "search"
    assert "search" in overview.head(folder)["tabs"]
    assert PAGES["search"](folder, Query())["history"] == []


def test_a_training_shows_its_ranks_figures_checkpoints_and_evaluations(tmp_path: Path) -> None:
    found = kinds.of_training(opened("train-done", tmp_path), Query())
    assert found["ranks"][0]["rank"] == 0 and found["ranks"][0]["state"] == "done"
    assert all(seconds >= 0 for seconds in found["ranks"][0]["phases"].values())
    assert found["curves"][0] == "train/loss"
    steps = [one["step"] for one in found["checkpoints"]]
    assert steps == sorted(steps) and sum(one["best"] for one in found["checkpoints"]) <= 1
    assert found["evaluations"] and "loss" in found["evaluations"][0]
    assert {"best loss", "loss at the end"} <= {one["name"] for one in found["figures"]}


def test_failures_are_counted_over_the_time_of_the_run(tmp_path: Path) -> None:
    folder = opened("sweep-failed", tmp_path)
    found = overview.errors(folder, Query())
    with closing(sqlite3.connect(folder.folder.ledger)) as ledger:
        rows = ledger.execute("SELECT started_s, seconds FROM attempts").fetchall()
    assert found["since"] == min(begin for begin, _ in rows)
    assert found["until"] == max(begin + took for begin, took in rows)
    for group in found["groups"]:
        assert sum(group["times"]) == group["count"], "each attempt that failed, once"
        wide = (found["until"] - found["since"]) / len(group["times"])
        [first, *_] = [at for at, num in enumerate(group["times"]) if num]
        assert abs(found["since"] + wide * (first + 0.5) - group["first"]) <= wide * 0.51


@pytest.mark.parametrize(
    ("slot", "every_s", "seconds", "hours"),
    [
        ("cuda:0+1", 5, 240.0, 2 * 120 * 300 / 3600),
        ("cuda:1", 5, 120.0, 120 * 300 / 3600),
        ("cuda:1", 600, 120.0, None),  # too long without a sample
        ("cuda:1/2", 5, None, None),  # what it had to itself is not known
        ("cpu:0", 5, None, None),
    ],
)
def test_a_task_says_how_long_it_had_its_gpus_and_their_energy(
    slot: str, every_s: int, seconds: float | None, hours: float | None, tmp_path: Path
) -> None:
    run = made_sweep(tmp_path / "run", 3)
    with closing(sqlite3.connect(run.ledger)) as ledger, ledger:
        ledger.execute("UPDATE workers SET label = ?, host = 'here'", (slot,))
        ledger.execute("UPDATE attempts SET started_s = 1e9 + 7, seconds = 120.0")
    lines = [*csv_header().decode().splitlines()]
    for after in range(0, 1000, every_s):
        when = datetime.fromtimestamp(1e9 + after, UTC).isoformat()
        for gpu in ("gpu0", "gpu1"):
            row = {"time_utc": when, "elapsed_s": after, "host": "here", "device": gpu,
                   "power_w": 300.0}  # fmt: skip
            lines.append(",".join(str(row.get(name, "")) for name in COLUMNS))
    run.monitor_csv().write_text("\n".join(lines) + "\n")
    found = PAGES["task"](Folder(run.path), Query.of(task=1))
    assert found["gpu_seconds"] == seconds
    assert found["energy_wh"] == (None if hours is None else pytest.approx(hours))


def test_a_training_shows_what_each_rank_was_at(tmp_path: Path) -> None:
    folder = opened("train-done", tmp_path)
    seen = {"0": {"forward": 1.5, "the rest": 9}, "1": {"communication": 3.0, "forward": 0.5}}
    damaged = {"2": [1], "x": {"forward": 1.0}, "3": {"forward": "long"}}
    folder.folder.rank_phases.write_text(json.dumps(seen | damaged))
    ranks = kinds.of_training(folder, Query())["ranks"]
    assert [one["phases"] for one in ranks] == [seen["0"], seen["1"]][: len(ranks)]
    assert list(ranks[0]["phases"]) == ["forward", "the rest"], "the rest is last"
    folder.folder.rank_phases.write_text("[")
    assert "the rest" in kinds.of_training(folder, Query())["ranks"][0]["phases"], "as before"


def test_a_rank_that_failed_says_why(tmp_path: Path) -> None:
    found = kinds.of_training(opened("run-failed", tmp_path), Query())
    assert [one["state"] for one in found["ranks"]].count("failed") >= 1
    assert any(one["error"] for one in found["ranks"])
    groups = overview.errors(opened("run-failed", tmp_path / "again"), Query())["groups"]
    assert [one["tasks"] for one in groups if one["unit"] == "ranks"] == [[]], "ranks are no tasks"
