"""A call in a process of its own: it gives what the call gives, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from muster.base.errors import SetupError, UsageError
from muster.pipeline.apart import Call, apart
from muster.pipeline.sinks.formats import spec_of

#: Bits of the three signals, as /proc shows them.
_ENDING = sum(1 << (number - 1) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def test_it_gives_what_the_call_gives_from_another_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert apart(os.getpid) != os.getpid()
    assert apart(json.loads, '{"a": [1, null]}') == {"a": [1, None]}
    assert apart(print, "what a library says") is None
    assert "what a library says" in capfd.readouterr().err


def test_errors_for_people_come_through_and_others_show_where_they_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError) as here:
        spec_of("")
    with pytest.raises(UsageError) as there:
        apart(spec_of, "")
    assert str(there.value) == str(here.value)
    with pytest.raises(FileNotFoundError) as missing:
        apart(os.stat, "/nowhere/at all")
    assert missing.value.errno == 2
    with pytest.raises(SetupError, match="loads ended with exit code 1"):
        apart(json.loads, "{")
    assert "JSONDecodeError" in capfd.readouterr().err
    with pytest.raises(SetupError, match="exit ended with exit code 7"):
        apart(os._exit, 7)


def test_what_lies_in_the_folder_or_is_printed_at_the_start_does_not_get_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pickle.py").write_text("raise RuntimeError('not the one')")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.chdir(tmp_path)
    # An empty entry of PYTHONPATH would be the folder itself.
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(tmp_path / "site"), before])))
    assert apart(json.loads, "[1]") == [1]
    assert "hello" in capfd.readouterr().err


def test_a_kill_by_the_system_is_said_to_be_for_memory() -> None:
    with pytest.raises(SetupError, match="ended by signal 9") as caught:
        apart(signal.raise_signal, signal.SIGKILL)
    assert "memory may have been short" in str(caught.value)


def test_it_hears_no_signal_and_ends_with_its_caller() -> None:
    program = "import time; from muster.pipeline.apart import apart; apart(time.sleep, 300)"
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        child = _child_of(caller.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
        time.sleep(0.3)
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    finally:
        caller.kill()
        caller.wait()
    child.wait(120)


def _child_of(pid: int) -> psutil.Process:
    """The process of the call, once its signals are ignored."""
    for _ in range(2400):
        for child in psutil.Process(pid).children():
            if _ignored(child.pid) & _ENDING == _ENDING:
                return child
        time.sleep(0.05)
    raise AssertionError("no process was started")


def _ignored(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))


def test_it_is_told_more_while_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    call = Call(eval, "sum(told(), 1)")
    for number in range(20):
        assert call.has_room
        call.tell(number)
    assert call.result() == 191
    assert Call(eval, "sum(told(), 5)").result() == 5


def test_whoever_does_not_listen_has_no_room_and_can_be_ended() -> None:
    before = psutil.Process().children()  # an earlier test may have left one that has ended
    call = Call(time.sleep, 300)
    told_kib = 0
    while call.has_room and told_kib < 4096:
        call.tell(bytes(3 << 10))
        told_kib += 3
    assert not call.has_room and told_kib < 4096
    call.end()
    call.end()
    assert not {*psutil.Process().children()} - {*before}


def test_what_is_told_to_one_that_has_ended_is_lost_and_the_result_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    call = Call(os._exit, 7)
    for _ in range(300):
        call.tell(bytes(1 << 10))
        time.sleep(0.01)
    with pytest.raises(SetupError, match="exit ended with exit code 7"):
        call.result()


def test_a_child_that_holds_the_pipe_does_not_keep_it_from_ending() -> None:
    call = Call(eval, "list(told())")
    call.tell("one")
    holder = os.fork()
    if not holder:
        time.sleep(300)
        os._exit(0)
    try:
        began_s = time.monotonic()
        assert call.result() == ["one"]
        assert time.monotonic() - began_s < 120
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def test_it_has_room_at_descriptors_that_select_does_not_know() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no more than 2,048 descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        call = Call(eval, "list(told())")
        assert call.has_room
        assert call.result() == []
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
