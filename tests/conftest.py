"""Tests that police themselves: what a test leaves behind fails it."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from tests.examples import settings
from tests.ray_cluster import ray_cluster, ray_driver
from tests.slurm_cluster import slurm, slurm_session
from tests.ssh_hosts import ssh_hosts

__all__ = [
    "ray_cluster",
    "ray_driver",
    "ssh_hosts",
    "slurm",
    "slurm_session",
]  # fixtures for every test

settings.load_profile("fixed")

# Threads of OpenMP that wait for each other spin, which takes the core from the one that is waited
# for as soon as anything else runs: a training on one device then takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What a suite in the background ignores (nohup, a shell's &) would be ignored by all that it starts
# as well. A handler that does nothing ignores it here alone: it does not outlive an exec.
for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    _number = getattr(signal, _name, None)  # Windows has no SIGHUP
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# Where PYTHONDONTWRITEBYTECODE is set, every process that a test starts would compile Muster anew,
# which is a third of its work. What has not changed is not compiled again.
_TESTS = Path(__file__).parent
if "PYTEST_XDIST_WORKER" not in os.environ:
    for _folder in (_TESTS.parent / "src", _TESTS):
        compileall.compile_dir(_folder, quiet=2)

#: Set by pytest itself or by libraries on import, and no test's doing.
_FOREIGN = (
    "PYTEST_",
    "COV_",
    "KMP_",
    "TORCH",
    "TRITON_",
    "CUDA_MODULE_",
    "MPL",
    "COLUMNS",
    "LINES",
)
#: How long what a test has begun may take to end while it waits for something; and at most, where
#: it is at work: beside busy processes a second's work of ending takes ten.
_GRACE_S, _LONGEST_S = 5.0, 60.0

# Inherited by what tests start, so that an orphan in a session of its own is still known as ours.
_MARK = f"PYTEST_STARTED_BY={uuid.uuid4().hex}"
os.environ.update([_MARK.split("=")])


#: Folders of real processes: what runs in them is thorough unless it is marked as quick.
_OF_PROCESSES = ("chaos", "integration")


def _is_left(item: pytest.Item) -> bool:
    """Whether `make test-all AFTER=test` runs it."""
    return any(item.get_closest_marker(name) for name in ("thorough", "property"))


@cache
def _says_so(path: Path) -> bool:
    text = path.read_text()
    return "thorough" in text or "hypothesis" in text


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` is looked at."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if item.get_closest_marker("alone") and folder != "integration":
            raise pytest.UsageError(f"{item.nodeid}: `alone` is looked for in integration only")
        if folder in _OF_PROCESSES and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.thorough)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
        if folder not in _OF_PROCESSES and _is_left(item) and not _says_so(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: `make test-all AFTER=test` looks for it by the word `thorough` or "
                "`hypothesis`, which its file has not"
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What is rewritten is kept as bytecode; the garbage collector leaves out what will stay."""
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = writes_none
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.longest_first import LongestFirst

    return LongestFirst(config, log)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """In CI a failure is named at once: what ends CI in the middle would end the summary too."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and os.environ.get("CI") in ("true", "1"):
        config.pluginmanager.register(_Failures(terminal))


class _Failures:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            where = "" if report.when == "call" else f" in {report.when}"
            why = report.longreprtext.strip().splitlines() or [""]
            said = next((line[1:].strip() for line in why if line.startswith("E ")), why[-1])
            self._terminal.write_line(
                f"\nFAILED{where} after {report.duration:.0f} s: {report.nodeid}: {said}"
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The last line says how many tests were skipped, and why: a green suite may lack a part."""
    yield
    terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # not in a process of pytest -n
        terminal.write_line(_skipped(terminal.stats.get("skipped", [])))


def _skipped(reports: list[pytest.TestReport]) -> str:
    reasons: Counter[str] = Counter()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if not reasons:
        return "No test was skipped."
    why = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    return f"Skipped: {len(reports)} of the tests: {why}"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """No changed environment or folder, no thread and no process outlives a test.

    It is set up before all other fixtures of the test and so ends after them: what monkeypatch
    changed is back by then. What a test leaves is put right, so that only that test fails. Not
    seen: daemon threads, and orphans started with an environment of their own.
    """
    environment, folder = _environment(), Path.cwd()
    threads, processes = set(threading.enumerate()), set(psutil.pids())
    yield
    wrong = []
    if (now := _environment()) != environment:
        names = sorted(key for key, _ in now.items() ^ environment.items())
        wrong.append(f"changed environment variables {sorted(set(names))}")
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(environment)
    if Path.cwd() != folder:
        wrong.append(f"changed the working folder to {Path.cwd()}")
        os.chdir(folder)
    over_s = busy_s = time.monotonic()
    while (left := _threads(threads)) or _processes(processes):
        alive, now_s = _processes(processes), time.monotonic()
        if any(map(_is_busy, alive)):
            busy_s = now_s
        if now_s - busy_s > _GRACE_S or now_s - over_s > _LONGEST_S:
            wrong += [f"leaves the thread {thread}" for thread in left]
            wrong += [f"leaves the process {' '.join(words)}" for words in map(_command, alive)]
            for process in alive:
                process.kill()
            break
        time.sleep(0.05)
    assert not wrong, f"the test {', '.join(wrong)}"


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}


def _threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before and not t.daemon]


def _processes(before: set[int]) -> list[psutil.Process]:
    """Processes that are ours by descent or by their mark, began since, and have not ended."""
    if not (begun := set(psutil.pids()) - before):
        return []
    found = []
    for pid in begun:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.name() == "chromium" and process.ppid() in before:
                continue  # a browser that several tests share starts helpers when it likes
            name, _, value = _MARK.partition("=")
            if _is_below(pid) or process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it has just ended, or is somebody else's
    return found


def _is_busy(process: psutil.Process) -> bool:
    """Whether it has or wants a core, or waits for a disk."""
    try:
        return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.Error:
        return False


def _is_below(pid: int) -> bool:
    """Whether it descends from us. A list of our descendants would read every process there is."""
    while pid > 1:
        if (pid := psutil.Process(pid).ppid()) == os.getpid():
            return True
    return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return ["gone"]


class MusterCli(Protocol):
    """Runs ``muster`` with ``args`` in the test's ``tmp_path`` and waits for its end."""

    def __call__(
        self, *args: str, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def muster_cli(tmp_path: Path) -> MusterCli:
    """A real process with its output as text; at the time limit its whole session is killed."""

    def run(*args: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "muster", *args]
        with subprocess.Popen(
            words,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, error = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                # Windows has no sessions to kill; there the program alone ends.
                if sys.platform == "win32":
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, error)

    return run


@pytest.fixture
def muster_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> MusterCli:
    """``muster ARGS`` in this process and in ``tmp_path``: for what starts no work of its own.

    Refusals, help, dry runs and looking at folders need no process of their own, which costs
    seconds wherever torch is imported. There is no time limit but that of the test.
    """
    from muster.cli.main import main

    def run(
        *args: str, timeout_s: float = 300.0, folder: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        capfd.readouterr()
        try:
            code = main(args)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        out, error = capfd.readouterr()
        return subprocess.CompletedProcess(args, code, out, error)

    return run
