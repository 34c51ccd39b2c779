"""The one door to the driver (NVML). Nothing else imports pynvml.

Nothing here raises for what a driver or a device cannot say: a field that fails is None, a device
that fails stays a row that says so, and a driver that fails is a sentence. The library is opened
once per process, on first use, and stays open: opening it anew for each sample would take longer
than the sample.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from muster.devices.inventory import ComputeMode, Device, Holder, Inventory

_MIB = 1024 * 1024
#: NVML's number for the second version of its memory record: 40 bytes, version 2.
_MEMORY_V2 = 40 | 2 << 24
#: nvmlComputeMode_t: who may use a GPU. The first is the usual one: everybody.
COMPUTE_MODES: dict[int, ComputeMode] = {0: "default", 2: "prohibited", 3: "exclusive process"}

_LIBRARY = "libnvidia-ml.so.1"
_NO_DRIVER = (
    f"No NVIDIA driver was found on this host (its library {_LIBRARY} is missing), "
    "so there is no GPU to use. In a container, start it with GPU access (--gpus all)."
)


class Unavailable(Exception):
    """NVML cannot be used at all; the text is for the user."""


def read_inventory() -> Inventory:
    """Every GPU of this host, and for a GPU cut by MIG its instances in its place."""
    try:
        library = open_library()
    except Unavailable as error:
        return Inventory(problem=str(error))
    devices: list[Device] = []
    for index in range(Reader(library).read("nvmlDeviceGetCount") or 0):
        devices.extend(_read_gpu(library, index))
    system = Reader(library)
    version = system.read("nvmlSystemGetCudaDriverVersion")
    return Inventory(
        devices=tuple(devices),
        driver_version=system.read("nvmlSystemGetDriverVersion"),
        cuda_driver_version=None if version is None else (version // 1000, version % 1000 // 10),
        problem=None if devices else "The NVIDIA driver is loaded, but it reports no GPU.",
    )


def process_memory_mib(uuids: Iterable[str]) -> dict[str, dict[int, int | None]]:
    """Device UUID -> pid -> MiB held there, now; None where the driver hides the amount.

    A device whose processes cannot be read is left out, which is not the same as an empty one.
    """
    try:
        library = open_library()
    except Unavailable:
        return {}
    result: dict[str, dict[int, int | None]] = {}
    for uuid in uuids:
        reader = Reader(library)
        handle = reader.read("nvmlDeviceGetHandleByUUID", uuid)
        memory = None if handle is None else _memory_by_pid(reader, handle)
        if memory is not None:
            result[uuid] = memory
    return result


def memory_used_mib(uuid: str) -> int | None:
    """MiB of a device that anybody holds now; None where the driver does not say."""
    try:
        reader = Reader(open_library())
    except Unavailable:
        return None
    handle = reader.read("nvmlDeviceGetHandleByUUID", uuid)
    return None if handle is None else memory_mib(reader, handle)[1]


def why_lost(uuid: str) -> str:
    """Why a GPU that this host had cannot be used any more; "" where it answers, or nobody knows.

    A GPU that has fallen off the bus keeps its name for a while and answers nothing else.
    """
    try:
        library = open_library()
    except Unavailable:
        return ""
    reader = Reader(library)
    handle = reader.read("nvmlDeviceGetHandleByUUID", uuid)
    if handle is not None:
        memory_mib(reader, handle)
    elif reader.code == library.NVML_ERROR_NOT_FOUND:
        return f"the driver has no GPU {uuid} any more; the kernel log (dmesg | grep Xid) says why"
    return "" if reader.broken is None else _does_not_answer(f"GPU {uuid}", reader.broken)


@functools.cache
def open_library() -> Any:
    """The initialised library; a failure is not cached, so a later call tries again."""
    if not _has_driver():
        raise Unavailable(_NO_DRIVER)
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        raise Unavailable(
            "The package nvidia-ml-py is not installed, so the GPUs of this host cannot be listed. "
            "Install it with: pip install nvidia-ml-py"
        ) from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise Unavailable(_why_no_driver(library, error)) from None
    return library


def _has_driver() -> bool:
    """Whether the library that pynvml opens is there; true where only pynvml can tell.

    pynvml takes as long to import as half of a bare interpreter, in vain where there is no driver.
    """
    if sys.platform != "linux" or "pynvml" in sys.modules:
        return True
    import ctypes  # here: only where GPUs are looked for

    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def _why_no_driver(library: Any, error: Any) -> str:
    if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _NO_DRIVER
    if error.value == library.NVML_ERROR_DRIVER_NOT_LOADED:
        return (
            "The NVIDIA driver is installed but not loaded, so no GPU can be used. "
            "Load it (modprobe nvidia) or reboot."
        )
    if error.value == library.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return (
            "The NVIDIA driver was updated while an older one is still loaded, so no GPU can be "
            "used. Reboot this host."
        )
    return f"The NVIDIA driver does not start ({error}), so no GPU can be used. Try nvidia-smi."


class Reader:
    """Calls into NVML for one device; remembers the first answer that means it is broken."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._fatal = (library.NVML_ERROR_GPU_IS_LOST, library.NVML_ERROR_RESET_REQUIRED)
        self.broken: str | None = None
        self.last_error: str | None = None
        self.code: int | None = None  # of that error

    def read(self, name: str, *arguments: Any) -> Any:
        """What the function called ``name`` returns, None if it fails or does not exist."""
        function = getattr(self._library, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._library.NVMLError as error:
            self.last_error, self.code = str(error), error.value
            if error.value in self._fatal and self.broken is None:
                self.broken = str(error)
        except self._library.NVMLLibraryMismatchError as error:
            self.last_error = str(error)
        return None


def _read_gpu(library: Any, index: int) -> list[Device]:
    reader = Reader(library)
    handle = reader.read("nvmlDeviceGetHandleByIndex", index)
    if handle is None and reader.code == library.NVML_ERROR_NO_PERMISSION:
        return []  # it belongs to another job or container: a control group hides it
    if handle is None:
        reason = _lost(index, reader.broken or reader.last_error)
        return [Device(index=index, uuid="", name="unknown GPU", lost=reason)]
    gpu = _read_device(reader, handle, index, parent=None)
    if gpu.lost is not None:
        return [gpu]
    mode = reader.read("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != 1:
        return [gpu]
    instances: list[Device] = []
    for position in range(reader.read("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = reader.read("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        if instance is not None:
            instances.append(_read_device(Reader(library), instance, index, parent=gpu))
    return instances or [_without_instances(gpu)]


def _read_device(reader: Reader, handle: Any, index: int, parent: Device | None) -> Device:
    uuid = reader.read("nvmlDeviceGetUUID", handle)
    name = reader.read("nvmlDeviceGetName", handle)
    total_mib, used_mib = memory_mib(reader, handle)
    capability = reader.read("nvmlDeviceGetCudaComputeCapability", handle)
    mode = reader.read("nvmlDeviceGetComputeMode", handle)
    holders = _holders(_memory_by_pid(reader, handle) or {})
    lost = _lost(index, reader.broken) if reader.broken else None
    if uuid is None and lost is None:
        lost = _lost(index, reader.last_error)
    if parent is not None:
        name = name or f"{parent.name} (MIG)"
        capability = capability or parent.compute_capability
    return Device(
        index=index,
        uuid=uuid or "",
        name=name or "unknown GPU",
        memory_total_mib=total_mib,
        memory_used_mib=used_mib,
        holders=holders,
        compute_capability=None if capability is None else (capability[0], capability[1]),
        lost=lost,
        compute_mode=COMPUTE_MODES.get(mode),
        parent_uuid=None if parent is None else parent.uuid,
        gpu_instance=reader.read("nvmlDeviceGetGpuInstanceId", handle) if parent else None,
        compute_instance=reader.read("nvmlDeviceGetComputeInstanceId", handle) if parent else None,
    )


def memory_mib(reader: Reader, handle: Any) -> tuple[int | None, int | None]:
    """MiB that a device has, and that anybody holds of it."""
    # The second version keeps the driver's own reserve apart. The first counts it as used, some
    # hundred MiB on large GPUs, and an idle GPU would look busy.
    info = reader.read("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
    if info is None:
        info = reader.read("nvmlDeviceGetMemoryInfo", handle)
    return (None, None) if info is None else (info.total // _MIB, info.used // _MIB)


def _memory_by_pid(reader: Reader, handle: Any) -> dict[int, int | None] | None:
    """None if no list of processes can be read at all."""
    lists = []
    for kind in ("Compute", "Graphics"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        # Drivers of before 2021 know only the second version of this call.
        found = reader.read(name, handle)
        lists.append(reader.read(f"{name}_v2", handle) if found is None else found)
    if lists[0] is None:
        return None
    memory: dict[int, int | None] = {}
    for process in (*lists[0], *(lists[1] or ())):
        used_mib = None if process.usedGpuMemory is None else process.usedGpuMemory // _MIB
        # A process that computes and draws is in both lists, with the same total.
        amounts = [mib for mib in (memory.get(process.pid), used_mib) if mib is not None]
        memory[process.pid] = max(amounts, default=None)
    return memory


def _holders(memory: dict[int, int | None]) -> tuple[Holder, ...]:
    return tuple(
        Holder(pid=pid, user=owner_of(pid), used_mib=used_mib, command=command_of(pid))
        for pid, used_mib in sorted(memory.items())
    )


def _lost(index: int, error: str | None) -> str:
    return _does_not_answer(f"GPU {index}", error)


def _does_not_answer(gpu: str, error: str | None) -> str:
    return (
        f"{gpu} does not answer ({error or 'no reason given'}); it needs a reset or a "
        "reboot, and the kernel log (dmesg | grep Xid) says what happened"
    )


def _without_instances(gpu: Device) -> Device:
    return replace(
        gpu,
        lost=f"GPU {gpu.index} is in MIG mode but has no instance; create one with nvidia-smi mig",
    )


_COMMAND_CHARS = 120


def owner_of(pid: int) -> str | None:
    """The user who runs ``pid``, by name, or by number where there is no name.

    None where the process cannot be seen, as in another container.
    """
    import psutil  # here: it takes 15 ms, and few starts of muster look at processes

    try:
        name: str = psutil.Process(pid).username()
    except psutil.Error:
        return None
    return name


def command_of(pid: int) -> str | None:
    """The beginning of the command line of ``pid``; None where the process cannot be seen."""
    import psutil

    try:
        text = " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return None
    if len(text) > _COMMAND_CHARS:
        text = text[: _COMMAND_CHARS - 1] + "…"
    return text or None
