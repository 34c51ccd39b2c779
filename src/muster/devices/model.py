"""What is known about a host's devices, as plain values. Memory is in MiB; absence is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds memory of a device, as far as the driver and the system tell."""

    pid: int
    user: str | None = None
    used_mib: int | None = None
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one MIG instance of a GPU.

    ``index``: the number that nvidia-smi shows; instances of one GPU share it. It is not the
    ``N`` of ``cuda:N``: that is the position in ``Inventory.devices``.
    ``uuid``: what a worker's CUDA_VISIBLE_DEVICES is set to; ``""`` when a lost GPU hides it.
    ``lost``: why nothing can run here, None for a working device.
    ``parent_uuid``, ``gpu_instance``, ``compute_instance``: set for MIG instances only.
    """

    kind: Literal["cuda", "cpu"] = "cuda"
    index: int
    uuid: str
    name: str
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    holders: tuple[Holder, ...] = ()
    compute_capability: tuple[int, int] | None = None
    lost: str | None = None
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The devices a process may use, in the order in which CUDA numbers them.

    ``problem``: why there is no device, or what is wrong with the driver, in a sentence.
    ``cuda_visible_devices``: the value that was applied, None when the variable is not set.
    ``visibility_note``: what is wrong with that value, None when it does what it says.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str | None = None
    cuda_driver_version: tuple[int, int] | None = None
    problem: str | None = None
    cuda_visible_devices: str | None = None
    visibility_note: str | None = None
