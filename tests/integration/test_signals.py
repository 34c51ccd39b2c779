"""Each long command, at each phase, ended by each signal: the exit code, and what status says.

The phases are found in files, not by the clock: run.json is there, a task or a step has begun,
the last step is done, the journal has said that all tasks have ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.programs import read_program

from muster.base.signals import shown_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals of POSIX")

MusterMain = Callable[..., subprocess.CompletedProcess[str]]
TASKS = "phases.py:f --grid x=1,2,3,4,5,6 --devices cpu:1"
TRAINING = "--devices cpu:1 --no-tensorboard --grace 60"

#: What is typed. ``resume`` and ``retry`` go on with a sweep that was interrupted before.
COMMANDS = {
    "sweep": f"sweep {TASKS} --run-dir run",
    "map": "map phases.py:double --input in.jsonl --output out.jsonl --chunk-rows 1 "
    "--devices cpu:1 --run-dir run",
    "run": "run --devices cpu:1 --run-dir run phases.py",
    "train": f"train phases_training.py:Model {TRAINING} --run-dir run",
    "agent": f"train phases_training.py:Agent {TRAINING} --run-dir run",
    "resume": "resume run",
    "retry": "retry run",
}
#: Phase → the files of which one says that it is reached.
BEGUN, MIDDLE, FINISHING, EXPORTING = "begun", "middle", "finishing", "exporting"
PHASES = {
    "sweep": (BEGUN, MIDDLE, EXPORTING),
    "map": (BEGUN, MIDDLE, EXPORTING),
    "run": (BEGUN, MIDDLE),
    "train": (BEGUN, MIDDLE, FINISHING),
    "agent": (BEGUN, MIDDLE, FINISHING),
    "resume": (MIDDLE, EXPORTING),
    "retry": (MIDDLE, EXPORTING),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: As another command: an agent is trained by the ranks of a training, and a sweep that goes on
#: exports as one that begins.
_ALIKE = {("agent", BEGUN), ("agent", FINISHING), ("resume", EXPORTING), ("retry", EXPORTING)}
#: Every phase of every command with one signal, in turns; the other combinations are slow.
CASES = [
    pytest.param(
        command, phase, number,
        id=f"{command}-{phase}-{number.name}",
        marks=[pytest.mark.slow]
        * (number != SIGNALS[(row + column) % 3] or (command, phase) in _ALIKE),
    )
    for row, (command, phases) in enumerate(PHASES.items())
    for column, phase in enumerate(phases)
    for number in SIGNALS
]  # fmt: skip


def expected(command: str, phase: str, number: int, *, has_saved: bool) -> tuple[int, str]:
    """Exit code, and the state that ``muster status`` names."""
    if phase in (FINISHING, EXPORTING):
        return 0, "done"
    code = 130 if number == signal.SIGINT or command == "run" else 75
    return code, "saved" if code == 75 and has_saved else "stopped"


class Case:
    """A command in a folder of its own, and the files that say how far it is."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run = folder / "run"
        self.errors = folder / "stderr.txt"
        for name in ("phases.py", "phases_training.py", "phases_fit.py"):
            (folder / name).write_text(read_program(name))
        lines = [json.dumps({"x": i}) + "\n" for i in range(6)]
        (folder / "in.jsonl").write_text("".join(lines))

    def start(self, words: str) -> subprocess.Popen[bytes]:
        first, *rest = words.split()
        program = [first] if first.endswith(".py") else ["-m", "muster", first]
        with self.errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, *program, *rest],
                cwd=self.folder,
                env={**os.environ, "PHASES": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def until(self, process: subprocess.Popen[bytes], found: Callable[[], bool]) -> None:
        """As soon as ``found``, or the process has ended."""
        deadline = time.monotonic() + 300
        while process.poll() is None and not found():
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.002)

    def has_event(self, name: str) -> bool:
        path = self.run / "events.jsonl"
        return path.exists() and f'"event": "{name}"' in path.read_text()

    def has_reached(self, phase: str) -> bool:
        if phase == BEGUN:
            return (self.run / "run.json").exists()
        if phase == EXPORTING:
            return self.has_event("end")
        return (self.folder / phase).exists()

    def has_been_heard(self) -> bool:
        return self.has_event("wish") or "asked to end" in self.errors.read_text()

    def go(self, phase: str) -> None:
        (self.folder / f"go-{phase}").touch()

    def check_done(self, muster_main: MusterMain) -> None:
        """Nothing says that it was ended: the request came when there was nothing left to do."""
        events = map(json.loads, (self.run / "events.jsonl").read_text().splitlines())
        assert [event.get("stopped_by") for event in events if event["event"] == "end"] == [None]
        assert "It was ended by" not in muster_main("why", "run", folder=self.folder).stdout
        said = muster_main("status", "run", folder=self.folder).stdout
        assert said.startswith("run: done\n")

    def interrupted_before(self, *, first: int) -> None:
        """A sweep with some tasks ended and the others open; a negative first one has failed."""
        process = self.start(COMMANDS["sweep"].replace("x=1", f"x={first}"))
        self.until(process, lambda: self.has_reached(MIDDLE))
        process.send_signal(signal.SIGTERM)
        self.until(process, self.has_been_heard)
        self.go(MIDDLE)
        assert process.wait(300) == 75, self.errors.read_text()
        for name in ("go-middle", "middle", "stderr.txt", "run/events.jsonl"):
            (self.folder / name).unlink()
        (self.folder / "mended").touch()


