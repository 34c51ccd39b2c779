"""How GPUs reach the host and each other, as the driver and the kernel describe it."""

from __future__ import annotations

from collections.abc import Iterator

from muster.devices.nvml_health import GpuHealth
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, ok
from muster.doctor.machine import gang_gpus, gpus_named, loaded_of, pci_of, visible_health


def pcie_link(facts: Facts) -> Iterator[Finding]:
    """Each card has all the lanes it could have, and at work their full speed."""
    health = [gpu for gpu in visible_health(facts) if gpu.pcie_width is not None]
    findings = [finding for gpu in health for finding in _link_of(facts, gpu)]
    yield from findings
    if health and not findings:
        links = sorted({f"x{gpu.pcie_width}" for gpu in health})
        yield ok(f"PCIe links are as wide as the cards: {', '.join(links)}.")


def _link_of(facts: Facts, gpu: GpuHealth) -> Iterator[Finding]:
    card = pci_of(facts, gpu)
    width = gpu.pcie_width or 0
    # The driver may count what the slot allows as the maximum; the kernel knows the card's.
    most = max(gpu.pcie_width_max or 0, (card.width_max if card else None) or 0)
    if width < most:
        yield Finding(
            severity="warning",
            what=f"GPU {gpu.index} has a PCIe x{width} link, the card could use x{most}.",
            why="Loading data, and gradients where there is no NVLink, take that much longer.",
            fix="Reseat the card or its riser, or use a slot with more lanes; the mainboard's "
            "manual says which slots share lanes with which.",
        )
    # An idle GPU lowers the speed of its link, so only one at work tells.
    busy = loaded_of(facts, gpu.index) or (gpu if gpu.performance_state == 0 else None)
    if busy is None or busy.pcie_generation is None or busy.pcie_generation_max is None:
        return
    if busy.pcie_generation < busy.pcie_generation_max:
        yield Finding(
            severity="warning",
            what=f"GPU {gpu.index} runs its PCIe link at generation {busy.pcie_generation} under "
            f"load, {busy.pcie_generation_max} is possible.",
            why="Each generation less halves the bandwidth to the host.",
            fix="Set the slot to the generation of the card in the firmware; a riser cable that "
            "is too long makes the link fall back.",
        )


def nvlinks(facts: Facts) -> Iterator[Finding]:
    """The NVLinks are up, and equally many on each GPU."""
    health = [gpu for gpu in visible_health(facts) if gpu.nvlinks]
    if not health:
        return
    up = {gpu.index: sum(gpu.nvlinks) for gpu in health}
    most = max(up.values())
    down = [index for index, number in up.items() if number < most]
    if not most:
        yield Finding(
            severity="note",
            what=f"{gpus_named(list(up))} could use NVLink, but no link is up.",
            why="Gradients go over PCIe.",
            fix="Two cards need a bridge between them; on an NVSwitch system start "
            "nvidia-fabricmanager.",
        )
    elif down:
        yield Finding(
            severity="warning",
            what=f"{gpus_named(down)}: {up[down[0]]} NVLinks are up, on other GPUs {most}.",
            why="A collective is as fast as its weakest link.",
            fix="nvidia-smi nvlink -s shows which; reset the GPUs or reboot, and look at "
            "nvidia-fabricmanager.",
        )
    else:
        yield ok(f"{most} NVLinks are up on each GPU.")


def peer_access(facts: Facts) -> Iterator[Finding]:
    """GPUs can read each other's memory."""
    indices = {gpu.index for gpu in gang_gpus(facts)}
    links = [
        link
        for link in facts.links
        if link.first in indices and link.second in indices and link.peer_read is not None
    ]
    if not links:
        return
    without = [link for link in links if link.peer_read != "ok"]
    if without:
        reasons = ", ".join(sorted({str(link.peer_read) for link in without}))
        yield Finding(
            severity="note",
            what=f"{len(without)} of {len(links)} pairs of GPUs have no peer-to-peer access: "
            f"{reasons}.",
            why="NCCL goes through the host's memory there, which is slower but right. GeForce "
            "cards since the RTX 40 series have none by design.",
        )
        return
    yield ok("Every pair of GPUs has peer-to-peer access.")


def topology(facts: Facts) -> Iterator[Finding]:
    """No pair of a gang talks over the link between processor sockets."""
    indices = {gpu.index for gpu in gang_gpus(facts)}
    links = [
        link
        for link in facts.links
        if link.first in indices and link.second in indices and link.level is not None
    ]
    if not links:
        return
    # With NVLink between them the bus does not matter.
    across = [link for link in links if link.level == "between sockets" and not link.is_nvlink]
    if across:
        near = sorted({link.second for link in links if link.first == 0 and link not in across})
        group = gpus_named([0, *near]) if near else "GPUs of one socket"
        yield Finding(
            severity="note",
            what=f"{len(across)} of {len(links)} pairs of GPUs are joined only by the link "
            "between the processor sockets.",
            why="An all-reduce over all GPUs goes at that link's speed.",
            fix=f"A gang that needs fewer GPUs is faster on {group}.",
        )
    else:
        kinds = sorted({"NVLink" if link.is_nvlink else str(link.level) for link in links})
        yield ok(f"Between GPUs: {', '.join(kinds)}.")
