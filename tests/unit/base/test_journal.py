"""The journal of a run survives a torn line."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.clock import SystemClock
from muster.base.journal import Journal, read_journal


@pytest.mark.parametrize(
    "left", [b"", b'{"time": "20', b"\xff\xfe", b'{"event": "start"}', b"[1]", b'"text"\n']
)
def test_what_was_torn_does_not_swallow_the_next_line(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "first"}\n' + left)
    journal = Journal(path, SystemClock())
    journal.write("second", text="a\nb \udcff")
    journal.write("third")
    journal.close()
    events = [line["event"] for line in read_journal(path)]
    assert [event for event in events if event != "start"] == ["first", "second", "third"]
