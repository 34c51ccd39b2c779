"""Examines a machine: gathers the facts or reads them, checks them, keeps them, writes the repairs.

Facts are gathered each by a child process or a plain read, none of which can hang the doctor.
What everybody needs comes first and what takes longest comes last, under one deadline, so that a
machine where much is broken still gives a report in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from muster.base.atomic_files import write_atomic
from muster.base.codec import to_json
from muster.base.errors import SetupError, UsageError
from muster.base.flags import Flag, parse_duration
from muster.base.settings import child_environment
from muster.base.shown_text import count as counted
from muster.devices.inventory import DeviceRequest, Inventory, parse_devices
from muster.devices.nvml_health import GpuHealth, PairLink
from muster.devices.placement import busy_reason
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import DiskFacts, Facts, TorchFacts, load_facts
from muster.doctor.findings import (
    Finding,
    env_script,
    sorted_by_severity,
    wants_master,
    working_gpus,
)
from muster.doctor.gather_host import (
    gather_extensions,
    gather_host,
    gather_master,
    gather_network,
    installed_torch,
    running_torch,
)
from muster.doctor.gather_probes import (
    Targets,
    measure_all_reduce,
    measure_host_copies,
    measure_matmuls,
    measure_peer_copies,
    no_time,
    read_answer,
    read_loaded,
    run_probe,
)

#: Variables that decide how a run behaves. Others may hold secrets and are left out.
_PREFIXES = (
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_CUDA_", "PYTORCH_CUDA_", "ROCR_",
    "PYTORCH_ALLOC_", "HIP_", "HSA_", "ZE_", "OMP_", "MKL_NUM", "KMP_", "UCX_", "SLURM_",
)  # fmt: skip
_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NNODES",
    "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MUSTER_DEVICE_FACTS", "LD_LIBRARY_PATH",
)  # fmt: skip
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "JWT")
_LEAST_BUDGET_S, _MEET_S = 5.0, 10.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is examined."""

    devices: Annotated[str | None, Flag(metavar="auto|N|0,2|cpu:4")] = None
    """What is measured: auto (all free GPUs, else two CPU ranks), 4 (GPUs), 0,2,3, cpu, cpu:4."""
    run_dir: Annotated[Path, Flag(metavar="DIR")] = Path("runs")
    """Where runs will be written: its disk is examined."""
    is_quick: Annotated[bool, Flag(name="quick")] = False
    """Measure nothing and start no torch: about a second."""
    time_limit_s: Annotated[float, Flag(name="time-limit", metavar="TIME", read=parse_duration)] = (
        55.0
    )
    """End after this time: 55, 2m. What is not reached is reported as skipped."""

    def __post_init__(self) -> None:
        if self.time_limit_s < _LEAST_BUDGET_S:
            raise UsageError(
                f"--time-limit {self.time_limit_s:g}: nothing can be examined in that time.",
                hint=f"give {_LEAST_BUDGET_S:g} s at least; --quick measures nothing and takes "
                "about a second.",
            )


def gather(options: DoctorOptions, say: Callable[[str], None]) -> Facts:
    """Gather all facts of this machine; ``say`` is told what is being done, as it takes a while.

    Raises UsageError for devices that do not exist, and for nothing else.
    """
    began_s, every = time.monotonic(), child_environment({})
    devices = DeviceRequest(kind="auto", text="--devices auto")
    if options.devices is not None:
        devices = parse_devices(options.devices)

    def left() -> float:
        return options.time_limit_s - (time.monotonic() - began_s)

    def left_for_one() -> float:
        return max(2.0, left())

    environment = relevant(every)
    host = gather_host()
    facts = Facts(
        is_quick=options.is_quick,
        host=host,
        environment=environment,
        torch=installed_torch(every),
    )
    say("reading the driver")
    facts = _with_driver(facts, limit_s=15.0, left_s=left_for_one())
    network = gather_network(host.name, limit_s=5.0, left_s=left_for_one())
    facts = replace(facts, network=network)
    say(f"reading {options.run_dir}")
    facts = replace(facts, disk=_disk(options, limit_s=8.0, left_s=left_for_one()))
    limit_s = min(60.0, left_for_one())
    extensions = gather_extensions(loads=not options.is_quick, limit_s=limit_s)
    facts = replace(facts, extensions=extensions)
    if not options.is_quick:
        if wants_master(environment):
            say(f"meeting the other nodes at {environment['MASTER_ADDR']}")
            master = gather_master(
                environment, facts.network, limit_s=5.0, meet_s=min(_MEET_S, left() / 3)
            )
            facts = replace(facts, master=master)
        facts = _with_measurements(facts, options, devices, left, say)
    return replace(facts, seconds=round(time.monotonic() - began_s, 3))


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how a run behaves, without what may be a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and not any(word in name.upper() for word in _SECRET)
    }


