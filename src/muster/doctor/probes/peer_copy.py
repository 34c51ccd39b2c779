"""Copies between pairs of devices, each verified: some hosts deliver zeros, or never finish.

    python -m muster.doctor.probes.peer_copy KIND 0-1,1-0,0-2 SECONDS_PER_PAIR

Each pair is named before it is tried, so that whoever cuts this process off knows which hung. What
arrives is compared with what was made on the host, never with a copy of itself.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch

from muster.doctor.probes.report import begin, one_line, progress, result
from muster.doctor.probes.targets import parse_targets, seconds_per_call, synchronise

_NUM_VALUES = 4 << 20
_NUM_TIMED_BYTES = 64 << 20
_CPU_TIMED_BYTES = 8 << 20


def main(words: list[str]) -> int:
    results = begin()
    kind, budget_s = words[0], float(words[2])
    # The first use of a GPU may take seconds; later silence then means a hang.
    for number in sorted({number for pair in words[1].split(",") for number in pair.split("-")}):
        progress(f"starting {kind}:{number}")
        with suppress(Exception):  # the pairs with this device will tell
            torch.zeros(1, device=parse_targets(kind, number)[0])
    copies: list[dict[str, Any]] = []
    for text in words[1].split(","):
        source, target = (int(number) for number in text.split("-"))
        progress(f"{source}-{target}")
        copies.append(try_pair(kind, source, target, budget_s))
        result(results, {"copies": copies})
    return 0


def try_pair(kind: str, source: int, target: int, budget_s: float) -> dict[str, Any]:
    """One direction of one pair; what fails is told in its row."""
    row: dict[str, Any] = {"source": source, "target": target}
    one, two = parse_targets(kind, f"{source},{target}")
    try:
        if kind == "cuda":
            row["can_access"] = torch.cuda.can_device_access_peer(one, two)
        row["is_right"] = is_copied(one, two)
        row["gb_s"] = _speed(one, two, budget_s)
    except Exception as error:  # this pair's trouble; the others are still tried
        row["problem"] = one_line(error)
        row.setdefault("is_right", False)
    return row


def is_copied(one: torch.device, two: torch.device) -> bool:
    """Whether what arrives on ``two`` is what was made on the host and sent to ``one``."""
    # Never zero, so that memory that was only cleared cannot pass.
    sent = torch.randint(1, 1 << 30, (_NUM_VALUES,), dtype=torch.int32)
    there = sent.to(one)
    arrived = torch.zeros(_NUM_VALUES, dtype=torch.int32, device=two)
    synchronise([one, two])
    arrived.copy_(there)
    synchronise([one, two])
    return bool(torch.equal(arrived.cpu(), sent))


def _speed(one: torch.device, two: torch.device, budget_s: float) -> float:
    num_bytes = _CPU_TIMED_BYTES if one.type == "cpu" else _NUM_TIMED_BYTES
    there = torch.empty(num_bytes, dtype=torch.uint8, device=one)
    arrived = torch.empty(num_bytes, dtype=torch.uint8, device=two)
    seconds = seconds_per_call(
        lambda: arrived.copy_(there, non_blocking=True), [one, two], budget_s=budget_s
    )
    return num_bytes / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
