"""What was measured, against what the cards and the links should give."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from muster.devices.cards import find_card
from muster.doctor.facts import Facts, MatmulRate, PeerCopy, Run
from muster.doctor.findings import (
    Finding,
    error,
    health_of_torch_device,
    loaded_of,
    note,
    ok,
    pcie_gb_s,
    warning,
)

#: Of the data sheet's dense peak. A large product reaches 60 to 90 % on a sound card.
_LEAST_PEAK = 0.4
#: Of the median of equal cards.
_LEAST_OF_EQUALS = 0.85
#: Of the median of pairs that are joined in the same way.
_LEAST_OF_PAIRS = 0.5
#: Of the link's raw rate; 80 to 90 % is usual for pinned memory.
_LEAST_LINK = 0.5
#: Largest relative errors of a 256 x 256 product. bf16 has 8 bits of fraction, tf32 and fp16 have
#: 11, fp32 has 24; sums of 256 are rounded at the end, and a factor of about 10 is left.
_MOST_ERROR = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}


def probe_trouble(run: Run, what: str) -> Iterator[Finding]:
    """Report a measurement that was not finished."""
    if run.status == "skipped" and run.error:
        yield note(
            what=f"{what} was not examined: {run.error}.",
            fix="Give more time with --time-limit.",
        )
    elif run.status == "hung":
        yield error(
            what=f"{what} hung{run.where} and was cut off after {run.seconds:.0f} s.",
            why="A training would hang there as well.",
            fix="Look at the kernel log (dmesg | grep Xid); reset the GPU or reboot.",
        )
    elif run.status == "failed":
        yield error(
            what=f"{what} failed{run.where}: {run.reason}",
            why="A training would fail in the same way.",
        )


def matmul_values(facts: Facts) -> Iterator[Finding]:
    """Products of matrices are right, in each precision."""
    if facts.matmuls is None:
        return
    yield from probe_trouble(facts.matmuls.run, "The matrix product")
    known = [rate for rate in facts.matmuls.rates if rate.error is not None]
    bad = [rate for rate in known if not (rate.error or 0) <= _MOST_ERROR.get(rate.precision, 1)]
    for rate in bad:
        yield error(
            what=f"{_device(facts, rate)} multiplies wrongly in {rate.precision}: relative error "
            f"{rate.error:.2g}.",
            why="Whatever is computed there is wrong.",
            fix="Have the card replaced; look at its memory errors.",
        )
    for rate in facts.matmuls.rates:
        if rate.problem is not None:
            yield error(
                what=f"{_device(facts, rate)} cannot multiply in {rate.precision}: {rate.problem}",
                why="A training in that precision would fail.",
            )
    if known and not bad:
        yield ok("Matrix products are right in every precision.")


def matmul_speed(facts: Facts) -> Iterator[Finding]:
    """The GPUs are about as fast as their data sheets say, and equal ones equally fast."""
    if facts.matmuls is None:
        return
    rates = [rate for rate in facts.matmuls.rates if rate.tflops is not None]
    slow = list(_against_sheet(facts, rates))
    yield from slow
    uneven = [] if slow else list(_against_equals(facts, rates))
    yield from uneven
    if rates and not slow and not uneven:
        best = ", ".join(
            f"{precision} {max(r.tflops or 0 for r in rates if r.precision == precision):.3g}"
            for precision in dict.fromkeys(rate.precision for rate in rates)
        )
        yield ok(f"Matrix products, TFLOP/s: {best}.")


def _against_sheet(facts: Facts, rates: list[MatmulRate]) -> Iterator[Finding]:
    """One finding per device, however many precisions are slow there."""
    shares: dict[int, list[tuple[MatmulRate, float]]] = {}
    for rate in rates:
        peak = _peak_tflops(rate)
        share = None if peak is None else (rate.tflops or 0.0) / peak
        if share is not None and share < _LEAST_PEAK:
            shares.setdefault(rate.device, []).append((rate, share))
    for device, slow in shares.items():
        gpu = health_of_torch_device(facts, device)
        loaded = None if gpu is None else loaded_of(facts, gpu.index)
        causes = ", ".join((loaded.throttle if loaded else None) or ())
        figures = ", ".join(f"{r.precision} {r.tflops:.3g} ({share:.0%})" for r, share in slow)
        yield warning(
            what=f"{_device(facts, slow[0][0])} is slow; TFLOP/s and share of the data sheet's "
            f"peak: {figures}." + (f" Under load: {causes}." if causes else ""),
            why=f"A sound card reaches more than {_LEAST_PEAK:.0%} with large matrices: something "
            "else uses it, or it is throttled or limited. A gang waits for it.",
            fix="Look at who uses it, at its power limit, its temperature and its power cables.",
        )


def _peak_tflops(rate: MatmulRate) -> float | None:
    """The data sheet's peak; None for an unknown card, such as a MIG instance."""
    card = find_card(rate.name)
    peak = None if card is None else card.peak_flops(rate.precision)
    return None if peak is None else peak / 1e12


