"""What is known about a host's devices, as plain values. Memory is in MiB; absence is None.

As JSON a host can be recorded once and replayed anywhere:

    {"driver_version": "550.54.15", "cuda_driver_version": [12, 4], "problem": null,
     "devices": [{"index": 0, "uuid": "GPU-…", "name": "…", "memory_total_mib": 81559,
                  "holders": [{"pid": 41, "user": "ada", "used_mib": 900}]}]}

Only ``index``, ``uuid`` and ``name`` of a device and ``pid`` of a holder are needed; what is left
out is not known. A key that does not exist is an error, because a misspelt fact would otherwise
be read as an unknown one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.base.codec import MalformedError, decode
from muster.base.codec import to_json as record_to_json
from muster.base.errors import SetupError

ComputeMode = Literal["default", "prohibited", "exclusive process"]


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
    ``compute_mode``: how many processes the driver lets use it, None where it says nothing.
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
    compute_mode: ComputeMode | None = None
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The devices a process may use, in the order in which CUDA numbers them.

    ``problem``: why there is no device, or what is wrong with the driver, in a sentence.
    ``cuda_visible_devices``: the value that was applied, None when the variable is not set.
    ``visibility_note``: what is wrong with that value, None when it does what it says.
    ``has_mps``: NVIDIA's MPS server runs here, so that processes share a GPU side by side.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str | None = None
    cuda_driver_version: tuple[int, int] | None = None
    problem: str | None = None
    cuda_visible_devices: str | None = None
    visibility_note: str | None = None
    has_mps: bool = False


def to_json(inventory: Inventory) -> bytes:
    """Readable JSON that ``from_json`` turns back into an equal value."""
    return record_to_json(inventory)


def from_json(data: bytes, source: str) -> Inventory:
    """The inventory in ``data``; ``source`` (a path, say) names it in the SetupError."""
    try:
        inventory = decode(Inventory, json.loads(data))
        _refuse_impossible(inventory.devices)
    except ValueError as error:
        raise SetupError(
            f"The device facts in {source} cannot be used: {error}. "
            "Without them it is not known which GPUs there are.",
            hint="correct the file, or unset MUSTER_DEVICE_FACTS to ask the driver instead.",
        ) from None
    return inventory


def read_facts(path: Path) -> Inventory:
    """The inventory recorded in ``path``; SetupError when it is missing or malformed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SetupError(
            f"Cannot read the device facts in {path}: {error.strerror or error}. "
            "MUSTER_DEVICE_FACTS names that file as the list of this host's GPUs.",
            hint="correct the path, or unset MUSTER_DEVICE_FACTS to ask the driver instead.",
        ) from None
    return from_json(data, str(path))


def _refuse_impossible(devices: tuple[Device, ...]) -> None:
    uuids = [device.uuid for device in devices if device.uuid]
    for position, device in enumerate(devices):
        if not device.uuid and device.lost is None:
            raise MalformedError(
                f"devices[{position}] has no uuid, which only a lost device may lack"
            )
        if uuids.count(device.uuid) > 1:
            raise MalformedError(f"two devices have the uuid {device.uuid!r}")
