"""The work of a run comes before its trackers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel has none")
def test_the_sessions_of_a_tracker_and_its_helpers_come_behind_the_run() -> None:
    # W&B's library starts a helper with its first run, in a session of its own.
    program = """
import os, subprocess
from muster.api.trackers.guard import _ComingSecond, _put_second

class Library:
    most_open = 3
    def open(self, tracked):
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)

_put_second([os.getpid()])
tracker = _ComingSecond(Library())
helper = tracker.open(None)
for pid in (os.getpid(), helper.pid):
    print(open(f"/proc/{pid}/autogroup").read().split()[-1], tracker.most_open)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], start_new_session=True, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["10 3", "10 3"]
