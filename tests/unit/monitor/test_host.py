"""A host from its files. The figures are worked out by hand from the fields' meaning."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from muster.monitor.host import HostReader, HostUsage, cpu_ticks

STAT = """\
cpu  400 0 200 1000 400 0 0 0 0 0
cpu0 100 0 50 800 50 0 0 0 0 0
cpu1 300 0 150 200 350 0 0 0 0 0
intr 12345 0 0
"""
LATER = """\
cpu  500 0 300 1100 500 0 0 0 0 0
cpu0 150 0 100 850 100 0 0 0 0 0
cpu1 300 0 150 250 400 0 0 0 0 0
"""
DISKS = """\
   8       0 sda 10 0 2048 0 20 0 4096 0 0 0 0
   8       1 sda1 10 0 2048 0 20 0 4096 0 0 0 0
   7       0 loop0 10 0 999999 0 0 0 0 0 0 0 0
"""
DISKS_LATER = DISKS.replace("sda 10 0 2048 0 20 0 4096", "sda 10 0 6144 0 20 0 24576")
NETWORK = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 9999999 1 0 0 0 0 0 0 9999999 1 0 0 0 0 0 0
  eth0: 1048576 1 0 0 0 0 0 0 2097152 1 0 0 0 0 0 0
docker0:5555555 1 0 0 0 0 0 0 5555555 1 0 0 0 0 0 0
"""
NETWORK_LATER = NETWORK.replace("eth0: 1048576", "eth0: 5242880").replace("2097152", "3145728")
MEMORY = "".join(
    f"{name}: {kib} kB\n"
    for name, kib in {
        "MemTotal": 8388608, "MemFree": 100, "MemAvailable": 6291456, "Buffers": 0, "Cached": 0,
        "Shmem": 0, "Active": 0, "Inactive": 0, "Slab": 0,
    }.items()
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "sys/block/sda").mkdir(parents=True)
    (tmp_path / "sys/block/loop0").mkdir()
    (tmp_path / "sys/class/net/eth0/device").mkdir(parents=True)
    (tmp_path / "sys/class/net/docker0").mkdir()
    (tmp_path / "sys/class/net/lo").mkdir()
    write(tmp_path, STAT, DISKS, NETWORK)
    (tmp_path / "proc/meminfo").write_text(MEMORY)
    return tmp_path


def write(root: Path, stat: str, disks: str, network: str) -> None:
    (root / "proc/stat").write_text(stat)
    (root / "proc/diskstats").write_text(disks)
    (root / "proc/net/dev").write_text(network)


def test_rates_need_two_readings(root: Path) -> None:
    reader = HostReader(root, cores={0, 1})
    first = reader.read(10.0)
    assert first == HostUsage(memory_used_mib=2048, memory_total_mib=8192)
    write(root, LATER, DISKS_LATER, NETWORK_LATER)
    second = reader.read(12.0)
    # Both cores: 100 of 300 ticks busy; waiting for a disk is idle.
    assert second.cpu_percent == pytest.approx(100 * 100 / 300)
    # 4096 and 20480 sectors of 512 bytes in 2 s; the partition and the loop do not count again.
    assert (second.disk_read_mib_s, second.disk_write_mib_s) == (1.0, 5.0)
    # 4 MiB in and 1 MiB out in 2 s on the card; a bridge and the loop are not added.
    assert (second.network_receive_mib_s, second.network_send_mib_s) == (2.0, 0.5)


def test_only_the_cores_that_may_be_used_count(root: Path) -> None:
    reader = HostReader(root, cores={0})
    reader.read(10.0)
    write(root, LATER, DISKS, NETWORK)
    assert reader.read(11.0).cpu_percent == pytest.approx(100 * 100 / 200)


def test_counters_that_go_back_are_no_negative_rate(root: Path) -> None:
    reader = HostReader(root, cores={0, 1})
    write(root, LATER, DISKS_LATER, NETWORK_LATER)
    reader.read(10.0)
    write(root, STAT, DISKS, NETWORK)
    found = reader.read(11.0)
    assert found.cpu_percent is None
    assert (found.disk_read_mib_s, found.network_send_mib_s) == (0.0, 0.0)


def test_without_proc_nothing_is_known_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "nowhere"))
    reader = HostReader(tmp_path / "nowhere")
    assert reader.read(1.0) == reader.read(2.0) == HostUsage()


def test_a_core_that_is_switched_off_is_not_counted_as_its_neighbour(root: Path) -> None:
    stat = root / "proc/stat"
    stat.write_text("cpu  6 6 6 6\ncpu0 1 2 3 4\ncpu2 5 4 3 2\n")
    assert cpu_ticks(stat, {0}) == (6, 10)
    assert cpu_ticks(stat, {2}) == (12, 14)
    assert cpu_ticks(stat, {1}) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_this_very_host_agrees_with_the_system() -> None:
    reader = HostReader()
    reader.read(0.0)
    found = reader.read(1.0)
    total_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    assert found.memory_total_mib == pytest.approx(total_mib, abs=1)
    assert found.memory_used_mib is not None
    assert 0 < found.memory_used_mib < found.memory_total_mib
