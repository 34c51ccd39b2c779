"""The host as the kernel describes it, its network, torch as it is installed, and what other
packages add to muster. Linux mostly.

Only files are read (/proc, /sys, torch's own version file), which neither block nor need rights;
elsewhere than on Linux most of it stays unknown. What torch, those packages, a name server and the
master of a gang on several nodes answer is asked in child processes.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import math
import os
import platform
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from muster.base.clock import iso_utc
from muster.base.control_group import counts_own_limit, divides_memory, own_group
from muster.base.host_memory import host_memory_mib
from muster.base.modules import all_plugins
from muster.base.settings import usable_cpu_count
from muster.doctor.facts import (
    NO_TORCH,
    Extension,
    HostFacts,
    Interface,
    MasterFacts,
    NetworkFacts,
    PciGpu,
    Run,
    TorchFacts,
)
from muster.doctor.gather_probes import read_answer, run_probe

_VENDORS: dict[str, Literal["nvidia", "amd", "intel"]] = {
    "0x10de": "nvidia",
    "0x1002": "amd",
    "0x8086": "intel",
}
#: PCI classes: VGA and 3D controllers, and what AMD's compute cards call themselves.
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
_MIB = 1 << 20
_TIME_ERROR = 5
_CGROUP = Path("/sys/fs/cgroup")


def gather_host() -> HostFacts:
    """What is known of this host; never raises."""
    shm = None
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
    files = _limit("RLIMIT_NOFILE")
    locked = _limit("RLIMIT_MEMLOCK")
    memory = host_memory_mib()
    return HostFacts(
        name=platform.node(),
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        cpu_cores=min(usable_cpu_count(), cpu_quota(_CGROUP / "cpu.max") or 1 << 20),
        memory_total_mib=memory.total_mib,
        memory_available_mib=memory.available_mib,
        shm_total_mib=None if shm is None else shm.total // _MIB,
        shm_free_mib=None if shm is None else shm.free // _MIB,
        open_files_soft=files[0],
        open_files_hard=files[1],
        locked_memory_mib=None if locked[0] is None else locked[0] // _MIB,
        is_container=_is_container(),
        iommu=_has_entries(Path("/sys/class/iommu")),
        counts_own_limit=own_limit_counts(),
        infiniband=_names(Path("/sys/class/infiniband")),
        pci_gpus=pci_gpus(Path("/sys/bus/pci/devices")),
        clock_synchronised=_is_clock_synchronised(),
        wall_time=iso_utc(time.time()),
    )


def pci_gpus(devices: Path) -> tuple[PciGpu, ...]:
    """The graphics and compute cards under ``/sys/bus/pci/devices``, by address."""
    found = []
    for name in _names(devices):
        folder = devices / name
        vendor = _VENDORS.get(_text(folder / "vendor") or "")
        kind = _text(folder / "class") or ""
        if vendor is None or not kind.startswith(_GPU_CLASSES):
            continue
        driver = folder / "driver"
        found.append(
            PciGpu(
                address=name,
                vendor=vendor,
                driver=driver.resolve().name if driver.exists() else None,
                is_compute=kind.startswith(_COMPUTE_CLASSES),
                width=_number(folder / "current_link_width"),
                width_max=_number(folder / "max_link_width"),
            )
        )
    return tuple(found)


def own_limit_counts(root: Path = Path("/")) -> bool | None:
    """Whether the kernel counts how often a control group came to its own memory limit; None where
    no group here may divide its memory."""
    group = own_group(root)
    return None if group is None or not divides_memory(group) else counts_own_limit(group)


def cpu_quota(file: Path) -> int | None:
    """The cores that a container's limit comes to, at least 1 (cgroup v2, ``cpu.max``).

    ``docker --cpus 2`` leaves all cores in the affinity mask, which is what Python counts.
    """
    words = (_text(file) or "").split()
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit():
        return None  # "max 100000": no limit
    return max(1, round(int(words[0]) / int(words[1])))


def _limit(name: str) -> tuple[int | None, int | None]:
    """The soft and the hard limit ``name``; None: unknown or without limit."""
    if sys.platform == "win32":
        return None, None
    import resource

    soft, hard = resource.getrlimit(getattr(resource, name))
    no_limit = resource.RLIM_INFINITY
    return (None if soft == no_limit else soft), (None if hard == no_limit else hard)


def _is_container() -> bool | None:
    if not Path("/proc/1").is_dir():
        return None
    marks = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
    groups = _text(Path("/proc/1/cgroup")) or ""
    words = ("docker", "kubepods", "containerd", "lxc")
    return any(Path(mark).exists() for mark in marks) or any(word in groups for word in words)


def _is_clock_synchronised() -> bool | None:
    """What the kernel says, by adjtimex(2) without a change; None where there is no such call."""
    if sys.platform != "linux":
        return None
    with suppress(OSError, AttributeError):
        # struct timex has 208 bytes; modes=0 asks only. TIME_ERROR: nothing disciplines the clock.
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(1024))
        return None if state < 0 else state != _TIME_ERROR
    return None


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _has_entries(folder: Path) -> bool | None:
    return bool(_names(folder)) if folder.is_dir() else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(file: Path) -> int | None:
    text = _text(file) or ""
    # A card without a PCIe link of its own says 255, or "Unknown".
    return int(text) if text.isdigit() and 0 < int(text) <= 32 else None


#: Names in torch/version.py, and ours.
_NAMES = {
    "__version__": "version",
    "cuda": "cuda_build",
    "hip": "hip_build",
    "xpu": "xpu_build",
}


def installed_torch(environment: Mapping[str, str]) -> TorchFacts:
    """Version and builds from ``torch/version.py``; everything None where torch is missing."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return TorchFacts(run=Run(error=NO_TORCH))
    torch = read_version_file(Path(found.origin).parent / "version.py")
    has_triton = importlib.util.find_spec("triton") is not None
    return replace(torch, triton_lacks=triton_lacks(environment) if has_triton else None)


