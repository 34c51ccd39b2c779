"""Which devices this process may use. The face of the layer for whoever only wants to look."""

from __future__ import annotations

from dataclasses import replace

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.facts import from_json, read_facts, to_json
from muster.devices.model import Device, Holder, Inventory
from muster.devices.visibility import PhysicalDevice, visible

__all__ = [
    "Device",
    "Holder",
    "Inventory",
    "apply_visibility",
    "discover",
    "from_json",
    "to_json",
]


def discover(settings: Settings) -> Inventory:
    """The visible GPUs of this host, from ``settings.device_facts`` or else from the driver.

    A host without GPU or driver is an empty inventory whose ``problem`` says why, never an error;
    a GPU that does not answer stays a row whose ``lost`` says why. Raises SetupError only for a
    facts file that is missing or malformed. To record a host with all its GPUs, clear
    ``settings.cuda_visible_devices`` first.
    """
    if settings.device_facts is not None:
        physical = read_facts(settings.device_facts)
    else:
        physical = nvml.read_inventory()
    return apply_visibility(physical, settings.cuda_visible_devices)


def apply_visibility(physical: Inventory, value: str | None) -> Inventory:
    """``physical`` with only the devices that CUDA_VISIBLE_DEVICES=``value`` shows, in its order.

    On a host without devices the value decides nothing, so nothing is said about it.
    """
    if not physical.devices:
        return replace(physical, cuda_visible_devices=value, visibility_note=None)
    by_key = {_key(device): device for device in physical.devices if device.kind == "cuda"}
    result = visible(value, tuple(by_key))
    return replace(
        physical,
        devices=tuple(by_key[key] for key in result.devices),
        cuda_visible_devices=value,
        visibility_note=result.problem,
    )


def _key(device: Device) -> PhysicalDevice:
    return PhysicalDevice(
        index=device.index,
        uuid=device.uuid,
        parent_uuid=device.parent_uuid,
        gpu_instance=device.gpu_instance,
        compute_instance=device.compute_instance,
    )
