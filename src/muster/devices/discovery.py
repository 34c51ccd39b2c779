"""Which devices this process may use: those of the host that CUDA_VISIBLE_DEVICES leaves.

`visible` applies CUDA's own rules, as a pure function. A host with four GPUs, numbered as
nvidia-smi numbers them:

>>> host = [Device(index=i, uuid=u, name="T4")
...         for i, u in enumerate(["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"])]
>>> def seen(value):
...     return [device.index for device in visible(value, host).devices]

===========================  ===============================================================
value                        what is visible
===========================  ===============================================================
not set                      every GPU
empty, or ``-1``             none
``2,0``                      those, in this order: GPU 2 becomes ``cuda:0``
``GPU-bb33,GPU-aa11``        those; a beginning is enough when only one GPU starts with it
``0,9,1`` (there is no 9)    only what stands before the first invalid entry: GPU 0
``0,-1,1``                   likewise GPU 0; the idiom for hiding the rest, so no complaint
``1,1``                      none: CUDA rejects a list that names a GPU twice
``0,GPU-bb33``               GPU 0: the first entry decides what the others must be
``1abc``                     GPU 1: CUDA reads as many digits as there are
``MIG-<uuid>``               that MIG instance (the whole UUID)
``MIG-GPU-<uuid>/<gi>/<ci>`` that MIG instance, in the older spelling
===========================  ===============================================================

>>> seen(None), seen(""), seen("-1"), seen("2,0")
([0, 1, 2, 3], [], [], [2, 0])
>>> seen("GPU-bb33,GPU-aa11"), seen("GPU-b"), seen("GPU-aa")
([2, 0], [2], [])
>>> seen("0,9,1"), seen("0,-1,1"), seen("1,1"), seen("0,GPU-bb33"), seen("1abc")
([0], [0], [], [0], [1])

Two limits. Numbers follow the PCI bus, as in nvidia-smi; CUDA does the same on hosts whose GPUs
are all alike, and elsewhere when CUDA_DEVICE_ORDER=PCI_BUS_ID. And where a GPU is cut into MIG
instances, its number or UUID stands here for all its instances, because each worker is given one
of its own; a single process would see only the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.base.settings import Settings, child_environment, replace_environment
from muster.base.shown_text import count
from muster.devices import nvml
from muster.devices.inventory import Device, Inventory, read_facts

#: SLURM's way to say that the job was given no GPU.
_SLURM_NO_GPU = "NoDevFiles"


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The visible devices in CUDA's order, and what is wrong with the value, if anything."""

    devices: tuple[Device, ...]
    problem: str | None = None


def visible(value: str | None, physical: Sequence[Device]) -> Visibility:
    """Apply ``value`` of CUDA_VISIBLE_DEVICES (None: not set) to the devices of a host."""
    if value is None:
        return Visibility(devices=tuple(physical))
    if not value.strip():
        return Visibility(devices=())
    if value.strip() == _SLURM_NO_GPU:
        return Visibility(
            devices=(),
            problem=f"CUDA_VISIBLE_DEVICES={value}: SLURM gave this job no GPU. "
            "Ask for one when submitting, for example with --gres=gpu:1.",
        )

    entries = value.split(",")
    chosen: list[Device] = []
    for position, entry in enumerate(entries, start=1):
        if _is_stop_sign(entry, entries[0]):
            break
        matches = _matches(entry, entries[0], physical)
        if not matches:
            return Visibility(
                devices=tuple(chosen),
                problem=f"CUDA_VISIBLE_DEVICES={value}: entry {position} ({entry!r}) "
                f"{_why_invalid(entry, entries[0], physical)}, so CUDA ignores it and "
                f"everything after it; {count(len(chosen), 'GPU is', 'GPUs are')} visible. "
                "Correct the list, or unset the variable.",
            )
        if any(device in chosen for device in matches):
            return Visibility(
                devices=(),
                problem=f"CUDA_VISIBLE_DEVICES={value}: entry {position} ({entry!r}) names a "
                "GPU that is already in the list, and CUDA then shows none at all. "
                "Name each GPU once.",
            )
        chosen.extend(matches)
    return Visibility(devices=tuple(chosen))


def _is_stop_sign(entry: str, first: str) -> bool:
    number = _leading_number(entry)
    return not first.startswith(("GPU-", "MIG-")) and number is not None and number < 0