@dataclass(frozen=True, kw_only=True)
class DriverAnswer:
    """What the driver's probe answers; it may have come no further than the inventory."""

    inventory: Inventory
    health: tuple[GpuHealth, ...] = ()
    links: tuple[PairLink, ...] = ()


def _with_driver(facts: Facts, *, limit_s: float, left_s: float) -> Facts:
    no_answer = DriverAnswer(inventory=Inventory(problem="the driver gave no answer"))
    outcome = run_probe("driver", [], limit_s=limit_s, left_s=left_s)
    found, run = read_answer(outcome, no_answer)
    return replace(facts, driver=run, **vars(found))


def _disk(options: DoctorOptions, *, limit_s: float, left_s: float) -> DiskFacts:
    budget_s = 0.3 if options.is_quick else min(2.0, options.time_limit_s / 20)
    path = str(options.run_dir.absolute())
    outcome = run_probe("disk", [path, str(budget_s)], limit_s=limit_s, left_s=left_s)
    value = dict(outcome.value)
    problem = value.pop("problem", None)
    answer = replace(outcome, value=value)
    found, run = read_answer(answer, DiskFacts(path=path), given={"path": path})
    return replace(found, run=run if problem is None else replace(run, error=str(problem)))


def _with_measurements(
    facts: Facts,
    options: DoctorOptions,
    devices: DeviceRequest,
    left: Callable[[], float],
    say: Callable[[str], None],
) -> Facts:
    say("starting torch")
    if skipped := no_time(left, least_s=3.0):
        is_there = facts.torch.version is not None  # else it is known why nothing can be measured
        return replace(facts, torch=replace(facts.torch, run=skipped)) if is_there else facts
    # A first import from a network disk takes long; who gives more time gets it here.
    limit_s = max(25.0, options.time_limit_s / 2)
    facts = replace(facts, torch=running_torch(facts.torch, limit_s=limit_s, left_s=left()))
    if facts.torch.run.status != "ok":
        return facts  # no probe can start either
    targets = choose_targets(facts, devices)
    if targets is None:
        return facts
    say("matrix products")
    facts = _with_matmuls(facts, targets, left)
    if targets.kind != "cpu":
        say("copies between host and devices")
        copies = measure_host_copies(targets, left, limit_s=15.0)
        facts = replace(facts, host_copies=copies)
    if targets.kind == "cuda" and len(targets.devices) > 1:
        say("copies between pairs of GPUs")
        facts = replace(facts, peer_copies=measure_peer_copies(targets, left, limit_s=20.0))
    backend = _backend(targets, facts.torch)
    if backend is not None and len(targets.devices) > 1:
        say(f"all-reduce over {len(targets.devices)} ranks with {backend}")
        reduce = measure_all_reduce(
            targets, backend, facts.network, facts.environment, left, limit_s=20.0
        )
        facts = replace(facts, all_reduce=reduce)
    return facts


