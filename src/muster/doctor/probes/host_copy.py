"""Copies between host memory and each device, one device at a time, pinned memory and not.

python -m muster.doctor.probes.host_copy KIND 0,1,2 SECONDS_PER_DEVICE
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from muster.doctor.probes.report import begin, one_line, progress, result
from muster.doctor.probes.targets import parse_targets, seconds_per_call

_NUM_BYTES = 256 << 20
_CPU_BYTES = 64 << 20


def main(words: list[str]) -> int:
    results = begin()
    kind, numbers, budget_s = words[0], words[1].split(","), float(words[2])
    rates: list[dict[str, Any]] = []
    for number, device in zip(numbers, parse_targets(kind, words[1]), strict=True):
        progress(f"copying to and from {kind}:{number}")
        row: dict[str, Any] = {"device": int(number)}
        try:
            row |= _measure(device, budget_s)
        except Exception as error:  # this device's trouble, told beside the others' figures
            row["problem"] = one_line(error)
        rates.append(row)
        result(results, {"kind": kind, "rates": rates})
    return 0


def _measure(device: torch.device, budget_s: float) -> dict[str, float]:
    num_bytes = _CPU_BYTES if device.type == "cpu" else _NUM_BYTES
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # A CPU has nothing to pin for, and an Apple GPU shares the host's memory.
    kinds = ("pinned", "pageable") if device.type in ("cuda", "xpu") else ("pageable",)
    rates: dict[str, float] = {}
    for kind in kinds:
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        copies = {"to": (there, here), "from": (here, there)}
        for direction, (target, source) in copies.items():
            copy = functools.partial(target.copy_, source, non_blocking=True)
            seconds = seconds_per_call(copy, [device], budget_s=budget_s / 4)
            rates[f"{direction}_{kind}_gb_s"] = num_bytes / seconds / 1e9
    return rates


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
