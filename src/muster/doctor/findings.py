"""What checks yield (findings with a severity), what is made of findings (the exit code, a file of
repairs), and the questions that several checks ask of the facts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from muster.devices.discovery import apply_visibility
from muster.devices.inventory import Device, Inventory
from muster.devices.nvml_health import GpuHealth
from muster.doctor.facts import Facts, PciGpu

Severity = Literal["ok", "note", "warning", "error"]
#: From good to bad.
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")

EXIT_HEALTHY = 0
EXIT_WARNINGS = 1
EXIT_BROKEN = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has found: ``what`` was seen, ``why`` it matters, and how to ``fix`` it.

    ``settings``: environment variables that repair it or work around it, for ``--fix env``.
    ``commands``: shell commands that a sourced file can run to the same end (``ulimit``).
    ``check``: the name of the check, filled in by the table of checks.
    """

    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    check: str = ""


def ok(what: str) -> Finding:
    return Finding(severity="ok", what=what)


note = partial(Finding, severity="note")
warning = partial(Finding, severity="warning")
error = partial(Finding, severity="error")


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """0 healthy, 1 warnings where ``strict``, 2 broken.

    >>> exit_code([ok("fine"), Finding(severity="warning", what="slow")], strict=False)
    0
    """
    seen = {finding.severity for finding in findings}
    if "error" in seen:
        return EXIT_BROKEN
    return EXIT_WARNINGS if strict and "warning" in seen else EXIT_HEALTHY


def sorted_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; equal ones stay in the order of the checks."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))


_HEAD = """\
# Written by `muster doctor --fix env` for {host}. Use it with: source {name}
# It changes this shell only. Delete a line to leave that setting as it is.
"""


def env_script(findings: Sequence[Finding], host: str, name: str) -> str:
    """The shell file: an export or a command per repair, each with the finding it is for.

    Of two findings that set the same variable the first counts: it is the worse one.
    """
    lines = [_HEAD.format(host=host or "this host", name=name)]
    seen: set[str] = set()
    for finding in findings:
        repairs = [
            f"export {key}={shlex.quote(value)}"
            for key, value in finding.settings.items()
            if key not in seen
        ]
        repairs += [command for command in finding.commands if command not in seen]
        if not repairs:
            continue
        seen |= {*finding.settings, *finding.commands}
        # A finding may quote an error of several lines, and none may leave its comment.
        lines.append(f"# {' '.join(finding.what.split())}")
        lines += [*repairs, ""]
    if len(lines) == 1:
        lines.append("# Nothing to set: no finding has a repair by variable.")
    return "\n".join(lines).rstrip() + "\n"


#: Bytes/s per lane and direction after encoding: 8b/10b for generations 1 and 2, 128b/130b for 3
#: to 5 (PCI Express base specification), 242B/256B flits for 6.
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
#: GB/s per NVLink and direction, by the version NVML gives: 1 (P100), 2 (V100), 3 (A100),
#: 4 (H100), 5 (B200). From the architecture whitepapers: 300, 600, 900, 1800 GB/s both ways of 6,
#: 12, 18, 18 links.
_NVLINK_GB_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


def visible(facts: Facts) -> Inventory:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in the order of torch's numbers."""
    return apply_visibility(facts.inventory, facts.environment.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(facts: Facts) -> tuple[Device, ...]:
    return visible(facts).devices


def working_gpus(facts: Facts) -> tuple[Device, ...]:
    """The visible GPUs that answer."""
    return tuple(gpu for gpu in visible_gpus(facts) if gpu.lost is None)


def gang_gpus(facts: Facts) -> tuple[Device, ...]:
    """Working GPUs that are no MIG instances: those that can be one gang."""
    return tuple(gpu for gpu in working_gpus(facts) if gpu.parent_uuid is None)


def visible_health(facts: Facts) -> tuple[GpuHealth, ...]:
    """The health of the visible GPUs; of all of them where no inventory is known."""
    if not facts.inventory.devices:
        return facts.health
    wanted = {gpu.index for gpu in visible_gpus(facts)}
    return tuple(gpu for gpu in facts.health if gpu.index in wanted)


def pci_of(facts: Facts, gpu: GpuHealth) -> PciGpu | None:
    return next((one for one in facts.host.pci_gpus if one.address == gpu.pci_address), None)


def loaded_of(facts: Facts, index: int) -> GpuHealth | None:
    """The health of the GPU ``index`` while it worked."""
    return next((gpu for gpu in facts.loaded if gpu.index == index), None)


def pcie_gb_s(generation: int | None, width: int | None) -> float | None:
    """What such a link carries in one direction, in GB/s, before packet overhead.

    >>> pcie_gb_s(4, 16)
    31.504
    """
    lane = _LANE_GB_S.get(generation or 0)
    return None if lane is None or not width else round(lane * width, 3)


def nvlink_gb_s(gpu: GpuHealth) -> float | None:
    """All links of a GPU that are up, one direction, in GB/s."""
    per_link = _NVLINK_GB_S.get(gpu.nvlink_version or 0)
    return None if per_link is None or not any(gpu.nvlinks) else per_link * sum(gpu.nvlinks)


def health_of_torch_device(facts: Facts, number: int) -> GpuHealth | None:
    """The GPU behind ``cuda:number``: torch counts those that work, in the driver's order."""
    gpus = working_gpus(facts)
    if number >= len(gpus):
        return None
    return next((one for one in facts.health if one.index == gpus[number].index), None)


def gpus_named(items: Sequence[int]) -> str:
    """``GPU 3``, ``GPUs 0, 1 and 3``."""
    *first, last = map(str, items)
    return f"GPUs {', '.join(first)} and {last}" if first else f"GPU {last}"


def accelerator_kind(facts: Facts) -> str | None:
    return facts.torch.accelerator if facts.torch.accelerator_count else None


def has_maker(facts: Facts, vendor: str) -> bool:
    """Whether the host has GPUs of this maker that are meant for computing."""
    if vendor == "nvidia":
        return bool(facts.inventory.devices)
    # A processor's own graphics of AMD is on the bus as well; it is not meant for computing.
    return any(card.vendor == vendor and card.is_compute for card in facts.host.pci_gpus)


def wants_master(environment: Mapping[str, str]) -> bool:
    """Whether the environment names several nodes that meet at MASTER_ADDR."""
    return bool(environment.get("MASTER_ADDR")) and num_nodes(environment) > 1


def num_nodes(environment: Mapping[str, str]) -> int:
    """How many hosts the launcher's variables name; 1 where they do not say."""
    for name in ("NNODES", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        text = environment.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    world, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local) > 0:
        return max(1, -(-int(world) // int(local)))
    return 1
