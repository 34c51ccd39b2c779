"""``--detach`` and ``muster wait``: a run that nobody's terminal holds, from its start to its end.

What it does is let go in phases, by files; nothing here is timed.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.test_gpus_from_facts import facts
from tests.json_schemas import check_printed
from tests.programs import read_program

from muster.cli import detached
from muster.cli.main import main
from muster.run.folder import RunFolder
from muster.run.session import is_held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions of POSIX")

MusterMain = Callable[..., subprocess.CompletedProcess[str]]
TRAINING = "--devices cpu:1 --no-tensorboard --grace 60"
COMMANDS = {
    "sweep": "sweep phases.py:f --grid x=1,2 --devices cpu:1 --run-dir run",
    "map": "map phases.py:double --input in.jsonl --output out.jsonl --devices cpu:1 --run-dir run",
    "stages": "map both.py:stages --input in.jsonl --output out.jsonl --stage-by-stage "
    "--devices cpu:1 --run-dir run",
    "run": "run --devices cpu:1 --run-dir run phases.py --detach",
    "train": f"train phases_training.py:Model {TRAINING} --run-dir run",
}


class Place:
    """A folder with work in it that waits to be let go, and the process that does it."""

    def __init__(self, folder: Path, muster_main: MusterMain) -> None:
        self.folder, self.muster = folder, muster_main
        self.run = RunFolder(folder / "run")
        self.pids: list[int] = []
        for name in ("phases.py", "phases_training.py"):
            (folder / name).write_text(read_program(name))
        (folder / "both.py").write_text(
            "from phases import double\ndef more(r):\n    return {'y': r['y'] + 1}\n"
            "stages = [double, more]\n"
        )
        (folder / "in.jsonl").write_text('{"x": 1}\n{"x": 2}\n')

    def muster_in_a_process(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        # Files take what it prints: a pipe would stay open for as long as the run goes on.
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        with out.open("wb") as said, err.open("wb") as complained:
            done = subprocess.run(
                [sys.executable, "-m", "muster", *words],
                cwd=self.folder, env={**os.environ, "PHASES": str(self.folder), **more},
                stdin=subprocess.DEVNULL, stdout=said, stderr=complained, check=False, timeout=300,
            )  # fmt: skip
        return subprocess.CompletedProcess(words, done.returncode, out.read_text(), err.read_text())

    def detach(self, line: str, **more: str) -> int:
        """Start it; the id of the process that does it."""
        first, *rest = line.split()
        done = self.muster_in_a_process(first, "--detach", "--json", *rest, **more)
        assert done.returncode == 0, done.stderr
        told = check_printed("detach", done.stdout)
        assert told["detached"] is True and Path(told["path"]).name == "run"
        self.pids.append(told["pid"])
        return int(told["pid"])

    def until(self, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not found():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def go(self) -> None:
        for phase in ("middle", "finishing"):
            (self.folder / f"go-{phase}").touch()

    def said(self) -> str:
        log = self.run.command_log
        return log.read_text() if log.exists() else "nothing"

    def wait(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.muster("wait", "run", "--timeout", "240", *words)


@pytest.fixture
def place(tmp_path: Path, muster_main: MusterMain) -> Iterator[Place]:
    made = Place(tmp_path, muster_main)
    yield made
    for pid in made.pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[] if name == "sweep" else pytest.mark.slow)
     for name in COMMANDS],
)  # fmt: skip
def test_it_goes_on_in_a_session_of_its_own(command: str, place: Place) -> None:
    pid = place.detach(COMMANDS[command])
    assert place.run.command_log.exists(), "told before it prints into the run's folder"
    process = psutil.Process(pid)
    assert os.getsid(pid) == pid != os.getsid(0)
    assert process.terminal() is None
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    for number in (1, 2):
        assert os.readlink(f"/proc/{pid}/fd/{number}") == str(place.run.command_log)
    place.go()
    done = place.wait()
    assert done.returncode == 0, (done.stdout, done.stderr, place.said())
    assert done.stdout == "run: done\n"
    place.until(lambda: place.said() != "")  # a run is over before its command has said so


def test_a_run_that_is_killed_is_said_to_be_and_goes_on(place: Place) -> None:
    pid = place.detach(COMMANDS["sweep"])
    place.until((place.folder / "middle").exists)
    os.kill(pid, signal.SIGKILL)
    killed = place.wait("--json")
    assert killed.returncode == 1
    (told,) = json.loads(killed.stdout)
    assert told["is_over"] is True and told["exit_code"] == 1
    assert "it was killed, or its machine went down" in told["sentence"]
    assert told["sentence"].endswith("go on: muster resume run")
    place.detach("resume run")
    late = place.muster("wait", "run", "--timeout", "0.1")
    assert late.returncode == 124 and "run: not over after 0.1 s" in late.stderr
    place.go()
    assert place.wait().stdout == "run: done\n"


@pytest.mark.slow  # as after a hang-up, which a thorough test below has
def test_a_request_to_end_is_saved_and_wait_says_so(place: Place) -> None:
    pid = place.detach(COMMANDS["sweep"])
    place.until((place.folder / "middle").exists)
    os.kill(pid, signal.SIGTERM)
    place.until(lambda: '"wish"' in place.run.events.read_text())
    place.go()
    done = place.wait()
    assert done.returncode == 75
    assert done.stdout == "run: stopped before all was done; go on: muster resume run\n"


@pytest.mark.slow  # with a folder that is busy; what is refused here is quick, below
def test_who_cannot_begin_says_why_and_leaves_nothing(place: Place) -> None:
    wrong = place.muster_in_a_process(
        "sweep", "phases.py:nobody", "--detach", "--grid", "x=1", "--run-dir", "run"
    )
    assert wrong.returncode == 2 and "phases.py has no function 'nobody'" in wrong.stderr
    assert wrong.stdout == "" and not place.run.path.exists()
    place.detach(COMMANDS["sweep"])
    busy = place.muster_in_a_process(*COMMANDS["sweep"].split(), "--detach")
    assert busy.returncode == 3 and "is being worked on by process" in busy.stderr
    place.go()
    assert place.wait().returncode == 0
    plan = place.muster_in_a_process(*COMMANDS["sweep"].split(), "--detach", "--dry-run")
    assert plan.returncode == 0 and "Nothing was started" in plan.stdout


def test_a_logout_ends_what_was_not_detached_and_nothing_else(place: Place) -> None:
    os.environ["PHASES"] = str(place.folder)
    try:
        pid, terminal = pty.fork()
        if pid == 0:  # a login shell with a terminal, which hangs up
            os.chdir(place.folder)
            line = f"{sys.executable} -m muster {COMMANDS['sweep']}"
            other = line.replace("--run-dir run", "--run-dir other")
            script = f"{line} --detach --json > told.json; {other} 2> other.txt"
            os.execv("/bin/sh", ["sh", "-c", script])
    finally:
        del os.environ["PHASES"]
    other = RunFolder(place.folder / "other")
    place.until(lambda: is_held(place.run) and is_held(other))
    place.pids.append(json.loads((place.folder / "told.json").read_text())["pid"])
    place.until(lambda: (place.folder / "middle").exists())
    os.close(terminal)
    os.waitpid(pid, 0)
    place.until(lambda: not other.events.exists() or '"wish"' in other.events.read_text())
    assert is_held(place.run)
    place.go()
    assert place.wait().returncode == 0
    assert place.muster("wait", "other", "--timeout", "240").returncode == 75


@pytest.mark.parametrize(
    ("linger", "kills", "scope", "says"),
    [
        ("yes", "yes", 0, "in a scope of systemd"),
        ("yes", "yes", 1, "A LOGOUT ENDS IT"),
        ("no", "yes", 0, "`loginctl enable-linger`"),
        ("no", "no", 0, "It goes on after a logout, not after a restart"),
    ],
)
@pytest.mark.quick
def test_it_lives_where_it_outlives_a_logout(
    linger: str, kills: str, scope: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_systemd(tmp_path, linger, kills, scope)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    place = detached.place()
    assert says in place.survives
    assert bool(place.prefix) == (linger == "yes" and scope == 0)
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    assert "SLURM job 812" in detached.place().survives


def write_systemd(folder: Path, linger: str, kills: str, scope: int) -> None:
    """What answers for systemd where there is none."""
    scripts = {
        "loginctl": f'case "$*" in *Linger*) echo Linger={linger};; '
        f"*Kill*) echo KillUserProcesses={kills};; esac",
        "systemd-run": f'[ {scope} = 0 ] || exit 1\necho "$@" >> {folder}/asked\n'
        'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@pytest.mark.slow
def test_it_runs_in_the_scope(place: Place) -> None:
    write_systemd(place.folder, "yes", "yes", 0)
    place.detach(COMMANDS["sweep"], PATH=f"{place.folder}:{os.environ['PATH']}")
    assert "--user --scope" in (place.folder / "asked").read_text()
    place.go()
    assert place.wait().returncode == 0


@pytest.mark.quick
def test_its_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    from muster.cli.detached import cut

    log = tmp_path / "command.log"
    with log.open("ab", buffering=0) as file:
        file.write(b"first\n")
        cut(log, 6)
        assert log.read_bytes() == b"first\n"
        file.write(b"second\n")
        cut(log, 6)
        file.write(b"third\n")
    assert (tmp_path / "command.log.1").read_bytes() == b"first\nsecond\n"
    assert log.read_bytes() == b"third\n"


@pytest.mark.quick
def test_who_is_killed_before_it_begins_is_said_to_be(
    tmp_path: Path, muster_main: MusterMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_systemd(tmp_path, "yes", "no", 0)
    (tmp_path / "systemd-run").write_text('#!/bin/sh\ncase "$*" in *true) ;; *) kill -9 $$;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = muster_main("sweep", "--detach", "phases.py:f", "--seeds", "2")
    assert done.returncode == 3 and "ended by signal 9 before it had begun" in done.stderr


@pytest.mark.quick
def test_what_it_tells_can_be_done_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "exp"
    (there / "run").mkdir(parents=True)
    (there / "run" / "experiment.json").write_text("{}")
    begun = {"run": "run", "path": "run", "log": "run/command.log", "cwd": str(there)}
    detached._tell(["--detach"], 7, detached._from_here(begun), "It goes on.")
    said = capfd.readouterr().out
    assert f"look:  muster status {there}/run\n" in said
    assert "attach" not in said and "logs" not in said, "which are for runs"
    assert str(there / "run" / "command.log") in said


@pytest.mark.quick
def test_a_rank_that_has_not_printed_yet_is_waited_for(
    tmp_path: Path, muster_main: MusterMain
) -> None:
    from muster.api.runs import Run
    from muster.cli.commands.logs import _Logs, _parts
    from muster.run.session import hold

    folder = RunFolder(tmp_path / "run")
    made_run(folder, 0)
    assert muster_main("logs", "run", "-f").returncode == 2, "nobody works on it"
    with hold(folder):
        parts = _parts(Run(folder.path), _Logs(run="run", follow=True))
        assert parts() == []
        folder.rank_log(0).write_text("hello\n")
        assert [part.path for part in parts()] == [folder.rank_log(0)]


def test_ranks_that_are_about_to_begin_again_are_waited_for(place: Place) -> None:
    (place.folder / "p.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom muster.base.codec import write_json\n"
        "from muster.run.folder import RunFolder\n"
        "write_json(RunFolder(Path('run')).ending_json, {'ending': 'restart'})\nsys.exit(1)\n"
    )
    done = place.muster_in_a_process("run", "--devices", "cpu:1", "--run-dir", "run", "p.py")
    assert done.returncode == 1, done.stderr
    now_s = time.time()
    os.utime(place.run.events, (now_s + 3600, now_s + 3600))  # however slow this machine is
    assert place.muster("wait", "run", "--timeout", "0.1").returncode == 124
    os.utime(place.run.events, (now_s - 3600, now_s - 3600))
    nobody, out = os.pipe()
    os.close(nobody)
    words = [sys.executable, "-m", "muster", "wait", "run"]
    waited = subprocess.run(words, cwd=place.folder, stdout=out, check=False, timeout=300)
    os.close(out)
    assert waited.returncode == 1, "also where nobody reads what it says"


@pytest.mark.quick
def test_who_is_in_slurms_hands_is_not_over_while_slurm_does_not_answer(
    tmp_path: Path, muster_main: MusterMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muster.api.experiments.watching import is_at_work
    from muster.api.runs import Run
    from muster.slurm.commands import write_job

    folder = RunFolder(tmp_path / "run")
    made_run(folder, 75)
    folder.slurm.mkdir(exist_ok=True)
    write_job(folder, "7", "x")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_at_work(Run(folder.path)), "a copy on a machine that has no SLURM"
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    assert is_at_work(Run(folder.path))
    shutil.copy(tmp_path / "scontrol", tmp_path / "squeue")
    late = muster_main("wait", "run", "--timeout", "0.001")  # its silence has taken all of that
    assert (late.returncode, "SLURM does not answer" in late.stderr) == (124, True), late


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sweep phases.py:f --seeds 2 --on slurm --array 2 --time 1:00", "an array is sent"),
        ("run --on slurm --gpus 1 --time 1:00 phases.py", "--no-wait"),
        ("slurm-script run --gpus 1 --time 1:00 --detach phases.py", "nobody's foreground"),
    ],
)
@pytest.mark.quick
def test_what_does_not_run_here_cannot_be_detached(
    line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phases.py").write_text("def f(seed):\n    return seed\n")
    words = line.split()
    words = words if "--detach" in words else [words[0], "--detach", *words[1:]]
    assert main(words, may_detach=False) == 2
    said = capfd.readouterr().err
    assert "--detach has no effect" in said and why in said


@pytest.mark.quick
def test_the_exit_code_of_several(tmp_path: Path, muster_main: MusterMain) -> None:
    for name, code in (("good", 0), ("bad", 1), ("saved", 75)):
        folder = RunFolder(tmp_path / "runs" / name)
        made_run(folder, code)
    assert muster_main("wait", "good", "saved", "bad").returncode == 75
    assert muster_main("wait", "good", "bad", "saved").returncode == 1
    assert muster_main("wait", "good").returncode == 0
    first = muster_main("wait", "saved", "bad", "--any")
    assert first.returncode == 75
    RunFolder(tmp_path / "runs" / "saved").events.unlink()
    never = muster_main("wait", "saved")
    assert never.returncode == 2 and "has not begun" in never.stderr
    nobody = muster_main("wait", "nobody")
    assert nobody.returncode == 2 and "Unknown run 'nobody'" in nobody.stderr
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    assert muster_main("wait", "bad").returncode == 3


def made_run(folder: RunFolder, code: int) -> None:
    """A program's run that has ended with this code."""
    from muster.api.gangs.work import GangWork, Script
    from muster.api.start.options import GangOptions
    from muster.run.session import open_run

    work = GangWork(folder=folder, program=Script(path="p.py"))
    renew = work.renewal(GangOptions(), ("muster", "run", "p.py"))
    with open_run(folder, renew, node=0) as session:
        session.begin(ranks=["cpu:0"])
        session.end(exit_code=code)


