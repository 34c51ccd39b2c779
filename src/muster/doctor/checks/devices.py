"""Each GPU by itself: who holds its memory, its health, its clocks, and whether they are alike."""

from __future__ import annotations

from collections.abc import Iterator

from muster.devices.nvml_health import GpuHealth
from muster.devices.placement import busy_reason
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, ok
from muster.doctor.machine import gang_gpus, gpus_named, visible_health, working_gpus

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
        yield Finding(
            severity="warning",
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
        yield Finding(
            severity="error",
            what=f"{gpus_named(bad)}: compute mode is Prohibited.",
            why="No program can compute there.",
            fix="As administrator: nvidia-smi -c DEFAULT",
        )
    if alone:
        yield Finding(
            severity="note",
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
        yield Finding(
            severity="error",
            what=f"GPU {gpu.index} has no spare memory rows left to replace a broken one.",
            why="Its memory is worn out: programs will fail or compute wrong values.",
            fix="Have the card replaced.",
        )
    elif gpu.rows_pending:
        yield Finding(
            severity="warning",
            what=f"GPU {gpu.index} waits for a reset to replace broken memory.",
            why="Until then the broken place is still in use.",
            fix="nvidia-smi --gpu-reset, or reboot.",
        )
    if gpu.ecc_uncorrected:
        yield Finding(
            severity="error",
            what=f"GPU {gpu.index} had {gpu.ecc_uncorrected} uncorrected memory errors since the "
            "driver was loaded.",
            why="Each one ends the program it meets, or worse, did not.",
            fix="Reset the GPU or reboot; if they come back, have the card replaced.",
        )
    elif gpu.ecc_uncorrected_total:
        yield Finding(
            severity="note",
            what=f"GPU {gpu.index} had {gpu.ecc_uncorrected_total} uncorrected memory errors in "
            "its life, none since the driver was loaded.",
            why="They were repaired or have not come back.",
        )
    if gpu.ecc_enabled is False:
        yield Finding(
            severity="note",
            what=f"GPU {gpu.index} can correct memory errors, but ECC is switched off.",
            why="A flipped bit goes unseen into your weights.",
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
        yield Finding(
            severity="warning",
            what=f"GPU {index} is throttled: {', '.join(sorted(reasons))}.",
            why="It runs slower than it could, and a gang waits for its slowest member.",
            fix="Thermal: look at fans, dust and airflow. Power brake or hardware slowdown: look "
            "at the power supply and its cables.",
        )
    if known and not seen:
        yield ok("No GPU is throttled.")


def temperature(facts: Facts) -> Iterator[Finding]:
    """Far from the temperature at which the clocks go down."""
    pairs = [
        (gpu.index, gpu.temperature_c, gpu.slowdown_temperature_c)
        for gpu in (*visible_health(facts), *facts.loaded)
        if gpu.temperature_c is not None and gpu.slowdown_temperature_c is not None
    ]
    hot = {i: (now, limit) for i, now, limit in pairs if now >= limit - _NEAR_SLOWDOWN_C}
    for index, (now, limit) in sorted(hot.items()):
        yield Finding(
            severity="warning",
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
        yield Finding(
            severity="note",
            what=f"GPU {index} is limited to {limit_w:.0f} W of its usual {default_w:.0f} W.",
            why="It is slower under load; a gang waits for it if the others are not limited.",
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
    yield Finding(
        severity="warning",
        what=f"Different GPUs: {listing}.",
        why="With equal shares every step waits for the slowest, and the smallest memory decides "
        "the batch. A sweep does not mind: its tasks are independent.",
        fix="For a gang, choose equal ones with --gpu-ids.",
    )


def mig_instances(facts: Facts) -> Iterator[Finding]:
    """MIG instances suit sweeps, not gangs."""
    instances = [gpu for gpu in working_gpus(facts) if gpu.parent_uuid is not None]
    if instances:
        yield Finding(
            severity="note",
            what=f"{len(instances)} MIG instances on "
            f"{gpus_named(sorted({gpu.index for gpu in instances}))}.",
            why="A process sees one instance at most, and instances have no peer-to-peer path: a "
            "sweep can use each of them, a gang cannot span them.",
            fix="For a gang, switch MIG off (nvidia-smi -mig 0, as administrator).",
        )
    elif working_gpus(facts):
        yield ok("No GPU is cut into MIG instances.")
