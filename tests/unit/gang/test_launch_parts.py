"""The small parts of the launch: the spec on its way, logs, flags, places in a stack."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.api.start.options import GangOptions
from muster.base.errors import UsageError
from muster.base.journal import Tail, last_lines
from muster.cli.commands import run
from muster.gang.account import _is_ours
from muster.gang.beacon import BEACON, Beacon, read_place
from muster.gang.spec import Entry, GangSpec, Script
from muster.rank.life import StopFlag
from muster.run.folder import RunFolder


@pytest.mark.parametrize(
    "program",
    [Script(path="a b.py", args=("--x", "1\n2")), Entry(target="a.b:c", params={"lr": 0.1})],
)
def test_a_spec_crosses_unchanged(program: Script | Entry) -> None:
    spec = GangSpec(
        folder=RunFolder(Path("/r")), program=program, num_ranks=2, visible_devices=None
    )
    line = spec.to_line()
    assert line.count(b"\n") == 1
    assert GangSpec.from_line(line) == spec


def test_a_warning_is_not_the_first_of_two_requests_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that saves at a warning, and is then asked to end, may save to the end."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("muster.rank.life._ECHO_S", -1.0)
    with StopFlag() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
            assert (stop.is_set, stop.name, ended) == (True, "SIGUSR1", [])
        signal.raise_signal(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_second_ctrl_c_ends_a_call_and_not_its_callers_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may be a notebook's, with much in it beside a training."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    with StopFlag(is_callers=True) as stop:
        signal.raise_signal(signal.SIGINT)
        assert (stop.is_set, stop.name) == (True, "SIGINT")
        with pytest.raises(KeyboardInterrupt):  # also at once: nobody passes it on
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # it may be an echo
        monkeypatch.setattr("muster.rank.life._ECHO_S", -1.0)
        for number in (signal.SIGTERM, signal.SIGHUP):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert not ended


def test_names_of_programs() -> None:
    assert Script(path="src/train.py").name == "train"
    assert Script(path="package.train", is_module=True).name == "train"
    assert Entry(target="package.work:train").name == "work"


@pytest.mark.parametrize(
    ("argv", "words", "program"),
    [
        (["--gpus", "4", "train.py", "--lr", "1"], ["--devices", "4"], ["train.py", "--lr", "1"]),
        (["--all-ranks", "t.py", "--gpus", "2"], ["--all-ranks"], ["t.py", "--gpus", "2"]),
        (["--dry_run", "--gpus=2", "t.py"], ["--dry-run", "--devices", "2"], ["t.py"]),
        (["-m", "a.b", "-m", "x"], ["--module"], ["a.b", "-m", "x"]),
        (["--no-python", "--", "sh", "-c"], ["--no-python"], ["sh", "-c"]),
        (["--gpus", "2"], ["--devices", "2"], []),
    ],
)
def test_flags_after_the_script_are_its_own(
    argv: list[str], words: list[str], program: list[str]
) -> None:
    parsed = run.flags_of_run(argv)
    assert (parsed.words(), list(parsed.program)) == (words, program)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_restarts": -1}, "--max-restarts -1 is too small"),
        ({"num_ranks": 2, "gpu_ids": "0"}, "--nproc-per-node 2 and a choice of devices"),
        ({"num_nodes": 2, "node_rank": 2}, "--node-rank 2 is not below --nodes 2"),
        ({"num_nodes": 2}, "--nodes 2 needs a place to meet"),
        ({"min_nodes": 2}, "--min-nodes 2 is not between"),
    ],
)
def test_options_that_make_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GangOptions(**values)  # type: ignore[arg-type]


def test_a_tail_hears_whole_lines_and_hides_tracebacks(tmp_path: Path) -> None:
    path, heard = tmp_path / "log", []
    path.write_bytes(b"of an earlier run\n")
    limits: list[int] = []
    tail = Tail(path, heard.append, lambda: limits[0] if limits else None)
    with path.open("ab") as log:
        log.write(b"one\ntw")
        log.flush()
        tail.read()
        assert heard == ["one"]
        log.write(b"o\n10%\r20%\r\n")
        limits.append(log.tell())
        log.write(b"Traceback\n")
        log.flush()
    tail.read()
    assert heard == ["one", "two", "20%"]
    limits.clear()
    tail.skip_to(path.stat().st_size)
    with path.open("ab") as log:
        log.write(b"again, without end")
    tail.read(is_last=True)
    assert heard[-1] == "again, without end"


@pytest.mark.parametrize("text", ["\rstep {:07}", "step {:07}\r"])
def test_a_progress_bar_without_an_end_is_not_kept(text: str, tmp_path: Path) -> None:
    path, heard = tmp_path / "log", list[str]()
    tail = Tail(path, heard.append)
    tracemalloc.start()
    with path.open("w", buffering=1 << 16) as log:
        for first in range(0, 10_000, 10):
            log.writelines(text.format(step) * 100 for step in range(first, first + 10))
            log.flush()
            tail.read()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        log.write("\n")
    tail.read()
    assert heard == ["step 0009999"]
    assert kept < path.stat().st_size / 20


@given(st.lists(st.text("ab\r\n", max_size=5), max_size=8))
def test_a_line_is_the_same_however_it_comes(parts: list[str]) -> None:
    def lines_of(pieces: list[str]) -> list[str]:
        heard = list[str]()
        with TemporaryDirectory() as folder:
            path = Path(folder, "log")
            tail = Tail(path, heard.append)
            for piece in pieces:
                with path.open("ab") as log:
                    log.write(piece.encode())
                tail.read()
            tail.read(is_last=True)
        return heard

    assert lines_of(parts) == lines_of(["".join(parts)])


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == ()
    path.write_text("old\none\n\ntwo\nthree\n")
    assert last_lines(path, 2) == ("two", "three")
    assert last_lines(path, 9, start=4) == ("one", "two", "three")


def _frame_of(path: str, name: str) -> types.FrameType:
    """A frame of a function with this file and name, called from here."""
    space: dict[str, types.FrameType] = {}
    code = f"import sys\ndef {name}():\n    global frame\n    frame = sys._getframe()\n{name}()"
    exec(compile(code, path, "exec"), space)
    return space["frame"]


@pytest.mark.parametrize(
    ("path", "name", "place"),
    [
        ("/v/torch/distributed/distributed_c10d.py", "all_reduce", ("", "all-reduce")),
        ("/v/torch/distributed/distributed_c10d.py", "barrier", ("", "barrier")),
        ("/v/torch/autograd/graph.py", "_engine_run_backward", ("backward", "")),
        ("/v/torch/utils/data/_utils/fetch.py", "fetch", ("data loader", "")),
        ("/v/torch/optim/sgd.py", "step", ("optimizer", "")),
        ("/v/torch/serialization.py", "save", ("checkpoint", "")),
        ("/home/me/train.py", "load", ("train.py:4 in load", "")),
    ],
)
def test_a_stack_says_where_a_rank_is(path: str, name: str, place: tuple[str, str]) -> None:
    assert read_place(_frame_of(path, name)) == place


def test_a_beacon_is_plain_attributes() -> None:
    beacon = Beacon()
    assert (beacon.step, beacon.phase, beacon.collective) == (-1, "", "")
    assert isinstance(BEACON, Beacon) and not hasattr(beacon, "__dict__")
    assert read_place(None) == ("", "")
    assert sys.getsizeof(beacon) < 100


@pytest.mark.parametrize("name", ["gang.rank", "rank.life", "train.loop", "rl.loop"])
def test_what_stands_between_a_rank_and_its_task_is_left_out_of_tracebacks(name: str) -> None:
    found = importlib.util.find_spec(f"muster.{name}")
    assert found is not None and found.origin is not None
    assert _is_ours(found.origin)
    assert not _is_ours("/home/user/train.py")


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")
@pytest.mark.parametrize("spoils", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_ranks_are_not_forked_once_torch_has_counted_gpus(spoils: bool, tmp_path: Path) -> None:
    """torch.cuda.is_available() looks like nothing here, and a forked process cannot use CUDA."""
    (tmp_path / "counts.py").write_text(
        "import os, torch\n"
        "def poison(): torch.cuda._is_in_bad_fork = lambda: True\n"
        f"if {spoils}: os.register_at_fork(after_in_child=poison)\n"
    )
    program = (
        "import torch\n"
        "from muster.supervisor.forkserver import _prepare\n"
        "print(_prepare('counts:main', []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("importing counts:main has initialised CUDA" if spoils else "")
