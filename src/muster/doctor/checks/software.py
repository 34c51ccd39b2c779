"""The driver and torch: are they there, do they fit the GPUs and each other?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from muster.base.shown_text import count
from muster.devices.discovery import apply_visibility
from muster.doctor.checks.speed import probe_trouble
from muster.doctor.checks.torch_start import torch_start
from muster.doctor.facts import Facts
from muster.doctor.findings import (
    MAKERS,
    Finding,
    accelerator_kind,
    error,
    gpus_named,
    has_maker,
    note,
    ok,
    visible,
    visible_gpus,
    warning,
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
    if facts.driver.status == "skipped" and facts.driver.error:
        yield from probe_trouble(facts.driver, "The NVIDIA driver")
        if not facts.inventory.devices:
            return
    if facts.inventory.devices:
        cuda = facts.inventory.cuda_driver_version
        version = "" if cuda is None else f", CUDA up to {cuda[0]}.{cuda[1]}"
        num = len(facts.inventory.devices)
        name = facts.inventory.driver_version or "of unknown version"
        yield ok(f"NVIDIA driver {name}{version}; {count(num, 'GPU')}.")
        return
    if "installed but not loaded" in problem or "Reboot" in problem:
        yield error(what=problem, why="No GPU can be used until then.")
        return
    cards = [card for card in facts.host.pci_gpus if card.vendor == "nvidia"]
    if cards:
        drivers = sorted({card.driver or "no driver" for card in cards})
        yield error(
            what=f"{count(len(cards), 'NVIDIA card')} on the PCI bus "
            f"({', '.join(drivers)}), but: {problem}",
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
                what=f"{count(len(cards), f'{MAKERS[vendor]} card')} on the PCI bus "
                "without a driver.",
                why="The GPUs are there and cannot be used.",
                fix=f"Load the kernel's driver ({name}).",
            )
        else:
            yield ok(f"{count(len(cards), f'{MAKERS[vendor]} card')}, driver {cards[0].driver}.")


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


#: The oldest Linux driver that runs programs of a CUDA major version ("minor version
#: compatibility", NVIDIA CUDA Compatibility guide, table 1).
_LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def torch_build(facts: Facts) -> Iterator[Finding]:
    """torch is there, and built for this kind of GPU and this driver."""
    torch = facts.torch
    told = list(torch_start(facts))
    yield from told
    if torch.version is None or any(one.severity == "error" for one in told):
        return
    for vendor, build, index in (
        ("nvidia", torch.cuda_build, "cu126"),
        ("amd", torch.hip_build, "rocm6.4"),
    ):
        if build is None and has_maker(facts, vendor):
            others = torch.cuda_build or torch.hip_build or torch.xpu_build
            yield error(
                what=f"This host has {MAKERS[vendor]} GPUs, but torch {torch.version} was built "
                + ("for another kind of GPU." if others else "for CPUs only."),
                why="torch sees no GPU and computes on the CPU.",
                fix=f"pip install --force-reinstall torch --index-url "
                f"https://download.pytorch.org/whl/{_index(facts, index)}",
            )
            return
    yield from _cuda_against_driver(facts)


def _cuda_against_driver(facts: Facts) -> Iterator[Finding]:
    torch, driver = facts.torch, facts.inventory.cuda_driver_version
    build = _version(torch.cuda_build)
    if build is None or driver is None:
        yield ok(f"torch {torch.version}{_built_for(facts)}.")
        return
    words = f"torch {torch.version} is built for CUDA {build[0]}.{build[1]}"
    own = f"the driver {facts.inventory.driver_version or ''} offers CUDA {driver[0]}.{driver[1]}"
    if driver[0] < build[0]:
        least = _LEAST_DRIVER.get(build[0])
        needed = f"at least {least}" if least else f"one for CUDA {build[0]}"
        yield error(
            what=f"{words}, but {own}.",
            why="A driver runs programs of its own major version of CUDA and older ones only: "
            "torch will say that the driver is too old and see no GPU.",
            fix=f"Update the driver ({needed}), or install a torch for this driver: pip install "
            f"--force-reinstall torch --index-url https://download.pytorch.org/whl/"
            f"{_index(facts, 'cu118')}",
        )
    elif driver < build:
        yield note(
            what=f"{words}; {own}, an older minor version.",
            why="This works, except for kernels that are compiled at run time (PTX), as some "
            "extensions do: those fail with 'unsupported toolchain'.",
            fix="Update the driver if an extension fails so.",
        )
    else:
        yield ok(f"{words}; {own}.")


def counts_agree(facts: Facts) -> Iterator[Finding]:
    """torch sees the GPUs that the driver has."""
    torch, gpus = facts.torch, working_gpus(facts)
    if torch.run.status != "ok" or torch.device_count is None or torch.cuda_build is None:
        return
    # A process sees one MIG instance at most, however many are visible.
    expected = len({gpu.uuid for gpu in gpus if gpu.parent_uuid is None})
    if not expected and gpus:
        expected = 1
    if torch.device_count == expected and (torch.is_cuda_available or not expected):
        if expected:
            yield ok(f"torch sees {count(expected, 'GPU')}, as the driver does.")
        return
    if not facts.inventory.devices and not torch.device_count:
        return
    why = f" It says: {torch.cuda_error}" if torch.cuda_error else ""
    yield Finding(
        severity="error" if torch.device_count < expected else "warning",
        what=f"torch sees {count(torch.device_count, 'GPU')}; the driver offers {expected}.{why}",
        why="Work is placed by what the driver says and would fail in torch.",
        fix="Repair what torch says, and what the check torch-build finds."
        if torch.cuda_error
        else "Look at CUDA_VISIBLE_DEVICES; with NVSwitch, start nvidia-fabricmanager; after an "
        "update of the driver, reboot.",
    )


def compute_capability(facts: Facts) -> Iterator[Finding]:
    """torch has kernels for each GPU."""
    arch_list = facts.torch.arch_list
    if not arch_list or facts.torch.hip_build:
        return
    pairs = {
        gpu.compute_capability: gpu.name for gpu in working_gpus(facts) if gpu.compute_capability
    }
    bad = {pair: name for pair, name in pairs.items() if not is_supported(pair, arch_list)}
    for (major, minor), name in bad.items():
        yield error(
            what=f"torch {facts.torch.version} has no kernels for {name} (compute capability "
            f"{major}.{minor}; it has {', '.join(arch_list)}).",
            why="Programs fail with 'no kernel image is available for execution on the device'.",
            fix="Install a torch whose build lists this GPU: a newer one for a new card, an older "
            "one for an old card (see https://pytorch.org/get-started/previous-versions).",
        )
    if pairs and not bad:
        yield ok("torch has kernels for every GPU here.")


def is_supported(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether kernels compiled for ``arch_list`` run there.

    Machine code (``sm_``) runs on its own major version from its minor version on, PTX
    (``compute_``) on everything newer; a trailing letter binds either to that very model
    (CUDA C++ programming guide, compatibility of cubins and of PTX).

    >>> is_supported((8, 6), ("sm_80",)), is_supported((12, 0), ("sm_90", "compute_90"))
    (True, True)
    >>> is_supported((12, 0), ("sm_90",)), is_supported((10, 0), ("sm_90a", "compute_90a"))
    (False, False)
    """
    for entry in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
        if found is None:
            continue
        kind, own = found[1], (int(found[2]), int(found[3]))
        if own == capability:
            return True
        if found[4]:
            continue
        if kind == "sm" and own[0] == capability[0] and own[1] <= capability[1]:
            return True
        if kind == "compute" and own <= capability:
            return True
    return False


