"""An inventory as JSON, so that a host can be recorded once and replayed anywhere.

    {"driver_version": "550.54.15", "cuda_driver_version": [12, 4], "problem": null,
     "devices": [{"index": 0, "uuid": "GPU-…", "name": "…", "memory_total_mib": 81559,
                  "holders": [{"pid": 41, "user": "ada", "used_mib": 900}]}]}

Only ``index``, ``uuid`` and ``name`` of a device and ``pid`` of a holder are needed; what is left
out is not known. A key that does not exist is an error, because a misspelt fact would otherwise
be read as an unknown one.
"""

from __future__ import annotations

import json
from pathlib import Path

from muster.base.codec import MalformedError, decode
from muster.base.codec import to_json as record_to_json
from muster.base.errors import SetupError
from muster.devices.model import Device, Inventory


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
