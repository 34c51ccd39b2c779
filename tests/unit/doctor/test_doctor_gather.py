"""The edges: the kernel's files, torch's files, the environment, the choice of devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from muster.base.atomic_files import file_system_of
from muster.base.errors import UsageError
from muster.devices.inventory import Holder, parse_devices
from muster.doctor.checks.host import network_disk
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import DiskFacts, Facts, NetworkFacts, load_facts
from muster.doctor.findings import num_nodes, wants_master
from muster.doctor.gather import choose_targets, relevant
from muster.doctor.gather_host import (
    cpu_quota,
    default_interface,
    gather_host,
    interfaces,
    is_own_address,
    pci_gpus,
    read_version_file,
    triton_lacks,
)
from muster.doctor.probes.host import existing

HOSTS = Path(__file__).parent / "hosts"


def write_card(folder: Path, vendor: str, kind: str, width: str, driver: str | None) -> None:
    folder.mkdir(parents=True)
    for name, text in (
        ("vendor", vendor),
        ("class", kind),
        ("current_link_width", width),
        ("max_link_width", "16"),
    ):
        (folder / name).write_text(f"{text}\n")
    if driver:
        (folder.parent.parent / driver).mkdir(exist_ok=True)
        (folder / "driver").symlink_to(folder.parent.parent / driver)


def test_cards_on_the_bus(tmp_path: Path) -> None:
    bus = tmp_path / "devices"
    write_card(bus / "0000:1a:00.0", "0x10de", "0x030200", "4", "nvidia")
    write_card(bus / "0000:00:02.0", "0x8086", "0x030000", "255", "i915")
    write_card(bus / "0000:40:00.0", "0x1002", "0x120000", "Unknown", None)
    write_card(bus / "0000:1a:00.1", "0x10de", "0x040300", "16", "snd_hda_intel")
    write_card(bus / "0000:01:00.0", "0x15b3", "0x020700", "16", "mlx5_core")
    seen = [
        (c.address, c.vendor, c.driver, c.is_compute, c.width, c.width_max) for c in pci_gpus(bus)
    ]
    assert seen == [
        ("0000:00:02.0", "intel", "i915", False, None, 16),
        ("0000:1a:00.0", "nvidia", "nvidia", True, 4, 16),
        ("0000:40:00.0", "amd", None, True, None, 16),
    ]
    assert pci_gpus(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("200000 100000", 2), ("50000 100000", 1), ("", None), ("x y", None)],
)
def test_a_containers_share_of_the_cores(text: str, cores: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == cores
    assert cpu_quota(tmp_path / "none") is None


def test_this_host_is_described() -> None:
    host = gather_host()
    assert host.cpu_cores >= 1
    assert host.name
    assert run_checks(Facts(host=host))


VERSION = """
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.8.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = 'ba56102387ef21a3b04b357e5b183d48f0afefc7'
hip: Optional[str] = None
xpu: Optional[str] = None
"""


def test_torchs_builds_are_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(VERSION)
    torch = read_version_file(tmp_path / "version.py")
    assert (torch.version, torch.cuda_build, torch.hip_build, torch.xpu_build) == (
        "2.8.0+cu128",
        "12.8",
        None,
        None,
    )
    (tmp_path / "version.py").write_text("__version__ = ")
    assert read_version_file(tmp_path / "version.py").version is None


def test_what_triton_compiles_with(tmp_path: Path) -> None:
    compiler = tmp_path / "gcc"
    assert "C compiler" in triton_lacks({"PATH": str(tmp_path)})
    compiler.touch(mode=0o755)
    assert "C compiler" not in triton_lacks({"PATH": str(tmp_path)})
    assert "C compiler" in triton_lacks({"PATH": str(tmp_path), "CC": "other-cc"})
    assert "C compiler" not in triton_lacks({"PATH": "/nowhere", "CC": str(compiler)})


def test_only_what_decides_a_run_is_recorded_and_no_secret() -> None:
    kept = relevant(
        {
            "NCCL_DEBUG": "INFO",
            "RANK": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_JWT": "ey",
            "HF_TOKEN": "hf_x",
            "NVIDIA_API_KEY": "nv",
            "HOME": "/home/ada",
            "CUDA_VISIBLE_DEVICES": "0",
        }
    )
    assert kept == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "INFO",
        "RANK": "0",
        "SLURM_JOB_ID": "7",
    }


def test_the_route_out(tmp_path: Path) -> None:
    table = tmp_path / "route"
    rows = [
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT",
        "wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0",
        "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0",
        "docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0",
    ]
    table.write_text("\n".join(rows))
    assert default_interface(table) == "eth0"
    table.write_text(rows[0])
    assert default_interface(table) is None
    assert default_interface(tmp_path / "none") is None


def test_the_interfaces_of_this_host() -> None:
    loopback = [one for one in interfaces() if one.is_loopback]
    assert [one.ipv4 for one in loopback] in ([], [("127.0.0.1",)])
    assert is_own_address(("127.0.1.1",), NetworkFacts())
    assert not is_own_address(("192.0.2.77",), NetworkFacts(interfaces=interfaces()))


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "4"}, 3),
        ({"SLURM_NNODES": "4"}, 4),
        ({"NNODES": "1:4"}, 1),
        ({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_how_many_nodes(environment: dict[str, str], nodes: int) -> None:
    assert num_nodes(environment) == nodes
    assert wants_master({**environment, "MASTER_ADDR": "node0"}) == (nodes > 1)
    assert not wants_master(environment)


def test_the_file_system_of_a_folder_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /home rw shared:1 - nfs4 server:/home rw\n"
        "3 1 0:6 / /home/ada/a\\040ü rw - tmpfs tmpfs rw\n"
    )
    assert file_system_of(Path("/home/ada/runs"), mounts) == "nfs4"
    assert file_system_of(Path("/homes/ada"), mounts) == "ext4"
    assert file_system_of(Path("/home/ada/a ü/runs"), mounts) == "tmpfs"
    assert file_system_of(Path("/x"), "") is None
    assert existing(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize("kind", ["nfs4", "wekafs", "fuse.sshfs"])
def test_the_doctor_calls_a_disk_remote_where_the_ledger_does(kind: str) -> None:
    found = list(network_disk(Facts(disk=DiskFacts(path="/runs", file_system=kind))))
    assert [one.severity for one in found] == ["note"]
    assert kind in found[0].what


def facts(name: str) -> Facts:
    return load_facts(HOSTS / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "request_", "kind", "devices"),
    [
        ("healthy_8gpu", "auto", "cuda", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("healthy_8gpu", "2", "cuda", (0, 1)),
        ("healthy_8gpu", "5,3", "cuda", (5, 3)),
        ("healthy_8gpu", "GPU-00000006,0", "cuda", (6, 0)),
        ("healthy_8gpu", "cpu:3", "cpu", (0, 1, 2)),
        ("mixed_cards", "auto", "cuda", (1,)),  # GPU 0 is in use
        ("mixed_cards", "2", "cuda", (1, 0)),
        ("no_gpu", "auto", "cpu", (0, 1)),
        ("apple", "auto", "mps", (0,)),
        ("rocm", "auto", "cuda", tuple(range(8))),
    ],
)
def test_what_is_measured(name: str, request_: str, kind: str, devices: tuple[int, ...]) -> None:
    targets = choose_targets(facts(name), parse_devices(request_))
    assert targets is not None
    assert (targets.kind, targets.devices) == (kind, devices)


@pytest.mark.parametrize(
    ("name", "request_", "says"),
    [
        ("healthy_8gpu", "9", "torch sees 8 devices"),
        ("healthy_8gpu", "0,8", "there is no device 8"),
        ("healthy_8gpu", "GPU-0000000,1", "there is no device GPU-0000000"),
        ("no_gpu", "1", "torch sees no GPU here"),
        ("no_gpu", "0,1", "torch sees no GPU here"),
    ],
)
def test_devices_that_do_not_exist(name: str, request_: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_targets(facts(name), parse_devices(request_))


def test_gpus_in_use_are_left_alone() -> None:
    busy = facts("healthy_8gpu")
    gpus = tuple(
        dataclasses.replace(gpu, memory_used_mib=9000, holders=(Holder(pid=9, used_mib=8900),))
        for gpu in busy.inventory.devices
    )
    busy = dataclasses.replace(busy, inventory=dataclasses.replace(busy.inventory, devices=gpus))
    assert choose_targets(busy, parse_devices("auto")) is None
