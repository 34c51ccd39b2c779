"""Probes of the host: its driver, its disk, its torch, its name server and the other nodes.

Each may hang for good: a broken GPU in any call to the driver, a network disk that is gone, a dead
name server. torch is imported only where it is asked.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import struct
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from muster.base.atomic_files import file_system_of
from muster.base.errors import TargetError
from muster.base.modules import all_plugins, load_plugin
from muster.base.settings import read_settings
from muster.devices.discovery import discover
from muster.devices.nvml_health import read_health, read_links
from muster.doctor.probes.report import Tell, one_line, progress


def driver(words: list[str], tell: Tell) -> None:
    """Read the NVIDIA driver; with ``health`` only what changes from moment to moment."""
    # What CUDA_VISIBLE_DEVICES hides is decided by a check, so everything is read.
    settings = dataclasses.replace(read_settings(), cuda_visible_devices=None)
    is_recorded = settings.device_facts is not None
    if words == ["health"]:
        tell({"health": () if is_recorded else read_health()})
        return
    progress("listing the GPUs")
    value: dict[str, Any] = {"inventory": discover(settings)}
    tell(value)
    if not is_recorded:
        progress("reading the health of the GPUs")
        value["health"] = read_health()
        tell(value)
        progress("reading the links between GPUs")
        value["links"] = read_links()
        tell(value)


def extensions(words: list[str], tell: Tell) -> None:
    """Import what installed packages add to muster, but none of ``words``: why each cannot be
    used, "" where it can."""
    problems: dict[str, str] = {}
    for plugin in all_plugins():
        name = f"{plugin.kind} {plugin.name}"
        if name in words:
            continue
        progress(name)
        try:
            load_plugin(plugin.kind, plugin.name)
            problems[name] = ""
        except TargetError as error:
            problems[name] = one_line(error.__cause__ or error)
        tell({"problems": problems})


_CHUNK = 4 << 20
_MIB = 1 << 20
_NUM_APPENDS = 5


def disk(words: list[str], tell: Tell) -> None:
    """FOLDER SECONDS: write there with fsync until SECONDS are over, 256 MiB at most, and read the
    file system's clock.
    """
    folder, budget_s = existing(Path(words[0])), float(words[1])
    value: dict[str, object] = {"path": words[0]}
    progress(f"asking {folder} for its free space")
    space = shutil.disk_usage(folder)
    value |= {
        "free_mib": space.free // _MIB,
        "total_mib": space.total // _MIB,
        "file_system": file_system_of(folder.resolve()),
    }
    tell(value)
    progress(f"writing to {folder}")
    try:
        value |= _write(folder, budget_s, space.free)
    except OSError as error:
        value |= {"is_writable": False, "problem": one_line(error)}
    tell(value)


def existing(folder: Path) -> Path:
    """The nearest folder upwards that exists: a run's folder is made when the run starts."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _write(folder: Path, budget_s: float, free_bytes: int) -> dict[str, object]:
    # Incompressible, so that a file system that compresses does not look faster than it is.
    chunk = os.urandom(_CHUNK)
    most = min(256 << 20, max(_CHUNK, free_bytes // 20))
    # Without a name, so that nothing stays however this ends.
    with tempfile.TemporaryFile(prefix=".muster-doctor-", dir=folder, buffering=0) as file:
        before_s = time.time()
        file.write(b"x")
        os.fsync(file.fileno())
        # Network file systems stamp with the server's clock.
        stamp_s = os.fstat(file.fileno()).st_mtime
        middle_s = (before_s + time.time()) / 2
        began_s, written = time.monotonic(), 0
        while written < most and time.monotonic() - began_s < budget_s:
            written += file.write(chunk)
            # Synced as it goes: 256 MiB in one sync could outlast any budget.
            os.fsync(file.fileno())
        took_s = time.monotonic() - began_s
        appends = []
        for _ in range(_NUM_APPENDS):
            start_s = time.monotonic()
            file.write(b"x" * 100)
            os.fsync(file.fileno())
            appends.append(time.monotonic() - start_s)
    return {
        "is_writable": True,
        "write_mb_s": written / took_s / 1e6,
        "fsync_s": median(appends),
        "clock_skew_s": middle_s - stamp_s,
    }


def torch_facts(words: list[str], tell: Tell) -> None:
    """What torch says of itself and of the devices that it sees."""
    progress("importing torch")
    import torch

    value: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cpu_threads": torch.get_num_threads(),
    }
    value |= _distributed()
    tell(value)
    progress("starting the accelerator")
    value |= _accelerator(torch)
    tell(value)
    if torch.cuda.is_available():
        progress("asking for the devices")
        value |= _cuda(torch)
        tell(value)


def _distributed() -> dict[str, Any]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"is_distributed": False, "backends": []}
    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    backends = [name for name, is_available in known.items() if is_available()]
    if getattr(dist, "is_xccl_available", lambda: False)():
        backends.append("xccl")
    return {"is_distributed": True, "backends": backends}


