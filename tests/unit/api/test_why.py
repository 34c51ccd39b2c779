"""``muster why``: the state, the cause and what to try, of every kind of run in every state.

The folders are those of an older version; what they lack is written into them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.conftest import MusterCli
from tests.fixtures.old_runs.old_runs import unpack
from tests.tracked import gang_folder

from muster.api.look.listing import find_run
from muster.api.look.why import alerts, why
from muster.api.report.make import write_report
from muster.api.trackers.guard import track
from muster.base.errors import SetupError, TargetError
from muster.devices.tickets import Note
from muster.farm.task import TaskState
from muster.run import session
from muster.run.folder import RunFolder
from muster.run.session import hold

OLD = Path(__file__).parents[2] / "fixtures/old_runs/0.1.0"
#: A search stands as a sweep does, and an agent as a training.
KINDS = (
    "sweep", "map", "train", "run",
    pytest.param("search", marks=pytest.mark.thorough),
    pytest.param("agent", marks=pytest.mark.thorough),
)  # fmt: skip
GANGS = ("train", "agent", "run")


def folder_of(kind: str, state: str, place: Path) -> RunFolder:
    """A run of this kind, from the archive that comes nearest."""
    name = f"{'sweep' if kind == 'search' else kind}-{state}"
    unpack(OLD / f"{name}.tar.xz", place)
    folder = RunFolder(place / "runs" / name)
    if kind == "search":
        record = json.loads(folder.run_json.read_bytes())
        record["spec"]["search"] = {"sampler": "random"}
        folder.run_json.write_text(json.dumps(record))
    return folder


def lines_of(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


def write(folder: RunFolder, *lines: dict[str, object]) -> None:
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ended(folder: RunFolder, **fields: object) -> RunFolder:
    """The run of ranks with another end, and what it had come to taken away."""
    start, *_ = lines_of(folder)
    write(folder, start, {"event": "end", "node": 0, **fields})
    folder.training_results.unlink(missing_ok=True)
    return folder


def done(kind: str, place: Path) -> RunFolder:
    return folder_of(kind, "done", place)


def failed(kind: str, place: Path) -> RunFolder:
    if kind in ("sweep", "search", "run"):
        return folder_of(kind, "failed", place)
    if kind == "map":
        folder = folder_of(kind, "done", place)
        reject = {"id": "words.jsonl:2", "stage": "upper", "reason": "KeyError: 'text'"}
        folder.errors_jsonl.write_text(json.dumps(reject) + "\n")
        return folder
    folder = ended(
        folder_of(kind, "done", place), exit_code=1,
        report=["rank 0 of 1 failed: ValueError: the loss is nan", "log: rank-0.log"],
    )  # fmt: skip
    error = {"type": "ValueError", "message": "the loss is nan", "frames": ["  step.py"],
             "time_s": 1.0}  # fmt: skip
    folder.rank_error(0).write_text(json.dumps(error))
    return folder


def stalled(kind: str, place: Path) -> RunFolder:
    """A gang was ended by the watchdog; of tasks, one took longer than it may."""
    if kind in GANGS:
        report = ["stalled: rank 1 has said nothing for 60 s", "stacks: logs/rank-*.stack"]
        return ended(folder_of(kind, "done", place), exit_code=1, stall=report[0][9:],
                     report=report)  # fmt: skip
    folder = folder_of(kind, "stopped", place)
    note = {"event": "waiting", "text": "No GPU is free. Nothing more begins until one has."}
    write(folder, *lines_of(folder)[:2], note)
    return folder


def killed(kind: str, place: Path) -> RunFolder:
    folder = folder_of(kind, "done" if kind == "run" else "stopped", place)
    write(folder, *(line for line in lines_of(folder) if line["event"] in ("start", "enqueued")))
    return folder


def paused(kind: str, place: Path) -> RunFolder:
    """The circuit breaker of tasks; ranks save and go, asked by a cluster."""
    if kind in GANGS:
        return ended(folder_of(kind, "done", place), exit_code=75, stopped_by="SIGUSR1")
    folder = folder_of(kind, "stopped", place)
    text = "the first 3 tasks that ended all failed in the same way: ValueError"
    *before, end = (line for line in lines_of(folder) if line["event"] != "wish")
    write(folder, *before, {"event": "paused", "text": text}, end)
    return folder


def cancelled(kind: str, place: Path) -> RunFolder:
    if kind in GANGS:
        return ended(folder_of(kind, "done", place), exit_code=130, stopped_by="cancel")
    if kind == "map":
        return folder_of(kind, "stopped", place)
    return folder_of(kind, "cancelled", place)


def never_started(kind: str, place: Path) -> RunFolder:
    folder = folder_of(kind, "not-begun", place) if kind in ("sweep", "search") else (
        folder_of(kind, "done", place)
    )  # fmt: skip
    for path in folder.path.iterdir():
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def unreadable(kind: str, place: Path) -> RunFolder:
    folder = folder_of(kind, "done", place)
    folder.run_json.write_text("{")
    return folder


Make = Callable[[str, Path], RunFolder]
#: What was done to it → its state, a part of the cause, and a part of what to try, for tasks and
#: for ranks.
TASKS: dict[Make, tuple[str, str, str]] = {
    done: ("done", "", "muster report {run}"),
    failed: ("failed", "ValueError", "muster retry {run}"),
    stalled: ("stopped", "No GPU is free", "muster resume {run}"),
    killed: ("stopped", "Its process was killed", "muster resume {run}"),
    paused: ("stopped", "all failed in the same way", "muster resume {run}"),
    cancelled: ("cancelled", "cancelled", "muster retry {run} --cancelled"),
    never_started: ("not begun", "It has not begun", "muster resume {run}"),
    unreadable: ("unreadable", "run.json", "copy"),
}
RANKS: dict[Make, tuple[str, str, str]] = {
    done: ("done", "", "muster report {run}"),
    failed: ("failed", "ValueError: ", "muster logs {run}"),
    stalled: ("failed", "rank 1 has said nothing for 60 s", "{run}/logs/rank-*.stack"),
    killed: ("stopped", "Its process was killed", "muster resume {run}"),
    paused: ("saved", "the end of its job (SIGUSR1).", "muster resume {run}"),
    cancelled: ("stopped", "It was ended by `muster cancel`.", "muster resume {run}"),
    never_started: ("not begun", "It has not begun", "muster resume {run}"),
    unreadable: ("unreadable", "run.json", "copy"),
}
#: Where a kind differs from the others.
OTHERWISE: dict[tuple[str, Make], tuple[str, str, str]] = {
    ("map", failed): ("done", "KeyError: 'text' in the stage upper", "errors.jsonl"),
    ("map", cancelled): ("stopped", "asked to end", "muster resume {run}"),
    ("agent", paused): ("saved", "the end of its job (SIGUSR1).", "muster resume {run}"),
    ("run", paused): ("stopped", "the end of its job (SIGUSR1).", "muster run"),
    ("run", killed): ("stopped", "Its process was killed", "muster run"),
    ("run", cancelled): ("stopped", "It was ended by `muster cancel`.", "muster run"),
    ("run", never_started): ("not begun", "It has not begun", "muster run"),
}


@pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_says_why(kind: str, make: Make, tmp_path: Path) -> None:
    folder = make(kind, tmp_path)
    of_kind = RANKS if kind in GANGS else TASKS
    state, cause, advice = OTHERWISE.get((kind, make), of_kind[make])
    found = why(find_run(str(folder.path)))
    assert found.state == state
    assert found.kind == ("" if make is unreadable else kind)
    said = [found.sentence, *found.reasons, *(one.text for one in found.causes)]
    assert any(cause in text for text in said), said
    assert any(advice.format(run=folder.path) in text for text in found.tries), found.tries
    assert make is not done or not found.reasons


def test_a_task_says_why_it_failed(tmp_path: Path, muster_main: MusterCli) -> None:
    folder = folder_of("sweep", "failed", tmp_path)
    (group,) = find_run(str(folder.path)).failures()
    number = group.named[0].split()[0]
    done = muster_main("why", str(folder.path), number)
    assert done.returncode == 0, done.stderr
    assert f"task {number}" in done.stdout.splitlines()[0] and "failed" in done.stdout
    assert group.message.splitlines()[0] in done.stdout
    assert f"muster logs {folder.path} {number}" in done.stdout
    told = json.loads(muster_main("why", str(folder.path), number, "--json").stdout)
    assert told["task"] == number and told["state"] == "failed" and told["tries"]
    other = muster_main("why", str(folder.path), "99")
    assert other.returncode == 2 and "There is no task '99'" in other.stderr


def test_a_task_that_failed_twice_stands_for_itself(tmp_path: Path, muster_main: MusterCli) -> None:
    """`muster errors` went on with ", …" as if there were others."""
    folder = folder_of("sweep", "failed", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        columns = "failure_id, worker_id, started_s, seconds, outcome, log_start, log_end"
        ledger.execute(
            f"INSERT INTO attempts (task_id, token, {columns}) "
            f"SELECT task_id, token + 1, {columns} FROM attempts WHERE failure_id IS NOT NULL"
        )
    said = muster_main("errors", str(folder.path)).stdout
    assert "(2 attempts)" in said and "  tasks: " in said and "…" not in said


def test_tasks_that_came_right_later_are_not_named_as_failed(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    """The tasks before it have had an attempt that ended for the same cause."""
    folder = folder_of("sweep", "failed", tmp_path)
    (before,) = find_run(str(folder.path)).failures()
    number = before.named[0].split()[0]
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        columns = "failure_id, worker_id, started_s, seconds, outcome, log_start, log_end"
        ledger.execute(
            f"INSERT INTO attempts (task_id, token, {columns}) "
            "SELECT done.task_id, 0, failure_id, a.worker_id, a.started_s, a.seconds, a.outcome, "
            "a.log_start, a.log_end FROM attempts a, tasks done "
            "WHERE failure_id IS NOT NULL AND done.state = 2"
        )
    (group,) = find_run(str(folder.path)).failures()
    assert group.num_tasks > group.num_failed == 1
    assert (group.tasks, group.named) == (before.tasks, before.named)
    said = muster_main("errors", str(folder.path)).stdout
    assert f"  tasks: {before.named[0]}\n" in said and f"logs {folder.path} {number}\n" in said
    found = why(find_run(str(folder.path)))
    assert found.causes[0].named == before.named
    assert f"muster logs {folder.path} {number}" in found.tries


@pytest.mark.parametrize(
    ("kind", "lines", "said"),
    [("train", [{"event": "end", "exit_code": 130, "stopped_by": "SIGINT"}],
      "It was ended by Ctrl-C (SIGINT)."),
     ("sweep", [{"event": "asked", "by": "SIGHUP"}, {"event": "wish", "what": "drain"}],
      "It was ended by the hang-up of its terminal (SIGHUP)."),
     ("sweep", [{"event": "asked", "by": "SIGTERM"}, {"event": "wish", "what": "drain"},
                {"event": "wish", "what": "cancel"}],
      "It was ended by SIGTERM and `muster cancel`."),
     ("sweep", [{"event": "asked", "by": "SIGTERM"}, {"event": "wish", "what": "drain"},
                {"event": "limit", "text": "It has had its hour."}], "It has had its hour.")],
)  # fmt: skip
def test_a_run_that_was_asked_to_end_says_by_what(
    kind: str, lines: list[dict[str, object]], said: str, tmp_path: Path
) -> None:
    folder = folder_of(kind, "stopped" if kind == "sweep" else "done", tmp_path)
    start, *_ = lines_of(folder)
    end: list[dict[str, object]] = [{"event": "end", "exit_code": 130}]
    write(folder, start, *lines, *(end if kind == "sweep" else ()))
    folder.training_results.unlink(missing_ok=True)
    assert why(find_run(str(folder.path))).reasons == (said,)


def test_a_full_disk_is_named_where_nothing_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed("sweep", tmp_path)
    run = find_run(str(folder.path))
    assert not any("disk" in text for text in why(run).reasons)
    monkeypatch.setattr("shutil.disk_usage", lambda place: shutil._ntuple_diskusage(9, 9, 0))
    text = why(run).reasons[-1]
    assert f"The disk of {folder.path} is full now (0 MiB are free), which is the likely" in text


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="it writes instead")
@pytest.mark.parametrize(
    ("number", "owner", "what"),
    [(errno.EDQUOT, 0, "Your quota on the disk of {} is used up now, which is a possible cause"),
     (errno.EDQUOT, 1, ""),
     (errno.EROFS, 0, "")],
)  # fmt: skip
def test_what_the_disk_refuses_now_is_named_where_nothing_could_be_written(
    number: int, owner: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota leaves the disk as free as it was, and is only the owner's; what may only be read
    from here may have been written to where the run was."""
    folder = killed("sweep", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: folder.path.stat().st_uid + owner)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    reasons = why(find_run(str(folder.path))).reasons
    said = [text for text in reasons if "possible cause" in text or "likely cause" in text]
    assert len(said) == bool(what)
    assert not what or said[0].startswith(what.format(folder.path))