@pytest.mark.parametrize(("command", "phase", "number"), CASES)
def test_every_command_at_every_phase(
    command: str, phase: str, number: int, tmp_path: Path, muster_main: MusterMain
) -> None:
    for turn in range(20):
        case = Case(tmp_path / str(turn))
        if check(case, muster_main, command, phase, number):
            return
    raise AssertionError("it was over each time before its phase was seen")


def check(case: Case, muster_main: MusterMain, command: str, phase: str, number: int) -> bool:
    """Whether the phase was seen: an export may be over before."""
    if command in ("resume", "retry"):
        case.interrupted_before(first=-1 if command == "retry" else 1)
    if phase in (FINISHING, EXPORTING):
        case.go(MIDDLE)
    process = case.start(COMMANDS[command])
    try:
        case.until(process, lambda: case.has_reached(phase))
        if phase == EXPORTING and process.poll() == 0:
            return False
        assert process.poll() is None, case.errors.read_text()
        process.send_signal(number)
        case.until(process, case.has_been_heard)
        if command in ("train", "agent") and phase == MIDDLE:
            case.until(process, (case.folder / "asked").exists)
        for name in (MIDDLE, FINISHING):
            case.go(name)
        code = process.wait(300)
    finally:
        process.kill()
    # Before the first step it may have come to save, or not.
    has_saved = any((case.run / "checkpoints").glob("step-*"))
    assert has_saved or command not in ("train", "agent") or phase == BEGUN
    wanted, state = expected(command, phase, number, has_saved=has_saved)
    assert code == wanted, case.errors.read_text()
    said = muster_main("status", "run", folder=case.folder).stdout
    assert said.splitlines()[0] == f"run: {state}", said
    if phase == MIDDLE and code in (75, 130):
        name = shown_request(signal.Signals(number).name)
        told = muster_main("why", "run", folder=case.folder).stdout
        assert f"It was ended by {name}." in told
    if command in ("train", "agent") and phase == FINISHING:
        assert ": done after" in case.errors.read_text()
        case.check_done(muster_main)
    if command in ("train", "agent") and code == 75:
        word = "; start it again to go on" if has_saved else "stopped before its first save"
        assert word in case.errors.read_text()
        assert ("go on: " if has_saved else "nothing is saved; begin again: ") in said
    return True


