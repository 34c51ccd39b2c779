"""GPUs: who holds their memory, their health and clocks, and how they reach the host and each
other."""

from __future__ import annotations

from collections.abc import Iterator

from muster.base.shown_text import count
from muster.devices.nvml_health import GpuHealth, PairLink
from muster.devices.placement import busy_reason
from muster.doctor.facts import Facts
from muster.doctor.findings import (
    Finding,
    error,
    gang_gpus,
    gpus_named,
    loaded_of,
    note,
    ok,
    pci_of,
    visible_health,
    warning,
    working_gpus,
)

#: Throttling that means trouble; a power cap under load is how most cards always run.
_BAD_THROTTLE = ("hardware slowdown", "thermal (hardware)", "thermal (software)", "power brake")
_NEAR_SLOWDOWN_C = 3
_LOW_POWER_SHARE = 0.9


def memory_holders(facts: Facts) -> Iterator[Finding]:
    """Nobody holds the memory of a visible GPU."""
    gpus = working_gpus(facts)
    busy = [(gpu, reason) for gpu in gpus if (reason := busy_reason(gpu)) is not None]
    for gpu, reason in busy:
        left = ""
        if gpu.memory_total_mib is not None and gpu.memory_used_mib is not None:
            free_mib = gpu.memory_total_mib - gpu.memory_used_mib
            left = f"; {free_mib} of {gpu.memory_total_mib} MiB are free"
        yield warning(
            what=f"GPU {gpu.index} is {reason}{left}.",
            why="A run there may lack memory and shares the time; it was not measured here "
            "unless you chose it. Muster leaves such a GPU alone unless --force is given.",
            fix="End that process if it is yours (a forgotten notebook, say), or choose others.",
        )
    if gpus and not busy:
        yield ok("No process holds GPU memory.")


def compute_mode(facts: Facts) -> Iterator[Finding]:
    """Programs may use the GPUs, several at a time."""
    health = [gpu for gpu in visible_health(facts) if gpu.compute_mode is not None]
    bad = [gpu.index for gpu in health if gpu.compute_mode == "prohibited"]
    alone = [gpu.index for gpu in health if gpu.compute_mode == "exclusive process"]
    if bad:
        yield error(
            what=f"{gpus_named(bad)}: compute mode is Prohibited.",
            why="No program can compute there.",
            fix="As administrator: nvidia-smi -c DEFAULT",
        )
    if facts.inventory.has_mps:
        yield ok("NVIDIA MPS runs here: processes on one GPU compute side by side.")
    elif alone:
        yield note(
            what=f"{gpus_named(alone)}: compute mode is Exclusive_Process.",
            why="One process per GPU: --per-gpu above 1 and a second program will fail.",
            fix="As administrator: nvidia-smi -c DEFAULT",
        )
    if health and not bad and not alone:
        yield ok("Compute mode of every GPU is Default.")


def ecc_errors(facts: Facts) -> Iterator[Finding]:
    """The memory is sound."""
    health = [gpu for gpu in visible_health(facts) if _knows_memory(gpu)]
    findings = [finding for gpu in health for finding in _memory_of(gpu)]
    yield from findings
    if health and not findings:
        yield ok("No uncorrected memory errors.")


def _knows_memory(gpu: GpuHealth) -> bool:
    return gpu.ecc_enabled is not None or gpu.rows_pending is not None


def _memory_of(gpu: GpuHealth) -> Iterator[Finding]:
    if gpu.rows_failed:
        yield error(
            what=f"GPU {gpu.index} has no spare memory rows left to replace a broken one.",
            why="Its memory is worn out: programs will fail or compute wrong values.",
            fix="Have the card replaced.",
        )
    elif gpu.rows_pending:
        yield warning(
            what=f"GPU {gpu.index} waits for a reset to replace broken memory.",
            why="Until then the broken place is still in use.",
            fix="nvidia-smi --gpu-reset, or reboot.",
        )
    if gpu.ecc_uncorrected:
        yield error(
            what=f"GPU {gpu.index} had {count(gpu.ecc_uncorrected, 'uncorrected memory error')} "
            "since the driver was loaded.",
            why="Each one ends the program that it hits, or goes unseen, which is worse.",
            fix="Reset the GPU or reboot; if they come back, have the card replaced.",
        )
    elif gpu.ecc_uncorrected_total:
        yield note(
            what=f"GPU {gpu.index} had "
            f"{count(gpu.ecc_uncorrected_total, 'uncorrected memory error')} in its life, but none "
            "since the driver was loaded.",
            why="They were repaired or have not come back.",
        )
    if gpu.ecc_enabled is False:
        yield note(
            what=f"GPU {gpu.index} can correct memory errors, but ECC is switched off.",
            why="A flipped bit gets into your weights unseen.",
            fix="As administrator: nvidia-smi -e 1, then reboot.",
        )


