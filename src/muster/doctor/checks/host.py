"""The host: shared memory, limits, cores, memory, and the disk of the runs."""

from __future__ import annotations

from collections.abc import Iterator

from muster.doctor.checks.speed import probe_trouble
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, ok
from muster.doctor.machine import working_gpus

_LEAST_SHM_MIB = 1024
_SHM_PER_GPU_MIB = 1024
_LEAST_FILES, _GOOD_FILES = 1024, 4096
_WANTED_FILES = 65536
_LEAST_CORES, _GOOD_CORES = 2, 4
_LEAST_FREE_MIB, _GOOD_FREE_MIB = 1024, 10 * 1024
_LEAST_WRITE_MB_S = 50.0
_SLOW_FSYNC_S = 0.1
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p")


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm holds the batches that data-loader workers hand over."""
    total_mib, free_mib = facts.host.shm_total_mib, facts.host.shm_free_mib
    if total_mib is None:
        return
    needed_mib = max(_LEAST_SHM_MIB, _SHM_PER_GPU_MIB * len(working_gpus(facts)))
    have_mib = total_mib if free_mib is None else free_mib
    if have_mib >= needed_mib:
        yield ok(f"/dev/shm has {have_mib} MiB free.")
        return
    yield Finding(
        severity="warning",
        what=f"/dev/shm has {have_mib} MiB free of {total_mib} MiB; {needed_mib} MiB are "
        "wise here.",
        why="Workers of data loaders and NCCL hand data over there. When it is full they die with "
        "'Bus error' or 'insufficient shared memory'.",
        fix="docker run --ipc=host, or --shm-size=16g; in Kubernetes an emptyDir of medium Memory "
        "at /dev/shm; elsewhere mount -o remount,size=16G /dev/shm. Without rights for that: "
        "--num-workers 0.",
        # NCCL has another way between processes; a data loader has none.
        settings={"NCCL_SHM_DISABLE": "1"} if have_mib < 64 and working_gpus(facts) else {},
    )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Enough files may be open: each tensor from a data-loader worker is one."""
    soft, hard = facts.host.open_files_soft, facts.host.open_files_hard
    if soft is None:
        return
    if soft >= _GOOD_FILES:
        yield ok(f"{soft} files may be open.")
        return
    wanted = _WANTED_FILES if hard is None else min(hard, _WANTED_FILES)
    yield Finding(
        severity="warning" if soft < _LEAST_FILES else "note",
        what=f"Only {soft} files may be open at a time.",
        why="Data loaders with many workers fail with 'Too many open files'.",
        fix=f"ulimit -n {wanted}" + ("" if wanted >= _GOOD_FILES else " is the most allowed here"),
        commands=(f"ulimit -n {wanted}",) if wanted > soft else (),
    )


def cores(facts: Facts) -> Iterator[Finding]:
    """Each GPU has cores to feed it."""
    num_cores, num_gpus = facts.host.cpu_cores, len(working_gpus(facts))
    if not num_gpus:
        yield ok(f"{num_cores} CPU core{'s' if num_cores > 1 else ''} for this process.")
        return
    each = num_cores / num_gpus
    if each >= _GOOD_CORES:
        yield ok(f"{num_cores} cores for {num_gpus} GPUs, {each:.3g} each.")
        return
    in_slurm = "SLURM_JOB_ID" in facts.environment
    yield Finding(
        severity="warning" if each < _LEAST_CORES else "note",
        what=f"{num_cores} usable cores for {num_gpus} GPU{'s' if num_gpus > 1 else ''}, "
        f"{each:.3g} each.",
        why="One core drives a GPU, others load its data: with fewer than "
        f"{_GOOD_CORES} a GPU often waits.",
        fix="Ask SLURM for more with --cpus-per-task or --cpus-per-gpu."
        if in_slurm
        else "Give the container or the job more cores; prepare data beforehand.",
    )


def threads(facts: Facts) -> Iterator[Finding]:
    """OMP_NUM_THREADS is not more than there are cores."""
    text = facts.environment.get("OMP_NUM_THREADS", "")
    if not text.isdigit():
        return
    if int(text) > facts.host.cpu_cores:
        yield Finding(
            severity="warning",
            what=f"OMP_NUM_THREADS={text}, but this process may use {facts.host.cpu_cores} cores.",
            why="Threads that wait for each other's core make everything slower.",
            fix="unset OMP_NUM_THREADS; muster gives each rank its share of the cores.",
            settings={"OMP_NUM_THREADS": str(facts.host.cpu_cores)},
        )
    else:
        yield ok(f"OMP_NUM_THREADS={text}, with {facts.host.cpu_cores} cores.")


