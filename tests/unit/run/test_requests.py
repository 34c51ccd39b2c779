"""Requests to a run that is under way reach the session that they are for, and no other."""

from __future__ import annotations

from pathlib import Path

from muster.run.folder import RunFolder
from muster.run.requests import Mailbox, ask_to_cancel


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