@pytest.mark.slow
def test_an_experiment_is_waited_for_whole(place: Place) -> None:
    (place.folder / "job.py").write_text("def f(x):\n    return x\n")
    (place.folder / "e.toml").write_text(
        'run_dir = "run"\ndevices = "cpu:1"\n'
        '[phase.one]\ncommand = "sweep"\ntarget = "phases.py:f"\ngrid.x = [1]\n'
        '[phase.two]\ncommand = "sweep"\ntarget = "job.py:f"\ngrid.x = [3]\nafter = ["one"]\n'
    )
    place.detach("start e.toml")
    place.go()
    done = place.wait()
    assert (done.returncode, done.stdout) == (0, "run: done\n")
    assert (place.folder / "run" / "command.log").exists()
    assert place.muster("status", "run" + "/two").stdout.startswith("two: done")


@pytest.mark.slow
def test_a_logout_leaves_what_waits_for_devices_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(place.folder / "facts.json"))
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(place.folder / "leases"))
    monkeypatch.setenv("XDG_STATE_HOME", str(place.folder / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PHASES", str(place.folder))
    (place.folder / "facts.json").write_bytes(facts(1))
    place.detach(COMMANDS["sweep"].replace("cpu:1", "1"))
    line = COMMANDS["sweep"].replace("cpu:1", "1").replace("--run-dir run", "--run-dir other")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place.folder)
        os.execv(sys.executable, [sys.executable, "-m", "muster", *line.split(), "--detach",
                                  "--wait"])  # fmt: skip
    seen = b""
    while b"stop:  muster cancel other" not in seen:
        seen += os.read(terminal, 1 << 16)
    assert b"in the queue for 1 of 1 GPU" in seen
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    place.go()
    assert place.wait().returncode == 0
    place.until((place.folder / "other" / "run.json").exists)
    assert place.muster("wait", "other", "--timeout", "240").returncode == 0
