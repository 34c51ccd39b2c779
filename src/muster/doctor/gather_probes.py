"""The measurements on the devices (products, copies, all-reduce), each in a child process that can
neither hang the doctor nor outlive it.

What fails is tried again with the settings that are known to help, so that the advice given has
been seen to work on this very machine.

A probe (`muster.doctor.probes.report`) prints one JSON object on standard output and, on standard
error, lines ``at: …`` before each thing that may hang. It runs in a session of its own, which is
killed whole at the limit, when it has been silent for too long, and when it has ended.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from muster.base.codec import decode
from muster.base.processes import KILL, signal_group
from muster.base.settings import child_environment
from muster.devices.nvml_health import GpuHealth
from muster.doctor.facts import (
    AllReduce,
    Facts,
    HostCopies,
    Matmuls,
    NetworkFacts,
    PeerCopies,
    PeerCopy,
    ReduceTry,
    Run,
)

T = TypeVar("T")

_POLL_S = 0.02
#: A process in uninterruptible sleep (a dead disk, a dead GPU) cannot be killed: it is left.
_GOODBYE_S = 2.0
_TAIL_LINES, _TAIL_CHARS = 12, 1500
_PROGRESS = "at: "
PROBES = (sys.executable, "-P", "-m", "muster.doctor.probes.report")
#: Devices are numbered as the driver numbers them, so that both numbers mean the same card.
_SETTINGS = {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a probe ended, and ``value``, its JSON object; {} where there is none.

    The last object that a probe prints counts, so that one that hangs later has not lost what it
    measured before.
    """

    run: Run
    value: dict[str, Any] = field(default_factory=dict)


