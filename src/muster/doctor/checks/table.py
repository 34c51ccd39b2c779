"""All checks, in the order in which they are shown. A check is a pure function of the facts.

It yields findings: "ok" where it looked and all is well, nothing where the facts do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from muster.doctor.checks import (
    devices,
    host,
    network,
    software,
    speed,
)
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding

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
}


def run_checks(facts: Facts) -> list[Finding]:
    """What every check has to say, in the table's order, each finding with its check's name."""
    return [
        replace(finding, check=name) for name, check in CHECKS.items() for finding in check(facts)
    ]