def triton_lacks(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What Triton's ``runtime/build.py`` needs to compile a kernel and would not find."""
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    has_compiler = any(shutil.which(name, path=environment.get("PATH")) for name in compilers)
    # Debian's own scheme names a folder that has no headers; Triton takes the usual one then.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    found = {"C compiler": has_compiler, "Python.h": headers.is_file()}
    return tuple(name for name, is_there in found.items() if not is_there)


def read_version_file(file: Path) -> TorchFacts:
    """The constants that torch's build wrote into ``file``."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return TorchFacts(run=Run(error=f"torch's own version file cannot be read: {error}"))
    values: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if (
            isinstance(target, ast.Name)
            and target.id in _NAMES
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            values[_NAMES[target.id]] = value.value
    return TorchFacts(run=Run(error="not started"), **values)


def running_torch(installed: TorchFacts, *, limit_s: float, left_s: float) -> TorchFacts:
    """``installed`` with what torch answers in a child process; never raises or hangs."""
    outcome = run_probe("torch_facts", [], limit_s=limit_s, left_s=left_s)
    record = {key: value for key, value in outcome.value.items() if value is not None}
    answer = replace(outcome, value=record)
    answered, run = read_answer(answer, installed, ignore_unknown=True)
    given = {f.name: getattr(answered, f.name) for f in fields(answered) if f.name in record}
    return replace(installed, run=run, **given)


def gather_extensions(
    *, loads: bool, limit_s: float, silence_s: float = 20.0
) -> tuple[Extension, ...]:
    """What installed packages add to muster; ``loads``: each is imported in a child process, and
    one that hangs or ends it is left out of the next child."""
    found = tuple(
        Extension(
            kind=one.kind, name=one.name, place=one.place, package=one.package,
            version=one.version, problem=one.problem,
        )
        for one in all_plugins()
    )  # fmt: skip
    said: dict[str, str] = {}
    missing, untried, until_s = "", "", time.monotonic() + limit_s
    while loads and any(f"{one.kind} {one.name}" not in said for one in found):
        left_s, words = until_s - time.monotonic(), list(said)
        outcome = run_probe(
            "extensions", words, limit_s=limit_s, left_s=left_s, silence_s=silence_s
        )
        said |= outcome.value.get("problems") or {}
        if outcome.run.status == "ok":
            break
        if outcome.run.status == "skipped":
            missing, untried = "", outcome.run.error or ""
            break
        at = outcome.run.at or "their probe"
        missing = f"it was not tried, because {at} failed"
        how = "it hangs" if outcome.run.status == "hung" else "Python ends"
        said.setdefault(at, f"{how} when it is imported")
        if outcome.run.at is None or time.monotonic() + silence_s > until_s:
            break
    known = [said.get(f"{one.kind} {one.name}") for one in found]
    return tuple(
        replace(
            one,
            problem=one.problem or (missing if why is None else why),
            untried=untried if why is None and not one.problem else "",
        )
        for one, why in zip(found, known, strict=True)
    )


def gather_network(host_name: str, *, limit_s: float, left_s: float) -> NetworkFacts:
    """What is known of the network of this host; never raises, ends within ``limit_s``."""
    found, run = _resolve(host_name, limit_s, left_s)
    error = found.resolve_error
    if run.status == "hung":
        error = f"the resolver gave no answer within {limit_s:.0f} s"
    return replace(
        found,
        interfaces=interfaces(),
        default_interface=default_interface(Path("/proc/net/route")),
        resolve_error=error or (run.error if run.status != "skipped" else None),
    )


def _resolve(name: str, limit_s: float, left_s: float = math.inf) -> tuple[NetworkFacts, Run]:
    outcome = run_probe("network", ["resolve", name], limit_s=limit_s, left_s=left_s)
    value = {"host_addresses": outcome.value.get("addresses"),
             "resolve_error": outcome.value.get("error")}  # fmt: skip
    return read_answer(replace(outcome, value=value), NetworkFacts())


def interfaces() -> tuple[Interface, ...]:
    """Every interface with its addresses."""
    import psutil

    try:
        addresses, found = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:  # no /proc
        return ()

    def of_family(name: str, family: int) -> tuple[str, ...]:
        texts = (one.address for one in addresses.get(name, ()) if one.family == family)
        return tuple(text.partition("%")[0] for text in texts)  # without the scope of IPv6

    return tuple(
        Interface(
            name=name,
            is_up=one.isup,
            is_loopback="loopback" in one.flags.split(","),
            ipv4=of_family(name, socket.AF_INET),
            ipv6=of_family(name, socket.AF_INET6),
            speed_mbit_s=one.speed or None,
        )
        for name, one in sorted(found.items())
    )


def default_interface(table: Path) -> str | None:
    """The interface of the IPv4 default route in ``/proc/net/route``; the lowest metric counts."""
    best: tuple[int, str] | None = None
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
                best = min(best or (1 << 30, ""), (int(fields[6]), fields[0]))
    return best[1] if best else None


def gather_master(
    environment: Mapping[str, str], network: NetworkFacts, *, limit_s: float, meet_s: float
) -> MasterFacts:
    """Meet the other nodes at MASTER_ADDR for up to ``meet_s``: the doctor runs on all of them.

    On the master it listens at MASTER_PORT; elsewhere it connects there and compares clocks.
    """
    address = environment["MASTER_ADDR"]
    text = environment.get("MASTER_PORT", "")
    port = int(text) if text.isdigit() and 0 < int(text) < 1 << 16 else None
    found, run = _resolve(address, limit_s)
    resolved = found.host_addresses or ()
    facts = MasterFacts(run=run, address=address, port=port, resolved=resolved)
    if not resolved:
        problem = found.resolve_error or run.error or "the resolver gave no answer"
        return replace(facts, is_reachable=False, port_problem=problem)
    is_local = is_own_address(resolved, network)
    facts = replace(facts, is_local=is_local)
    if port is None:
        return facts
    words = ["serve" if is_local else "join", address, str(port), str(meet_s)]
    meeting = run_probe("network", words, limit_s=meet_s + limit_s)
    met, run = read_answer(meeting, MasterFacts(), ignore_unknown=True)
    return replace(
        facts,
        run=Run(status=run.status, seconds=run.seconds, error=run.error),
        is_reachable=met.is_reachable,
        port_problem=met.port_problem,
        clock_skew_s=met.clock_skew_s,
        round_trip_s=met.round_trip_s,
    )


def is_own_address(addresses: tuple[str, ...], network: NetworkFacts) -> bool:
    """Whether one of ``addresses`` belongs to an interface of this host."""
    own = {at for one in network.interfaces for at in (*one.ipv4, *one.ipv6)}
    return any(at in own or at.startswith("127.") or at == "::1" for at in addresses)
