"""Copies, timed: between host memory and each device, and from each device straight to another.

    host KIND 0,1,2 SECONDS      pinned memory and not, one device at a time
    pairs KIND 0-1,1-0 SECONDS   each verified: some hosts deliver zeros, or never finish

Each pair is named before it is tried, so that the doctor knows which one hung. What
arrives is compared with what was made on the host, never with a copy of itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch

from muster.doctor.probes.report import Tell, one_line, progress

_HOST_BYTES, _CPU_HOST_BYTES = 256 << 20, 64 << 20
_PAIR_BYTES, _CPU_PAIR_BYTES = 64 << 20, 8 << 20
_NUM_CHECKED = 4 << 20


def main(words: list[str], tell: Tell) -> None:
    what, kind, names, budget_s = words[0], words[1], words[2].split(","), float(words[3])
    rows: list[dict[str, Any]] = []
    if what == "pairs":
        # The first use of a GPU may take seconds; later silence then means a hang.
        for number in sorted({number for pair in names for number in pair.split("-")}):
            progress(f"starting {kind}:{number}")
            with suppress(Exception):  # the pairs with this device will tell
                torch.zeros(1, device=parse_targets(kind, number)[0])
    for name in names:
        if what == "pairs":
            progress(name)
            source, target = map(int, name.split("-"))
            rows.append(try_pair(kind, source, target, budget_s))
            tell({"copies": rows})
        else:
            progress(f"copying to and from {kind}:{name}")
            rows.append(_try_host(kind, name, budget_s))
            tell({"kind": kind, "rates": rows})


def _try_host(kind: str, number: str, budget_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"device": int(number)}
    try:
        (device,) = parse_targets(kind, number)
        num_bytes = _CPU_HOST_BYTES if kind == "cpu" else _HOST_BYTES
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # A CPU has nothing to pin for, and an Apple GPU shares the host's memory.
        for memory in ("pinned", "pageable") if kind in ("cuda", "xpu") else ("pageable",):
            here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=memory == "pinned")
            row[f"to_{memory}_gb_s"] = _gb_s(here, there, [device], budget_s / 4)
            row[f"from_{memory}_gb_s"] = _gb_s(there, here, [device], budget_s / 4)
    except Exception as error:  # this device's trouble, told beside the others' figures
        row["problem"] = one_line(error)
    return row


def try_pair(kind: str, source: int, target: int, budget_s: float) -> dict[str, Any]:
    """Try one direction of one pair; a failure is reported in its row."""
    row: dict[str, Any] = {"source": source, "target": target}
    one, two = parse_targets(kind, f"{source},{target}")
    try:
        if kind == "cuda":
            row["can_access"] = torch.cuda.can_device_access_peer(one, two)
        row["is_right"] = is_copied(one, two)
        num_bytes = _CPU_PAIR_BYTES if kind == "cpu" else _PAIR_BYTES
        there = torch.empty(num_bytes, dtype=torch.uint8, device=one)
        row["gb_s"] = _gb_s(there, torch.empty_like(there, device=two), [one, two], budget_s)
    except Exception as error:  # this pair's trouble; the others are still tried
        row["problem"] = one_line(error)
        row.setdefault("is_right", False)
    return row


def is_copied(one: torch.device, two: torch.device) -> bool:
    """Whether what arrives on ``two`` is what was made on the host and sent to ``one``."""
    # Never zero, so that memory that was only cleared cannot pass.
    sent = torch.randint(1, 1 << 30, (_NUM_CHECKED,), dtype=torch.int32)
    there = sent.to(one)
    arrived = torch.zeros(_NUM_CHECKED, dtype=torch.int32, device=two)
    synchronise([one, two])
    arrived.copy_(there)
    synchronise([one, two])
    return bool(torch.equal(arrived.cpu(), sent))


def parse_targets(kind: str, numbers: str) -> list[torch.device]:
    """``cuda`` and ``0,2`` as devices. Several CPUs are all the same one, which is for tests.

    >>> parse_targets("cpu", "0,1")
    [device(type='cpu'), device(type='cpu')]
    """
    indices = [int(number) for number in numbers.split(",")]
    return [torch.device("cpu") if kind == "cpu" else torch.device(kind, at) for at in indices]


def synchronise(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _gb_s(
    source: torch.Tensor, target: torch.Tensor, devices: Sequence[torch.device], budget_s: float
) -> float:
    """The median over a few rounds of copying; a first copy warms up.

    Each round takes about a fifth of ``budget_s``, and is only waited for at its end, so that
    launches cost nothing.
    """
    copy = functools.partial(target.copy_, source, non_blocking=True)
    copy()
    synchronise(devices)
    seconds = once_s = _timed(copy, devices, 1)
    if once_s <= budget_s:
        num_calls = max(1, min(200, int(budget_s / 5 / max(once_s, 1e-7))))
        num_rounds = max(1, min(5, int(budget_s / (once_s * num_calls))))
        seconds = median(_timed(copy, devices, num_calls) for _ in range(num_rounds))
    return source.nbytes / seconds / 1e9


def _timed(work: Callable[[], object], devices: Sequence[torch.device], num_calls: int) -> float:
    began_s = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronise(devices)
    return (time.perf_counter() - began_s) / num_calls