def test_a_very_long_line_of_a_log_is_shown_by_its_ends(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    folder = folder_of("sweep", "stopped", tmp_path)
    (folder.logs / "worker-0.log").write_text("begin" + "x" * 5000 + "end\n")
    (line,) = (
        one.strip()
        for one in muster_main("why", str(folder.path)).stdout.splitlines()
        if one.endswith("xend")
    )
    assert line.startswith("beginx") and "x…x" in line and len(line) == 500


def test_a_run_that_may_only_be_read_is_sent_to_no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try failed alike with an errno, and it was said that it would be tried again."""
    with TemporaryDirectory() as place:
        folder = gang_folder(Path(place) / "run")
        for path in (Path(place), *Path(place).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            with pytest.raises(SetupError, match="you may not write to") as caught:
                track(folder, ["tensorboard"], pytest.fail)
        finally:
            if is_root:
                os.seteuid(0)
            for path in (Path(place), *Path(place).rglob("*")):
                path.chmod(0o755)
    assert "have the run's owner send it" in str(caught.value)


def test_a_rank_says_why_it_failed(tmp_path: Path, muster_main: MusterCli) -> None:
    folder = folder_of("run", "failed", tmp_path)
    done = muster_main("why", str(folder.path))
    assert "rank 1 of 2 failed: ValueError: rank 1 has had enough" in done.stdout
    done = muster_main("why", str(folder.path), "0")
    assert done.returncode == 0 and "rank-0.log" in done.stdout
    other = muster_main("why", str(folder.path), "7")
    assert other.returncode == 2 and "There is no rank '7'" in other.stderr


def test_a_run_that_goes_on_is_not_explained_away(tmp_path: Path) -> None:
    folder = killed("sweep", tmp_path)
    with hold(folder):
        found = why(find_run(str(folder.path)))
    assert found.state == "running" and not found.reasons
    assert found.tries == (f"muster status {folder.path}",)


def test_an_error_that_ended_a_run_is_told_later_too(tmp_path: Path) -> None:
    """It was printed once, and nothing of it was kept."""
    folder = folder_of("sweep", "stopped", tmp_path)
    message = "Importing bad.py failed: No module named 'x'."
    with pytest.raises(TargetError), session.open_run(folder) as begun:
        begun.begin(tasks=4)
        raise TargetError(message, hint="python bad.py shows the whole traceback.")
    found = why(find_run(str(folder.path)))
    assert found.state == "stopped" and found.reasons == (message,)
    assert found.tries[0] == "python bad.py shows the whole traceback."
    assert ("bad", message) in alerts(folder)


def test_a_run_that_waits_says_what_for(tmp_path: Path) -> None:
    folder = stalled("sweep", tmp_path)
    with hold(folder):
        found = why(find_run(str(folder.path)))
    assert found.state == "running"
    assert found.reasons == ("No GPU is free. Nothing more begins until one has.",)
    assert found.lines[-1] == "x is 3 and the seed 0"


def test_the_last_lines_are_those_of_the_task_that_failed(tmp_path: Path) -> None:
    """The log of a worker goes on with the tasks after it."""
    folder = folder_of("sweep", "command", tmp_path)
    with (folder.logs / "worker-0.log").open("a") as log:
        log.write("another task\n")
    found = why(find_run(str(folder.path)))
    assert found.log == str(folder.logs / "worker-0.log") and found.lines == ("x is 9",)


def test_an_array_is_explained_by_its_elements(tmp_path: Path) -> None:
    found = why(find_run(str(folder_of("array", "done", tmp_path).path)))
    assert found.state == "not collected"
    assert found.sentence == "An array of 2 elements: 4 tasks done, 0 failed."
    assert any("muster collect" in text for text in found.tries)


def test_an_element_of_an_array_is_resumed_by_its_place(tmp_path: Path) -> None:
    """It was told to be called again, and no command says an element."""
    folder = RunFolder(folder_of("array", "done", tmp_path).path / "elements/1")
    *lines, _ = lines_of(folder)
    write(folder, *lines)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        ledger.execute("UPDATE tasks SET state = 0 WHERE task_id = 1")
        ledger.execute("DELETE FROM results WHERE task_id = 1")
    found = why(find_run(str(folder.path)))
    assert found.state == "stopped"
    assert found.tries == (f"muster resume {folder.path}",)


def test_a_task_that_was_begun_runs_only_while_somebody_works(tmp_path: Path) -> None:
    """It was said not to have been tried, and to be running where its run was killed."""
    folder = killed("sweep", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        (number,) = ledger.execute("SELECT min(task_id) FROM tasks WHERE state = 0").fetchone()
        ledger.execute("UPDATE tasks SET state = 1 WHERE task_id = ?", (number,))
    run = find_run(str(folder.path))
    with hold(folder):
        found = why(run, str(number))
    assert found.state == "running" and ": it runs now" in found.sentence
    found = why(run, str(number))
    assert found.state == "waiting" and "was begun when its run ended" in found.sentence


def test_a_trial_that_was_stopped_after_its_run_was_killed_has_been_tried(tmp_path: Path) -> None:
    """Its attempt went with the run, and what it had logged was enough to stop it."""
    folder = killed("sweep", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        (number,) = ledger.execute("SELECT min(task_id) FROM tasks WHERE state = 0").fetchone()
        ledger.execute(
            "UPDATE tasks SET state = ? WHERE task_id = ?", (TaskState.STOPPED.value, number)
        )
    found = why(find_run(str(folder.path)), str(number))
    assert found.state == "stopped" and "not been tried" not in found.sentence


def test_a_retry_of_a_run_at_work_names_what_is_not_refused(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    folder = folder_of("sweep", "failed", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        ledger.execute("UPDATE tasks SET state = 0 WHERE state = 3")
    with hold(folder):
        said = muster_main("retry", str(folder.path))
    assert said.returncode == 0, said.stderr
    assert f"muster attach {folder.path}" in said.stdout and "muster resume" not in said.stdout
    said = muster_main("retry", str(folder.path))
    assert f"what is left: muster resume {folder.path}" in said.stdout


def test_what_cannot_be_retried_is_not_told_to(tmp_path: Path) -> None:
    """`muster retry` refuses maps, and arrays as a whole."""
    folder = folder_of("map", "stopped", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        ledger.execute("UPDATE tasks SET state = 4 WHERE state IN (0, 1)")
        (number,) = ledger.execute("SELECT min(task_id) FROM tasks WHERE state = 4").fetchone()
    run = find_run(str(folder.path))
    for found in (why(run), why(run, str(number))):
        assert found.state == "cancelled"
        assert f"muster resume {folder.path}" in found.tries
        assert not any("retry" in text for text in found.tries)
    array = folder_of("array", "collected", tmp_path / "a")
    with closing(sqlite3.connect(array.ledger)) as ledger, ledger:
        ledger.execute("UPDATE tasks SET state = 3 WHERE task_id = 1")
        ledger.execute("DELETE FROM results WHERE task_id = 1")
    found = why(find_run(str(array.path)))
    retry = f"muster retry {array.path}/elements/N, then: muster collect {array.path}"
    assert found.state == "failed" and retry in found.tries


def test_a_run_that_cannot_be_read_is_no_success(tmp_path: Path, muster_main: MusterCli) -> None:
    folder = unreadable("sweep", tmp_path)
    for more in ((), ("--json",)):
        done = muster_main("why", str(folder.path), *more)
        assert done.returncode == 3 and done.stderr.startswith("muster: ")


def test_secrets_of_a_command_are_not_repeated(tmp_path: Path) -> None:
    folder = killed("run", tmp_path)
    record = json.loads(folder.run_json.read_bytes())
    record["argv"] = [*record["argv"], "--api-key", "s3cret"]
    folder.run_json.write_text(json.dumps(record))
    tries = why(find_run(str(folder.path))).tries
    assert any("muster run" in text for text in tries) and "s3cret" not in " ".join(tries)


@pytest.mark.parametrize(
    ("end", "later"),
    [({"exit_code": 1, "starts_again": True}, "failed"),
     ({"exit_code": 75, "is_moving": True}, "stopped")],
)  # fmt: skip
def test_ranks_between_two_starts_are_being_started_again(
    end: dict[str, object], later: str, tmp_path: Path, muster_main: MusterCli
) -> None:
    folder = gang_folder(tmp_path / "run")
    events = ({"event": "start"}, {"event": "end", **end})
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "run: starting again" in muster_main("status", "run").stdout
    shown = muster_main("why", "run")
    assert "It is being started again." in shown.stdout and "killed" not in shown.stdout
    os.utime(folder.events, (0, 0))  # whoever was to start it has died meanwhile
    assert f"run: {later}" in muster_main("status", "run").stdout


def test_a_run_that_paused_is_told_to_try_what_failed_again(tmp_path: Path) -> None:
    """At its end it had said so; `muster resume` would leave out all that had failed."""
    folder = folder_of("sweep", "failed", tmp_path)
    with closing(sqlite3.connect(folder.ledger)) as ledger, ledger:
        done, ready = TaskState.DONE.value, TaskState.READY.value
        ledger.execute("UPDATE tasks SET state = ? WHERE state = ?", (ready, done))
        ledger.execute("DELETE FROM results")
    *before, end = lines_of(folder)
    write(folder, *before, {"event": "paused", "text": "all failed in the same way"}, end)
    found = why(find_run(str(folder.path)))
    assert found.state == "stopped" and found.tries[-1] == f"muster retry {folder.path}"


def test_a_run_whose_code_was_changed_says_so_also_when_it_is_done(tmp_path: Path) -> None:
    folder = folder_of("sweep", "done", tmp_path)
    text = "train.py changed while the run was at work."
    write(folder, *lines_of(folder), {"event": "code", "text": text}, {"event": "code"})
    found = why(find_run(str(folder.path)))
    assert found.state == "done" and found.reasons == (text,)
    page = write_report(find_run(str(folder.path)), draws_monitor=False)[-1]
    assert text in page.read_text()


def test_a_run_whose_process_is_stopped_says_so(tmp_path: Path, muster_main: MusterCli) -> None:
    folder = killed("sweep", tmp_path)
    other = subprocess.Popen(["sleep", "60"])
    try:
        with hold(folder):
            folder.lock.with_suffix(".pid").write_text(f"{other.pid} {socket.gethostname()}")
            assert "kill -CONT" not in muster_main("status", str(folder.path)).stdout
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            said = muster_main("status", str(folder.path)).stdout
            listed = muster_main("devices", str(folder.path)).stdout
            asked = muster_main("devices", str(folder.path), "--release", "1")
    finally:
        other.kill()
        other.wait()
    assert asked.returncode == 3 and "is stopped (Ctrl-Z): it keeps its devices" in asked.stderr
    assert f"Hint: let it go on, and ask again: kill -CONT {other.pid}" in asked.stderr
    assert f"to let it go on: kill -CONT {other.pid}" in listed
    assert f"its process is stopped (Ctrl-Z); to let it go on: kill -CONT {other.pid}" in said


@pytest.mark.parametrize("command", ["status", "why", "attach", "wait", "cancel", "logs"])
def test_a_run_that_waits_for_gpus_is_not_unknown(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """After `--wait --detach` all of them said "Unknown run", and proposed another one."""
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ticket = Note(tmp_path, "ticket", {"run": "later", "pid": 4711})
    try:
        refused = muster_main(command, "runs/later")
    finally:
        ticket.remove()
    assert refused.returncode == 2 and "muster queue" in refused.stderr
    assert "a run of this name waits for GPUs, in process 4711" in refused.stderr
    assert "Unknown run" in muster_main(command, "runs/later").stderr


def test_what_is_no_run_is_refused_with_where_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    root = folder_of("sweep", "done", tmp_path / "my runs").path.parent
    for name, said in {
        "nope": "Unknown run 'nope'.\nHint: Known: none. Others are named by their folder; muster",
        "t.py": "Unknown run 't.py'.\nHint: Known: none. That file is no run.",
        str(root): f"holds runs and is none: muster list --root '{root}'",
    }.items():
        done = muster_main("status", name)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_stopped_run_that_waits_to_go_on_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """Its folder is there already; whoever only read "stopped" started it a second time."""
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))
    (tmp_path / "leases").mkdir()
    folder = folder_of("sweep", "stopped", tmp_path)
    ticket = Note(tmp_path / "leases", "ticket", {"run": folder.name, "pid": 4711})
    try:
        for command in ("status", "why"):
            said = muster_main(command, str(folder.path)).stdout
            assert "run of this name waits for GPUs, in process 4711" in said
    finally:
        ticket.remove()
    assert "waits for GPUs" not in muster_main("status", str(folder.path)).stdout


def test_a_program_is_not_retried_by_a_resume_that_is_refused(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    folder = folder_of("run", "failed", tmp_path)
    said = muster_main("retry", str(folder.path)).stderr
    assert "there are no failed tasks" in said and "muster resume" not in said
    assert "muster run " in said
