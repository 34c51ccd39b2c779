"""Everything the doctor knows about a machine, as one value. Absence is None: not known.

Checks read this value and nothing else, so a machine can be recorded (``--save-facts``) and looked
at elsewhere (``--from-facts``). In the file a key that does not exist is an error, because a
misspelt fact would otherwise be read as an unknown one. Units: MiB are 2^20 bytes, GB/s are 10^9
bytes per second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from muster.base.codec import MalformedError, decode
from muster.base.errors import UsageError
from muster.devices.cards import Precision
from muster.devices.inventory import Inventory
from muster.devices.nvml_health import GpuHealth, PairLink

#: Raised when a field changes its meaning; a file of a later version is refused.
FACTS_VERSION = 1

NO_TORCH = "torch is not installed"

Status = Literal["ok", "failed", "hung", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a child process ended.

    ``hung``: it was cut off at its limit, or had said nothing for too long; ``at``: what it did
    last. ``skipped``: it was not started, or was cut off when the time for all was over, as
    ``error`` says. ``seconds``: how long it ran.
    """

    status: Status = "skipped"
    seconds: float = 0.0
    at: str | None = None
    error: str | None = None

    @property
    def where(self) -> str:
        return f" at {self.at}" if self.at else ""

    @property
    def reason(self) -> str:
        return (self.error or "no reason given").strip().splitlines()[-1]


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A display or compute controller on the PCI bus, whether or not a driver drives it.

    ``is_compute``: it has no display, so it is no processor's own graphics.
    """

    address: str
    vendor: Literal["nvidia", "amd", "intel"]
    driver: str | None = None
    is_compute: bool = False
    #: From the kernel, which sees the port's side too; NVML may know only the card's.
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The host. ``cpu_cores``: how many this process may use; ``shm_*``: of /dev/shm; ``iommu``:
    whether it translates addresses; ``counts_own_limit``: of a control group (cgroup v2) whose
    memory is handed on, whether the kernel counts how often it came to its limit.
    """

    name: str = ""
    system: str = ""
    kernel: str = ""
    python: str = ""
    cpu_cores: int = 1
    memory_total_mib: int | None = None
    memory_available_mib: int | None = None
    shm_total_mib: int | None = None
    shm_free_mib: int | None = None
    open_files_soft: int | None = None
    open_files_hard: int | None = None
    locked_memory_mib: int | None = None
    is_container: bool | None = None
    iommu: bool | None = None
    counts_own_limit: bool | None = None
    infiniband: tuple[str, ...] = ()
    pci_gpus: tuple[PciGpu, ...] = ()
    clock_synchronised: bool | None = None
    wall_time: str | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """``speed_mbit_s``: as the driver of the card says, None for virtual ones."""

    name: str
    is_up: bool = True
    is_loopback: bool = False
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()
    speed_mbit_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """``host_addresses``: what this host's own name resolves to, in the resolver's order."""

    interfaces: tuple[Interface, ...] = ()
    default_interface: str | None = None
    host_addresses: tuple[str, ...] | None = None
    resolve_error: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what is no address, because checks compare them as addresses."""
        for text in (*(self.host_addresses or ()), *(at for i in self.interfaces for at in i.ipv6)):
            ip_address(text.partition("%")[0])


@dataclass(frozen=True, kw_only=True)
class MasterFacts:
    """MASTER_ADDR as seen from here.

    ``is_local``: the address is one of this host's. ``port_problem``: why the port could not be
    bound (on the master) or connected to (elsewhere). ``clock_skew_s``: this host's clock minus
    the master's, by the exchange of the probe ``network``.
    """

    run: Run = field(default_factory=Run)
    address: str = ""
    port: int | None = None
    resolved: tuple[str, ...] = ()
    is_local: bool | None = None
    is_reachable: bool | None = None
    port_problem: str | None = None
    clock_skew_s: float | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """The folder runs are written to. ``write_mb_s``: 10^6 bytes/s of a file that is fsynced;
    ``fsync_s``: one small append with fsync, the median.
    """

    run: Run = field(default_factory=Run)
    path: str = ""
    file_system: str | None = None
    free_mib: int | None = None
    total_mib: int | None = None
    is_writable: bool | None = None
    write_mb_s: float | None = None
    fsync_s: float | None = None
    clock_skew_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """torch as installed (``version`` and the builds, read from its files) and as it answers.

    ``run`` tells whether it was started at all; what only a running torch knows is None otherwise.
    ``arch_list``: what its CUDA kernels are compiled for (``sm_90``, ``compute_90``).
    ``accelerator``: the kind that ``torch.accelerator`` reports: cuda (also ROCm), xpu, mps.
    ``triton_lacks``: what Triton needs to compile and does not find; None: it is not installed.
    """

    run: Run = field(default_factory=Run)
    version: str | None = None
    cuda_build: str | None = None
    hip_build: str | None = None
    xpu_build: str | None = None
    is_cuda_available: bool | None = None
    cuda_error: str | None = None
    device_count: int | None = None
    device_names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    arch_list: tuple[str, ...] | None = None
    accelerator: str | None = None
    accelerator_count: int | None = None
    is_distributed: bool | None = None
    backends: tuple[str, ...] | None = None
    nccl_version: str | None = None
    cpu_threads: int | None = None
    triton_lacks: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ReduceSize:
    """One size of message: ``seconds`` per all-reduce, ``wrong_values`` of ``num_values``."""

    num_bytes: int
    seconds: float
    num_values: int
    wrong_values: int


@dataclass(frozen=True, kw_only=True)
class ReduceTry:
    """One attempt of the all-reduce with these variables set in addition."""

    run: Run
    settings: dict[str, str] = field(default_factory=dict)
    sizes: tuple[ReduceSize, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it ended and every value was right."""
        return self.run.status == "ok" and not any(size.wrong_values for size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """``tries``: the first is with the user's own environment; further ones only if it failed."""

    kind: str = "cpu"
    backend: str = "gloo"
    num_ranks: int = 0
    devices: tuple[int, ...] = ()
    tries: tuple[ReduceTry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PeerCopy:
    """One direction of one pair, in torch's numbering; ``is_right`` None: it never came back."""

    source: int
    target: int
    can_access: bool | None = None
    is_right: bool | None = None
    gb_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class PeerCopies:
    run: Run = field(default_factory=Run)
    copies: tuple[PeerCopy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """``tflops``: 10^12 operations per second, median of several; ``error``: relative, against
    double precision on the CPU.
    """

    device: int
    name: str
    precision: Precision
    tflops: float | None = None
    error: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Matmuls:
    run: Run = field(default_factory=Run)
    kind: str = "cpu"
    rates: tuple[MatmulRate, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CopyRate:
    """Copies of one device, one at a time: GB/s to it and from it, pinned memory and not."""

    device: int
    to_pinned_gb_s: float | None = None
    from_pinned_gb_s: float | None = None
    to_pageable_gb_s: float | None = None
    from_pageable_gb_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    run: Run = field(default_factory=Run)
    kind: str = "cpu"
    rates: tuple[CopyRate, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an installed package adds to muster, and why it cannot be used, if it cannot.

    ``place``: ``module:attribute``. ``untried``: why it is not known whether it can.
    """

    kind: str
    name: str
    place: str
    package: str
    version: str = ""
    problem: str = ""
    untried: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the doctor knows about a machine.

    ``inventory``: every GPU of the host, also those that CUDA_VISIBLE_DEVICES hides. ``loaded``:
    the GPUs' health while the matrix products ran. ``environment``: only variables that decide how
    a run behaves. ``driver``: how the reading of the driver itself ended.
    """

    version: int = FACTS_VERSION
    is_quick: bool = False
    seconds: float = 0.0
    host: HostFacts = field(default_factory=HostFacts)
    environment: dict[str, str] = field(default_factory=dict)
    driver: Run = field(default_factory=Run)
    inventory: Inventory = field(default_factory=Inventory)
    health: tuple[GpuHealth, ...] = ()
    loaded: tuple[GpuHealth, ...] = ()
    links: tuple[PairLink, ...] = ()
    network: NetworkFacts = field(default_factory=NetworkFacts)
    master: MasterFacts | None = None
    disk: DiskFacts | None = None
    torch: TorchFacts = field(default_factory=TorchFacts)
    matmuls: Matmuls | None = None
    host_copies: HostCopies | None = None
    peer_copies: PeerCopies | None = None
    all_reduce: AllReduce | None = None
    extensions: tuple[Extension, ...] = ()


def load_facts(path: Path) -> Facts:
    """The facts in ``path``. Raises UsageError when it is missing or is no facts file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the facts in {path}: {error.strerror or error}.",
            hint="record a machine there with `muster doctor --save-facts FILE`.",
        ) from None
    return facts_from_json(data, str(path))


def facts_from_json(data: bytes, source: str) -> Facts:
    """The facts in ``data``; ``source`` names it in the UsageError."""
    try:
        record = json.loads(data)
        version = record.get("version", FACTS_VERSION) if isinstance(record, dict) else None
        if isinstance(version, int) and version > FACTS_VERSION:
            raise MalformedError(
                f"it has version {version}, and this muster reads up to {FACTS_VERSION}"
            )
        return decode(Facts, record)
    except ValueError as error:
        raise UsageError(
            f"The facts in {source} cannot be used: {error}.",
            hint="record them again with `muster doctor --save-facts FILE`.",
        ) from None
