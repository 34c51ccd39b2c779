"""The work of a run comes before its trackers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(
    not os.access("/proc/self/autogroup", os.W_OK), reason="this kernel weighs no sessions"
)
def test_the_sessions_of_a_tracker_and_its_helpers_come_behind_the_run_until_it_is_over() -> None:
    # W&B's library starts a helper with its first run, in a session of its own.
    program = """
import os, subprocess, threading, time
from muster.api.trackers.guard import _ComingSecond, _listen

class Library:
    most_open = 3
    def open(self, tracked):
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)

is_over = threading.Event()
tracker = _ComingSecond(Library(), is_over)
helper = tracker.open(None)
def show():
    print(*(open(f"/proc/{pid}/autogroup").read().split()[-1] for pid in (os.getpid(), helper.pid)))

show()
threading.Thread(target=_listen, args=(is_over,), daemon=True).start()
is_over.wait()
for _ in range(100):
    if open(f"/proc/{helper.pid}/autogroup").read().endswith(" 0\\n"):
        break
    time.sleep(0.02)
show()
helper = _ComingSecond(Library(), is_over).open(None)  # a library that took longer than the run
show()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "10 10\n"
        process.stdin.write("over\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0 0\n", "the run waits for its trackers at the end"
        assert process.stdout.readline() == "0 0\n", "for one that begins only then, too"
