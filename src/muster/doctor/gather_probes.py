"""The measurements on the devices: products, copies, all-reduce. Each in child processes.

What fails is tried again with the settings that are known to help, so that the advice given has
been seen to work on this very machine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from muster.devices.nvml_health import GpuHealth
from muster.doctor.child import PROBES, read_answer, run_probe
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

#: Not worth a start: importing torch alone takes this long.
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
    outcome = run_probe(name, arguments, limit_s=min(limit_s, left()), **options)
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
            limit_s=min(limit_s - seconds + 1.0, left()),
            silence_s=silence_s,
            program=program,
        )
        found, last = read_answer(outcome, PeerCopies())
        seconds += last.seconds
        copies += found.copies
        tried = {f"{copy.source}-{copy.target}" for copy in found.copies}
        waiting = [pair for pair in waiting if pair not in tried]
        if last.status == "ok" or not waiting:
            break
        if last.at not in waiting:  # it did not come as far as a pair
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
