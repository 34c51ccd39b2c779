"""``muster attach``, ``muster logs -f`` and ``status --watch``: a run seen from another process."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.integration.test_detach import COMMANDS, TRAINING, MusterMain, Place, made_run, place

from muster.base.codec import write_json
from muster.cli.commands.logs import Part, Shown
from muster.cli.gang import RankLogs
from muster.farm.view import Interval, RunView, WorkerLine, view_of
from muster.run.folder import RunFolder

__all__ = ["place"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="terminals of POSIX")


class Terminal:
    """``muster WORDS`` on a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.seen = b""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, "-m", "muster", *words])

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text.encode() not in self.seen:
            assert time.monotonic() < deadline, self.seen.decode("utf-8", "replace")
            self._hear()

    def _hear(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], 0.2)
        try:
            data = os.read(self.master, 1 << 16) if ready else None
        except OSError:  # its other end is closed
            return False
        self.seen += data or b""
        return data != b""

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            is_open = self._hear()
            pid, status = os.waitpid(self.pid, 0 if not is_open else os.WNOHANG)
            if pid:
                os.close(self.master)
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(self.seen)


def test_a_terminal_comes_and_goes_while_the_run_goes_on(place: Place) -> None:
    place.detach(COMMANDS["sweep"])
    place.until((place.folder / "middle").exists)
    first = Terminal(place.folder, "attach", "run")
    first.until("0/2")
    first.press(b"q")
    assert first.end() == 0 and b"run goes on." in first.seen
    second = Terminal(place.folder, "attach", "run")
    second.until("0/2")
    second.press(b"\x03")
    assert second.end() == 130 and b"run goes on." in second.seen
    third = Terminal(place.folder, "attach", "run")
    third.until("0/2")
    place.go()
    assert third.end() == 0 and b"run: done" in third.seen
    over = place.muster("attach", "run")
    assert over.returncode == 0
    assert over.stdout == "run: done (nobody works on it now)\n"


