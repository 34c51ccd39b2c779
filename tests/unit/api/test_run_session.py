"""One start of a run: who gets the folder, what is written when, and how it is said to end."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from pathlib import Path

import pytest

from muster.api.runs import Run
from muster.api.start.options import GangOptions
from muster.base.errors import PlanMismatchError, SetupError, UsageError
from muster.base.journal import read_journal
from muster.base.signals import Interrupted
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, new_record, read_run
from muster.run.requests import ask_to_cancel
from muster.run.session import is_held, open_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "r")


def renew_in(folder: RunFolder, *argv: str) -> RunRecord:
    return new_record(folder, "run", GangOptions(restart=True), spec={}, code={}, argv=argv)


def test_inside_the_folder_is_held_and_has_its_record(folder: RunFolder) -> None:
    with open_run(folder, lambda before: before or renew_in(folder, "a")) as session:
        assert is_held(folder)
        assert read_run(folder).argv == ("a",)
        assert not session.is_cancelled()
        with pytest.raises(SetupError, match="is being worked on"), open_run(folder, _refuse):
            pass
    assert not is_held(folder)
    assert not folder.events.exists()  # nothing has begun


def test_a_run_of_ranks_is_asked_for_no_results_of_tasks(folder: RunFolder) -> None:
    """It said that the ledger cannot be read."""
    with open_run(folder, lambda before: renew_in(folder)):
        for ask in (Run(folder.path).has_results, Run(folder.path).has_metrics):
            with pytest.raises(UsageError, match="it has ranks, and no tasks"):
                ask()


def test_what_is_said_for_one_start_is_not_kept(folder: RunFolder) -> None:
    with open_run(folder, lambda before: renew_in(folder)):
        assert read_run(folder).options["restart"] is False


def test_a_record_that_stays_the_same_is_not_written_again(folder: RunFolder) -> None:
    with open_run(folder, lambda before: renew_in(folder, "a")):
        before = folder.run_json.stat()
    with open_run(folder, lambda record: record or renew_in(folder)):
        assert folder.run_json.stat().st_ino == before.st_ino
    with open_run(folder, lambda record: dataclasses.replace(record or _none(), argv=("b",))):
        assert read_run(folder).argv == ("b",)


def test_a_refusal_leaves_the_record_and_the_folder_free(folder: RunFolder) -> None:
    with open_run(folder, lambda before: renew_in(folder, "a")):
        pass
    written = folder.run_json.read_bytes()
    with pytest.raises(UsageError, match="not so"), open_run(folder, _refuse):
        pass
    assert folder.run_json.read_bytes() == written and not is_held(folder)


def test_a_ledger_without_a_record_is_nobodys(folder: RunFolder) -> None:
    folder.create()
    folder.ledger.touch()
    with pytest.raises(PlanMismatchError, match=r"no run\.json"), open_run(folder, _refuse):
        pass
    assert not folder.run_json.exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("no"), 2), (SetupError("no"), 3), (KeyboardInterrupt(), 130),
     (Interrupted(signal.SIGTERM), 130), (ValueError(), 1)],
)  # fmt: skip
def test_an_exception_is_an_end(folder: RunFolder, error: BaseException, code: int) -> None:
    with (
        pytest.raises(type(error)),
        open_run(folder, lambda before: renew_in(folder), node=0) as session,
    ):
        session.begin(ranks=["cpu:0"])
        raise error
    begun, ended = read_journal(folder.events)
    assert (begun["event"], begun["ranks"], begun["node"]) == ("start", ["cpu:0"], 0)
    assert (ended["event"], ended["exit_code"], ended["node"]) == ("end", code, 0)
    by = {KeyboardInterrupt: "SIGINT", Interrupted: "SIGTERM"}.get(type(error))
    assert ended.get("stopped_by") == by


def test_an_end_that_was_said_is_not_said_again(folder: RunFolder) -> None:
    with (
        pytest.raises(ValueError, match="later"),
        open_run(folder, lambda before: renew_in(folder)) as session,
    ):
        session.begin()
        session.end(done=3)
        raise ValueError("later")
    lines = list(read_journal(folder.events))
    assert [line["event"] for line in lines] == ["start", "end", "over"]
    assert lines[-1]["exit_code"] == 1, "what came of it in spite of that end"


def test_further_nodes_share_the_folder_of_the_first(folder: RunFolder) -> None:
    with (
        open_run(folder, lambda before: renew_in(folder), node=0),
        open_run(folder, _refuse, node=1) as second,
    ):
        second.begin(ranks=["cpu:0"])
        second.end(exit_code=0)
        assert not second.is_cancelled()
    assert {line["node"] for line in read_journal(folder.events)} == {1}


def test_a_request_is_heard_from_the_first_moment(folder: RunFolder) -> None:
    with open_run(folder, lambda before: renew_in(folder)) as session:
        assert ask_to_cancel(folder, lambda: True, timeout_s=0.2)
        assert session.is_cancelled()


def test_a_disk_that_fails_is_told_with_the_folder(folder: RunFolder) -> None:
    folder.path.write_text("a file")
    with pytest.raises(SetupError, match=r"use the run folder .*/r"), open_run(folder, _refuse):
        pass


def _refuse(before: RunRecord | None) -> RunRecord:
    raise UsageError("It may not be so: not so.")


def _none() -> RunRecord:
    raise AssertionError("there was a record")


def test_a_folder_that_is_moved_while_it_is_at_work_says_how_to_go_on(folder: RunFolder) -> None:
    """It named the old place, hinted at another --run-dir, and kept no reason."""
    moved = folder.path.with_name("moved")
    with (
        pytest.raises(SetupError, match=r"r is gone: it was moved or removed .*\n.*NEW_PLACE"),
        open_run(folder, lambda before: renew_in(folder)) as session,
    ):
        session.begin()
        folder.path.rename(moved)
        folder.spent_json.write_text("{}")
    *_, end = read_journal(RunFolder(moved).events)
    assert end["event"] == "end" and "is gone" in end["error"]


def test_what_is_missing_elsewhere_is_not_called_the_run_folder(folder: RunFolder) -> None:
    """The Python environment was moved, and a worker was to be started: it blamed the folder."""
    with (
        pytest.raises(SetupError, match=r"Cannot use /no/python, .* needs: No such file"),
        open_run(folder, lambda before: renew_in(folder)) as session,
    ):
        session.begin()
        subprocess.Popen(["/no/python"])
