"""The options that only the commands which start a gang have, and the gang that they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from muster.api.options import GangOptions
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.cli.flags import ShownFlags, refuse_without_effect
from muster.cli.options import Part
from muster.cli.parse import Parsed
from muster.gang.topology import Meeting, read_meeting
from muster.slurm.request import JobRequest
from muster.slurm.script import gang_warning_s


@dataclass(frozen=True, kw_only=True)
class GangShownFlags(ShownFlags):
    """What is shown of ranks, and of a job."""

    all_ranks: bool = False
    """Show what every rank prints, not only rank 0."""
    no_wait: Annotated[bool, Flag(engines=("slurm",))] = False
    """SLURM: print the job's id and leave, instead of showing what rank 0 prints."""


def gang_groups(options: GangOptions, run_dir: str, *, may_leave: bool = True) -> dict[str, Any]:
    """``run_dir``: the help of that flag. ``may_leave``: for another place than this machine, and
    with work that is kept; without it nothing is planned, recorded or resumed."""
    of_run = ("executor", "run_dir", "allow_changed_code", "restart", "monitor_interval_s",
              "log_to")  # fmt: skip
    groups: dict[str, Any] = {
        "options": Part(
            of=options, without=() if may_leave else of_run, texts={"run_dir": run_dir}
        ),
        "shown": GangShownFlags if may_leave else Part(of=ShownFlags, without=("dry_run",)),
    }
    return {**groups, "slurm": JobRequest} if may_leave else groups


def gang_options(parsed: Parsed) -> GangOptions:
    """The options of the gang; UsageError where two of them contradict each other."""
    options = parsed.given("options")
    executor = options.get("executor", "local")
    refuse_without_effect(parsed, executor)
    default: GangOptions = parsed.groups["options"].of
    if options.get("min_nodes") and not options.get("max_restarts", default.max_restarts):
        raise UsageError(
            f"--min-nodes {options['min_nodes']} has no effect without restarts.",
            hint="add --max-restarts 3.",
        )
    if executor == "slurm":
        num_nodes = options.get("num_nodes", 1)
        made: GangOptions = parsed.make("options", num_nodes=1)
        num_gpus, num_cpus = _of_each_node(made, options.get("devices", ""))
        request = parsed.make(
            "slurm", num_nodes=num_nodes, gpus_per_node=num_gpus,
            warn_before_s=gang_warning_s(made.grace_s),
            cpus_per_node=parsed.given("slurm").get("cpus_per_node", num_cpus),
        )  # fmt: skip
        found: GangOptions = parsed.make("options", num_nodes=1, slurm=request)
        return found
    met = read_meeting() if options.get("num_nodes", 1) > 1 else Meeting()
    environment = {
        "node_rank": met.node_rank or 0,
        "master_addr": met.master_addr,
        "master_port": met.master_port,
    }
    there = {name: value for name, value in environment.items() if name not in options}
    here: GangOptions = parsed.make("options", **there)
    return here


def _of_each_node(options: GangOptions, devices: str) -> tuple[int, int | None]:
    """GPUs and cores that each node must give, for one rank each; ``devices`` as it was said."""
    words = devices.strip()
    if words.isdecimal() and int(words) > 0:
        return int(words), None
    if words == "cpu" or (words.startswith("cpu:") and words[4:].isdecimal()):
        return 0, int(words.partition(":")[2] or 1)
    chosen = options.gpu_ids or words
    if options.max_gpus is not None:
        chosen = f"at most {options.max_gpus} GPUs"
    if options.num_ranks is not None:
        chosen = f"--nproc-per-node {options.num_ranks}"
    raise UsageError(
        "With --on slurm the number of GPUs of each node must be said"
        + (f", not {chosen}: SLURM chooses which." if chosen else "."),
        hint="add --gpus 4, or --devices cpu:8 for ranks on the CPU.",
    )
