"""Limits of control groups, as files recorded on hosts have them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from muster.base.host_memory import HostMemory, MemoryLimit, host_memory_mib, memory_limit
from muster.monitor.host import HostReader

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712\n"
MEMINFO = "".join(
    f"{name}: {kib} kB\n"
    for name, kib in {
        "MemTotal": 64 << 20, "MemFree": 1 << 20, "MemAvailable": 32 << 20, "Buffers": 0,
        "Cached": 0, "Shmem": 0, "Active": 0, "Inactive": 0, "Slab": 0,
    }.items()
)  # fmt: skip


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    group = f"sys/fs/cgroup/{folder}"
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\n",
    }


def v1(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    group = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": f"{used}\n",
        f"{group}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}\n",
    }


def test_a_job_of_slurm_under_v2(tmp_path: Path) -> None:
    """The step has no limit of its own; the job above it has."""
    job = "system.slice/slurmstepd.scope/job_812"
    files = {
        "proc/self/cgroup": f"0::/{job}/step_0/user/task_0\n",
        **v2(f"{job}/step_0/user/task_0", "max", 3 * GIB),
        **v2(job, str(16 * GIB), 5 * GIB, cached=2 * GIB),
    }
    assert memory_limit(512 * 1024, write(tmp_path, files)) == MemoryLimit(16384, 3072)


def test_a_container_under_v2_whose_group_is_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", **v2("", str(8 * GIB), GIB)}
    assert memory_limit(64 * 1024, write(tmp_path, files)) == MemoryLimit(8192, 1024)


def test_a_container_under_v1_that_sees_the_path_of_the_host(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n0::/\n",
        **v1("", f"{4 * GIB}\n", 2 * GIB, cached=GIB),
    }
    assert memory_limit(64 * 1024, write(tmp_path, files)) == MemoryLimit(4096, 1024)


def test_no_limit_is_none(tmp_path: Path) -> None:
    one = {"proc/self/cgroup": "5:memory:/user\n", **v1("user", UNLIMITED_V1, GIB)}
    assert memory_limit(64 * 1024, write(tmp_path / "v1", one)) is None
    assert memory_limit(None, tmp_path / "v1") is None
    two = {"proc/self/cgroup": "0::/user\n", **v2("user", "max", GIB)}
    assert memory_limit(64 * 1024, write(tmp_path / "v2", two)) is None
    more = {"proc/self/cgroup": "0::/user\n", **v2("user", str(128 * GIB), GIB)}
    assert memory_limit(64 * 1024, write(tmp_path / "more", more)) is None
    assert memory_limit(64 * 1024, tmp_path / "elsewhere") is None


def test_monitor_and_doctor_show_what_the_job_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/job\n",
        **v2("job", str(16 * GIB), 5 * GIB, cached=2 * GIB),
    }
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(write(tmp_path, files) / "proc"))
    usage = HostReader(tmp_path, cores=()).read(0.0)
    assert (usage.memory_used_mib, usage.memory_total_mib) == (3072, 16384)
    assert host_memory_mib(tmp_path) == HostMemory(16384, 3072, 13312)
    write(tmp_path, {"proc/self/cgroup": "0::/none\n"})
    assert host_memory_mib(tmp_path) == HostMemory(65536, 32768, 32768)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "nowhere"))
    assert host_memory_mib(tmp_path) == HostMemory()