def host_memory(facts: Facts) -> Iterator[Finding]:
    """The host has as much memory as its GPUs, or checkpoints and loaders may not fit."""
    have_mib = facts.host.memory_available_mib
    gpus_mib = sum(gpu.memory_total_mib or 0 for gpu in working_gpus(facts))
    if have_mib is None:
        return
    if have_mib < gpus_mib / 2:
        yield Finding(
            severity="note",
            what=f"{have_mib} MiB of host memory are available, the GPUs have {gpus_mib} MiB.",
            why="Loading and saving what fills the GPUs needs about as much on the host.",
            fix="Ask for more memory (--mem of SLURM, --memory of docker).",
        )
    else:
        yield ok(f"{have_mib} MiB of host memory are available.")


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """With InfiniBand, memory may be locked."""
    if not facts.host.infiniband:
        return
    limit_mib = facts.host.locked_memory_mib
    if limit_mib is not None and limit_mib < 1024:
        yield Finding(
            severity="warning",
            what=f"Only {limit_mib} MiB may be locked, and there is InfiniBand "
            f"({', '.join(facts.host.infiniband)}).",
            why="NCCL fails to register its buffers ('ibv_reg_mr failed').",
            fix="ulimit -l unlimited (docker: --ulimit memlock=-1), or do without: "
            "NCCL_IB_DISABLE=1, which is slower.",
        )
    else:
        yield ok("Memory may be locked, as InfiniBand needs.")


def disk_space(facts: Facts) -> Iterator[Finding]:
    """The folder of the runs can be written and has space."""
    disk = facts.disk
    if disk is None:
        return
    if disk.run.status == "hung":
        yield Finding(
            severity="error",
            what=f"The disk of {disk.path} does not answer ({disk.run.at}).",
            why="A run there would hang.",
            fix="Look at the network file system's server, or choose another --run-dir.",
        )
    elif disk.is_writable is False:
        yield Finding(
            severity="error",
            what=f"{disk.path} cannot be written: {disk.run.error}",
            why="No run can be stored there.",
            fix="Choose another place with --run-dir.",
        )
    elif disk.run.status == "failed":
        yield from probe_trouble(disk.run, f"The disk of {disk.path}")
    elif disk.free_mib is not None and disk.free_mib < _GOOD_FREE_MIB:
        yield Finding(
            severity="error" if disk.free_mib < _LEAST_FREE_MIB else "warning",
            what=f"{disk.free_mib} MiB are free for runs at {disk.path}.",
            why="Checkpoints fill that quickly, and a run whose disk is full stops.",
            fix="Free space, or choose another place with --run-dir.",
        )
    elif disk.free_mib is not None:
        yield ok(f"{disk.free_mib >> 10} GiB are free for runs.")


def disk_speed(facts: Facts) -> Iterator[Finding]:
    """Checkpoints are written in reasonable time."""
    disk = facts.disk
    if disk is None or disk.write_mb_s is None or disk.fsync_s is None:
        return
    if disk.write_mb_s < _LEAST_WRITE_MB_S:
        yield Finding(
            severity="warning",
            what=f"{disk.path} takes {disk.write_mb_s:.0f} MB/s ({disk.file_system}).",
            why=f"A checkpoint of 1 GB takes {1000 / disk.write_mb_s:.0f} s there.",
            fix="Choose a local disk with --run-dir, or save less often.",
        )
    elif disk.fsync_s > _SLOW_FSYNC_S:
        yield Finding(
            severity="note",
            what=f"One synced write to {disk.path} takes {disk.fsync_s * 1e3:.0f} ms.",
            why="Records of many short tasks wait for it.",
            fix="MUSTER_LEDGER_DIR names a local folder for the ledger.",
        )
    else:
        yield ok(
            f"Runs are written with {disk.write_mb_s:.0f} MB/s, {disk.fsync_s * 1e3:.1f} ms "
            "per synced line."
        )


def network_disk(facts: Facts) -> Iterator[Finding]:
    """Where the runs go is a local disk, or is known not to be."""
    disk = facts.disk
    if disk is None or disk.file_system is None:
        return
    if is_network_file_system(disk.file_system):
        yield Finding(
            severity="note",
            what=f"{disk.path} is on a network file system ({disk.file_system}).",
            why="Ledgers (SQLite) are kept on a local disk then and copied, which muster does "
            "by itself.",
        )
    else:
        yield ok(f"Runs are on a local file system ({disk.file_system}).")


def is_network_file_system(kind: str | None) -> bool:
    """Whether a file system of this type lives on another host.

    >>> is_network_file_system("nfs4"), is_network_file_system("ext4")
    (True, False)
    """
    return kind is not None and kind.startswith(("fuse.", *_NETWORK_FILE_SYSTEMS))