@pytest.mark.parametrize("command", ["train", pytest.param("agent", marks=pytest.mark.slow)])
def test_what_was_cancelled_goes_on_with_resume(
    command: str, tmp_path: Path, muster_main: MusterMain
) -> None:
    case = Case(tmp_path)
    process = case.start(COMMANDS[command])
    try:
        case.until(process, lambda: case.has_reached(MIDDLE))
        asked = muster_main("cancel", "run")
        assert "asked its ranks to save what they can and to end" in asked.stdout, asked.stderr
        case.until(process, (tmp_path / "asked").exists)
        for name in (MIDDLE, FINISHING):
            case.go(name)
        assert process.wait(300) == 130, case.errors.read_text()
        assert "ended by `muster cancel`" in case.errors.read_text()
        assert "SIGINT" not in case.errors.read_text()
        assert "It was ended by `muster cancel`." in muster_main("why", "run").stdout
    finally:
        process.kill()
    saved = [int(path.name.removeprefix("step-")) for path in case.run.glob("checkpoints/step-*")]
    said = muster_main("status", "run").stdout
    assert said.startswith("run: stopped\n") and "go on: muster resume run" in said
    assert "nothing to cancel here" in muster_main("cancel", "run").stdout
    case.errors.unlink()
    process = case.start("resume run")
    try:
        assert process.wait(300) == 0, case.errors.read_text()
    finally:
        process.kill()
    assert f"resume     from step {max(saved)}" in case.errors.read_text()
    assert muster_main("status", "run").stdout.startswith("run: done\n")


#: A program that calls `muster.fit`, in its own process and on ranks, and commands like it.
FIT, FIT_ON_RANKS = "phases_fit.py cpu", "phases_fit.py cpu:2"
CANCEL = "cancel"
ASKED = [
    *((FIT, by) for by in (CANCEL, "SIGINT")),
    (FIT_ON_RANKS, "SIGTERM"),
    (COMMANDS["train"], "SIGUSR1"),
    *(
        pytest.param(words, by, marks=pytest.mark.slow)
        for words, by in [
            *((FIT, by) for by in ("SIGTERM", "SIGHUP", "SIGUSR1")),
            *((FIT_ON_RANKS, by) for by in (CANCEL, "SIGUSR1")),
            (COMMANDS["agent"], "SIGUSR1"),
        ]
    ),
]


@pytest.mark.parametrize(("words", "by"), ASKED)
def test_status_and_why_say_who_has_asked_a_training_to_end(
    words: str, by: str, tmp_path: Path, muster_main: MusterMain
) -> None:
    """The same of a call as of the command."""
    case = Case(tmp_path)
    process = case.start(words)
    try:
        case.until(process, lambda: case.has_reached(MIDDLE))
        assert process.poll() is None, case.errors.read_text()
        if by == CANCEL:
            assert "asked" in muster_main("cancel", "run").stdout
        else:
            process.send_signal(signal.Signals[by])
        if words != FIT:  # which gets it itself
            case.until(process, (tmp_path / "asked").exists)
        for name in (MIDDLE, FINISHING):
            case.go(name)
        code = process.wait(300)
    finally:
        process.kill()
    said = case.errors.read_text()
    assert code == (130 if by in (CANCEL, "SIGINT") else 75), said
    if words in (FIT, FIT_ON_RANKS):
        assert f"exit code {code} no results" in said
    state = muster_main("status", "run").stdout.splitlines()[0]
    assert state == f"run: {'saved' if code == 75 else 'stopped'}"
    assert f"It was ended by {shown_request(by)}." in muster_main("why", "run").stdout


@pytest.mark.parametrize(
    "words",
    [FIT, *(pytest.param(each, marks=pytest.mark.slow) for each in (FIT_ON_RANKS,))],
)
def test_a_call_that_was_asked_when_all_was_done_is_done(
    words: str, tmp_path: Path, muster_main: MusterMain
) -> None:
    case = Case(tmp_path)
    case.go(MIDDLE)
    process = case.start(words)
    try:
        case.until(process, lambda: case.has_reached(FINISHING))
        process.send_signal(signal.SIGTERM)
        if words != FIT:
            case.until(process, case.has_been_heard)
        case.go(FINISHING)
        assert process.wait(300) == 0, case.errors.read_text()
    finally:
        process.kill()
    assert "exit code 0 results" in case.errors.read_text()
    case.check_done(muster_main)
