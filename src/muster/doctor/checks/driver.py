"""The NVIDIA driver and what it shows: is it there, do the GPUs answer, which are visible?"""

from __future__ import annotations

from collections.abc import Iterator

from muster.devices.discovery import apply_visibility
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, error, note, ok, warning
from muster.doctor.machine import (
    MAKERS,
    accelerator_kind,
    gpus_named,
    has_maker,
    visible,
    visible_gpus,
    working_gpus,
)


def driver_present(facts: Facts) -> Iterator[Finding]:
    """The driver answers, or there is no GPU that would need one."""
    problem = facts.inventory.problem or "no GPU was found"
    if facts.driver.status == "hung":
        yield error(
            what=f"The NVIDIA driver hangs ({facts.driver.at or 'no answer'}).",
            why="Every program that touches a GPU will hang in the same way.",
            fix="Look at the kernel log (dmesg | grep -e Xid -e NVRM), then reset the GPU "
            "(nvidia-smi --gpu-reset) or reboot.",
        )
        return
    if facts.driver.status == "failed":
        yield error(
            what=f"The NVIDIA driver could not be read{facts.driver.where}: {facts.driver.reason}",
            why="It is not known which GPUs there are; programs that touch one may fail as well.",
            fix="Run nvidia-smi. If it fails too, look at the kernel log (dmesg | grep -e Xid "
            "-e NVRM), then reinstall the driver or reboot.",
        )
        return
    if facts.inventory.devices:
        cuda = facts.inventory.cuda_driver_version
        version = "" if cuda is None else f", CUDA up to {cuda[0]}.{cuda[1]}"
        num = len(facts.inventory.devices)
        name = facts.inventory.driver_version or "of unknown version"
        yield ok(f"NVIDIA driver {name}{version}; {num} GPU{'s' if num > 1 else ''}.")
        return
    if "installed but not loaded" in problem or "Reboot" in problem:
        yield error(what=problem, why="No GPU can be used until then.")
        return
    cards = [card for card in facts.host.pci_gpus if card.vendor == "nvidia"]
    if cards:
        drivers = sorted({card.driver or "no driver" for card in cards})
        yield error(
            what=f"{len(cards)} NVIDIA card{'s' * (len(cards) > 1)} on the PCI bus "
            f"({', '.join(drivers)}), "
            f"but: {problem}",
            why="The GPUs are there and cannot be used.",
            fix="Install NVIDIA's driver (the package nvidia-driver of your system), or start the "
            "container with --gpus all."
            + (" The nouveau driver cannot compute." if "nouveau" in drivers else ""),
        )
        return
    yield from _other_makers(facts)
    if accelerator_kind(facts) is None and not has_maker(facts, "amd"):
        yield note(
            what=f"No GPU here. {problem}",
            why="Everything runs on the CPU, which is much slower for deep learning.",
        )


def _other_makers(facts: Facts) -> Iterator[Finding]:
    for vendor, name in (("amd", "amdgpu"), ("intel", "i915 or xe")):
        cards = [card for card in facts.host.pci_gpus if card.vendor == vendor and card.is_compute]
        if not cards:
            continue
        if any(card.driver is None for card in cards):
            yield error(
                what=f"{len(cards)} {MAKERS[vendor]} card{'s' * (len(cards) > 1)} on the PCI bus "
                "without a driver.",
                why="The GPUs are there and cannot be used.",
                fix=f"Load the kernel's driver ({name}).",
            )
        else:
            yield ok(
                f"{len(cards)} {MAKERS[vendor]} card{'s' * (len(cards) > 1)}, "
                f"driver {cards[0].driver}."
            )


def gpus_answer(facts: Facts) -> Iterator[Finding]:
    """No GPU is lost."""
    lost = [gpu for gpu in visible_gpus(facts) if gpu.lost is not None]
    for gpu in lost:
        yield error(
            what=f"GPU {gpu.index} cannot be used: {gpu.lost}.",
            why="A gang that includes it fails; CUDA may also refuse the other GPUs.",
            fix="Reset or reboot; until then leave it out.",
            settings=_without(facts) if working_gpus(facts) else {},
        )
    if visible_gpus(facts) and not lost:
        yield ok("All visible GPUs answer.")


def _without(facts: Facts) -> dict[str, str]:
    """The setting that leaves lost GPUs out, by UUID: numbers change when a GPU is missing."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in working_gpus(facts))}


def visible_devices(facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES means what its author meant."""
    value = facts.environment.get("CUDA_VISIBLE_DEVICES")
    seen = visible(facts)
    if value is None or not facts.inventory.devices:
        return
    if seen.visibility_note is not None:
        yield error(
            what=seen.visibility_note,
            why="CUDA says nothing about it: programs just find fewer GPUs.",
            fix="Correct the list, or unset CUDA_VISIBLE_DEVICES.",
            settings=_corrected(facts, value),
        )
    elif not seen.devices:
        yield warning(
            what=f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU of this host.",
            why="Programs find no GPU and compute on the CPU.",
            fix="unset CUDA_VISIBLE_DEVICES, unless that is what you want.",
        )
    else:
        indices = [gpu.index for gpu in seen.devices]
        yield ok(f"CUDA_VISIBLE_DEVICES={value}: {gpus_named(indices)}.")


def _corrected(facts: Facts, value: str) -> dict[str, str]:
    """The list with each GPU of this host once, in the order that was meant; {} for none."""
    seen: list[str] = []
    kept: list[str] = []
    for entry in value.split(","):
        uuids = [gpu.uuid for gpu in apply_visibility(facts.inventory, entry).devices]
        if uuids and not set(uuids) & set(seen):
            seen += uuids
            kept.append(entry.strip())
    # CUDA reads a list either as numbers or as UUIDs, as the first entry says.
    is_number = [entry[:1].isdigit() for entry in kept]
    alike = [entry for entry, number in zip(kept, is_number, strict=True) if number == is_number[0]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(alike)} if alike else {}


def device_order(facts: Facts) -> Iterator[Finding]:
    """CUDA and nvidia-smi number the GPUs alike."""
    names = {gpu.name for gpu in facts.inventory.devices if gpu.lost is None}
    if len(facts.inventory.devices) < 2:
        return
    order = facts.environment.get("CUDA_DEVICE_ORDER")
    if len(names) > 1 and order != "PCI_BUS_ID":
        yield warning(
            what="This host has different GPUs and CUDA_DEVICE_ORDER is not PCI_BUS_ID.",
            why="CUDA then puts the fastest first, so GPU 0 of nvidia-smi may be cuda:1, and "
            "CUDA_VISIBLE_DEVICES=0 may choose another card than you think.",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            settings={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
    else:
        yield ok("CUDA numbers the GPUs as nvidia-smi does.")
