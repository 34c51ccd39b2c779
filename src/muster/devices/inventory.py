"""What is known about a host's devices, and what a user may ask for, as plain values. Memory is in
MiB; absence is None.

As JSON a host can be recorded once and replayed anywhere:

    {"driver_version": "550.54.15", "cuda_driver_version": [12, 4], "problem": null,
     "devices": [{"index": 0, "uuid": "GPU-…", "name": "…", "memory_total_mib": 81559,
                  "holders": [{"pid": 41, "user": "ada", "used_mib": 900}]}]}

Only ``index``, ``uuid`` and ``name`` of a device and ``pid`` of a holder are needed; what is left
out is not known. A key that does not exist is an error, because a misspelt fact would otherwise
be read as an unknown one.

What is asked for with ``--devices`` and ``--gpu-ids``:

====================  ========================================================================
``--devices auto``    every free GPU, or one CPU worker per core where there is none
``--devices 4``       four GPUs, whichever are free
``--devices 0,2,3``   these GPUs: numbers as in ``cuda:N``, or UUIDs (a beginning is enough)
``--devices cpu``     one CPU worker per core
``--devices cpu:8``   eight CPU workers
``--gpu-ids 0``       GPU 0: always a list, also when it has one member
====================  ========================================================================
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.base.codec import MalformedError, decode
from muster.base.errors import SetupError, UsageError

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


#: No machine has so many cores: a larger number is a slip of the pen.
MOST_CPU_WORKERS = 4096


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """What was asked for.

    ``count``: GPUs for kind "count", at most this many for kind "auto" (None: all), workers for
    kind "cpu" (None: one per core).
    ``ids``: for kind "ids", each a number (as in ``cuda:N``) or the beginning of a UUID.
    ``text``: the option as the user wrote it, for messages.
    ``is_exact``: it is refused where fewer GPUs are free than a "count" or "ids" names, because the
    number of ranks decides what is computed.
    """

    kind: Literal["auto", "count", "ids", "cpu"]
    count: int | None = None
    ids: tuple[str, ...] = ()
    text: str = ""
    is_exact: bool = False


def parse_devices(text: object) -> DeviceRequest:
    """The request in a ``--devices`` value; UsageError when it is none of the known forms, which
    are texts, from Python too.

    >>> parse_devices("4").count, parse_devices("0,2").ids, parse_devices("cpu:8").count
    (4, ('0', '2'), 8)
    """
    if not isinstance(text, str):
        raise UsageError(
            f"devices={text!r} is not a text.",
            hint="write devices='4' for four GPUs, gpu_ids='0,2' for these two, or "
            "devices='cpu:4' for four workers on the CPU.",
        )
    value = text.strip()
    option = f"--devices {value}"
    if value == "auto":
        return DeviceRequest(kind="auto", text=option)
    if value == "cpu":
        return DeviceRequest(kind="cpu", text=option)
    if found := re.fullmatch(r"cpu:([0-9]+)", value):
        count = int(found.group(1))
        if count == 0:
            raise UsageError(
                "--devices cpu:0 asks for no CPU worker, so nothing could run.",
                hint="write --devices cpu for one worker per core, or cpu:1 for a single one.",
            )
        if count > MOST_CPU_WORKERS:
            raise UsageError(
                f"--devices {value} asks for more CPU workers than {MOST_CPU_WORKERS:,}, and each "
                "is a process.",
                hint="write --devices cpu for one worker per core.",
            )
        return DeviceRequest(kind="cpu", count=count, text=option)
    if re.fullmatch(r"[0-9]+", value):
        if int(value) == 0:
            raise UsageError(
                "--devices 0 asks for zero GPUs: a single number is how many, not which one.",
                hint="write --devices cpu to run on the CPU, or --gpu-ids 0 for GPU 0.",
            )
        return DeviceRequest(kind="count", count=int(value), text=option)
    if value.lower() in ("none", "gpu", "cuda", "all", ""):
        raise UsageError(
            f"--devices {value or repr('')} is not a choice of devices.",
            hint="write --devices cpu for no GPU, --devices auto for all free GPUs, "
            "or --devices 2 for two of them.",
        )
    if found := re.fullmatch(r"(?:cuda|gpu):([0-9]+)", value.lower()):
        raise UsageError(
            f"--devices {value} is not a choice of devices.",
            hint=f"write --gpu-ids {found.group(1)} for GPU {found.group(1)}.",
        )
    return DeviceRequest(kind="ids", ids=_ids(value, option), text=option)


def parse_gpu_ids(text: str) -> DeviceRequest:
    """The GPUs listed in a ``--gpu-ids`` value, where ``0`` is GPU 0; UsageError if malformed.

    >>> parse_gpu_ids("0").ids, parse_gpu_ids("3, GPU-8a").ids
    (('0',), ('3', 'GPU-8a'))
    """
    option = f"--gpu-ids {text.strip()}"
    return DeviceRequest(kind="ids", ids=_ids(text.strip(), option), text=option)


def _ids(value: str, option: str) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in value.split(","))
    for position, part in enumerate(ids, start=1):
        if not re.fullmatch(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+", part):
            cores = " cpu:8 is eight workers or ranks on the CPU." * part.startswith("cpu")
            raise UsageError(
                f"{option}: entry {position} ({part!r}) is neither a GPU number nor a UUID.",
                hint="write numbers (0,2,3) or UUIDs (GPU-8932f937,…), separated by commas."
                + cores,
            )
        if part in ids[: position - 1]:
            raise UsageError(
                f"{option}: {part} is listed twice.",
                hint="list each GPU once; --per-gpu 2 puts two workers on each.",
            )
    return ids
