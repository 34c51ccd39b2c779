"""Every check on a host where it fires and on one where it looks and is content.

The hosts are composed after outputs of real tools; none was recorded on the machine it describes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from muster.devices.nvml_health import PairLink
from muster.doctor.checks.network import bus_gb_s
from muster.doctor.checks.software import is_supported
from muster.doctor.checks.table import CHECKS, run_checks
from muster.doctor.facts import (
    DiskFacts,
    Facts,
    PeerCopy,
    ReduceTry,
    Run,
    TorchFacts,
    load_facts,
)
from muster.doctor.findings import Finding, Severity, exit_code, ok, pcie_gb_s

HOSTS = Path(__file__).parent / "hosts"


def host(name: str) -> Facts:
    return load_facts(HOSTS / f"{name}.json")


def findings(name: str, check: str) -> list[Finding]:
    return list(CHECKS[check](host(name)))


#: Check → hosts on which it fires, each with the severity and a part of what it says.
FIRES: dict[str, list[tuple[str, Severity, str]]] = {
    "driver": [
        ("no_gpu", "note", "No GPU here"),
        ("nouveau", "error", "1 NVIDIA card on the PCI bus (nouveau)"),
        ("driver_hangs", "error", "hangs (reading the health of the GPUs)"),
    ],
    "gpus-answer": [("one_gpu_lost", "error", "GPU 2 cannot be used")],
    "visible-devices": [("duplicate_visible", "error", "CUDA_VISIBLE_DEVICES=1,1")],
    "device-order": [("mixed_cards", "warning", "CUDA_DEVICE_ORDER is not PCI_BUS_ID")],
    "torch-build": [
        (
            "driver_mismatch",
            "error",
            "built for CUDA 12.8, but the driver 470.57.02 offers",
        ),
        ("small_container", "error", "NVIDIA GPUs, but torch 2.8.0+cpu was built for CPUs only"),
        ("rocm_with_cpu_torch", "error", "AMD GPUs, but torch 2.8.0+cpu"),
        ("no_torch", "warning", "torch is not installed"),
        ("driver_hangs", "error", "torch 2.8.0+cu128 was still starting the accelerator"),
    ],
    "counts": [("driver_mismatch", "error", "torch sees 0 GPUs; the driver offers 4. It says")],
    "compute-capability": [("old_card", "error", "no kernels for NVIDIA GeForce GTX 1080 Ti")],
    "triton": [("pcie_x4", "warning", "Triton is installed, but finds no C compiler")],
    "accelerator": [
        ("rocm_without_rights", "error", "built for ROCm 6.4.43482-0f2d60242 finds no such GPU"),
        ("apple", "note", "Apple's GPU is one device"),
    ],
    "memory-holders": [("mixed_cards", "warning", "pid 4711 (grace) holds 21250 MiB; 27740 of")],
    "compute-mode": [("worn_cards", "error", "GPU 3: compute mode is Prohibited")],
    "ecc": [
        ("worn_cards", "error", "GPU 1 had 3 uncorrected memory errors"),
        ("worn_cards", "error", "GPU 2 has no spare memory rows"),
        ("worn_cards", "warning", "GPU 3 waits for a reset"),
    ],
    "throttling": [("worn_cards", "warning", "GPU 0 is throttled: hardware slowdown, thermal (h")],
    "temperature": [("worn_cards", "warning", "GPU 0 is at 86 °C; its clocks go down at 87 °C")],
    "power-limit": [("worn_cards", "note", "GPU 2 is limited to 250 W of its usual 400 W")],
    "mixed-models": [("mixed_cards", "warning", "GPU 1: NVIDIA GeForce RTX 4090, 24564 MiB")],
    "mig": [("mig", "note", "3 MIG instances on GPU 0")],
    "pcie-link": [
        ("pcie_x4", "warning", "GPU 1 has a PCIe x4 link; the card could use x16"),
        ("pcie_x4", "warning", "GPU 1 runs its PCIe link at generation 3 under load"),
    ],
    "nvlink": [("worn_cards", "warning", "GPU 1: 11 NVLinks are up; on other GPUs, 12")],
    "peer-access": [("pcie_x4", "note", "1 of 1 pairs of GPUs have no peer-to-peer access")],
    "topology": [("two_sockets", "note", "4 of 6 pairs of GPUs are joined only by the link bet")],
    "matmul": [("worn_cards", "error", "cuda:1 (NVIDIA A100-SXM4-80GB) multiplies wrongly in bf")],
    "matmul-speed": [("worn_cards", "warning", "cuda:0 (NVIDIA A100-SXM4-80GB) is slow")],
    "host-copies": [("pcie_x4", "warning", "cuda:1 copies 2.9 GB/s")],
    "peer-copies": [
        ("peer_copies_wrong", "error", "deliver wrong values: 0→1"),
        ("peer_copies_wrong", "error", "fail: 1→0 (it never finished)"),
    ],
    "backends": [("old_card", "error", "torch has no NCCL")],
    "all-reduce": [
        ("peer_copies_wrong", "error", "hangs at all-reduce of 4096 bytes"),
        ("worn_cards", "error", "gives wrong values: 12 of 16777216"),
    ],
    "all-reduce-speed": [
        ("pcie_x4", "warning", "slow: 0.5 GB/s for 64 MiB"),
        ("two_sockets", "note", "A small all-reduce takes 900 µs"),
    ],
    "shared-memory": [("small_container", "warning", "/dev/shm has 63 MiB free of 64 MiB")],
    "open-files": [
        ("small_container", "warning", "Only 512 files"),
        ("no_gpu", "note", "Only 1024 files"),
    ],
    "cores": [
        ("small_container", "warning", "2 usable cores for 4 GPUs, 0.5 each"),
        ("mixed_cards", "note", "6 usable cores for 2 GPUs, 3 each"),
    ],
    "threads": [("mixed_cards", "warning", "OMP_NUM_THREADS=64, but this process may use 6")],
    "host-memory": [("two_sockets", "note", "58.6 GiB of host memory")],
    "task-memory": [("old_card", "note", "This kernel (4.19.0-27-amd64) does not count")],
    "locked-memory": [("small_container", "warning", "Only 8 MiB may be locked")],
    "disk-space": [
        ("small_container", "error", "700 MiB are free"),
        ("worn_cards", "warning", "5.9 GiB are free"),
        ("no_torch", "error", "cannot be written: PermissionError"),
        ("driver_hangs", "error", "does not answer (asking /data for its free space)"),
    ],
    "disk-speed": [("slurm_without_gpus", "warning", "takes 31 MB/s (nfs4)")],
    "network-disk": [("slurm_without_gpus", "note", "network file system (nfs4)")],
    "interface-names": [
        ("two_nodes_wrong_interface", "error", "NCCL_SOCKET_IFNAME=ib0"),
        ("two_nodes_wrong_interface", "error", "GLOO_SOCKET_IFNAME=eth9"),
    ],
    "host-name": [
        ("two_nodes_apart", "error", "node1 resolves to 127.0.1.1, which other nodes cannot"),
        ("small_container", "warning", "c0ffee123456, does not resolve"),
        ("nouveau", "warning", "resolves to the IPv6 address 2001:db8::5 first"),
    ],
    "interface-choice": [("two_nodes_apart", "warning", "own containers: br-1f2e3d")],
    "master": [
        ("two_nodes_apart", "error", "MASTER_ADDR=node0, port 29500: no answer from here"),
        ("two_nodes_wrong_interface", "error", "this host is the master, but the port is in use"),
    ],
    "clocks": [("two_nodes_apart", "warning", "41.2 s ahead of the master's")],
    "torchrun": [("slurm_without_gpus", "error", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not")],
    "local-ranks": [("two_nodes_apart", "error", "6 ranks on this node, 4 visible GPUs")],
    "slurm-gpus": [("slurm_without_gpus", "error", "SLURM job 881234 was given no GPU")],
    "slurm-cores": [("slurm_without_gpus", "warning", "SLURM_CPUS_PER_TASK=8, but this process")],
    "extensions": [("no_torch", "warning", "The engine acme of acme-muster 0.3 (acme.eng")],
}

#: Check → a host on which it looks and finds everything in order.
CONTENT: dict[str, list[str]] = {
    **{name: ["healthy_8gpu"] for name in CHECKS},
    "accelerator": ["healthy_8gpu", "rocm", "intel_xpu"],
    "counts": ["healthy_8gpu", "mig", "one_gpu_lost"],
    "driver": ["healthy_8gpu", "driver_mismatch", "rocm"],
    "device-order": ["healthy_8gpu", "one_gpu_lost"],
    "all-reduce": ["healthy_8gpu", "no_gpu"],
    "all-reduce-speed": ["healthy_8gpu", "no_gpu"],
    "host-name": ["healthy_8gpu", "no_gpu"],
    "locked-memory": ["infiniband"],
    "interface-names": ["two_nodes"],
    "interface-choice": ["two_nodes_plain"],
    "master": ["two_nodes", "two_nodes_plain"],
    "clocks": ["two_nodes"],
    "torchrun": ["two_nodes"],
    "local-ranks": ["two_nodes"],
    "slurm-gpus": ["slurm_with_gpus"],
    "slurm-cores": ["slurm_with_gpus"],
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_fires_on_one_host_and_is_content_with_another(check: str) -> None:
    assert FIRES[check], f"{check} has no host on which it fires"
    assert CONTENT[check], f"{check} has no host on which it is content"
    for name, severity, text in FIRES[check]:
        said = [(found.severity, found.what) for found in findings(name, check)]
        assert any(severity == got and text in what for got, what in said), (name, said)
    for name in CONTENT[check]:
        said = [(found.severity, found.what) for found in findings(name, check)]
        assert {severity for severity, _ in said} == {"ok"}, (name, said)


def test_the_tables_name_no_check_that_does_not_exist() -> None:
    assert set(FIRES) == set(CONTENT) == set(CHECKS)


def test_every_host_is_used() -> None:
    used = {name for rows in FIRES.values() for name, *_ in rows}
    used |= {name for names in CONTENT.values() for name in names}
    assert used == {path.stem for path in HOSTS.glob("*.json")}


@pytest.mark.parametrize("path", sorted(HOSTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_bad_finding_says_why_and_every_error_what_to_do(path: Path) -> None:
    for finding in run_checks(load_facts(path)):
        assert finding.check in CHECKS
        if finding.severity != "ok":
            assert finding.why, finding
            assert finding.what[-1] in ".:" or finding.what[-1].isalnum() or finding.what[-1] in ")"
        if finding.severity == "warning":
            assert finding.fix, finding


def test_checks_say_nothing_of_what_is_not_known() -> None:
    """An empty record: no check may take absence for trouble."""
    found = [one for one in run_checks(Facts()) if one.severity != "ok"]
    assert {(one.check, one.severity) for one in found} == {
        ("driver", "note"),
        ("torch-build", "note"),
    }


@pytest.mark.parametrize(
    ("name", "strict", "code"),
    [
        ("healthy_8gpu", True, 0),
        ("no_gpu", True, 0),
        ("mixed_cards", False, 0),
        ("mixed_cards", True, 1),
        ("pcie_x4", True, 1),
        ("driver_mismatch", False, 2),
        ("driver_mismatch", True, 2),
    ],
)
def test_exit_codes(name: str, strict: bool, code: int) -> None:
    assert exit_code(run_checks(host(name)), strict=strict) == code


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("peer_copies_wrong", {"NCCL_P2P_DISABLE": "1"}),
        ("duplicate_visible", {"CUDA_VISIBLE_DEVICES": "1"}),
        ("mixed_cards", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "6"}),
        (
            "two_nodes_apart",
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"},
        ),
        ("healthy_8gpu", {}),
        ("worn_cards", {}),
    ],
)
def test_settings_that_repair(name: str, settings: dict[str, str]) -> None:
    found: dict[str, str] = {}
    for finding in run_checks(host(name)):
        found |= finding.settings
    assert found == settings


def test_a_lost_gpu_is_left_out_by_uuid() -> None:
    (finding,) = findings("one_gpu_lost", "gpus-answer")
    uuids = finding.settings["CUDA_VISIBLE_DEVICES"].split(",")
    assert [uuid[4:12] for uuid in uuids] == ["00000000", "00000001", "00000003"]


@pytest.mark.parametrize(
    ("value", "corrected"),
    [
        ("2,2,0", "2,0"),
        ("0,9,1", "0,1"),
        ("9", None),
        ("GPU-00000002,GPU-ffff", "GPU-00000002"),
        ("GPU-00000002,0", "GPU-00000002"),
    ],
)
def test_a_wrong_list_of_devices_is_corrected(value: str, corrected: str | None) -> None:
    facts = dataclasses.replace(
        host("duplicate_visible"), environment={"CUDA_VISIBLE_DEVICES": value}
    )
    (finding,) = CHECKS["visible-devices"](facts)
    assert finding.severity == "error"
    assert finding.settings.get("CUDA_VISIBLE_DEVICES") == corrected


@pytest.mark.parametrize(
    ("driver", "build", "severity"),
    [
        ((12, 8), "12.8", "ok"),
        ((12, 8), "12.6", "ok"),
        ((13, 0), "12.8", "ok"),
        ((12, 2), "12.8", "note"),
        ((11, 8), "12.1", "error"),
        ((12, 8), "13.0", "error"),
        ((12, 8), "11.8", "ok"),
    ],
)
def test_driver_against_build(driver: tuple[int, int], build: str, severity: str) -> None:
    facts = host("healthy_8gpu")
    facts = dataclasses.replace(
        facts,
        inventory=dataclasses.replace(facts.inventory, cuda_driver_version=driver),
        torch=dataclasses.replace(facts.torch, cuda_build=build),
    )
    (finding,) = CHECKS["torch-build"](facts)
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("capability", "arch_list", "is_good"),
    [
        ((8, 0), ("sm_80",), True),
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80",), False),
        ((9, 0), ("sm_80", "compute_80"), True),
        ((12, 0), ("sm_90a", "compute_90a"), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100",), True),
        ((6, 1), ("sm_75", "compute_75"), False),
        ((12, 1), ("sm_120",), True),
    ],
)
def test_what_kernels_run_where(
    capability: tuple[int, int], arch_list: tuple[str, ...], is_good: bool
) -> None:
    assert is_supported(capability, arch_list) is is_good


def test_a_torch_for_a_newer_cuda_than_the_driver_offers() -> None:
    """Seen by what is installed, without starting torch, so that --quick says it too."""
    facts = dataclasses.replace(
        host("pcie_x4"), torch=TorchFacts(version="2.11.0+cu130", cuda_build="13.0")
    )
    (found,) = CHECKS["torch-build"](facts)
    assert found.severity == "error"
    assert "built for CUDA 13.0, but the driver 570.86.15 offers CUDA 12.8" in found.what
    assert "at least 580.65.06" in found.fix
    assert "whl/cu126" in found.fix


def test_an_idle_gpu_may_lower_its_link() -> None:
    """Generation 1 of a sleeping card says nothing; generation 1 at work does."""
    facts = host("driver_mismatch")
    assert {gpu.pcie_generation for gpu in facts.health} == {1}
    assert [one.severity for one in CHECKS["pcie-link"](facts)] == ["ok"]
    awake = [dataclasses.replace(gpu, performance_state=0) for gpu in facts.health]
    facts = dataclasses.replace(facts, health=tuple(awake))
    assert [one.severity for one in CHECKS["pcie-link"](facts)] == ["warning"] * 4


def test_the_kernel_knows_the_width_of_a_card_that_the_driver_does_not() -> None:
    facts = host("pcie_x4")
    narrow = [dataclasses.replace(gpu, pcie_width_max=gpu.pcie_width) for gpu in facts.health]
    facts = dataclasses.replace(facts, health=tuple(narrow), loaded=())
    (finding,) = CHECKS["pcie-link"](facts)
    assert "GPU 1 has a PCIe x4 link; the card could use x16" in finding.what


def test_a_slow_one_among_equals_is_named_once() -> None:
    facts = host("healthy_8gpu")
    assert facts.matmuls is not None
    rates = tuple(
        dataclasses.replace(rate, tflops=(rate.tflops or 0) * 0.8) if rate.device == 5 else rate
        for rate in facts.matmuls.rates
    )
    facts = dataclasses.replace(facts, matmuls=dataclasses.replace(facts.matmuls, rates=rates))
    (finding,) = CHECKS["matmul-speed"](facts)
    assert finding.severity == "warning"
    assert "cuda:5" in finding.what


def test_an_error_of_a_product_that_is_not_a_number_is_an_error() -> None:
    facts = host("healthy_8gpu")
    assert facts.matmuls is not None
    rates = (dataclasses.replace(facts.matmuls.rates[0], error=float("nan")),)
    facts = dataclasses.replace(facts, matmuls=dataclasses.replace(facts.matmuls, rates=rates))
    assert [one.severity for one in CHECKS["matmul"](facts)] == ["error"]


def test_bandwidth_with_a_repair_is_not_held_against_links_it_does_not_use() -> None:
    facts = host("healthy_8gpu")
    assert facts.all_reduce is not None
    (good,) = facts.all_reduce.tries
    bad = ReduceTry(run=Run(status="failed", error="unhandled system error"))
    slow = dataclasses.replace(
        good,
        settings={"NCCL_P2P_DISABLE": "1"},
        sizes=(good.sizes[0], dataclasses.replace(good.sizes[1], seconds=0.012)),
    )
    for tries, severities in (((slow,), ["ok"]), ((bad, slow), ["ok"])):
        reduce = dataclasses.replace(facts.all_reduce, tries=tries)
        told = CHECKS["all-reduce-speed"](dataclasses.replace(facts, all_reduce=reduce))
        assert [one.severity for one in told] == severities
    plain = dataclasses.replace(slow, settings={})
    reduce = dataclasses.replace(facts.all_reduce, tries=(plain,))
    told = CHECKS["all-reduce-speed"](dataclasses.replace(facts, all_reduce=reduce))
    assert [one.severity for one in told] == ["warning"]


@pytest.mark.parametrize("status", ["hung", "failed", "skipped"])
def test_a_probe_that_did_not_end_is_told(status: str) -> None:
    facts = host("healthy_8gpu")
    run = Run(status=status, seconds=20.0, at="3-4", error="why it was so")  # type: ignore[arg-type]
    expected = "note" if status == "skipped" else "error"
    for check, field in (
        ("matmul", "matmuls"),
        ("host-copies", "host_copies"),
        ("peer-copies", "peer_copies"),
    ):
        part = dataclasses.replace(getattr(facts, field), run=run)
        told = list(CHECKS[check](dataclasses.replace(facts, **{field: part})))
        assert expected in {one.severity for one in told}, check
        assert any("hung at 3-4" in one.what for one in told) == (status == "hung")


@pytest.mark.parametrize("name", ["healthy_8gpu", "slurm_without_gpus"])
def test_nothing_is_blamed_for_the_time_that_the_doctor_was_given(name: str) -> None:
    """On a slow machine `--time-limit 6` said that the disk does not answer."""
    facts = host(name)
    run = Run(status="skipped", seconds=2.0, at="listing the GPUs", error="the time was over")
    assert facts.disk is not None
    parts: dict[str, dict[str, Any]] = {
        "driver": {"driver": run},
        "disk-space": {"disk": DiskFacts(path="/runs", run=run)},
        "torch-build": {"torch": dataclasses.replace(facts.torch, run=run)},
    }
    for check, part in parts.items():
        told = list(CHECKS[check](dataclasses.replace(facts, is_quick=False, **part)))
        assert [one.severity for one in told if one.severity != "ok"] == ["note"], check
        assert "was not examined: the time was over." in told[0].what
    known = dataclasses.replace(facts.disk, run=run)
    told = list(CHECKS["disk-space"](dataclasses.replace(facts, disk=known)))
    assert [one.severity for one in told] == ["note", "ok"], "what it had found counts"


#: How an import of torch ended, after how long, and what is said of it.
IMPORTS = [
    ("skipped", 2.0, "note", "The start of torch was not examined: the time was over."),
    ("skipped", 8.0, "warning", "The start of torch 2.8.0+cu128 was not examined: the time was"),
    ("hung", 30.0, "error", "torch 2.8.0+cu128 was still importing torch after 30 s."),
]


@pytest.mark.parametrize(("status", "seconds", "severity", "says"), IMPORTS)
def test_an_import_of_torch_that_may_hang_is_told(
    status: Any, seconds: float, severity: str, says: str
) -> None:
    """With `--time-limit 10` it was a note beside a healthy machine; of a torch that does not say
    its version, that it is not installed, or to be installed again."""
    facts = host("healthy_8gpu")
    run = Run(status=status, seconds=seconds, at="importing torch")
    if status == "skipped":
        run = dataclasses.replace(run, error="the time was over")
    for version in (facts.torch.version, None):
        torch = dataclasses.replace(facts.torch, run=run, version=version)
        told, *_ = CHECKS["torch-build"](dataclasses.replace(facts, is_quick=False, torch=torch))
        assert told.severity == severity and told.fix
        assert told.what.startswith(says if version else says.replace(" 2.8.0+cu128", ""))


@pytest.mark.parametrize("name", ["healthy_8gpu", "slurm_without_gpus"])
def test_a_driver_that_could_not_be_read_is_an_error(name: str) -> None:
    """A probe that died was "No GPU here", and the machine healthy."""
    run = Run(status="failed", at="listing the GPUs", error="ended by signal 11")
    (told,) = CHECKS["driver"](dataclasses.replace(host(name), driver=run))
    assert told.severity == "error" and told.fix
    assert "could not be read at listing the GPUs: ended by signal 11" in told.what


def test_many_bad_pairs_are_not_all_listed() -> None:
    facts = host("healthy_8gpu")
    assert facts.peer_copies is not None
    bad = tuple(PeerCopy(source=0, target=t, is_right=False) for t in range(1, 9))
    copies = dataclasses.replace(facts.peer_copies, copies=bad)
    (finding,) = CHECKS["peer-copies"](dataclasses.replace(facts, peer_copies=copies))
    assert "and 2 more" in finding.what


def test_a_slow_pair_among_equals_is_named() -> None:
    facts = host("healthy_8gpu")
    assert facts.peer_copies is not None
    copies = tuple(
        dataclasses.replace(copy, gb_s=(copy.gb_s or 0) * (0.3 if copy.source == 4 else 1))
        for copy in facts.peer_copies.copies
    )
    part = dataclasses.replace(facts.peer_copies, copies=copies)
    (finding,) = CHECKS["peer-copies"](dataclasses.replace(facts, peer_copies=part))
    assert finding.severity == "warning"
    assert "4→0 112, 4→1 112" in finding.what


def test_slow_pairs_over_a_slow_path_are_no_trouble() -> None:
    """Between sockets copies are slower by nature."""
    facts = host("two_sockets")
    assert facts.peer_copies is not None
    across = {(a, b) for a in (0, 1) for b in (2, 3)} | {(b, a) for a in (0, 1) for b in (2, 3)}
    copies = tuple(
        dataclasses.replace(copy, gb_s=6.0 if (copy.source, copy.target) in across else 22.0)
        for copy in facts.peer_copies.copies
    )
    part = dataclasses.replace(facts.peer_copies, copies=copies)
    told = CHECKS["peer-copies"](dataclasses.replace(facts, peer_copies=part))
    assert [one.severity for one in told] == ["ok"]


def test_advice_of_a_split_host_names_the_near_gpus() -> None:
    (finding,) = findings("two_sockets", "topology")
    assert "GPUs 0 and 1" in finding.fix
    part = dataclasses.replace(host("two_sockets"), environment={"CUDA_VISIBLE_DEVICES": "1,2,3"})
    (finding,) = CHECKS["topology"](part)
    assert "GPUs 2 and 3" in finding.fix


def test_one_gpu_is_not_one_gpus() -> None:
    facts = dataclasses.replace(
        host("two_sockets"), environment={"CUDA_VISIBLE_DEVICES": "1", "LOCAL_WORLD_SIZE": "1"}
    )
    (told,) = CHECKS["local-ranks"](facts)
    assert told.what == "1 rank on this node for 1 GPU."
    (told,) = CHECKS["cores"](facts)
    assert "for 1 GPU," in told.what


def test_hidden_gpus_do_not_count() -> None:
    """Trouble of a card that CUDA_VISIBLE_DEVICES hides is not this user's trouble."""
    facts = dataclasses.replace(host("worn_cards"), environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert [one.severity for one in CHECKS["ecc"](facts)] == ["ok"]
    facts = dataclasses.replace(
        facts, links=(PairLink(first=0, second=1, peer_read="not supported"),)
    )
    assert list(CHECKS["peer-access"](facts)) == []


def test_rates_of_links() -> None:
    """PCIe 4 x16 is 31.5 GB/s; an all-reduce of n ranks moves 2 (n - 1) / n of its bytes."""
    assert pcie_gb_s(4, 16) == pytest.approx(31.5, rel=1e-3)
    assert pcie_gb_s(3, 8) == pytest.approx(7.88, rel=1e-3)
    assert pcie_gb_s(None, 16) is None
    assert bus_gb_s(8 * 10**9, 2.0, 4) == pytest.approx(6.0)


def test_exit_code_of_findings() -> None:
    warning = Finding(severity="warning", what="slow", why="x")
    error = Finding(severity="error", what="broken", why="x")
    assert exit_code([], strict=True) == 0
    assert exit_code([ok("a"), Finding(severity="note", what="b")], strict=True) == 0
    assert exit_code([warning], strict=False) == 0
    assert exit_code([warning], strict=True) == 1
    assert exit_code([warning, error], strict=False) == 2


def test_mps_lets_programs_share_what_is_exclusive() -> None:
    whole = host("worn_cards")
    health = tuple(
        dataclasses.replace(gpu, compute_mode="exclusive process") for gpu in whole.health
    )
    alone = dataclasses.replace(whole, health=health)
    shared = dataclasses.replace(
        alone, inventory=dataclasses.replace(alone.inventory, has_mps=True)
    )
    check = CHECKS["compute-mode"]
    assert [finding.severity for finding in check(alone)] == ["note"]
    assert ["MPS runs here" in finding.what for finding in check(shared)] == [True]
