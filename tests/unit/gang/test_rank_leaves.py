"""A rank that was forked leaves without an end of the interpreter, and loses nothing by that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.settings import child_environment
from muster.run.folder import RunFolder

PROGRAM = """
import logging, logging.handlers, sys
text = open("text.txt", "w")
text.write("text")
class Holder:
    raw = open("raw.bin", "wb")
Holder.raw.write(b"raw")
closed = open("closed.txt", "w")
closed.close()
handler = logging.handlers.MemoryHandler(9, target=logging.FileHandler("log.txt"))
logging.getLogger().addHandler(handler)
logging.warning("logged")
print("printed", end="")
sys.exit(ENDING)
"""


#: Holds its process with a thread of its own, for longer than a rank that has failed may take.
HOLDING = """
import sys, threading, time
def train():
    threading.Thread(target=time.sleep, args=(15,), name="uploads").start()
    ENDING
"""


def ranked(place: Path, *words: str, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """What a process comes to that becomes a rank of a gang that nobody else is in, and may take
    little time to leave.
    """
    about = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}  # fmt: skip
    argv = [str(place / "run"), str(os.getpid()), *words]
    program = "from muster.gang import rank; rank._LEAVING_S = 0.1\n"
    return subprocess.run(
        [sys.executable, "-c", f"{program}rank.become_and_leave({argv})"],
        cwd=place, env=child_environment(about), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("ending", ["0", "3", "'why'"])
def test_what_open_files_hold_is_written(ending: str, tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").logs.mkdir(parents=True)
    (tmp_path / "p.py").write_text(PROGRAM.replace("ENDING", ending))
    done = ranked(tmp_path, "script", "p.py", num_ranks=1)
    assert done.returncode == (1 if "why" in ending else int(ending)), done.stderr
    assert done.stdout == "printed"
    written = [(tmp_path / name).read_text() for name in ("text.txt", "raw.bin", "log.txt")]
    assert written == ["text", "raw", "logged\n"]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("sys.exit('why')", 1, "why"), ("sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_a_failed_rank_does_not_wait_for_a_thread_of_the_task(
    ending: str, code: int, said: str, tmp_path: Path
) -> None:
    """The other ranks wait for it, and cannot see that it has ended."""
    RunFolder(tmp_path / "run").logs.mkdir(parents=True)
    (tmp_path / "t.py").write_text(HOLDING.replace("ENDING", ending))
    done = ranked(tmp_path, "entry", "t:train", "{}", num_ranks=2)
    assert done.returncode == code and said in done.stderr
    assert "has failed and not ended" in done.stderr and "uploads" in done.stderr, done.stderr


def left(ending: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from muster.base.forked import run_and_leave\n"
    return subprocess.run(
        [sys.executable, "-c", f"{program}run_and_leave(lambda: {ending})"],
        capture_output=True, check=False, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "code"),
    [("None", 0), ("0", 0), ("3", 3), ("True", 1), ("-1", 255), ("256", 0), ("'why'", 1)],
)
def test_the_code_of_an_exit_is_pythons(ending: str, code: int) -> None:
    done = left(f"sys.exit({ending})")
    assert (done.returncode, done.stderr) == (code, "why\n" if "why" in ending else "")


def test_an_exception_that_nobody_takes_is_shown() -> None:
    done = left("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