def triton_compiles(facts: Facts) -> Iterator[Finding]:
    """Triton, where it is installed, finds what it compiles its kernels with."""
    lacks = facts.torch.triton_lacks
    if lacks is None or not (working_gpus(facts) or has_maker(facts, "amd")):
        return
    if lacks:
        yield warning(
            what=f"Triton is installed, but finds no {' and no '.join(lacks)}.",
            why="It compiles a part of every kernel when that is first used: torch.compile and "
            "kernels written for Triton fail then, 'Failed to find C compiler' for one.",
            fix="Debian, Ubuntu: apt-get install gcc python3-dev. Another compiler is named by CC.",
        )
    else:
        yield ok("Triton finds a C compiler.")


def accelerator(facts: Facts) -> Iterator[Finding]:
    """ROCm, XPU and MPS are recognised through torch's own interface."""
    kind, number = accelerator_kind(facts), facts.torch.accelerator_count or 0
    if kind is None:
        if facts.torch.run.status == "ok" and (facts.torch.hip_build or facts.torch.xpu_build):
            yield error(
                what=f"torch{_built_for(facts)} finds no such GPU.",
                why="It computes on the CPU.",
                fix="For ROCm: be in the groups render and video, and load amdgpu. For XPU: "
                "install Intel's level-zero driver.",
            )
        return
    names = {"xpu": "Intel (xpu)", "mps": "Apple (mps)", "cuda": "NVIDIA (cuda)"}
    name = "AMD ROCm (cuda in torch)" if facts.torch.hip_build else names.get(kind, kind)
    yield ok(f"torch computes on {name}, {count(number, 'device')}.")
    if kind == "mps":
        yield note(
            what="Apple's GPU is one device, and torch has no collectives for it.",
            why="Several ranks run on the CPU with gloo only.",
        )


def _built_for(facts: Facts) -> str:
    torch = facts.torch
    for name, build in (
        ("CUDA", torch.cuda_build),
        ("ROCm", torch.hip_build),
        ("Intel XPU", torch.xpu_build),
    ):
        if build:
            return f" built for {name} {build}"
    return " built for CPUs"


def _version(text: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _index(facts: Facts, otherwise: str) -> str:
    """The folder of PyTorch's wheels that fits the driver."""
    driver = facts.inventory.cuda_driver_version
    if otherwise.startswith("rocm") or driver is None:
        return otherwise
    return "cu130" if driver >= (13, 0) else "cu126" if driver >= (12, 0) else "cu118"