def test_ranks_in_a_pipe_are_lines_and_the_exit_code_is_theirs(place: Place) -> None:
    (place.folder / "p.py").write_text(
        "from phases import HERE\nimport time\nprint('one', flush=True)\n"
        "(HERE / 'middle').touch()\n"
        # By which the one that shows only what is new can be seen to have begun.
        "while not (HERE / 'go-middle').exists():\n"
        "    time.sleep(0.05)\n    print('still', flush=True)\n"
        "print('two', flush=True)\nraise ValueError('no such label')\n"
    )
    place.detach("run --devices cpu:1 --run-dir run p.py")
    place.until((place.folder / "middle").exists)
    words = [sys.executable, "-m", "muster"]
    watching = {
        name: subprocess.Popen([*words, *line.split()], cwd=place.folder, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, line in {"attach": "attach run", "logs": "logs run -f",
                           "status": "status run --watch"}.items()
    }  # fmt: skip
    try:
        seen = {name: one.stdout for name, one in watching.items() if one.stdout is not None}
        lines = [seen["logs"].readline() for _ in range(2)]
        assert lines[1] == "one\n"
        assert seen["status"].readline() == "run: running\n"
        assert seen["attach"].readline() == "[0] still\n"
        place.go()
        ends = {name: one.communicate(timeout=240) for name, one in watching.items()}
    finally:
        for one in watching.values():
            one.kill()
    said = {name: end[0] for name, end in ends.items()}
    assert watching["attach"].returncode == 1
    assert said["attach"].endswith("[0] two\nrun: failed; see why: muster why run\n")
    assert ends["attach"][1].startswith("rank 0 of 1 failed: ValueError: no such label\n")
    printed = said["logs"].replace("still\n", "")
    assert printed.startswith("two\nTraceback") and watching["logs"].returncode == 0
    assert "run: failed\n" in said["status"] and watching["status"].returncode == 0


def test_the_traceback_of_a_rank_that_starts_again_is_not_shown_later(tmp_path: Path) -> None:
    """Its record, which says where the traceback begins, is gone by then."""
    folder, heard = RunFolder(tmp_path), list[str]()
    folder.logs.mkdir()
    logs = RankLogs(folder, lambda rank, line: heard.append(f"{rank} {line}"))

    def add(text: str) -> None:
        with folder.rank_log(0).open("a") as log:
            log.write(text)

    def fail(message: str) -> None:
        start = folder.rank_log(0).stat().st_size
        record = {"type": "E", "message": message, "frames": [], "time_s": start}
        write_json(folder.rank_error(0), {**record, "log_start": start})

    def said() -> list[str]:
        logs.read(is_last=False)
        lines = heard.copy()
        heard.clear()
        return lines

    add("one\n")
    fail("a neighbour")
    add("Traceback\n")
    assert said() == ["0 one"]
    add("of it\n")
    assert said() == []
    folder.rank_error(0).unlink()
    add("two\n")
    assert said() == ["0 (it starts again after E: a neighbour)", "0 two"]
    fail("first")
    add("Traceback 1\n")
    assert said() == []
    add("three\n")
    fail("second")  # before anybody has seen that it had started again
    add("Traceback 2\n")
    assert said() == ["0 (it starts again after E: first)", "0 three"]
    logs.read(is_last=True)  # nobody has left a report
    assert heard == ["0 Traceback 2"]


#: A run of every kind, that waits until it is let go; and what it is called once it has ended.
KINDS = {
    **{name: (line, "done") for name, line in COMMANDS.items()},
    "search": ("sweep phases.py:f --space x=int(1,9) --maximize y --trials 2 --devices cpu:1 "
               "--run-dir run", "done"),
    "agent": (f"train phases_training.py:Agent {TRAINING} --run-dir run", "done"),
    "failing": ("sweep phases.py:f --grid x=-1,2 --devices cpu:1 --run-dir run", "failed"),
    "experiment": ("start e.toml", "done"),
}  # fmt: skip


def of_each_view(place: Place) -> dict[str, subprocess.Popen[str]]:
    """All that looks at a live run, each with its output in a pipe."""
    lines = ["status run --watch", "wait run", "wait run --any"]
    if not (place.run.path / "experiment.json").exists():  # which has no screen and no log
        lines += ["attach run", "logs run -f"]
    return {
        line: subprocess.Popen(
            [sys.executable, "-m", "muster", *line.split()], cwd=place.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for line in lines
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_looks_at_a_run_of_any_kind_sees_its_end(kind: str, place: Place) -> None:
    line, state = KINDS[kind]
    (place.folder / "e.toml").write_text(
        'run_dir = "run"\ndevices = "cpu:1"\n[phase.one]\ncommand = "sweep"\n'
        'target = "phases.py:f"\ngrid.x = [1]\n[phase.two]\ncommand = "sweep"\n'
        'target = "phases.py:f"\ngrid.x = [3]\nafter = ["one"]\n'
    )
    place.detach(line)
    place.until((place.folder / "middle").exists)
    views = of_each_view(place)
    cut = subprocess.Popen(  # a reader that goes away, such as head
        [sys.executable, "-m", "muster", "logs", "run", "-f"], cwd=place.folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert cut.stdout is not None
        cut.stdout.close()
        time.sleep(2.0)
        place.go()
        said = {name: one.communicate(timeout=240) for name, one in views.items()}
        cut.wait(timeout=240)
    finally:
        for one in (*views.values(), cut):
            one.kill()
            one.wait()
            assert one.stderr is not None
            one.stderr.close()
    code = 0 if state == "done" else 1
    for name, (out, err) in said.items():
        assert "Traceback" not in out + err, (name, err)
        expected = code if name.split()[0] in ("attach", "wait") else 0
        assert views[name].returncode == expected, (name, out, err)
        if not name.startswith("logs"):
            assert f"run: {state}" in out, (name, out)
    for name in views:  # and once more, now that it is over
        done = place.muster(*name.split())
        assert done.returncode == (code if name.split()[0] in ("attach", "wait") else 0), done


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs another user")
def test_another_user_looks_at_a_live_run(muster_main: MusterMain) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        made = Place(folder, partial(muster_main, folder=folder))
        pid = made.detach(COMMANDS["sweep"])
        try:
            made.until((folder / "middle").exists)
            for words in ("attach", "logs", "wait"):
                muster_main(words, "--help", folder=folder)  # so that what it imports is there
            # Of root still, when this process is not any more; it waits for what is printed here.
            attached = "while [ ! -s /proc/self/fd/1 ]; do sleep 0.05; done"
            go = f"read word; {attached}; touch {folder}/go-middle {folder}/go-finishing"
            with subprocess.Popen(["sh", "-c", go], stdin=subprocess.PIPE) as lets_go:
                os.seteuid(65534)
                try:
                    seen = made.muster("status", "run")
                    cancelled = made.muster("cancel", "run")
                    assert lets_go.stdin is not None
                    lets_go.stdin.close()
                    ended = made.muster("attach", "run")
                    assert ended.stdout.count("\n") > 1, "it has seen the run at work"
                    waited = made.wait()
                    logs = made.muster("logs", "run", "-f")
                finally:
                    os.seteuid(0)
            assert seen.stdout.startswith("run: running"), seen
            assert (ended.returncode, waited.returncode) == (0, 0), (ended, waited)
            assert ended.stdout.endswith("run: done\n") and logs.returncode == 0
            assert cancelled.returncode != 0 and "Traceback" not in cancelled.stderr
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.chdir("/")


def test_logs_are_followed_across_a_resume(place: Place) -> None:
    pid = place.detach(COMMANDS["sweep"])
    place.until((place.folder / "middle").exists)
    (place.folder / "phases.py").write_text(
        (place.folder / "phases.py").read_text() + "\n_reach = reach\ndef reach(phase):\n"
        "    _reach(phase)\n    print('let go', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "muster", "logs", "run", "-f"], cwd=place.folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        try:
            os.kill(pid, signal.SIGKILL)
            assert follower.stderr is not None
            assert "run has stopped" in follower.stderr.readline()
            place.detach("resume run --allow-changed-code")
            place.go()
            said, _ = follower.communicate(timeout=240)
        finally:
            follower.kill()
    assert said == "worker-0: let go\n" * 2
    assert follower.returncode == 0


# ---------------------------------------------------------------------- without a process


@pytest.mark.quick
def test_a_log_that_is_cut_or_replaced_is_shown_from_its_beginning(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from muster.cli.streams import steady

    log = tmp_path / "log"
    log.write_bytes(b"1\n2\n3\nhal")
    part, shown = Part("", log), Shown(2)
    with steady(is_vital=True):
        shown.go_on(part)
        assert capfdbinary.readouterr().out == b"3\n", "of two lines the second is not whole"
        with log.open("ab") as file:
            file.write(b"f\n\xff\x1b[2J\n")
        shown.go_on(part)
        assert capfdbinary.readouterr().out == b"half\n\xff\x1b[2J\n", "as it is, in a pipe"
        log.write_bytes(b"cut\n")
        shown.go_on(part)
        (tmp_path / "new").write_bytes(b"another file that is longer\n")
        os.replace(tmp_path / "new", log)
        shown.go_on(part)
        log.unlink()
        shown.go_on(part)
        shown.end()
    assert capfdbinary.readouterr().out == b"cut\nanother file that is longer\n"


@pytest.mark.quick
def test_attempts_in_one_log_are_cut_and_followed_each(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from muster.cli.streams import steady

    log, other = tmp_path / "log", tmp_path / "other"
    log.write_bytes(b"1\n2\n3\n4\n5\n6\nhal")
    parts, shown = [Part("", log, 0, 6), Part("", log, 6)], Shown(2)
    with steady(is_vital=True):
        for part in parts:
            shown.go_on(part)
        assert capfdbinary.readouterr().out == b"2\n3\n6\n"
        shown.num_lines = None
        with log.open("ab") as file:
            file.write(b"f\n")
        for part in parts:
            shown.go_on(part)
        assert capfdbinary.readouterr().out == b"half\n"
        other.write_bytes(b"half")
        shown.go_on(Part("", other))
        other.write_bytes(b"x\n")
        shown.go_on(Part("", other))
    assert capfdbinary.readouterr().out == b"half\nx\n", "the old line does not go on in the new"


@pytest.mark.quick
@pytest.mark.parametrize("lines", [0, 1, 3, 1000, 5000])
def test_the_last_lines_are_exactly_so_many(
    lines: int, tmp_path: Path, muster_main: MusterMain
) -> None:
    folder = RunFolder(tmp_path / "run")
    made_run(folder, 0)
    text = [f"line {number} {'x' * (number % 90)}\n" for number in range(3000)]
    folder.rank_log(0).write_text("".join(text))
    done = muster_main("logs", "run", "-n", str(lines))
    assert done.returncode == 0
    assert done.stdout.splitlines(keepends=True)[1:] == (text[-lines:] if lines else [])


@pytest.mark.quick
def test_what_has_ended_is_not_waited_for(tmp_path: Path, muster_main: MusterMain) -> None:
    folder = RunFolder(tmp_path / "run")
    made_run(folder, 1)
    folder.rank_log(0).write_text("hello\n")
    assert muster_main("logs", "run", "--follow").stdout.endswith("hello\n")
    assert muster_main("status", "run", "--watch").stdout.startswith("run: failed\n")
    assert muster_main("attach", "run").returncode == 1
    both = muster_main("status", "run", "--watch", "--json")
    assert both.returncode == 2 and "contradict" in both.stderr
    assert muster_main("logs", "run", "-n", "-1").returncode == 2
    folder.elements.mkdir()
    folder.elements_json.write_text(json.dumps({"elements": 2, "share": "s", "job_id": 7}))
    array = muster_main("attach", "run")
    assert array.returncode == 2 and "elements/N" in array.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    "damage",
    [
        lambda picture: picture.pop("workers"),
        lambda picture: picture.update(workers=[1]),
        lambda picture: picture.update(notes=3),
        lambda picture: picture.update(eta="x"),
        lambda picture: picture.pop("total"),
        lambda picture: picture.update(total="many"),
    ],
)
def test_a_picture_is_read_back_or_not_shown(
    damage: Callable[[dict[str, object]], object],
) -> None:
    worker = WorkerLine("cpu:0", "running", "1 x=1", 2.0, 3.0, "", 4)
    view = RunView(
        "run", 9, 4, 0, 0, 1, 0, 2.0, 0.5, Interval(1.0, 2.0), "running", (worker,), (("a", "b"),)
    )
    record = json.loads(
        json.dumps({**view._asdict(), "workers": [worker._asdict()], "numbers": {}, "new": 1})
    )
    assert view_of(record) == view._replace(numbers={})
    damage(record)
    assert view_of(record) is None
