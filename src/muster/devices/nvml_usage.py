"""What each GPU does at this moment: utilisation, memory, power, clocks, processes.

Read from the driver, or from a recorded inventory as far as its facts go. A field that the driver
does not give is None; a GPU that is lost stays, with the reason and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.discovery import discover
from muster.devices.inventory import Device, Holder, read_facts

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReasons). An idle GPU
#: clocks down as well, which is not throttling, so bit 0 is not here.
_THROTTLE_BITS = (
    (0x02, "clocks set by user"),
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal (software)"),
    (0x40, "thermal (hardware)"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
)


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """One GPU or MIG instance at one moment; None: the driver does not say.

    ``index``: as in nvidia-smi. ``utilisation_percent``: share of the driver's last period in
    which a kernel ran, which says nothing about how much of the GPU it filled. ``throttle``: why
    clocks are held down; () when they are not. ``pcie_receive_mib_s``: to the GPU.
    ``lost``: why it gives no figures any more.
    """

    index: int
    uuid: str
    name: str
    instance: int | None = None
    utilisation_percent: float | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    pcie_receive_mib_s: float | None = None
    pcie_send_mib_s: float | None = None
    processes: tuple[Holder, ...] = ()
    lost: str | None = None

    @property
    def label(self) -> str:
        """``gpu0``, or ``gpu0:mig7`` for GPU instance 7 of it."""
        return f"gpu{self.index}" + ("" if self.instance is None else f":mig{self.instance}")


class UsageSource(Protocol):
    def read(self, *, quick: bool = False) -> tuple[GpuUsage, ...]:
        """One entry per GPU, always the same ones in the same order.

        ``quick``: without PCIe figures, for which a driver measures 20 ms per GPU and direction.
        """


def usage_source(settings: Settings, uuids: Collection[str] | None = None) -> UsageSource:
    """The visible GPUs of this host, or those among them whose UUID is in ``uuids``.

    Raises SetupError for a facts file that is missing or malformed.
    """
    if uuids is not None and not uuids:
        return DriverUsage(())  # a run on the CPU: the driver is not even asked
    devices = tuple(
        device
        for device in discover(settings).devices
        if device.kind == "cuda" and (uuids is None or device.uuid in uuids)
    )
    return DriverUsage(devices) if settings.device_facts is None else FactsUsage(settings, devices)


class DriverUsage:
    """Asks the driver. GPUs are those given at the start, whatever becomes of them."""

    def __init__(self, devices: Collection[Device]) -> None:
        self._devices = tuple(devices)
        # A driver looks through all GPUs to find one by UUID, so handles are kept.
        self._handles: dict[str, Any] = {}
        self._owners: dict[int, tuple[str | None, str | None]] = {}

    def read(self, *, quick: bool = False) -> tuple[GpuUsage, ...]:
        if not self._devices:
            return ()
        try:
            library = nvml.open_library()
        except nvml.Unavailable as error:
            return tuple(_lost(device, str(error)) for device in self._devices)
        memory = nvml.process_memory_mib([d.uuid for d in self._devices if d.uuid])
        found = [self._read_one(library, device, memory) for device in self._devices]
        if quick:
            return tuple(found)
        # Last, and for all GPUs together: it takes longer than everything else.
        return tuple(self._with_pcie(library, usage) for usage in found)

    def _read_one(
        self, library: Any, device: Device, memory: dict[str, dict[int, int | None]]
    ) -> GpuUsage:
        reader = nvml.Reader(library)
        handle = self._handle(reader, device)
        if handle is None:
            return _lost(device, reader.broken or reader.last_error or device.lost)
        usage = _read_fields(library, reader, handle, device)
        if reader.broken is not None:
            self._handles.pop(device.uuid, None)
            return _lost(device, reader.broken)
        held = memory.get(device.uuid, {})
        return replace(usage, processes=tuple(self._holder(p, m) for p, m in sorted(held.items())))

    def _handle(self, reader: nvml.Reader, device: Device) -> Any:
        if not device.uuid:  # it was lost from the start and hides its UUID
            return reader.read("nvmlDeviceGetHandleByIndex", device.index)
        if device.uuid not in self._handles:
            handle = reader.read("nvmlDeviceGetHandleByUUID", device.uuid)
            if handle is None:
                return None
            self._handles[device.uuid] = handle
        return self._handles[device.uuid]

    def _with_pcie(self, library: Any, usage: GpuUsage) -> GpuUsage:
        handle = self._handles.get(usage.uuid)
        if usage.lost is not None or handle is None:
            return usage
        reader = nvml.Reader(library)
        receive, send = (
            reader.read("nvmlDeviceGetPcieThroughput", handle, counter)
            for counter in (library.NVML_PCIE_UTIL_RX_BYTES, library.NVML_PCIE_UTIL_TX_BYTES)
        )
        return replace(
            usage, pcie_receive_mib_s=scaled(receive, 1024), pcie_send_mib_s=scaled(send, 1024)
        )

    def _holder(self, pid: int, used_mib: int | None) -> Holder:
        if pid not in self._owners:
            if len(self._owners) > 1000:
                self._owners.clear()
            self._owners[pid] = (nvml.owner_of(pid), nvml.command_of(pid))
        user, command = self._owners[pid]
        return Holder(pid=pid, user=user, used_mib=used_mib, command=command)


class FactsUsage:
    """Replays recorded facts: memory, processes and what is lost; the rest is not known.

    The file is read anew for each sample, so whoever writes it can let things change.
    """

    def __init__(self, settings: Settings, devices: Collection[Device]) -> None:
        self._settings = settings
        self._devices = tuple(devices)

    def read(self, *, quick: bool = False) -> tuple[GpuUsage, ...]:
        assert self._settings.device_facts is not None
        recorded = read_facts(self._settings.device_facts)
        # Every GPU of the file, or one that is hidden now would seem lost.
        by_uuid = {device.uuid: device for device in recorded.devices}
        return tuple(_from_facts(device, by_uuid.get(device.uuid)) for device in self._devices)


def read_throttle(reader: nvml.Reader, handle: Any) -> tuple[str, ...] | None:
    """Why the clocks are held down; () when they are not."""
    bits = reader.read("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # the name before driver 535
        bits = reader.read("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else throttle_reasons(bits)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The reasons in NVML's bit field.

    >>> throttle_reasons(0x44), throttle_reasons(0x1)
    (('power cap', 'thermal (hardware)'), ())
    """
    return tuple(words for bit, words in _THROTTLE_BITS if bits & bit)


