"""An inventory as JSON, so that a host can be recorded once and replayed anywhere.

    {"driver_version": "550.54.15", "cuda_driver_version": [12, 4], "problem": null,
     "devices": [{"index": 0, "uuid": "GPU-…", "name": "…", "memory_total_mib": 81559,
                  "holders": [{"pid": 41, "user": "ada", "used_mib": 900}]}]}

Only ``index``, ``uuid`` and ``name`` of a device and ``pid`` of a holder are needed; what is left
out is not known. A key that does not exist is an error, because a misspelt fact would otherwise
be read as an unknown one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.codec import to_json as record_to_json
from muster.base.errors import SetupError
from muster.devices.model import Device, Holder, Inventory

_TEXT = (str, type(None))
_NUMBER = (int, type(None))
_TYPES: Mapping[type, Mapping[str, tuple[type, ...]]] = {
    Holder: {"pid": (int,), "user": _TEXT, "used_mib": _NUMBER, "command": _TEXT},
    Device: {
        "kind": (str,),
        "index": (int,),
        "uuid": (str,),
        "name": (str,),
        "memory_total_mib": _NUMBER,
        "memory_used_mib": _NUMBER,
        "holders": (list,),
        "compute_capability": (list, type(None)),
        "lost": _TEXT,
        "parent_uuid": _TEXT,
        "gpu_instance": _NUMBER,
        "compute_instance": _NUMBER,
    },
    Inventory: {
        "devices": (list,),
        "driver_version": _TEXT,
        "cuda_driver_version": (list, type(None)),
        "problem": _TEXT,
        "cuda_visible_devices": _TEXT,
        "visibility_note": _TEXT,
    },
}


class _Malformed(ValueError):
    """Where in the file something is wrong, and what."""


def to_json(inventory: Inventory) -> bytes:
    """Readable JSON that ``from_json`` turns back into an equal value."""
    return record_to_json(inventory)


def from_json(data: bytes, source: str) -> Inventory:
    """The inventory in ``data``; ``source`` (a path, say) names it in the SetupError."""
    try:
        return _inventory(json.loads(data))
    except (_Malformed, ValueError) as error:
        raise SetupError(
            f"The device facts in {source} cannot be used: {error}. "
            "Without them it is not known which GPUs there are.",
            hint="correct the file, or unset MUSTER_DEVICE_FACTS to ask the driver instead.",
        ) from None


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


def _inventory(value: Any) -> Inventory:
    fields = _checked(value, Inventory, "the file")
    fields["devices"] = tuple(
        _device(item, f"devices[{position}]")
        for position, item in enumerate(fields.get("devices", []))
    )
    uuids = [device.uuid for device in fields["devices"] if device.uuid]
    for uuid in uuids:
        if uuids.count(uuid) > 1:
            raise _Malformed(f"two devices have the uuid {uuid!r}")
    _pair(fields, "cuda_driver_version", "the file")
    return Inventory(**fields)


def _device(value: Any, where: str) -> Device:
    fields = _checked(value, Device, where)
    if fields.get("kind", "cuda") not in ("cuda", "cpu"):
        raise _Malformed(f"{where}: kind is {fields['kind']!r}, not 'cuda' or 'cpu'")
    fields["holders"] = tuple(
        Holder(**_checked(item, Holder, f"{where}.holders[{position}]"))
        for position, item in enumerate(fields.get("holders", []))
    )
    if not fields["uuid"] and fields.get("lost") is None:
        raise _Malformed(f"{where} has no uuid, which only a lost device may lack")
    _pair(fields, "compute_capability", where)
    return Device(**fields)


def _checked(value: Any, record: type, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Malformed(f"{where} must be an object, not {type(value).__name__}")
    types = _TYPES[record]
    for key, item in value.items():
        if key not in types:
            raise _Malformed(f"{where} has the unknown key {key!r} (known: {', '.join(types)})")
        # bool is an int to Python, but true is no number of MiB.
        if not isinstance(item, types[key]) or isinstance(item, bool):
            raise _Malformed(f"{where}: {key} is {item!r}, which is not {_worded(types[key])}")
    required = [
        field.name
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.name not in value
    ]
    if required:
        raise _Malformed(f"{where} lacks {', '.join(required)}")
    return dict(value)


def _pair(fields: dict[str, Any], key: str, where: str) -> None:
    value = fields.get(key)
    if value is None:
        return
    if len(value) != 2 or not all(type(part) is int for part in value):
        raise _Malformed(f"{where}: {key} is {value!r}, which is not two whole numbers")
    fields[key] = (value[0], value[1])


def _worded(types: tuple[type, ...]) -> str:
    names = {str: "text", int: "a whole number", list: "a list", type(None): "null"}
    return " or ".join(names[kind] for kind in types)
