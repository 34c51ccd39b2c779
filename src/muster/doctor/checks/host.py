"""The host: shared memory, limits, cores, memory, the disk of the runs, and whether the variables
of SLURM and torchrun fit it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from muster.base.atomic_files import is_remote
from muster.base.shown_text import count, shown_mib
from muster.doctor.checks.speed import probe_trouble
from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, error, note, ok, visible_gpus, warning, working_gpus

_LEAST_SHM_MIB = 1024
_SHM_PER_GPU_MIB = 1024
_LEAST_FILES, _GOOD_FILES = 1024, 4096
_WANTED_FILES = 65536
_LEAST_CORES, _GOOD_CORES = 2, 4
_LEAST_FREE_MIB, _GOOD_FREE_MIB = 1024, 10 * 1024
_LEAST_WRITE_MB_S = 50.0
_SLOW_FSYNC_S = 0.1


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm holds the batches that data-loader workers hand over."""
    total_mib, free_mib = facts.host.shm_total_mib, facts.host.shm_free_mib
    if total_mib is None:
        return
    needed_mib = max(_LEAST_SHM_MIB, _SHM_PER_GPU_MIB * len(working_gpus(facts)))
    have_mib = total_mib if free_mib is None else free_mib
    if have_mib >= needed_mib:
        yield ok(f"/dev/shm has {shown_mib(have_mib)} free.")
        return
    yield warning(
        what=f"/dev/shm has {shown_mib(have_mib)} free of {shown_mib(total_mib)}; "
        f"{shown_mib(needed_mib)} would be enough here.",
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
        yield ok(f"{count(num_cores, 'CPU core')} for this process.")
        return
    each = num_cores / num_gpus
    if each >= _GOOD_CORES:
        yield ok(f"{num_cores} cores for {count(num_gpus, 'GPU')}, {each:.3g} each.")
        return
    in_slurm = "SLURM_JOB_ID" in facts.environment
    yield Finding(
        severity="warning" if each < _LEAST_CORES else "note",
        what=f"{num_cores} usable cores for {count(num_gpus, 'GPU')}, {each:.3g} each.",
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
        yield warning(
            what=f"OMP_NUM_THREADS={text}, but this process may use {facts.host.cpu_cores} cores.",
            why="Threads that compete for the cores make everything slower.",
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
        yield note(
            what=f"{shown_mib(have_mib)} of host memory are available; the GPUs have "
            f"{shown_mib(gpus_mib)}.",
            why="Loading and saving what fills the GPUs needs about as much on the host.",
            fix="Ask for more memory (--mem of SLURM, --memory of docker).",
        )
    else:
        yield ok(f"{shown_mib(have_mib)} of host memory are available.")


def task_memory(facts: Facts) -> Iterator[Finding]:
    """Where a control group is ours to divide, the kernel keeps ``--memory`` of tasks in it."""
    if facts.host.counts_own_limit is False:
        yield note(
            what=f"This kernel ({facts.host.kernel}) does not count for each control group how "
            "often its memory limit was reached (memory.events.local, since Linux 5.2).",
            why="So no worker gets a group of its own: --memory is kept by looking at the worker's "
            "processes, and a task can be above its limit for a moment.",
            fix="A kernel of 5.2 or newer keeps the limit itself.",
        )
    elif facts.host.counts_own_limit:
        yield ok("The kernel can keep --memory where a control group is handed to the run.")


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """With InfiniBand, memory may be locked."""
    if not facts.host.infiniband:
        return
    limit_mib = facts.host.locked_memory_mib
    if limit_mib is not None and limit_mib < 1024:
        yield warning(
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
        at = f" ({disk.run.at})" if disk.run.at else ""
        yield error(
            what=f"The disk of {disk.path} does not answer{at}.",
            why="A run there would hang.",
            fix="Look at the network file system's server, or choose another --run-dir.",
        )
        return
    if disk.run.status == "skipped":
        yield from probe_trouble(disk.run, f"The disk of {disk.path}")
    if disk.is_writable is False:
        yield error(
            what=f"{disk.path} cannot be written: {disk.run.error}",
            why="No run can be stored there.",
            fix="Choose another place with --run-dir.",
        )
    elif disk.run.status == "failed":
        yield from probe_trouble(disk.run, f"The disk of {disk.path}")
    elif disk.free_mib is not None and disk.free_mib < _GOOD_FREE_MIB:
        yield Finding(
            severity="error" if disk.free_mib < _LEAST_FREE_MIB else "warning",
            what=f"{shown_mib(disk.free_mib)} are free for runs at {disk.path}.",
            why="Checkpoints fill that quickly, and a run whose disk is full stops.",
            fix="Free space, or choose another place with --run-dir.",
        )
    elif disk.free_mib is not None:
        yield ok(f"{shown_mib(disk.free_mib)} are free for runs.")


def disk_speed(facts: Facts) -> Iterator[Finding]:
    """Checkpoints are written in reasonable time."""
    disk = facts.disk
    if disk is None or disk.write_mb_s is None or disk.fsync_s is None:
        return
    if disk.write_mb_s < _LEAST_WRITE_MB_S:
        yield warning(
            what=f"{disk.path} takes {disk.write_mb_s:.0f} MB/s ({disk.file_system}).",
            why=f"A checkpoint of 1 GB takes {1000 / disk.write_mb_s:.0f} s there.",
            fix="Choose a local disk with --run-dir, or save less often.",
        )
    elif disk.fsync_s > _SLOW_FSYNC_S:
        yield note(
            what=f"One synced write to {disk.path} takes {disk.fsync_s * 1e3:.0f} ms.",
            why="The records of many short tasks wait for such writes.",
            fix="MUSTER_LEDGER_DIR names a local folder for the ledger.",
        )
    else:
        yield ok(
            f"Runs are written with {disk.write_mb_s:.0f} MB/s, {disk.fsync_s * 1e3:.1f} ms "
            "per synced line."
        )


def network_disk(facts: Facts) -> Iterator[Finding]:
    """The runs go to a local disk; a note where they do not."""
    disk = facts.disk
    if disk is None or disk.file_system is None:
        return
    if is_remote(disk.file_system):
        yield note(
            what=f"{disk.path} is on a network file system ({disk.file_system}).",
            why="Muster then keeps ledgers (SQLite) on a local disk and copies them by itself.",
        )
    else:
        yield ok(f"Runs are on a local file system ({disk.file_system}).")


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM_GPUS = (
    "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK", "SLURM_JOB_GRES",
)  # fmt: skip


def torchrun_variables(facts: Facts) -> Iterator[Finding]:
    """The variables a launcher sets for each rank are all there, and are numbers that fit."""
    env = facts.environment
    given = [name for name in _TORCHRUN if name in env]
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return  # MASTER_ADDR alone is harmless
    missing = [name for name in _TORCHRUN if name not in env]
    problem = _bounds(env)
    if missing:
        yield error(
            what=f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not.",
            why="A program takes itself for a rank of a gang and waits for ranks that never come.",
            fix="Start with `muster run` or torchrun; to run alone: unset " + " ".join(given),
            commands=(f"unset {' '.join(given)}",),
        )
    elif problem is not None:
        yield error(
            what=f"The variables of a launcher contradict each other: {problem}.",
            why="The gang cannot form.",
            fix=f"Start with `muster run` or torchrun; to run alone: unset {' '.join(given)}",
            commands=(f"unset {' '.join(given)}",),
        )
    else:
        yield ok(f"Rank {env['RANK']} of {env['WORLD_SIZE']}, set by a launcher.")


def _bounds(env: Mapping[str, str]) -> str | None:
    values: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = env.get(name)
        if text is None:
            continue
        if not text.isdigit():
            return f"{name}={text} is not a whole number"
        values[name] = int(text)
    for name, limit in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "WORLD_SIZE"),
    ):
        if name in values and limit in values and values[name] >= values[limit]:
            return f"{name}={values[name]} is not below {limit}={values[limit]}"
    if values.get("LOCAL_WORLD_SIZE", 0) > values.get("WORLD_SIZE", 1 << 30):
        return "LOCAL_WORLD_SIZE is above WORLD_SIZE"
    if not 0 < values.get("MASTER_PORT", 1) < 1 << 16:
        return f"MASTER_PORT={values['MASTER_PORT']} is not a port"
    return None


def local_ranks(facts: Facts) -> Iterator[Finding]:
    """There are not more ranks on this node than GPUs."""
    text = facts.environment.get("LOCAL_WORLD_SIZE") or facts.environment.get(
        "SLURM_NTASKS_PER_NODE", ""
    )
    num_gpus = len(visible_gpus(facts))
    if not text.isdigit() or not num_gpus:
        return
    # SLURM may have bound one GPU to each task, which then sees only its own.
    if int(text) > num_gpus and facts.environment.get("SLURM_GPUS_PER_TASK") is None:
        yield error(
            what=f"{text} ranks on this node, {count(num_gpus, 'visible GPU')}.",
            why="Where ranks share a GPU, NCCL refuses with 'Duplicate GPU detected'; otherwise "
            "the last ranks find no GPU.",
            fix=f"Start {count(num_gpus, 'rank')} per node.",
        )
    else:
        yield ok(f"{count(int(text), 'rank')} on this node for {count(num_gpus, 'GPU')}.")


def slurm_gpus(facts: Facts) -> Iterator[Finding]:
    """A SLURM job on a node with GPUs has asked for them."""
    env = facts.environment
    if "SLURM_JOB_ID" not in env:
        return
    asked = next((env[name] for name in _SLURM_GPUS if env.get(name)), None)
    has_cards = any(card.vendor == "nvidia" for card in facts.host.pci_gpus)
    hidden = env.get("CUDA_VISIBLE_DEVICES", "x") in ("", "NoDevFiles")
    if asked is not None:
        yield ok(f"SLURM job {env['SLURM_JOB_ID']} with GPUs ({asked}).")
    elif hidden or (has_cards and not facts.inventory.devices):
        yield error(
            what=f"SLURM job {env['SLURM_JOB_ID']} was given no GPU.",
            why="Programs find none and compute on the CPU of a node that was paid for.",
            fix="Submit with --gres=gpu:N or --gpus-per-node=N.",
        )
    elif facts.inventory.devices:
        yield warning(
            what=f"SLURM job {env['SLURM_JOB_ID']} asked for no GPU and sees "
            f"{len(facts.inventory.devices)}.",
            why="SLURM does not keep them apart here: they may be somebody else's.",
            fix="Submit with --gres=gpu:N.",
        )
    else:
        yield ok(f"SLURM job {env['SLURM_JOB_ID']} on a node without GPUs.")


def slurm_cores(facts: Facts) -> Iterator[Finding]:
    """This process may use the cores that SLURM promised."""
    text = facts.environment.get("SLURM_CPUS_PER_TASK", "")
    if "SLURM_JOB_ID" not in facts.environment or not text.isdigit():
        return
    if facts.host.cpu_cores < int(text):
        yield warning(
            what=f"SLURM_CPUS_PER_TASK={text}, but this process may use {facts.host.cpu_cores}.",
            why="Since SLURM 22.05 srun does not take over sbatch's --cpus-per-task, so a step "
            "gets one core.",
            fix=f"srun --cpus-per-task={text}, or export SRUN_CPUS_PER_TASK={text}",
            settings={"SRUN_CPUS_PER_TASK": text},
        )
    else:
        yield ok(f"{facts.host.cpu_cores} cores, as asked of SLURM.")


def extensions(facts: Facts) -> Iterator[Finding]:
    """What installed packages add to muster can be imported."""
    packages = dict.fromkeys((one.package, one.version) for one in facts.extensions)
    for package, version in packages:
        here = [one for one in facts.extensions if (one.package, one.version) == (package, version)]
        for one in here:
            if one.problem:
                yield warning(
                    what=f"The {one.kind} {one.name} of {package} {version} ({one.place}) cannot "
                    f"be used: {one.problem}.".replace("..", "."),
                    why="A command that names it fails; the others work.",
                    fix=f"Reinstall or repair {package}, or uninstall it.",
                )
            elif one.untried:
                yield note(
                    what=f"The {one.kind} {one.name} of {package} {version} was not imported: "
                    f"{one.untried}.",
                    fix="Give more time with --time-limit.",
                )
        good = ", ".join(
            f"{one.kind} {one.name}" for one in here if not one.problem and not one.untried
        )
        if good:
            yield ok(f"{package} {version} adds: {good}.")
