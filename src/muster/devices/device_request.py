"""What a user may ask for with ``--devices`` and ``--gpu-ids``, as a value.

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

import re
from dataclasses import dataclass
from typing import Literal

from muster.base.errors import UsageError

#: No machine has so many cores; what asks for more is a slip of the pen.
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


def parse_devices(text: str) -> DeviceRequest:
    """The request in a ``--devices`` value; UsageError when it is none of the known forms.

    >>> parse_devices("4").count, parse_devices("0,2").ids, parse_devices("cpu:8").count
    (4, ('0', '2'), 8)
    """
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
