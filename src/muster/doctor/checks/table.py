"""All checks, in the order in which they are shown. A check is a pure function of the facts.

It yields findings: "ok" where it looked and all is well, nothing where the facts do not say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace

from muster.base.errors import MusterError
from muster.base.modules import load_plugin, plugins
from muster.base.shown_text import one_line
from muster.doctor.checks import (
    devices,
    host,
    network,
    software,
    speed,
)
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, warning

CHECKS: dict[str, Callable[[Facts], Iterable[Finding]]] = {
    "driver": software.driver_present,
    "gpus-answer": software.gpus_answer,
    "visible-devices": software.visible_devices,
    "device-order": software.device_order,
    "torch-build": software.torch_build,
    "counts": software.counts_agree,
    "compute-capability": software.compute_capability,
    "triton": software.triton_compiles,
    "accelerator": software.accelerator,
    "memory-holders": devices.memory_holders,
    "compute-mode": devices.compute_mode,
    "ecc": devices.ecc_errors,
    "throttling": devices.throttling,
    "temperature": devices.temperature,
    "power-limit": devices.power_limit,
    "mixed-models": devices.mixed_models,
    "mig": devices.mig_instances,
    "pcie-link": devices.pcie_link,
    "nvlink": devices.nvlinks,
    "peer-access": devices.peer_access,
    "topology": devices.topology,
    "matmul": speed.matmul_values,
    "matmul-speed": speed.matmul_speed,
    "host-copies": speed.host_copies,
    "peer-copies": speed.peer_copies,
    "backends": network.backends,
    "all-reduce": network.all_reduce,
    "all-reduce-speed": network.all_reduce_speed,
    "shared-memory": host.shared_memory,
    "open-files": host.open_files,
    "cores": host.cores,
    "threads": host.threads,
    "host-memory": host.host_memory,
    "task-memory": host.task_memory,
    "locked-memory": host.locked_memory,
    "disk-space": host.disk_space,
    "disk-speed": host.disk_speed,
    "network-disk": host.network_disk,
    "interface-names": network.interface_names,
    "host-name": network.host_name,
    "interface-choice": network.interface_choice,
    "master": network.master,
    "clocks": network.clocks,
    "torchrun": host.torchrun_variables,
    "local-ranks": host.local_ranks,
    "slurm-gpus": host.slurm_gpus,
    "slurm-cores": host.slurm_cores,
    "extensions": host.extensions,
}


def run_checks(facts: Facts) -> list[Finding]:
    """What every check has to say, in the table's order, each finding with its check's name.

    Those of installed packages come last. One that is broken says so itself, and nothing else.
    """
    own = [
        replace(finding, check=name) for name, check in CHECKS.items() for finding in check(facts)
    ]
    unusable = {
        one.name for one in facts.extensions if one.kind == "check" and (one.problem or one.untried)
    }
    theirs = [
        finding
        for name in plugins("check")
        if name not in unusable  # which has been told, and may hang
        for finding in _of_plugin(name, facts)
    ]
    return own + theirs


def _of_plugin(name: str, facts: Facts) -> list[Finding]:
    plugin = plugins("check")[name]
    named = f"{plugin.package}:{name}"
    found: list[Finding]
    try:
        check = load_plugin("check", name)
        with redirect_stdout(sys.stderr):  # what `--json` prints is the doctor's alone
            found = list(check(facts))
        wrong = [type(one).__name__ for one in found if not isinstance(one, Finding)]
        if wrong:
            raise TypeError(f"it yields {wrong[0]}, not findings")
    except (Exception, SystemExit) as error:  # a foreign package's code
        said = str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
        found = [
            warning(
                what=f"The check {name} of {plugin.package} failed: {one_line(said)}",
                why="What it looks for is not known.",
                fix=f"Reinstall or repair {plugin.package}, or uninstall it.",
            )
        ]
    return [replace(finding, check=named) for finding in found]
