"""Every command with streams as they come: it does the same, ends with the same code, and says
what it could not show. The commands come from the table of commands.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from muster.cli.main import COMMANDS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/full"),
]

#: Work that ends, or is refused, within a second or two. ``{}``: a name that nobody has yet.
WORDS = {
    "sweep": "sweep f.py:f --grid x=1,2 --devices cpu:1 --run-dir {}",
    "run": "run --devices cpu:1 --run-dir {} p.py",
    "map": "map f.py:stage --input in.jsonl --output {}.jsonl --devices cpu:1 --run-dir {}",
    "train": "train digits --devices cpu:1 --run-dir {} --dry-run",
    "verify": "verify nowhere.py:Task",
    "start": "start e.toml",
    "init": "init {}.toml --from runs/it",
    "launch": "launch",
    "plan": "plan runs/it",
    "slurm-script": "slurm-script run --gpus 1 p.py",
    "collect": "collect runs/it",
    "resume": "resume runs/it",
    "retry": "retry runs/it",
    "add": "add runs/it --grid x=1,2,3,4 --dry-run",
    "list": "list",
    "status": "status runs/it",
    "attach": "attach runs/it",
    "wait": "wait runs/it",
    "best": "best runs/it",
    "why": "why runs/it",
    "logs": "logs runs/it 1",
    "errors": "errors runs/it",
    "export": "export runs/it --to {}.csv",
    "metrics": "metrics runs/it",
    "report": "report nowhere",
    "web": "web nowhere",
    "track": "track nowhere --log-to tensorboard",
    "cancel": "cancel runs/it",
    "monitor": "monitor --duration 0.4 --interval 0.2",
    "doctor": "doctor --from-facts facts.json",
    "devices": "devices",
    "hosts": "hosts check a;b",
    "mcp": "mcp",
    "queue": "queue",
    "completion": "completion bash",
}


EXPERIMENT = """
command = "sweep"
target = "f.py:f"
devices = "cpu:1"
grid.x = [1, 2]
"""
FACTS = Path(__file__).parents[1] / "unit" / "doctor" / "hosts" / "driver_mismatch.json"


def test_no_command_is_missing_here() -> None:
    assert WORDS.keys() == COMMANDS.keys()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("streams")
    (place / "f.py").write_text(
        "def f(x: int):\n    print('hä', x)\n    if x == 3:\n        raise ValueError('nö')\n"
        "    return {'y': x}\n\ndef stage(r):\n    return {**r, 'b': 1}\n"
    )
    (place / "p.py").write_text("print('hello')\n")
    (place / "in.jsonl").write_text('{"a": 1}\n')
    (place / "e.toml").write_text(EXPERIMENT)
    shutil.copy(FACTS, place / "facts.json")
    sweep = ["sweep", "f.py:f", "--grid", "x=1,2,3", "--devices", "cpu:1", "--run-dir", "runs/it"]
    done = subprocess.run(
        [sys.executable, "-m", "muster", *sweep], cwd=place, capture_output=True, check=False
    )
    assert done.returncode == 1, done.stderr
    return place


class Done(NamedTuple):
    code: int
    out: str
    said: str


def plain(words: list[str], place: Path) -> Done:
    return _ran(words, place, "")


def reader_gone(words: list[str], place: Path) -> Done:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        return _ran(words, place, "", out=theirs)
    finally:
        os.close(theirs)


def disk_full(words: list[str], place: Path) -> Done:
    return _ran(words, place, ">/dev/full")


def of_c_without_stdin(words: list[str], place: Path) -> Done:
    """Neither changes what the other does."""
    return _ran(words, place, "<&-", LC_ALL="C", LANG="C")


def narrow(words: list[str], place: Path) -> Done:
    return _on_terminal(words, place)


def no_colour(words: list[str], place: Path) -> Done:
    return _on_terminal(words, place, NO_COLOR="1")


def _ran(
    words: list[str], place: Path, harm: str, out: int = subprocess.PIPE, **variables: str
) -> Done:
    line = f'exec "$@" {harm}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "muster", *words], cwd=place,
        stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, timeout=120, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip
    printed = (done.stdout or b"").decode(errors="replace")
    return Done(done.returncode, printed, done.stderr.decode(errors="replace"))


def _on_terminal(words: list[str], place: Path, **variables: str) -> Done:
    """All three streams are one terminal, of 40 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 40, 0, 0))
    gone = {"COLUMNS", "LINES", "CI", "NO_COLOR"}
    env = {k: v for k, v in os.environ.items() if k not in gone}
    with subprocess.Popen(
        [sys.executable, "-m", "muster", *words], cwd=place, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True, env={**env, "TERM": "xterm-256color", **variables},
    ) as process:  # fmt: skip
        os.close(theirs)
        found, due_s = b"", time.monotonic() + 120
        with suppress(OSError):  # EIO: the last who had it is gone
            while time.monotonic() < due_s:
                if not select.select([ours], [], [], 1.0)[0]:
                    os.write(ours, b"\x04")  # nothing is typed, whatever is asked
                elif data := os.read(ours, 1 << 16):
                    found += data
        if time.monotonic() >= due_s:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(120)
    os.close(ours)
    return Done(code, found.decode(errors="replace"), "")


WAYS: tuple[Callable[[list[str], Path], Done], ...] = (
    reader_gone, disk_full, of_c_without_stdin, narrow, no_colour,
)  # fmt: skip
_COLOUR = re.compile(r"\x1b\[[0-9;]*[349][0-7](?:;[0-9]+)*m")
#: All that they do is print, with the words above: they say so where it cannot be written.
ONLY_PRINT = {
    "train", "slurm-script", "plan", "add", "list", "status", "attach", "why", "best", "logs",
    "errors", "metrics", "monitor", "devices", "hosts", "queue", "completion",
}  # fmt: skip


@pytest.mark.parametrize("command", WORDS)
def test_streams_change_what_is_shown_and_nothing_else(command: str, place: Path) -> None:
    def ran(way: Callable[[list[str], Path], Done]) -> Done:
        """In a copy, as some of them change the run."""
        copy = place.parent / f"{place.name}-{command}-{way.__name__}"
        shutil.copytree(place, copy)
        done = way(WORDS[command].replace("{}", "new").split(), copy)
        shutil.rmtree(copy)
        print(way.__name__, done)
        return done

    usual = ran(plain)
    is_coloured = False
    for way in WAYS:
        if way is reader_gone and not usual.out:
            continue  # nobody reads it, and nothing is written
        if way is no_colour and not is_coloured:
            continue  # there is none to take away on the same terminal
        if command == "launch" and way in (narrow, no_colour):
            continue  # it asks there, until somebody answers
        done = ran(way)
        said = done.out + done.said
        for trace in ("Traceback", "Exception ignored", "BrokenPipe", "UnicodeEncode", "Errno"):
            assert trace not in said or trace in usual.out, (way.__name__, said)
        is_coloured = way is narrow and bool(_COLOUR.search(said))
        code = usual.code
        if way is reader_gone and usual.out and command in ONLY_PRINT:
            code = 0  # whoever read it has had enough
        if way is disk_full and usual.out and command in ONLY_PRINT:
            code = 1
            assert "cannot be written: No space left on device" in said, said
        assert done.code == code, (way.__name__, done, usual)
        if way is no_colour:
            assert not _COLOUR.search(said), said