def _against_equals(facts: Facts, rates: list[MatmulRate]) -> Iterator[Finding]:
    """One finding per device that is slower than the others of its kind in some precision."""
    groups: dict[tuple[str, str], list[MatmulRate]] = {}
    for rate in rates:
        groups.setdefault((rate.name, rate.precision), []).append(rate)
    slow: dict[int, list[tuple[MatmulRate, float]]] = {}
    for group in groups.values():
        middle = median(rate.tflops or 0.0 for rate in group)
        for rate in group:
            if len(group) > 2 and (rate.tflops or 0.0) < _LEAST_OF_EQUALS * middle:
                slow.setdefault(rate.device, []).append((rate, middle))
    for found in slow.values():
        figures = ", ".join(f"{r.precision} {r.tflops:.3g}, not {mid:.3g}" for r, mid in found)
        yield warning(
            what=f"{_device(facts, found[0][0])} is slower than its equals, TFLOP/s: {figures}.",
            why="Every step of a gang waits for it.",
            fix="Leave it out of gangs, or look at its cooling and power.",
        )


def host_copies(facts: Facts) -> Iterator[Finding]:
    """Data reaches each GPU at the speed of its PCIe link."""
    if facts.host_copies is None:
        return
    yield from probe_trouble(facts.host_copies.run, "Copying to a device")
    slow, best = [], 0.0
    for rate in facts.host_copies.rates:
        if rate.problem is not None:
            yield error(
                what=f"cuda:{rate.device} cannot copy: {rate.problem}",
                why="No data reaches that GPU.",
            )
        pinned = min(rate.to_pinned_gb_s or 0.0, rate.from_pinned_gb_s or 0.0)
        best = max(best, rate.to_pinned_gb_s or 0.0)
        gpu = health_of_torch_device(facts, rate.device)
        link = None if gpu is None else pcie_gb_s(gpu.pcie_generation_max, gpu.pcie_width)
        if gpu is not None and link is not None and 0 < pinned < _LEAST_LINK * link:
            slow.append(rate.device)
            yield warning(
                what=f"cuda:{rate.device} copies {pinned:.1f} GB/s from or to pinned memory; its "
                f"PCIe link (generation {gpu.pcie_generation_max}, x{gpu.pcie_width}) carries "
                f"{link:.0f}.",
                why="Loading batches takes longer than it must.",
                fix="Look at the link's generation under load, at other users of the same PCIe "
                "switch, and at the NUMA node of the process (numactl --cpunodebind).",
            )
    if best and not slow:
        yield ok(f"Copies from pinned memory reach {best:.1f} GB/s.")


def peer_copies(facts: Facts) -> Iterator[Finding]:
    """What one GPU sends is what another gets."""
    found = facts.peer_copies
    if found is None:
        return
    yield from probe_trouble(found.run, "Copying between GPUs")
    wrong = [copy for copy in found.copies if copy.is_right is False and copy.problem is None]
    broken = [copy for copy in found.copies if copy.problem is not None]
    for words, group in (("deliver wrong values", wrong), ("fail", broken)):
        if not group:
            continue
        pairs = ", ".join(f"{copy.source}→{copy.target}" for copy in group[:6])
        more = f" and {len(group) - 6} more" if len(group) > 6 else ""
        reason = f" ({group[0].problem})" if group[0].problem else ""
        yield error(
            what=f"Copies between GPUs {words}: {pairs}{more}{reason}.",
            why="Gradients would be wrong without any message, or a training would hang."
            + (" The IOMMU is on, the usual cause of it." if facts.host.iommu else ""),
            fix="Switch peer access off for NCCL with NCCL_P2P_DISABLE=1; to repair it, switch "
            "the IOMMU off (iommu=off or iommu=pt to the kernel) and ACS in the firmware.",
            settings={"NCCL_P2P_DISABLE": "1"},
        )
    slow = list(_slow_pairs(facts, found.copies))
    yield from slow
    if found.copies and not wrong and not broken and not slow:
        rates = [copy.gb_s for copy in found.copies if copy.gb_s]
        speed = f", {min(rates):.3g} to {max(rates):.3g} GB/s" if rates else ""
        yield ok(f"{len(found.copies)} copies between GPUs are right{speed}.")


def _slow_pairs(facts: Facts, copies: tuple[PeerCopy, ...]) -> Iterator[Finding]:
    """Pairs that are slower than others of their kind; how many links a pair has is not known."""
    groups: dict[tuple[str | None, bool | None], list[PeerCopy]] = {}
    for copy in copies:
        if copy.gb_s:
            groups.setdefault(_path(facts, copy), []).append(copy)
    for group in groups.values():
        middle = median(copy.gb_s or 0.0 for copy in group)
        slow = [copy for copy in group if (copy.gb_s or 0.0) < _LEAST_OF_PAIRS * middle]
        if slow and len(group) > 2:
            pairs = ", ".join(f"{copy.source}→{copy.target} {copy.gb_s:.3g}" for copy in slow[:6])
            yield warning(
                what=f"Copies between some GPUs are slow: {pairs} GB/s; pairs joined in the same "
                f"way reach {middle:.3g}.",
                why="A ring is as fast as its slowest link.",
                fix="nvidia-smi nvlink -s and nvidia-smi topo -m show the links; reset the GPUs.",
            )


def _path(facts: Facts, copy: PeerCopy) -> tuple[str | None, bool | None]:
    ends = [health_of_torch_device(facts, number) for number in (copy.source, copy.target)]
    wanted = {gpu.index for gpu in ends if gpu is not None}
    link = next((one for one in facts.links if {one.first, one.second} == wanted), None)
    return (None, None) if link is None else (link.level, link.is_nvlink)


def _device(facts: Facts, rate: MatmulRate) -> str:
    kind = "cuda" if facts.matmuls is None else facts.matmuls.kind
    name = f" ({rate.name})" if rate.name else ""
    return "The CPU" if kind == "cpu" else f"{kind}:{rate.device}{name}"