def _accelerator(torch: Any) -> dict[str, Any]:
    """``torch.accelerator`` names CUDA, ROCm (as cuda), XPU and MPS alike."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_cuda = torch.cuda.is_available()
        count = torch.cuda.device_count()
        # Without the check a build for XPU would name it on a host that has none.
        is_there = torch.accelerator.is_available()
        accelerator = torch.accelerator.current_accelerator() if is_there else None
    value: dict[str, Any] = {
        "is_cuda_available": is_cuda,
        "device_count": count,
        "accelerator": None if accelerator is None else accelerator.type,
        "accelerator_count": torch.accelerator.device_count() if is_there else 0,
    }
    if said and not is_cuda:
        value["cuda_error"] = str(said[-1].message).split("\n")[0][:400]
    return value


def _cuda(torch: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"arch_list": torch.cuda.get_arch_list()}
    indices = range(torch.cuda.device_count())
    try:
        value["device_names"] = [torch.cuda.get_device_name(index) for index in indices]
        value["capabilities"] = [torch.cuda.get_device_capability(index) for index in indices]
        if torch.distributed.is_nccl_available():
            value["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # whatever it is, it is what a program would meet
        value["cuda_error"] = one_line(error)
    return value


_NUM_EXCHANGES = 8
_STAMP = struct.Struct("!d")
_RETRY_S = 0.2


def network(words: list[str], tell: Tell) -> None:
    """Ask the resolver, or meet the other nodes at MASTER_ADDR:MASTER_PORT and compare clocks.

        resolve NAME                the way gloo does it
        serve ADDR PORT SECONDS     on the master: answers everybody with its clock
        join ADDR PORT SECONDS      elsewhere: asks several times and keeps the quickest answer

    The clock's difference is taken at the middle of the round trip, as NTP does it (RFC 5905,
    section 8), so its error is at most half of that trip.
    """
    role, addr = words[:2]
    if role == "resolve":
        progress(f"resolving {addr}")
        tell(resolve(addr))
        return
    port, seconds = int(words[2]), float(words[3])
    deadline_s = time.monotonic() + seconds
    progress(f"{role} {addr}:{port}")
    tell(serve(port, deadline_s) if role == "serve" else join(addr, port, deadline_s))


def resolve(name: str) -> dict[str, object]:
    """The addresses of ``name``, in the resolver's order."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": one_line(error)}
    return {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def serve(port: int, deadline_s: float) -> dict[str, object]:
    """Answer every host that connects until ``deadline_s`` of the monotonic clock."""
    try:
        # Both families: what a name resolves to elsewhere is not known here.
        listener = socket.create_server(
            ("", port) if not socket.has_dualstack_ipv6() else ("::", port),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        return {"port_problem": one_line(error)}
    with listener:
        while (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                break
            with guest:
                guest.settimeout(max(0.1, min(2.0, left_s)))
                with suppress(OSError):  # a guest that goes, or asks nothing
                    while guest.recv(1):
                        guest.sendall(_STAMP.pack(time.time()))
    return {"is_reachable": True}


def join(addr: str, port: int, deadline_s: float) -> dict[str, object]:
    """Ask until the master answers, which may start a little later."""
    problem = "nobody answered"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((addr, port), timeout=min(2.0, left_s)) as line:
                return {"is_reachable": True, **_exchange(line)}
        except OSError as error:
            problem = one_line(error)
            time.sleep(min(_RETRY_S, max(0.0, left_s)))
    return {"is_reachable": False, "port_problem": problem}


def _exchange(line: socket.socket) -> dict[str, float]:
    best: tuple[float, float] | None = None
    for _ in range(_NUM_EXCHANGES):
        sent_s = time.time()
        line.sendall(b"?")
        data = b""
        while len(data) < _STAMP.size:
            part = line.recv(_STAMP.size - len(data))
            if not part:  # something else listens there
                return {}
            data += part
        back_s = time.time()
        skew_s = (sent_s + back_s) / 2 - _STAMP.unpack(data)[0]
        best = min(best or (back_s - sent_s, skew_s), (back_s - sent_s, skew_s))
    assert best is not None
    return {"round_trip_s": best[0], "clock_skew_s": best[1]}