def throttling(facts: Facts) -> Iterator[Finding]:
    """Nothing holds the clocks down, idle or at work."""
    seen: dict[int, set[str]] = {}
    known = False
    for gpu in (*visible_health(facts), *facts.loaded):
        known = known or gpu.throttle is not None
        for reason in gpu.throttle or ():
            if reason in _BAD_THROTTLE:
                seen.setdefault(gpu.index, set()).add(reason)
    for index, reasons in sorted(seen.items()):
        yield warning(
            what=f"GPU {index} is throttled: {', '.join(sorted(reasons))}.",
            why="It runs slower than it could, and a gang waits for its slowest member.",
            fix="Thermal: look at fans, dust and airflow. Power brake or hardware slowdown: look "
            "at the power supply and its cables.",
        )
    if known and not seen:
        yield ok("No GPU is throttled.")


def temperature(facts: Facts) -> Iterator[Finding]:
    """No GPU is near the temperature at which its clocks go down."""
    pairs = [
        (gpu.index, gpu.temperature_c, gpu.slowdown_temperature_c)
        for gpu in (*visible_health(facts), *facts.loaded)
        if gpu.temperature_c is not None and gpu.slowdown_temperature_c is not None
    ]
    hot = {i: (now, limit) for i, now, limit in pairs if now >= limit - _NEAR_SLOWDOWN_C}
    for index, (now, limit) in sorted(hot.items()):
        yield warning(
            what=f"GPU {index} is at {now} °C; its clocks go down at {limit} °C.",
            why="A long run there will be slow.",
            fix="Look at fans, dust and airflow.",
        )
    if pairs and not hot:
        yield ok(f"The hottest GPU is at {max(now for _, now, _ in pairs)} °C.")


def power_limit(facts: Facts) -> Iterator[Finding]:
    """Nobody has lowered the power limit and forgotten it."""
    known = [
        (gpu.index, gpu.power_limit_w, gpu.power_limit_default_w)
        for gpu in visible_health(facts)
        if gpu.power_limit_w is not None and gpu.power_limit_default_w
    ]
    low = [row for row in known if row[1] < _LOW_POWER_SHARE * (row[2] or 0)]
    for index, limit_w, default_w in low:
        yield note(
            what=f"GPU {index} is limited to {limit_w:.0f} W of its usual {default_w:.0f} W.",
            why="It is slower under load, and a gang waits for it if the others are not limited.",
            fix=f"As administrator: nvidia-smi -i {index} -pl {default_w:.0f}",
        )
    if known and not low:
        yield ok("No power limit is lowered.")


def mixed_models(facts: Facts) -> Iterator[Finding]:
    """The GPUs of a gang are alike."""
    gpus = gang_gpus(facts)
    if len(gpus) < 2:
        return
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.memory_total_mib), []).append(gpu.index)
    if len(kinds) == 1:
        yield ok(f"{len(gpus)} GPUs of one kind: {gpus[0].name}.")
        return
    listing = "; ".join(
        f"{gpus_named(indices)}: {name}" + (f", {mib} MiB" if mib else "")
        for (name, mib), indices in kinds.items()
    )
    yield warning(
        what=f"Different GPUs: {listing}.",
        why="With equal shares every step waits for the slowest, and the smallest memory decides "
        "the batch. A sweep does not mind: its tasks are independent.",
        fix="For a gang, choose equal ones with --gpu-ids.",
    )


