"""Requests to a run that is under way reach the session that they are for, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.errors import SetupError
from muster.run.folder import RunFolder
from muster.run.requests import Mailbox, ask, ask_to_cancel


def test_a_request_that_comes_late_does_nothing_to_the_next_session(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    killed = Mailbox(folder).__enter__()  # and never closed
    assert ask_to_cancel(folder, lambda: True, timeout_s=0.1)  # not heard yet, but asked
    [request] = folder.requests.glob("cancel*")
    with Mailbox(folder) as following:
        request.write_text("cancel")  # whoever asked was slow
        assert not following.is_cancelled()
    request.write_text("cancel")
    assert killed.is_cancelled()


def test_who_asks_is_told_at_once_that_no_answer_can_be_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with Mailbox(folder) as mailbox:

        def is_running() -> bool:
            for asked in mailbox.asked():
                [path] = folder.requests.glob("ask-*")
                path.with_name(path.name.replace("ask-", "answer-")).mkdir()  # in its place
                asked.answer({"has": []})
            return True

        with pytest.raises(SetupError, match="its answer cannot be written"):
            ask(folder, {"devices": {}}, is_running)


def test_what_cannot_be_asked_is_said_and_not_raised_as_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with Mailbox(folder):
        session = (folder.requests / "session").read_text()
        long = "a" * (250 - len(session))  # a name that is too long, with ask- and a number
        (folder.requests / "session").write_text(session + long)
        with pytest.raises(SetupError, match="Cannot send a request to"):
            ask(folder, {"devices": {}}, lambda: True)
        with pytest.raises(SetupError, match="Cannot send a request to"):
            ask_to_cancel(folder, lambda: True)
