"""Variables of SLURM and torchrun: do they fit each other and this host?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, ok
from muster.doctor.machine import visible_gpus

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM_GPUS = (
    "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK", "SLURM_JOB_GRES",
)  # fmt: skip


def torchrun_variables(facts: Facts) -> Iterator[Finding]:
    """The variables a launcher sets for each rank are complete, numbers, and in their bounds."""
    env = facts.environment
    given = [name for name in _TORCHRUN if name in env]
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return  # MASTER_ADDR alone is harmless
    missing = [name for name in _TORCHRUN if name not in env]
    problem = _bounds(env)
    if missing:
        yield Finding(
            severity="error",
            what=f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set, "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not.",
            why="A program takes itself for a rank of a gang and waits for ranks that never come.",
            fix="Start with `muster run` or torchrun; to run alone: unset " + " ".join(given),
            commands=(f"unset {' '.join(given)}",),
        )
    elif problem is not None:
        yield Finding(
            severity="error",
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
        return f"MASTER_PORT={values['MASTER_PORT']} is no port"
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
        yield Finding(
            severity="error",
            what=f"{text} ranks on this node, {num_gpus} visible GPU{'s' if num_gpus > 1 else ''}.",
            why="Ranks that share a GPU: NCCL refuses with 'Duplicate GPU detected', or the last "
            "ranks find no GPU.",
            fix=f"Start {num_gpus} ranks per node.",
        )
    else:
        yield ok(f"{text} ranks on this node for {num_gpus} GPUs.")


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
        yield Finding(
            severity="error",
            what=f"SLURM job {env['SLURM_JOB_ID']} was given no GPU.",
            why="Programs find none and compute on the CPU, on a node that was paid for.",
            fix="Submit with --gres=gpu:N or --gpus-per-node=N.",
        )
    elif facts.inventory.devices:
        yield Finding(
            severity="warning",
            what=f"SLURM job {env['SLURM_JOB_ID']} asked for no GPU and sees "
            f"{len(facts.inventory.devices)}.",
            why="SLURM does not keep them apart here: they may be somebody else's.",
            fix="Submit with --gres=gpu:N.",
        )
    else:
        yield ok(f"SLURM job {env['SLURM_JOB_ID']} on a node without GPUs.")


def slurm_cores(facts: Facts) -> Iterator[Finding]:
    """The cores SLURM promised are the cores there are."""
    text = facts.environment.get("SLURM_CPUS_PER_TASK", "")
    if "SLURM_JOB_ID" not in facts.environment or not text.isdigit():
        return
    if facts.host.cpu_cores < int(text):
        yield Finding(
            severity="warning",
            what=f"SLURM_CPUS_PER_TASK={text}, but this process may use {facts.host.cpu_cores}.",
            why="Since SLURM 22.05 srun does not take --cpus-per-task from sbatch, and a step gets "
            "one core.",
            fix=f"srun --cpus-per-task={text}, or export SRUN_CPUS_PER_TASK={text}",
            settings={"SRUN_CPUS_PER_TASK": text},
        )
    else:
        yield ok(f"{facts.host.cpu_cores} cores, as asked of SLURM.")