def mig_instances(facts: Facts) -> Iterator[Finding]:
    """MIG instances suit sweeps, not gangs."""
    instances = [gpu for gpu in working_gpus(facts) if gpu.parent_uuid is not None]
    if instances:
        yield note(
            what=f"{count(len(instances), 'MIG instance')} on "
            f"{gpus_named(sorted({gpu.index for gpu in instances}))}.",
            why="A process sees one instance at most, and instances have no peer-to-peer path: a "
            "sweep can use each of them, a gang cannot span them.",
            fix="For a gang, switch MIG off (nvidia-smi -mig 0, as administrator).",
        )
    elif working_gpus(facts):
        yield ok("No GPU is cut into MIG instances.")


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
        yield warning(
            what=f"GPU {gpu.index} has a PCIe x{width} link; the card could use x{most}.",
            why="Loading data, and gradients where there is no NVLink, take that much longer.",
            fix="Reseat the card or its riser, or use a slot with more lanes; the mainboard's "
            "manual says which slots share lanes with which.",
        )
    # An idle GPU lowers the speed of its link, so only one at work tells.
    busy = loaded_of(facts, gpu.index) or (gpu if gpu.performance_state == 0 else None)
    if busy is None or busy.pcie_generation is None or busy.pcie_generation_max is None:
        return
    if busy.pcie_generation < busy.pcie_generation_max:
        yield warning(
            what=f"GPU {gpu.index} runs its PCIe link at generation {busy.pcie_generation} under "
            f"load; it could run at {busy.pcie_generation_max}.",
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
        yield note(
            what=f"{gpus_named(list(up))} could use NVLink, but no link is up.",
            why="Gradients go over PCIe.",
            fix="Two cards need a bridge between them; on an NVSwitch system start "
            "nvidia-fabricmanager.",
        )
    elif down:
        yield warning(
            what=f"{gpus_named(down)}: {count(up[down[0]], 'NVLink is', 'NVLinks are')} up; on "
            f"other GPUs, {most}.",
            why="A collective is as fast as its weakest link.",
            fix="nvidia-smi nvlink -s shows which; reset the GPUs or reboot, and look at "
            "nvidia-fabricmanager.",
        )
    else:
        yield ok(f"{count(most, 'NVLink is', 'NVLinks are')} up on each GPU.")


def _links_of_gang(facts: Facts) -> list[PairLink]:
    indices = {gpu.index for gpu in gang_gpus(facts)}
    return [link for link in facts.links if link.first in indices and link.second in indices]


def peer_access(facts: Facts) -> Iterator[Finding]:
    """GPUs can read each other's memory."""
    links = [link for link in _links_of_gang(facts) if link.peer_read is not None]
    if not links:
        return
    without = [link for link in links if link.peer_read != "ok"]
    if without:
        reasons = ", ".join(sorted({str(link.peer_read) for link in without}))
        yield note(
            what=f"{len(without)} of {len(links)} pairs of GPUs have no peer-to-peer access: "
            f"{reasons}.",
            why="NCCL goes through the host's memory there, which is slower but right. GeForce "
            "cards since the RTX 40 series have none by design.",
        )
        return
    yield ok("Every pair of GPUs has peer-to-peer access.")


def topology(facts: Facts) -> Iterator[Finding]:
    """No pair of a gang talks over the link between processor sockets."""
    links = [link for link in _links_of_gang(facts) if link.level is not None]
    if not links:
        return
    # With NVLink between them the bus does not matter.
    across = [link for link in links if link.level == "between sockets" and not link.is_nvlink]
    if across:
        near = [link for link in links if link not in across]
        beside = sorted(link.second for link in near if link.first == near[0].first)
        group = gpus_named([near[0].first, *beside]) if near else "GPUs of one socket"
        yield note(
            what=f"{len(across)} of {len(links)} pairs of GPUs are joined only by the link "
            "between the processor sockets.",
            why="An all-reduce over all GPUs goes at that link's speed.",
            fix=f"A gang that needs fewer GPUs is faster on {group}.",
        )
    else:
        kinds = sorted({"NVLink" if link.is_nvlink else str(link.level) for link in links})
        yield ok(f"Between GPUs: {', '.join(kinds)}.")
