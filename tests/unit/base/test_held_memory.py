"""What processes hold together: shared pages once, those of files not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.host_memory import part_mib, seen_mib, session_trees, tree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_SIZE_MIB = 64
#: Holds some memory, in three processes that share it, and says when it does.
_FORKED = f"""
import os, sys, time
held = bytearray({_SIZE_MIB} << 20)
for _ in range(2):
    if os.fork() == 0:
        time.sleep(600)
print("ready", flush=True)
sys.stdin.read()
"""
_MAPPED = f"""
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    seen = mmap.mmap(file.fileno(), {_SIZE_MIB} << 20)
assert sum(seen[at] for at in range(0, {_SIZE_MIB} << 20, 4096)) == 0
print("ready", flush=True)
sys.stdin.read()
"""


def _started(source: str, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, 9)
    process.communicate()


def test_pages_that_forks_share_count_once() -> None:
    process = _started(_FORKED)
    try:
        pids = session_trees(process.pid)
        assert pids == tree(process.pid) and len(pids) == 3
        assert _SIZE_MIB <= part_mib(pids) < 2 * _SIZE_MIB
        assert seen_mib(pids) > 2 * _SIZE_MIB, "counted in each of them"
    finally:
        _end(process)


def test_a_file_that_is_mapped_does_not_count(tmp_path: Path) -> None:
    place = tmp_path / "data"
    with place.open("wb") as file:
        file.truncate(_SIZE_MIB << 20)
    process = _started(_MAPPED, str(place))
    try:
        assert 0 < part_mib([process.pid]) < _SIZE_MIB / 2
    finally:
        _end(process)


def test_who_has_ended_holds_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert part_mib(session_trees(process.pid)) == 0