def _matches(entry: str, first: str, physical: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that ``entry`` stands for: none when invalid, several for a GPU cut by MIG."""
    if first.startswith("MIG-"):
        return tuple(device for device in physical if entry in _mig_spellings(device))
    if first.startswith("GPU-"):
        gpus = _gpus_starting_with(entry, physical)
        return tuple(d for d in physical if _gpu_uuid(d) in gpus) if len(gpus) == 1 else ()
    number = _leading_number(entry)
    return tuple(device for device in physical if device.index == number)


def _mig_spellings(device: Device) -> tuple[str, ...]:
    if device.parent_uuid is None:
        return ()
    older = f"MIG-{device.parent_uuid}/{device.gpu_instance}/{device.compute_instance}"
    return (device.uuid, older)


def _gpu_uuid(device: Device) -> str:
    return device.parent_uuid or device.uuid


def _gpus_starting_with(entry: str, physical: Sequence[Device]) -> set[str]:
    if not entry.startswith("GPU-"):
        return set()
    return {_gpu_uuid(device) for device in physical if _gpu_uuid(device).startswith(entry)}


def _leading_number(entry: str) -> int | None:
    found = re.match(r"\s*([+-]?[0-9]+)", entry)
    return int(found.group(1)) if found else None


def _why_invalid(entry: str, first: str, physical: Sequence[Device]) -> str:
    for prefix in ("GPU-", "MIG-"):
        if first.startswith(prefix) and not entry.startswith(prefix):
            return f"does not start with {prefix} as the first entry does"
    if first.startswith("GPU-") and len(_gpus_starting_with(entry, physical)) > 1:
        return "is the beginning of more than one GPU's UUID"
    if first.startswith("MIG-"):
        return "names no MIG instance of this host"
    if not physical:
        return "names no GPU: this host has none"
    highest = max(device.index for device in physical)
    return f"names no GPU of this host, whose GPUs are numbered 0 to {highest}"


def discover(settings: Settings) -> Inventory:
    """The visible GPUs of this host, from ``settings.device_facts`` or else from the driver.

    A host without GPU or driver is an empty inventory whose ``problem`` says why, never an error;
    a GPU that does not answer stays a row whose ``lost`` says why. Raises SetupError only for a
    facts file that is missing or malformed. To record a host with all its GPUs, clear
    ``settings.cuda_visible_devices`` first.
    """
    return apply_visibility(_physical(settings), settings.cuda_visible_devices)


def _physical(settings: Settings) -> Inventory:
    if settings.device_facts is not None:
        return read_facts(settings.device_facts)
    return replace(nvml.read_inventory(), has_mps=_has_mps(settings.mps_folder))


def why_lost(settings: Settings, uuids: Collection[str]) -> str:
    """Why one of these GPUs, which this host had, cannot be used any more.

    The text is "" where all of them answer, and where the driver cannot be asked.
    """
    if settings.device_facts is None:
        reasons = [nvml.why_lost(uuid) for uuid in uuids]
    else:
        known = {device.uuid: device.lost for device in read_facts(settings.device_facts).devices}
        gone = "the driver does not list it any more"
        reasons = [known.get(uuid, gone) or "" for uuid in uuids]
    return next(filter(None, reasons), "")


def numbers_of(value: str | None, physical: Inventory) -> str | None:
    """``value`` of CUDA_VISIBLE_DEVICES with numbers for UUIDs, in the order of the PCI bus.

    None where there is nothing to change, or a number might not name the same device: beside MIG
    instances and lost GPUs, and of a GPU that is not listed here.

    >>> host = Inventory(devices=(Device(index=0, uuid="GPU-a", name="T4"),
    ...                           Device(index=4, uuid="GPU-b", name="T4")))
    >>> numbers_of("GPU-b", host), numbers_of("0", host), numbers_of("GPU-c", host)
    ('1', None, None)
    """
    if value is None or not value.startswith("GPU-"):
        return None
    if any(device.parent_uuid or device.lost for device in physical.devices):
        return None
    # GPUs that a control group hides are not in the list, and CUDA does not count them either.
    uuids = [device.uuid for device in physical.devices]
    wanted = value.split(",")
    return ",".join(str(uuids.index(uuid)) for uuid in wanted) if {*wanted} <= {*uuids} else None


def name_gpus_by_number(settings: Settings) -> None:
    """Set CUDA_VISIBLE_DEVICES to numbers, for libraries that read it themselves, such as vLLM."""
    numbers = numbers_of(settings.cuda_visible_devices, _physical(settings))
    if numbers is not None:
        ordered = {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        replace_environment(child_environment(ordered))


def _has_mps(folder: Path) -> bool:
    """Whether the control daemon of NVIDIA's MPS lives: clients find it by its pipes there."""
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{pid}").exists()


def apply_visibility(physical: Inventory, value: str | None) -> Inventory:
    """``physical`` with only the devices that CUDA_VISIBLE_DEVICES=``value`` shows, in its order.

    On a host without devices the value decides nothing, so nothing is said about it.
    """
    if not physical.devices:
        return replace(physical, cuda_visible_devices=value, visibility_note=None)
    result = visible(value, [device for device in physical.devices if device.kind == "cuda"])
    return replace(
        physical,
        devices=result.devices,
        cuda_visible_devices=value,
        visibility_note=result.problem,
    )