def _with_matmuls(facts: Facts, targets: Targets, left: Callable[[], float]) -> Facts:
    single = replace(targets, devices=(0,)) if targets.kind == "cpu" else targets
    seen: list[tuple[GpuHealth, ...]] = []
    is_watched = targets.kind == "cuda" and bool(facts.health)
    watch = (lambda: seen.append(read_loaded(limit_s=5.0))) if is_watched else None
    matmuls = measure_matmuls(single, left, limit_s=25.0, watch=watch)
    return replace(facts, matmuls=matmuls, loaded=seen[0] if seen else ())


def choose_targets(facts: Facts, request: DeviceRequest) -> Targets | None:
    """The devices to measure: those asked for, else every free GPU, else two ranks on the CPU.

    None when there are GPUs and all are in use: measuring would disturb their users.
    Raises UsageError for a device that does not exist.
    """
    torch = facts.torch
    if request.kind == "cpu":
        return Targets(kind="cpu", devices=tuple(range(request.count or 2)))
    count = torch.accelerator_count or torch.device_count or 0
    if not torch.accelerator or not count:
        if request.kind in ("count", "ids"):
            raise UsageError(
                f"{request.text}: torch sees no GPU here, so none can be measured.",
                hint="run `muster doctor` without it to learn why, or with --devices cpu.",
            )
        return Targets(kind="cpu", devices=(0, 1))
    if request.kind == "ids":
        return Targets(kind=torch.accelerator, devices=_by_id(facts, request, count))
    gpus = working_gpus(facts)
    busy = {at for at, gpu in enumerate(gpus) if busy_reason(gpu) is not None}
    free = tuple(at for at in range(count) if at not in busy)
    if request.kind == "count":
        if (request.count or 0) > count:
            raise UsageError(
                f"{request.text}: torch sees {counted(count, 'device')}.",
                hint=f"ask for {count} at most.",
            )
        rest = tuple(at for at in range(count) if at not in free)
        free = (*free, *rest)[: request.count]
    return Targets(kind=torch.accelerator, devices=free) if free else None


def _by_id(facts: Facts, request: DeviceRequest, count: int) -> tuple[int, ...]:
    gpus = working_gpus(facts)
    found = []
    for text in request.ids:
        matching = [at for at, gpu in enumerate(gpus) if gpu.uuid.startswith(text)]
        number = int(text) if text.isdigit() else (matching[0] if len(matching) == 1 else count)
        if number >= count:
            raise UsageError(
                f"{request.text}: there is no device {text}; torch sees {count}.",
                hint="`muster devices` lists them.",
            )
        found.append(number)
    return tuple(found)


def _backend(targets: Targets, torch: TorchFacts) -> str | None:
    wanted = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}.get(targets.kind)
    return wanted if wanted in (torch.backends or ()) else None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """``findings``: in the order of the checks, good ones included."""

    facts: Facts
    findings: tuple[Finding, ...]


def examine(options: DoctorOptions, say: Callable[[str], None] = lambda _: None) -> Examination:
    """Look at this machine; ``say`` hears what is being done.

    Raises UsageError for devices that do not exist.
    """
    return _checked(gather(options, say))


def examine_recorded(path: Path) -> Examination:
    """Look at the machine recorded in ``path``; UsageError when that is not a facts file."""
    return _checked(load_facts(path))


def _checked(facts: Facts) -> Examination:
    return Examination(facts=facts, findings=tuple(run_checks(facts)))


def keep_facts(path: Path, facts: Facts) -> None:
    """Write ``facts`` to ``path``; SetupError where that fails."""
    _write("the facts", path, to_json(facts))


def write_fixes(path: Path, examination: Examination) -> None:
    """Write to ``path`` what the findings would set; SetupError where that fails."""
    findings = sorted_by_severity(examination.findings)
    script = env_script(findings, examination.facts.host.name, path.name)
    _write("the settings", path, script.encode())


def _write(what: str, path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise SetupError(
            f"Cannot write {what} to {path}: {error.strerror or error}.",
            hint="name a file in a folder that exists and that you may write to.",
        ) from None
