"""The health of each GPU, and how GPUs reach each other, as far as the driver tells.

A field that a driver or a card does not give is None; nothing here raises. What each call means
is described in NVIDIA's NVML reference under the name of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from muster.devices import nvml
from muster.devices.nvml_usage import read_throttle, scaled

#: nvmlGpuP2PStatus_t, worded.
_P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the PCIe topology does not support it",
    4: "it is switched off in the driver",
    5: "not supported",
}
#: nvmlGpuTopologyLevel_t.
PathLevel = Literal[
    "board", "one switch", "several switches", "host bridge", "CPU socket", "between sockets"
]
_LEVELS: dict[int, PathLevel] = {
    0: "board",
    10: "one switch",
    20: "several switches",
    30: "host bridge",
    40: "CPU socket",
    50: "between sockets",
}
#: Some releases of pynvml define NVML_P2P_CAPS_INDEX_READ as a tuple by a stray comma.
_P2P_READ, _P2P_NVLINK = 0, 2
_UNCORRECTED, _CORRECTED = 1, 0
_VOLATILE, _AGGREGATE = 0, 1
_SLOWDOWN = 1


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """One GPU (not a MIG instance) at one moment.

    ``index``: as in nvidia-smi. ``ecc_*``: errors since the driver was loaded, ``_total``: ever.
    ``rows_pending``: memory rows or pages wait for a reset to be replaced; ``rows_failed``: no
    spare rows are left. ``nvlinks``: for each link the card has, whether it is up.
    ``throttle``: why clocks are held down, () when they are not.
    ``performance_state``: 0 is the fastest; an idle GPU is at 8 or so, and lowers its PCIe link.
    """

    index: int
    uuid: str = ""
    pci_address: str | None = None
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    performance_state: int | None = None
    throttle: tuple[str, ...] | None = None
    ecc_enabled: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_total: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[bool, ...] = ()
    nvlink_version: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """Two GPUs, by nvidia-smi's numbers: their common ancestor on the bus, and whether each may
    read the other's memory (``peer_read``: "ok", or why not)."""

    first: int
    second: int
    level: PathLevel | None = None
    peer_read: str | None = None
    is_nvlink: bool | None = None


def read_health() -> tuple[GpuHealth, ...]:
    """One entry per GPU that answers; () without a driver."""
    try:
        library = nvml.open_library()
    except nvml.Unavailable:
        return ()
    found = []
    for index, handle in _handles(library):
        found.append(_read(nvml.Reader(library), handle, index))
    return tuple(found)


def read_links() -> tuple[PairLink, ...]:
    """One entry per pair of GPUs that answer; () without a driver."""
    try:
        library = nvml.open_library()
    except nvml.Unavailable:
        return ()
    return tuple(
        _read_pair(nvml.Reader(library), one, two)
        for one, two in combinations(_handles(library), 2)
    )


def _handles(library: Any) -> Iterator[tuple[int, Any]]:
    for index in range(nvml.Reader(library).read("nvmlDeviceGetCount") or 0):
        handle = nvml.Reader(library).read("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            yield index, handle


def _read(reader: nvml.Reader, handle: Any, index: int) -> GpuHealth:
    read = reader.read
    ecc = read("nvmlDeviceGetEccMode", handle)
    rows = read("nvmlDeviceGetRemappedRows", handle)
    pages = read("nvmlDeviceGetRetiredPagesPendingStatus", handle)
    pci = read("nvmlDeviceGetPciInfo", handle)
    persistence = read("nvmlDeviceGetPersistenceMode", handle)
    links = _nvlinks(reader, handle)
    return GpuHealth(
        index=index,
        uuid=read("nvmlDeviceGetUUID", handle) or "",
        pci_address=None if pci is None else pci_address(pci.busId),
        temperature_c=read("nvmlDeviceGetTemperature", handle, 0),
        slowdown_temperature_c=read("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN),
        power_w=scaled(read("nvmlDeviceGetPowerUsage", handle), 1000),
        power_limit_w=scaled(read("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
        power_limit_default_w=scaled(
            read("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1000
        ),
        performance_state=read("nvmlDeviceGetPerformanceState", handle),
        throttle=read_throttle(reader, handle),
        ecc_enabled=None if ecc is None else bool(ecc[0]),
        ecc_corrected=read("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _VOLATILE),
        ecc_uncorrected=read("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        ecc_uncorrected_total=read("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _AGGREGATE),
        # Ampere and later remap rows, older cards retire pages.
        rows_pending=_either(None if rows is None else rows[2], pages),
        rows_failed=None if rows is None else bool(rows[3]),
        pcie_generation=read("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_generation_max=read("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=read("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=read("nvmlDeviceGetMaxPcieLinkWidth", handle),
        nvlinks=links,
        nvlink_version=read("nvmlDeviceGetNvLinkVersion", handle, 0) if links else None,
        persistence=None if persistence is None else bool(persistence),
        compute_mode=nvml.COMPUTE_MODES.get(read("nvmlDeviceGetComputeMode", handle)),
    )


def _nvlinks(reader: nvml.Reader, handle: Any) -> tuple[bool, ...]:
    states = []
    for link in range(36):  # NVML_NVLINK_MAX_LINKS; a card answers for those it has
        state = reader.read("nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break
        states.append(bool(state))
    return tuple(states)


def _read_pair(reader: nvml.Reader, one: tuple[int, Any], two: tuple[int, Any]) -> PairLink:
    level = reader.read("nvmlDeviceGetTopologyCommonAncestor", one[1], two[1])
    read = reader.read("nvmlDeviceGetP2PStatus", one[1], two[1], _P2P_READ)
    nvlink = reader.read("nvmlDeviceGetP2PStatus", one[1], two[1], _P2P_NVLINK)
    return PairLink(
        first=one[0],
        second=two[0],
        level=None if level is None else _LEVELS.get(level),
        peer_read=None if read is None else _P2P_STATUS.get(read, "unknown"),
        is_nvlink=None if nvlink is None else nvlink == 0,
    )


def pci_address(bus_id: str | bytes) -> str:
    """The kernel's spelling of a bus id of NVML: four digits of domain, lower case.

    >>> pci_address(b"00000000:3B:00.0")
    '0000:3b:00.0'
    """
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}".lower()


def _either(*values: int | None) -> bool | None:
    known = [bool(value) for value in values if value is not None]
    return any(known) if known else None
