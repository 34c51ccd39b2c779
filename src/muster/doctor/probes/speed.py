"""Probes of the devices' speed: matrix products, and copies from and to a device.

Errors of one device stand in its row, beside the others' figures.
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


def matmul(words: list[str], tell: Tell) -> None:
    """KIND 0,1,2 SECONDS_PER_PRECISION: matrix products in each precision.

    All devices compute at the same time, as a training would load them, so that a power supply or a
    fan that cannot feed all of them shows; each is timed by events of its own. A product of n x n
    matrices counts 2 n^3 operations.
    """
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


_HOST_BYTES, _CPU_HOST_BYTES = 256 << 20, 64 << 20
_PAIR_BYTES, _CPU_PAIR_BYTES = 64 << 20, 8 << 20
_NUM_CHECKED = 4 << 20


def copies(words: list[str], tell: Tell) -> None:
    """Copies, timed: between host memory and each device, or from each device to another.

        host KIND 0,1,2 SECONDS      pinned memory and not, one device at a time
        pairs KIND 0-1,1-0 SECONDS   each verified: some hosts deliver zeros, or never finish

    Each pair is named before it is tried, so that the doctor knows which one hung. What arrives is
    compared with what was made on the host, never with a copy of itself.
    """
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