def _read_fields(library: Any, reader: nvml.Reader, handle: Any, device: Device) -> GpuUsage:
    rates = reader.read("nvmlDeviceGetUtilizationRates", handle)
    total_mib, used_mib = nvml.memory_mib(reader, handle)
    return GpuUsage(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        instance=device.gpu_instance,
        utilisation_percent=None if rates is None else float(rates.gpu),
        memory_used_mib=used_mib,
        memory_total_mib=device.memory_total_mib if total_mib is None else total_mib,
        power_w=scaled(reader.read("nvmlDeviceGetPowerUsage", handle), 1000),
        power_limit_w=scaled(reader.read("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
        temperature_c=reader.read("nvmlDeviceGetTemperature", handle, library.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=reader.read("nvmlDeviceGetClockInfo", handle, library.NVML_CLOCK_SM),
        memory_clock_mhz=reader.read("nvmlDeviceGetClockInfo", handle, library.NVML_CLOCK_MEM),
        throttle=read_throttle(reader, handle),
    )


def scaled(value: int | None, divisor: int) -> float | None:
    return None if value is None else value / divisor


def _from_facts(device: Device, now: Device | None) -> GpuUsage:
    if now is None or now.lost is not None:
        why = "it is no longer in the recorded facts" if now is None else now.lost
        return _lost(device, why)
    return GpuUsage(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        instance=device.gpu_instance,
        memory_used_mib=now.memory_used_mib,
        memory_total_mib=now.memory_total_mib,
        processes=now.holders,
    )


def _lost(device: Device, reason: str | None) -> GpuUsage:
    return GpuUsage(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        instance=device.gpu_instance,
        lost=reason or "no reason given",
    )
