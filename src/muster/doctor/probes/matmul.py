"""Real matrix products in each precision, on all devices at once, as a training would load them.

    matmul KIND 0,1,2 SECONDS_PER_PRECISION

Every device computes at the same time, so that a power supply or a fan that cannot feed all of
them shows; each is timed by events of its own. A product of n x n matrices counts 2 n^3 operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from muster.doctor.probes.copies import parse_targets, synchronise
from muster.doctor.probes.report import Tell, one_line, progress

#: fp32 is much slower than the others on matrix units, so it gets smaller matrices.
_SIZES = {"fp32": 4096, "tf32": 8192, "bf16": 8192, "fp16": 8192}
_TYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_CPU_SIZE = 768
_CHECKED_SIZE = 256
_NUM_ROUNDS = 5


def main(words: list[str], tell: Tell) -> None:
    kind, devices, budget_s = words[0], parse_targets(words[0], words[1]), float(words[2])
    rates: list[dict[str, Any]] = []
    for precision in _precisions(kind):
        progress(f"multiplying in {precision}")
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        rates += measure(precision, devices, words[1].split(","), budget_s)
        tell({"kind": kind, "rates": rates})


def _precisions(kind: str) -> list[str]:
    # tf32 is CUDA's; fp16 on a CPU without units for it would take the whole budget.
    without = {"cuda": (), "cpu": ("tf32", "fp16")}.get(kind, ("tf32",))
    return [precision for precision in _TYPES if precision not in without]


def measure(
    precision: str, devices: list[torch.device], numbers: list[str], budget_s: float
) -> list[dict[str, Any]]:
    """One row per device: its rate and its error, or what its problem is."""
    size = _CPU_SIZE if devices[0].type == "cpu" else _SIZES[precision]
    rows: list[dict[str, Any]] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, device in zip(numbers, devices, strict=True):
        row: dict[str, Any] = {"device": int(number), "name": "", "precision": precision}
        rows.append(row)
        try:
            row["name"] = name_of(device)
            if not can_compute(device, precision):
                rows.remove(row)
                continue
            row["error"] = relative_error(device, _TYPES[precision])
            shape = (size, size)
            left = torch.randn(shape, device=device, dtype=_TYPES[precision])
            pairs.append((left, torch.randn(shape, device=device, dtype=_TYPES[precision])))
        except Exception as error:  # this device's trouble, told beside the others' figures
            row["problem"] = one_line(error)
    able = [row for row in rows if "problem" not in row]
    try:
        for row, seconds in zip(able, _times(pairs, budget_s), strict=True):
            row["tflops"] = 2 * size**3 / seconds / 1e12
    except Exception as error:
        for row in able:
            row["problem"] = one_line(error)
    return rows


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU" if device.type == "cpu" else device.type


def can_compute(device: torch.device, precision: str) -> bool:
    """Whether the device has units for it: bf16 and tf32 came with Ampere.

    On ROCm torch computes tf32 as fp32 unless told otherwise, so there is nothing to compare.
    """
    if device.type != "cuda" or precision in ("fp32", "fp16"):
        return True
    if torch.version.hip is not None:
        return precision != "tf32"
    return torch.cuda.get_device_capability(device) >= (8, 0)


def relative_error(device: torch.device, dtype: torch.dtype) -> float:
    """The error of a small product against double precision on the CPU: largest over largest."""
    generator = torch.Generator().manual_seed(7)
    shape = (_CHECKED_SIZE, _CHECKED_SIZE)
    left = torch.randn(shape, generator=generator).to(dtype)
    right = torch.randn(shape, generator=generator).to(dtype)
    exact = left.double() @ right.double()
    found = (left.to(device) @ right.to(device)).cpu().double()
    return float((found - exact).abs().max() / exact.abs().max())


def _times(pairs: list[tuple[torch.Tensor, torch.Tensor]], budget_s: float) -> list[float]:
    """Seconds per product of each pair, all devices working at once."""
    if not pairs:
        return []
    devices = [left.device for left, _ in pairs]
    for left, right in pairs:  # the library chooses its kernels
        left @ right
    synchronise(devices)
    began_s = time.perf_counter()
    for left, right in pairs:
        left @ right
    synchronise(devices)
    once_s = max(time.perf_counter() - began_s, 1e-6)
    num_calls = max(1, min(500, int(budget_s / _NUM_ROUNDS / once_s)))
    rounds = [_round(pairs, num_calls) for _ in range(_NUM_ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


def _round(pairs: list[tuple[torch.Tensor, torch.Tensor]], num_calls: int) -> list[float]:
    marks: list[tuple[Callable[[], float], Callable[[], None]]] = []
    for left, right in pairs:
        elapsed_s, stop = _clock(left.device)
        for _ in range(num_calls):
            left @ right
        stop()
        marks.append((elapsed_s, stop))
    synchronise([left.device for left, _ in pairs])
    return [elapsed_s() / num_calls for elapsed_s, _ in marks]


def _clock(device: torch.device) -> tuple[Callable[[], float], Callable[[], None]]:
    """Start a clock; returns a function that reads the seconds, and one that stops it."""
    if device.type in ("cuda", "xpu"):
        kind: Any = getattr(torch, device.type)
        stream = kind.current_stream(device)
        start, end = kind.Event(enable_timing=True), kind.Event(enable_timing=True)
        start.record(stream)
        return (lambda: float(start.elapsed_time(end)) / 1000), (lambda: end.record(stream))
    start_s, end_s = time.perf_counter(), [0.0]

    def stop() -> None:
        synchronise([device])
        end_s[0] = time.perf_counter()

    return (lambda: end_s[0] - start_s), stop
