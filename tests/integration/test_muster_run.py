"""``muster run`` with real processes and real gloo ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import psutil
import pytest
from tests.conftest import MusterCli
from tests.ports import free_port
from tests.processes import command_line, is_gone
from tests.programs import read_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DDP = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), float(rank + 1))).sum().backward()
print("gradient", model.module.weight.grad.item(), "of", dist.get_world_size())
print("started as", sys.argv, __name__, __file__, sys.path[0] == os.getcwd())
print("threads", torch.get_num_threads(), os.environ["CUDA_VISIBLE_DEVICES"] == "")
dist.destroy_process_group()
"""

#: Everything a program without torch needs to wait for the others and to be found again.
PLAIN = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(".")
def everybody(name):
    (here / f"{name}-{rank}").write_text(str(os.getpid()))
    while len(list(here.glob(f"{name}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
"""


def write(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(text)


def until(found: Callable[[], object], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not found():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def pids_in(folder: Path, pattern: str) -> list[int]:
    """Those that are written: a file is there a moment before what is in it."""
    texts = [path.read_text() for path in folder.glob(pattern)]
    return [int(text) for text in texts if text]


@contextmanager
def started(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "muster", "run", *args],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def agent_of(launcher: int) -> psutil.Process:
    children = psutil.Process(launcher).children()
    return next(c for c in children if "muster.supervisor.main" in command_line(c))


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_plain_ddp_script_runs_unchanged(
    start: str, tmp_path: Path, muster_cli: MusterCli
) -> None:
    write(tmp_path, DDP)
    flags = ["--devices", "cpu:2", "--start", start, "--save_dir", "out"]
    done = muster_cli("run", *flags, "train.py", "--lr", "1e-3", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "never made a process group" not in done.stderr
    assert "[0] gradient 1.5 of 2" in lines
    arguments = ["train.py", "--lr", "1e-3", "--quiet"]
    assert f"[0] started as {arguments} __main__ train.py True" in lines
    assert all(line.startswith("[0] ") for line in lines)
    assert "gradient 1.5 of 2" in (tmp_path / "out/logs/rank-1.log").read_text()
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["spec"]["program"]["path"] == "train.py"


@pytest.mark.quick
def test_the_culprit_comes_first_and_the_rest_is_folded(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    write(
        tmp_path,
        """
import torch.distributed as dist
def check(label):
    raise ValueError(f"bad label {label}\\nand more")
dist.init_process_group("gloo")
print("before")
if dist.get_rank() == 1:
    check(7)
dist.barrier()
""",
    )
    flags = ["--devices", "cpu:3", "--start", "fork", "--all-ranks", "--run-dir", "out"]
    done = muster_cli("run", *flags, "train.py")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    lines = done.stderr.splitlines()
    report = lines[lines.index("muster: rank 1 of 3 failed: ValueError: bad label 7") :]
    assert len(report) <= 11  # the ten lines, and how long it took
    assert "in check" in "\n".join(report)
    assert any(line.startswith("ranks 0, 2 ended because of it (") for line in report)
    log = tmp_path / "out/logs/rank-1.log"
    assert f"log: {log}" in report
    assert "bad label 7" in log.read_text() and "muster/gang" not in log.read_text()


SLOW_TO_LEAVE = (
    PLAIN
    + """
import atexit
everybody("here")
if rank == 1:
    atexit.register(time.sleep, 60)
    raise ValueError("no such file")
while not list(here.glob("run/logs/rank-1.error.json")):
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer")
"""
)


#: Leaves the others before it comes to its end, as what holds its connections does.
SLOW_TO_TELL = (
    PLAIN
    + """
from pathlib import Path
here = Path.cwd()
everybody("here")
if rank == 1:
    try:
        raise ValueError("no such file")
    finally:
        (here / "parted").touch()
        time.sleep(2)
while not (here / "parted").exists():
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer")
"""
)


@pytest.mark.parametrize(
    ("start", "program"),
    [("exec", SLOW_TO_LEAVE), ("fork", SLOW_TO_LEAVE), ("exec", SLOW_TO_TELL)],
    ids=["exec", "fork", "tells late"],
)
def test_a_rank_that_was_leaving_when_the_others_noticed_is_the_culprit(
    start: str, program: str, tmp_path: Path, muster_cli: MusterCli
) -> None:
    """To free what it holds may take longer than the others need to fail because of it."""
    write(tmp_path, program)
    flags = ["--devices", "cpu:2", "--run-dir", "run", "--start", start, "--max-restarts", "0"]
    done = muster_cli("run", *flags, "train.py")
    assert done.returncode == 1
    assert "rank 1 of 2 failed: ValueError: no such file" in done.stderr, done.stderr
    assert "rank 0 ended because of it (connection closed by peer)" in done.stderr
    *_, last = (tmp_path / "run/logs/rank-0.log").read_text().splitlines()
    cause = "rank 1 of 2 failed: ValueError: no such file"
    assert last == f"muster: this followed (connection closed by peer); the cause: {cause}"
    for command in ("why", "errors"):
        told = muster_cli(command, "run").stdout.lower()
        assert "rank 0 ended because of it (connection closed by peer): runtimeerror" in told


def test_an_exit_code_and_a_killed_rank_are_told(tmp_path: Path, muster_cli: MusterCli) -> None:
    write(tmp_path, PLAIN + "everybody('up')\nprint('last words')\nif rank: sys.exit(3)")
    done = muster_cli("run", "--devices", "cpu:2", "train.py")
    assert done.returncode == 1
    assert "rank 1 of 2 failed: it ended with exit code 3" in done.stderr
    assert "last words" in done.stderr
    write(
        tmp_path,
        PLAIN + "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
    )
    done = muster_cli("run", "--devices", "cpu:2", "train.py")
    assert done.returncode == 1
    assert "rank 0 of 2 was killed by SIGKILL (9)" in done.stderr
    assert "rank 1 ended because of it (stopped)" in done.stderr


def test_what_a_rank_raises_is_told_when_it_has_closed_its_output(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    write(tmp_path, PLAIN + "everybody('up')\nos.close(1)\nos.close(2)\nif rank: 1 / 0\n")
    done = muster_cli("run", "--devices", "cpu:2", "train.py")
    assert done.returncode == 1
    assert "rank 1 of 2 failed: ZeroDivisionError: division by zero" in done.stderr


GRANDCHILDREN = (
    PLAIN
    + """
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
(here / f"child-{rank}").write_text(str(child.pid))
everybody("rank")
time.sleep(600)
"""
)


@pytest.mark.parametrize(
    ("victim", "start"),
    [
        ("launcher", "fork"),
        ("agent", "exec"),
        pytest.param("launcher", "exec", marks=pytest.mark.slow),
        pytest.param("agent", "fork", marks=pytest.mark.slow),
    ],
)
def test_nothing_survives_a_kill(victim: str, start: str, tmp_path: Path) -> None:
    write(tmp_path, GRANDCHILDREN)
    with started(tmp_path, "--devices", "cpu:2", "--start", start, "train.py") as launcher:
        until(lambda: len(pids_in(tmp_path, "rank-*")) == 2)
        pids = [*pids_in(tmp_path, "rank-*"), *pids_in(tmp_path, "child-*")]
        agent = agent_of(launcher.pid)
        assert len(pids) == 4 and not any(map(is_gone, pids))
        os.kill(launcher.pid if victim == "launcher" else agent.pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, [*pids, agent.pid])), 120.0)
        _, error = launcher.communicate(timeout=300)
    if victim == "agent":
        assert launcher.returncode == 3
        assert "the supervisor process was killed by signal 9" in error


def test_a_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks are written by the ranks themselves where there is no py-spy."""
    places = [p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "py-spy").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    write(
        tmp_path,
        PLAIN
        + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
everybody("rank")
for step in range(10000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
""",
    )
    flags = ["--devices", "cpu:3", "--start", "fork", "--stall-timeout", "2", "--run-dir", "out"]
    with started(tmp_path, *flags, "train.py") as launcher:
        until(lambda: len(pids_in(tmp_path, "rank-*")) == 3)
        time.sleep(2.5)  # the first beats
        os.kill(int((tmp_path / "rank-2").read_text()), signal.SIGSTOP)
        _, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert "stalled: rank 2 has been silent for" in error
    assert "ranks 0-1 wait in all-reduce" in error
    for rank in range(3):
        stack = (tmp_path / f"out/logs/rank-{rank}.stack").read_text()
        assert "train.py" in stack
        assert not stack.startswith("Process "), stack


def test_a_sleeping_data_loader_is_named_with_its_step(
    tmp_path: Path, muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stacks are written by py-spy where it is found."""
    scripts = Path(sys.executable).parent
    has_py_spy = (scripts / "py-spy").exists()
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    write(
        tmp_path,
        """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5 and os.environ["RANK"] == "1":
            time.sleep(120)
        return torch.ones(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Data(), batch_size=1):
    loss = model(batch).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )
    flags = ["--devices", "cpu:2", "--start", "fork", "--stall-timeout", "3", "--run-dir", "out"]
    done = muster_cli("run", *flags, "train.py")
    assert done.returncode == 1
    for rank in range(2):
        stack = (tmp_path / f"out/logs/rank-{rank}.stack").read_text()
        assert stack.startswith("Process ") == has_py_spy and "train.py" in stack, stack
    text = "rank 1 is in the data loader at step 4; rank 0 waits in "
    assert text in done.stderr
    assert done.stderr.count("stalled: ") == 1


def test_restarts_until_it_works(tmp_path: Path, muster_cli: MusterCli) -> None:
    write(
        tmp_path,
        PLAIN
        + """
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", restart)
everybody(f"up{restart}")
if restart < "2" and rank == 1:
    raise RuntimeError("not yet")
time.sleep(0.3)
""",
    )
    flags = ["--devices", "cpu:2", "--max-restarts", "3", "--json"]
    done = muster_cli("run", *flags, "train.py")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["restarts"], outcome["report"]) == (2, [])
    log = Path(tmp_path / outcome["path"] / "logs/rank-0.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == [
        "attempt 0",
        "attempt 1",
        "attempt 2",
    ]


KILLED_ONCE = (
    PLAIN
    + """
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", restart)
everybody(f"up{restart}")
if restart == "0":
    while not (here / "go").exists():
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise RuntimeError("Connection closed by peer")
"""
)


def test_the_killed_rank_is_told_first_however_late_the_launcher_hears(tmp_path: Path) -> None:
    """As where its output is read slowly: by then the ranks may have started again."""
    write(tmp_path, KILLED_ONCE)
    flags = ["--devices", "cpu:2", "--max-restarts", "1", "--run-dir", "out"]
    with started(tmp_path, *flags, "train.py") as process:
        until(lambda: len(pids_in(tmp_path, "up0-*")) == 2)
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(lambda: len(pids_in(tmp_path, "up1-*")) == 2)
        process.send_signal(signal.SIGCONT)
        shown, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert shown.splitlines() == ["[0] attempt 0", "[0] attempt 1"]
    lines = told.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("rank 1 of 2 was killed"))
    assert lines[first + 1 : first + 3] == [
        "  attempt 0",
        "rank 0 ended because of it (connection closed by peer)",
    ]


@pytest.mark.alone
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_lets_ranks_save_and_a_second_one_does_not(times: int, tmp_path: Path) -> None:
    write(
        tmp_path,
        PLAIN
        + """
def save(*_):
    (here / f"saving-{rank}").write_text("")
    time.sleep(60 if len(sys.argv) > 1 else 0.3)
    (here / f"saved-{rank}").write_text("")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
everybody("rank")
print("all up")
while True: time.sleep(0.05)
""",
    )
    words = ["-m", "muster", "run", "--devices", "cpu:2", "train.py", *["slow"] * (times - 1)]
    child = pexpect.spawn(sys.executable, words, cwd=str(tmp_path), timeout=300)
    child.expect("all up")
    child.sendintr()
    until(lambda: len(list(tmp_path.glob("saving-*"))) == 2)
    if times == 2:
        child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert len(list(tmp_path.glob("saved-*"))) == (2 if times == 1 else 0)
    assert all(map(is_gone, pids_in(tmp_path, "rank-*")))


def test_what_a_rank_raises_while_it_is_stopped_is_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        PLAIN
        + """
def save(*_):
    if rank == 1:
        raise ValueError("the shelf is full")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
everybody("rank")
print("all up")
while True: time.sleep(0.05)
""",
    )
    words = ["-m", "muster", "run", "--devices", "cpu:2", "train.py"]
    child = pexpect.spawn(sys.executable, words, cwd=str(tmp_path), timeout=300)
    child.expect("all up")
    child.sendintr()
    child.expect("rank 1 of 2 failed: ValueError: the shelf is full")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_two_gangs_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1,), float(sys.argv[1]))
dist.all_reduce(total)
print("total", total.item())
""",
    )
    with (
        started(tmp_path, "--devices", "cpu:2", "--start", "fork", "train.py", "1") as one,
        started(tmp_path, "--devices", "cpu:2", "--start", "fork", "train.py", "10") as two,
    ):
        out_one, words_one = one.communicate(timeout=300)
        out_two, words_two = two.communicate(timeout=300)
    assert (one.returncode, two.returncode) == (0, 0), words_one + words_two
    assert "[0] total 2.0" in out_one and "[0] total 20.0" in out_two
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_two_nodes_meet_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
import os, torch, torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise SystemExit(5)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "node", os.environ["GROUP_RANK"], "total", total.item())
""",
    )
    flags = ["--devices", "cpu:1", "--num-nodes", "2", "--master-addr", "127.0.0.1"]
    flags += ["--master-port", str(free_port()), "--max-restarts", "2", "--all-ranks"]
    with (
        started(tmp_path, *flags, "--node-rank", "1", "train.py") as second,
        started(tmp_path, *flags, "--node-rank", "0", "train.py") as first,
    ):
        out_first, error_first = first.communicate(timeout=300)
        out_second, error_second = second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), error_first + error_second
    assert "[0] rank 0 node 0 total 2.0" in out_first
    assert "[1] rank 1 node 1 total 2.0" in out_second
    assert "restart 1 of 2" in error_second


def test_spawned_processes_and_pickles_find_the_main_module(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    write(
        tmp_path,
        """
import multiprocessing, pickle
class Point:
    x = 1
def square(n):
    return n * n
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("squares", pool.map(square, [1, 2, 3]))
    print("pickled", type(pickle.loads(pickle.dumps(Point()))) is Point)
""",
    )
    done = muster_cli("run", "--devices", "cpu:1", "train.py")
    assert "[0] squares [1, 4, 9]" in done.stdout, done.stdout + done.stderr
    assert "[0] pickled True" in done.stdout


def test_modules_and_other_programs_run_too(tmp_path: Path, muster_cli: MusterCli) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "import sys\nprint(__name__, __package__, sys.argv[1:])", "package/train.py")
    done = muster_cli("run", "--devices", "cpu:1", "-m", "package.train", "--lr", "1")
    assert "[0] __main__ package ['--lr', '1']" in done.stdout, done.stderr
    done = muster_cli(
        "run", "--nproc_per_node=2", "--no-python", "sh", "-c", "echo I am $RANK; exit 4"
    )
    assert "[0] I am 0" in done.stdout
    assert "ended with exit code 4" in done.stderr and done.returncode == 1


def test_a_rank_may_ask_to_be_started_again(tmp_path: Path, muster_cli: MusterCli) -> None:
    write(
        tmp_path,
        PLAIN
        + """
(here / "out/ending.json").write_text('{"ending": "requeue"}')
""",
    )
    done = muster_cli("run", "--devices", "cpu:1", "--run-dir", "out", "train.py")
    assert done.returncode == 75
    assert "; start it again to go on" in done.stderr
    done = muster_cli("status", "out")
    assert done.stdout.splitlines() == ["out: saved", "  logs: out/logs/rank-*.log"]
    done = muster_cli("resume", "out")
    assert done.returncode == 2 and "goes on when it is started again in" in done.stderr


def test_usr1_reaches_the_ranks(tmp_path: Path) -> None:
    write(
        tmp_path,
        PLAIN
        + """
signal.signal(signal.SIGUSR1, lambda *_: (here / f"heard-{rank}").write_text("1"))
everybody("rank")
while not (here / f"heard-{rank}").exists(): time.sleep(0.02)
""",
    )
    with started(tmp_path, "--devices", "cpu:2", "train.py") as launcher:
        until(lambda: len(pids_in(tmp_path, "rank-*")) == 2)
        os.kill(launcher.pid, signal.SIGUSR1)
        launcher.communicate(timeout=300)
    assert launcher.returncode == 0
    assert len(list(tmp_path.glob("heard-*"))) == 2


ENTRY = """
import gc, os, sys, threading
from pathlib import Path
import torch
Path("imports").open("a").write("x")
def train(lr, steps):
    rank = os.environ["RANK"]
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("trained", lr, steps, total.item(), torch.get_num_threads(), os.environ["RANK"])
    Path("addresses").open("a").write(f"{id(torch)} {gc.isenabled()}\\n")
    dist.destroy_process_group()
def fail():
    raise KeyError("of mine")
"""

CALL = """
import sys
from pathlib import Path
from muster.api.gangs.work import Entry, GangAudience, GangWork
from muster.api.gangs.gang import run_gang
from muster.api.start.options import GangOptions
from muster.run.folder import RunFolder
name, params, start = eval(sys.argv[1])
audience = GangAudience(hear=lambda rank, line: print(rank, line), say=print, warn=print)
work = GangWork(folder=RunFolder(Path("out")), program=Entry(target=f"work:{name}", params=params))
ending = run_gang(work, GangOptions(devices="cpu:4", start=start), audience)
print("torch" in sys.modules)
print("\\n".join(ending.report))
sys.exit(ending.exit_code)
"""


def call(folder: Path, *what: object) -> subprocess.CompletedProcess[str]:
    write(folder, ENTRY, "work.py")
    return subprocess.run(
        [sys.executable, "-c", CALL, repr(what)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_forked_ranks_pay_for_their_imports_once(tmp_path: Path) -> None:
    done = call(tmp_path, "train", {"lr": 0.5, "steps": 3}, None)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"{rank} trained 0.5 3 4.0 1 {rank}" in done.stdout
    assert (tmp_path / "imports").read_text() == "x"
    addresses = (tmp_path / "addresses").read_text().splitlines()
    assert len(addresses) == 4 and len(set(addresses)) == 1  # a second import lies elsewhere
    assert addresses[0].endswith(" True")
    assert "\nFalse\n" in done.stdout  # the launcher has no torch


def test_the_error_of_an_entry_is_told(tmp_path: Path) -> None:
    done = call(tmp_path, "fail", {}, "fork")
    assert done.returncode == 1
    assert re.search(r"rank \d of 4 failed: KeyError: 'of mine'", done.stdout)  # which is chance
    assert "failed in the same way" in done.stdout
    assert "in fail" in done.stdout and "nursery" not in done.stdout


@pytest.mark.quick
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = muster_main("run", "--devices", "cpu:2", "nothing.py")
    assert done.returncode == 2 and "There is no script nothing.py" in done.stderr
    done = muster_main("run", "--devices", "cpu:2")
    assert done.returncode == 2 and "There is no script to run" in done.stderr
    write(tmp_path, "")
    done = muster_main("run", "--nodes", "2", "train.py")
    assert done.returncode == 2 and "--nodes 2 needs a place to meet" in done.stderr
    done = muster_main("run", "--gpus", "2", "train.py")
    assert done.returncode == 3 and "Cannot place" in done.stderr
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = muster_main("run", "train.py")
    assert done.returncode == 2 and "RANK=0 and WORLD_SIZE=1 are set, but" in done.stderr
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = muster_main("run", "train.py")
    assert done.returncode == 2 and "This is rank 0 of 1 of a gang" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.quick
def test_a_module_that_no_rank_would_find_is_refused_with_what_is_meant(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    (tmp_path / "train.py").touch()
    for place in ("runnable", "bare", "plain", "moved", "plain/inner"):
        (tmp_path / place).mkdir()
    for file in ("runnable/__main__.py", "bare/__main__.py", "bare/step.py"):
        (tmp_path / file).touch()
    for file in ("plain/__init__.py", "plain/fit.py", "plain/inner/fit.py"):
        (tmp_path / file).write_text("raise SystemExit('it was imported')\n")
    (tmp_path / "moved/__init__.py").write_text("__path__.append('elsewhere')\n")
    words = ("run", "--devices", "cpu:2", "--dry-run", "-m")
    for name in (
        "train",
        "runnable",
        "bare",
        "bare.step",
        "plain.fit",
        "plain.inner.fit",
        "timeit",
    ):
        done = muster_main(*words, name)
        assert done.returncode == 0, (name, done.stderr)
    assert muster_main(*words, "moved.any").returncode == 0  # the ranks will know
    refused = {
        "nosuchmodule": "There is no module nosuchmodule",
        "trian": "did you mean train?",
        "plain.fti": "did you mean plain.fit?",
        "plain.inner.none": "There is no module plain.inner.none",
        "train.py": "muster run train.py",
        "plain/fit.py": "muster run plain/fit.py",
        ".train": "There is no module .train",
        "train.deeper": "There is no module train.deeper",
        "plain": "plain is a package without a module __main__",
    }
    for name, sentence in refused.items():
        done = muster_main(*words, name)
        assert done.returncode == 2 and sentence in done.stderr, (name, done.stderr)
    assert "run one of its modules: plain.fit." in muster_main(*words, "plain").stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.quick
def test_a_dry_run_shows_and_starts_nothing(tmp_path: Path, muster_main: MusterCli) -> None:
    write(tmp_path, "")
    done = muster_main("run", "--devices", "cpu:3", "--dry-run", "train.py", "--json")
    assert done.returncode == 0
    assert "3 ranks: cpu:0, cpu:1, cpu:2" in done.stdout
    assert "train.py --json" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


@pytest.mark.thorough
def test_a_rank_that_computes_and_holds_its_interpreter_is_left_alone(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    write(tmp_path, read_program("holds_interpreter.py"))
    done = muster_cli(
        "run", "--devices", "cpu:2", "--stall-timeout", "3", "train.py", timeout_s=300
    )
    assert done.returncode == 0, done.stderr
    assert "[0] both are here" in done.stdout


@pytest.mark.thorough
def test_copies_that_never_met_are_told(tmp_path: Path, muster_cli: MusterCli) -> None:
    write(tmp_path, "print('alone')")
    done = muster_cli("run", "--devices", "cpu:2", "train.py", timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "The 2 ranks never made a process group" in done.stderr
    assert "muster sweep" in done.stderr
