"""Memory that a training frees is not asked for again, page by page."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from muster.rank.freed_memory import bytes_to_keep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is about glibc")

#: Page faults of 8 blocks of 512 KiB, freed and taken 100 times, as batches are; of taking, filling
#: and freeing 128 MiB for the third time, in blocks of 16 MiB, and what the process holds
#: afterwards; then the faults of one block of 4 MiB, freed and taken 100 times, as the tensors of a
#: notebook are. In a process of its own: malloc's settings last as long.
PROGRAM = """
import contextlib, ctypes, json, resource, sys
from muster.base.freed_blocks import keep_freed_blocks
from muster.rank.freed_memory import freed_memory_kept

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, size = [ctypes.c_void_p], 16 << 20

def fill(num=8, size=size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(num)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

if sys.argv[1] == "blocks":
    keep_freed_blocks(4 << 20)
batches = sum(fill(8, 512 << 10) for _ in range(100))
start = held_mib()
with freed_memory_kept() if sys.argv[1] == "kept" else contextlib.nullcontext():
    again = [fill() for _ in range(3)][-1]
    inside = held_mib() - start
after = held_mib() - start
later = sum(fill(1, 4 << 20) for _ in range(100))
found = {"batches": batches, "again": again, "inside": inside, "after": after, "later": later}
print(json.dumps(found))
"""


def measured(how: str) -> dict[str, float]:
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), how]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(told)
    return found


def test_memory_freed_inside_is_used_again_and_given_back_after_it() -> None:
    usual = measured("usual")
    assert usual["again"] > 30_000
    assert usual["inside"] < 64
    kept = measured("kept")
    assert kept["again"] < 100
    assert kept["inside"] > 120
    assert kept["after"] < 64


def test_blocks_that_are_to_be_kept_are_not_cleared_anew() -> None:
    assert measured("usual")["batches"] > 50_000
    assert measured("blocks")["batches"] < 3_000


def test_blocks_that_are_freed_and_taken_later_are_used_again_as_ever() -> None:
    usual, kept = measured("usual"), measured("kept")
    assert usual["later"] < 5_000
    assert kept["later"] < 5_000


def test_the_ranks_of_a_container_share_a_quarter_of_what_it_has_left(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{500 << 20}\n")
    (group / "memory.current").write_text(f"{180 << 20}\n")
    (group / "memory.stat").write_text(f"inactive_file {80 << 20}\n")
    assert bytes_to_keep(tmp_path, {}) == 100 << 20
    gang = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert bytes_to_keep(tmp_path, gang | address) == 25 << 20