def run_probe(
    name: str,
    arguments: Sequence[str],
    *,
    limit_s: float,
    left_s: float = math.inf,
    silence_s: float | None = None,
    settings: Mapping[str, str] | None = None,
    hear: Callable[[str], None] | None = None,
    program: Sequence[str] = PROBES,
) -> Outcome:
    """Run the probe ``name`` for at most ``limit_s`` seconds; it raises nothing itself.

    ``left_s``: what is left for all of them; one that is cut off by that is not said to hang.
    ``silence_s``: also cut off after this long without a line of progress. ``settings``: variables
    on top of the environment. ``hear``: called in this process with each line of progress.
    ``program``: another program that follows the same conventions.
    """
    with tempfile.TemporaryDirectory(prefix="muster-doctor-", ignore_cleanup_errors=True) as here:
        out, error = Path(here) / "out", Path(here) / "error"
        began_s = time.monotonic()
        try:
            with out.open("wb") as out_file, error.open("wb") as error_file:
                process = subprocess.Popen(
                    [*program, name, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=error_file,
                    # What a probe leaves in its own temporary folders goes with this one.
                    env=child_environment({**_SETTINGS, "TMPDIR": here, **(settings or {})}),
                    start_new_session=True,
                )
        except OSError as problem:
            return Outcome(run=Run(status="failed", error=str(problem)))
        is_hung = True
        try:
            is_hung = _watch(process, error, began_s + min(limit_s, left_s), silence_s, hear)
        finally:
            cut_s = time.monotonic() - began_s  # what a driver holds takes a while to end
            _end(process)
        run = _judge(process.returncode, is_hung, error, time.monotonic() - began_s)
        if run.status == "hung" and cut_s > left_s:
            over = f"the time for all checks was over{run.where}, after {run.seconds:.0f} s"
            run = replace(run, status="skipped", error=over)
        value = _last_object(out)
        if run.status == "ok" and value is None:
            run = Run(status="failed", seconds=run.seconds, error="it printed no result")
        return Outcome(run=run, value=value or {})


def _watch(
    process: subprocess.Popen[bytes],
    error: Path,
    deadline_s: float,
    silence_s: float | None,
    hear: Callable[[str], None] | None,
) -> bool:
    """Wait for the end; True when the deadline or too long a silence came first."""
    num_heard, heard_s = 0, time.monotonic()
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s > deadline_s:
            return True
        places = _places(error)
        if len(places) > num_heard:
            for place in places[num_heard:] if hear else ():
                hear(place)  # type: ignore[misc]
            num_heard, heard_s = len(places), now_s
        elif silence_s is not None and num_heard and now_s - heard_s > silence_s:
            return True
        time.sleep(_POLL_S)
    return False


def _places(error: Path) -> list[str]:
    """The whole lines of progress so far."""
    lines = error.read_text(errors="replace").splitlines(keepends=True)
    whole = [line.rstrip("\n") for line in lines if line.endswith("\n")]
    return [line.removeprefix(_PROGRESS) for line in whole if line.startswith(_PROGRESS)]


def _end(process: subprocess.Popen[bytes]) -> None:
    # Also after a good end: a rank that the probe has left behind goes with its group.
    signal_group(process.pid, KILL)
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        return


def _judge(code: int | None, is_hung: bool, error: Path, seconds: float) -> Run:
    lines = error.read_text(errors="replace").splitlines()
    places = _places(error)
    at = places[-1] if places else None
    rest = [line for line in lines if line.strip() and not line.startswith(_PROGRESS)]
    tail = "\n".join(rest[-_TAIL_LINES:])[-_TAIL_CHARS:]
    if is_hung:
        return Run(status="hung", seconds=seconds, at=at, error=tail or None)
    if code != 0:
        why = tail or (f"ended by signal {-code}" if code and code < 0 else f"exit code {code}")
        return Run(status="failed", seconds=seconds, at=at, error=why)
    return Run(status="ok", seconds=seconds)


def _last_object(out: Path) -> dict[str, Any] | None:
    for line in reversed(out.read_text(errors="replace").splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def read_answer(
    outcome: Outcome, otherwise: T, *, given: Mapping[str, Any] | None = None, **how: bool
) -> tuple[T, Run]:
    """Read the probe's answer as a value of ``otherwise``'s class, and say how the probe ran.

    ``given`` holds fields that the probe does not answer. An answer of another shape is a failure
    of the probe; ``otherwise`` is returned then.
    """
    try:
        return decode(type(otherwise), {**(given or {}), **outcome.value}, **how), outcome.run
    except ValueError as error:
        run = outcome.run
        if run.status == "ok":
            run = replace(run, status="failed", error=f"its answer makes no sense: {error}")
        return otherwise, run


#: With less time left no probe is started: importing torch alone takes this long.
_LEAST_S = 4.0
#: A pair of GPUs copies 64 MiB in milliseconds; only the first touches take longer.
_PAIR_SILENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Targets:
    """``kind``: cuda, xpu, mps or cpu; ``devices``: torch's numbers."""

    kind: str
    devices: tuple[int, ...]

    @property
    def numbers(self) -> str:
        return ",".join(map(str, self.devices))


#: Seconds that are left for everything.
TimeLeft = Callable[[], float]

_Measured = TypeVar("_Measured", Matmuls, HostCopies, ReduceTry)


def no_time(left: TimeLeft, least_s: float = _LEAST_S) -> Run | None:
    """Why a probe is not started, where less time is left than a start takes; else None."""
    if left() >= least_s:
        return None
    return Run(status="skipped", error="the time for all checks was used up before")


def measure_matmuls(
    targets: Targets, left: TimeLeft, *, limit_s: float, watch: Callable[[], None] | None = None
) -> Matmuls:
    """Measure matrix products; ``watch`` is called once meanwhile, in a thread of this process."""
    watcher = None if watch is None else threading.Thread(target=watch, daemon=True)

    def hear(place: str) -> None:
        if watcher is not None and place == "multiplying in bf16":
            watcher.start()

    budget_s = 0.4 if targets.kind == "cpu" else 1.0
    words = (targets.kind, targets.numbers, str(budget_s))
    found = _measured(Matmuls, {"kind": targets.kind}, "matmul", words, left, limit_s, hear=hear)
    if watcher is not None and watcher.ident is not None:
        watcher.join()
    return found


def _measured(
    kind: type[_Measured],
    given: Mapping[str, Any],
    name: str,
    arguments: Sequence[str],
    left: TimeLeft,
    limit_s: float,
    **options: Any,
) -> _Measured:
    """What the probe ``name`` has found, with what is ``given`` and how the probe ran."""
    if skipped := no_time(left):
        return kind(run=skipped, **given)
    outcome = run_probe(name, arguments, limit_s=limit_s, left_s=left(), **options)
    otherwise = kind(run=outcome.run, **given)
    found, run = read_answer(outcome, otherwise, given={"run": {}, **given})
    return replace(found, run=run)


def read_loaded(limit_s: float) -> tuple[GpuHealth, ...]:
    """The GPUs' health now; () when the driver does not answer."""
    found, _ = read_answer(run_probe("driver", ["health"], limit_s=limit_s), Facts())
    return found.health


def measure_host_copies(targets: Targets, left: TimeLeft, *, limit_s: float) -> HostCopies:
    words = ("host", targets.kind, targets.numbers, "0.4")
    return _measured(HostCopies, {"kind": targets.kind}, "copies", words, left, limit_s)


def measure_peer_copies(
    targets: Targets,
    left: TimeLeft,
    *,
    limit_s: float,
    silence_s: float = _PAIR_SILENCE_S,
    program: Sequence[str] = PROBES,
) -> PeerCopies:
    """Measure every ordered pair; a child that hangs at one is replaced for those after it."""
    waiting = [f"{a}-{b}" for a, b in itertools.permutations(targets.devices, 2)]
    copies: list[PeerCopy] = []
    seconds, last = 0.0, Run(status="skipped", error="there is no pair")
    num_pairs = len(waiting)
    while waiting:
        if no_time(left) or seconds > limit_s:
            error = f"{len(waiting)} of {num_pairs} pairs were not tried, for want of time"
            last = Run(status="skipped", error=error)
            break
        outcome = run_probe(
            "copies",
            ("pairs", targets.kind, ",".join(waiting), "0.03"),
            limit_s=limit_s - seconds + 1.0,
            left_s=left(),
            silence_s=silence_s,
            program=program,
        )
        found, last = read_answer(outcome, PeerCopies())
        seconds += last.seconds
        copies += found.copies
        tried = {f"{copy.source}-{copy.target}" for copy in found.copies}
        waiting = [pair for pair in waiting if pair not in tried]
        # It is done, out of time, or did not come as far as a pair.
        if last.status in ("ok", "skipped") or last.at not in waiting:
            break
        copies.append(_lost_pair(last))
        waiting.remove(str(last.at))
        last = replace(last, status="ok")  # that pair's row tells it; the probe itself goes on
    return PeerCopies(run=replace(last, seconds=seconds), copies=tuple(copies))


def _lost_pair(run: Run) -> PeerCopy:
    source, target = (int(number) for number in str(run.at).split("-"))
    problem = "it never finished" if run.status == "hung" else f"it crashed: {run.error}"
    return PeerCopy(source=source, target=target, problem=problem)


def repairs(
    backend: str, network: NetworkFacts, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Variables to try, one set after the other, when the all-reduce fails.

    The names are those of NCCL's and torch's documentation. What the user has set is not tried.
    """
    interface = network.default_interface
    if backend == "gloo":
        sets = [{"GLOO_SOCKET_IFNAME": "lo"}]
        if interface:
            sets.insert(0, {"GLOO_SOCKET_IFNAME": interface})
    else:
        sets = [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_IB_DISABLE": "1"}]
        sets.append({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
        if interface:
            sets.append({"NCCL_SOCKET_IFNAME": interface})
    return [
        settings
        for settings in sets
        if any(environment.get(name) != value for name, value in settings.items())
    ]


def measure_all_reduce(
    targets: Targets,
    backend: str,
    network: NetworkFacts,
    environment: Mapping[str, str],
    left: TimeLeft,
    *,
    limit_s: float,
) -> AllReduce:
    """Run one process per device; after a failure, try each of ``repairs`` until one works."""
    tries: list[ReduceTry] = []
    words = (backend, targets.kind, targets.numbers, "0.3")
    for settings in ({}, *repairs(backend, network, environment)):
        if tries and (tries[-1].is_good or no_time(left)):
            break
        given = {"settings": settings}
        tries.append(
            _measured(ReduceTry, given, "all_reduce", words, left, limit_s, settings=settings)
        )
    return AllReduce(
        kind=targets.kind,
        backend=backend,
        num_ranks=len(targets.devices),
        devices=targets.devices,
        tries=tuple(tries),
    )
