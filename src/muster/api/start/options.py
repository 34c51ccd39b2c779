"""The options of a run as values: defaults, help and flags are said here and nowhere else.

A field's name, type, default and docstring are its keyword in Python and its flag on the command
line; ``Flag`` says what these cannot.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from muster.api.start.limits import LimitOptions
from muster.base.errors import UnknownNameError, UsageError
from muster.base.flags import (
    Alias,
    Flag,
    check_interval,
    check_least,
    parse_duration,
    parse_memory_mib,
)
from muster.farm.executors.cluster import CLUSTERS, ClusterRequest
from muster.gang.spec import Start
from muster.hosts.names import parse_hosts
from muster.slurm.request import JobRequest

_LOCAL = ("local",)
#: Where devices are this machine's: a cluster has a queue of its own.
_HERE = ("local", "inline")
_WITHOUT_END_S = 3650 * 86_400.0
_NO_SETUP = "--setup has no effect without --hosts or --on slurm."
_SETUP_HERE = "run the line in this terminal before muster."


def _count(text: str, flag: str) -> str:
    """A number of GPUs; -1 means all."""
    try:
        return "auto" if int(text) == -1 else str(int(text))
    except ValueError:
        raise UsageError(f"{flag} {text}: write a whole number.") from None


def _trackers(text: str, flag: str) -> tuple[str, ...]:
    from muster.api.trackers.tracker import read_trackers  # here: few runs have one

    return read_trackers(text, flag)


def _start(text: str, flag: str) -> Start | None:
    if text not in ("auto", "exec", "fork", "spawn"):
        raise UsageError(f"{flag} {text}: write auto, exec, fork or spawn.")
    return None if text == "auto" else text  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Which devices it runs on.

    ``is_chosen_anew``: this goes before what `muster devices` was asked for. It holds for one
    start, and no record has it.
    """

    devices: Annotated[
        str,
        Flag(
            metavar="auto|N|0,2|cpu:8",
            chooses="the devices",
            aliases=("gpus", Alias(name="num-gpus", read=_count),
                     Alias(name="world-size", read=_count)),
        ),
    ] = "auto"  # fmt: skip
    """auto: all free GPUs, else the CPU. Or how many GPUs, a list of GPUs, cpu, or cpu:8 for eight
    workers or ranks on the CPU."""
    gpu_ids: Annotated[str | None, Flag(metavar="0,2", chooses="the devices")] = None
    """Which GPUs, as a list: 0 is GPU 0. Instead of --devices."""
    max_gpus: Annotated[
        int | None, Flag(chooses="the devices", aliases=(Alias(name="no-multi-gpu", means=1),))
    ] = None
    """At most this many GPUs; the CPU where there is none. Instead of --devices."""
    force: bool = False
    """Use GPUs that other processes or other runs hold."""
    wait_s: Annotated[
        float,
        Flag(
            name="wait", metavar="TIME", read=parse_duration, alone=_WITHOUT_END_S, engines=_HERE,
            aliases=(Alias(name="no-wait", means=0.0),),
        ),
    ] = 0.0  # fmt: skip
    """Where too few GPUs are free, wait for them in this machine's queue instead of refusing:
    --wait without end, --wait=2h for two hours at most."""
    queue_priority: Annotated[int, Flag(engines=_HERE)] = 0
    """Its priority in the queue, which counts before all else: a negative number lets others go
    first, and a positive one must be allowed by the administrator."""
    is_chosen_anew: Annotated[bool, Flag(is_hidden=True)] = False

    @property
    def choice(self) -> dict[str, Any]:
        """How the command chooses devices."""
        return {"devices": self.devices, "gpu_ids": self.gpu_ids, "max_gpus": self.max_gpus}

    def choosing(self, devices: str, gpu_ids: str | None) -> Self:
        """The same options with another choice of devices."""
        return dataclasses.replace(self, devices=devices, gpu_ids=gpu_ids, max_gpus=None)

    def check_devices(self) -> None:
        if self.max_gpus is not None and self.max_gpus < 1:
            raise UsageError(
                f"--max-gpus {self.max_gpus} leaves no GPU.", hint="use --devices cpu for the CPU."
            )
        if not 0 <= self.wait_s < math.inf:
            raise UsageError(f"--wait={self.wait_s:g} is not a time.", hint="write --wait=2h.")
        if self.wait_s and self.force:
            raise UsageError(
                "--wait and --force contradict each other: --force takes GPUs that others hold.",
                hint="give one of them.",
            )
        if self.queue_priority and not self.wait_s:
            raise UsageError("--queue-priority has no effect without --wait.", hint="add --wait.")


@dataclass(frozen=True, kw_only=True)
class KeptOptions(LimitOptions):
    """Where a run is kept, what is recorded, and what becomes of the work that is there already."""

    run_dir: Annotated[Path | None, Flag(metavar="DIR", aliases=("save-dir",))] = None
    """The run folder. Default: runs/<name>-<hash of the plan>."""
    monitor_interval_s: Annotated[
        float, Flag(name="monitor-interval", metavar="TIME", read=parse_duration)
    ] = 5.0
    """How often GPUs and host are sampled into the run's monitor.csv; 0: never."""
    log_to: Annotated[
        tuple[str, ...], Flag(metavar="wandb,mlflow,trackio,tensorboard", read=_trackers)
    ] = ()
    """Trackers that get settings, metrics and results while it runs; see docs/trackers.md."""
    notify: Annotated[tuple[str, ...], Flag(metavar="command:…|webhook:URL|slack:env:NAME|…")] = ()
    """Who is told that it has ended, failed for the first time, stalled, paused or reached a limit:
    command:LINE, webhook:URL, slack:, discord: or ntfy: with env:NAME or file:PATH, mail:ADDRESS.
    May be given several times; see docs/howto/server.md."""
    allow_changed_code: bool = False
    """Go on with earlier work although the code has changed since; results of old and new code are
    then in one run."""
    restart: bool = False
    """Begin anew; the old run is moved aside, to NAME.before-TIME."""

    def check_kept(self) -> None:
        """UsageError for a limit or a place to be notified that cannot be."""
        self.check_limits()
        if self.notify:
            from muster.api.start.notify import read_place  # here: few runs notify anybody

            for text in self.notify:
                read_place(text)

    def check_services(self) -> None:
        """UsageError for what could not do its work here; a dry run asks as well."""
        self.check_price()
        if self.notify:
            from muster.api.start.notify import check_places

            check_places(self.notify)
        if self.log_to:
            from muster.api.trackers.tracker import check_installed

            check_installed(self.log_to)

    def refuse_watching(self, why: str, hint: str) -> None:
        """UsageError where nobody would keep a limit or notify."""
        self.refuse_limits(why, hint)
        if self.notify:
            raise UsageError(f"--notify has no effect: {why}.", hint=hint)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(DeviceOptions, KeptOptions):
    """How a sweep is run, apart from what it runs."""

    per_gpu: int | Literal["auto"] = 1
    """Workers that share a GPU, or auto: as many as the measured memory of tasks allows."""
    gpus_per_task: int = 1
    """GPUs that each task sees."""
    retries: int = 1
    """How often a task whose process crashed is tried again, on a fresh worker."""
    retry_exceptions: int = 0
    """How often a task that raised an exception is tried again."""
    timeout_s: Annotated[
        float | None, Flag(name="timeout", metavar="TIME", read=parse_duration)
    ] = None
    """Kill a task, with its process group, after this time: 90, 30m, 2h."""
    memory_mib: Annotated[
        float | None,
        Flag(
            name="memory", metavar="SIZE", read=parse_memory_mib, engines=("local", "slurm", "ray")
        ),
    ] = None
    """How much of the host's memory a task may hold, with all that it starts: 12G, 900M. One that
    takes more is killed and fails, and only as many tasks run at once as fit with that much."""
    keep_going: bool = False
    """Go on although the first tasks all fail in the same way."""
    name: str | None = None
    """The name in the default of --run-dir."""
    export_interval_s: Annotated[
        float,
        Flag(
            name="export-interval",
            metavar="TIME",
            read=parse_duration,
            aliases=("checkpoint-interval",),
        ),
    ] = 60.0
    """How often results.* are refreshed while running; nothing depends on it."""
    executor: Annotated[str, Flag(name="on", metavar="local|slurm|ray|inline")] = "local"
    """Where workers come from: local, slurm, ray, or inline (in this process, for a debugger)."""
    python: Annotated[Path | None, Flag(metavar="PATH", engines=("local",))] = None
    """Run functions in this Python instead of Muster's own: a program, or the folder of an
    environment, such as .venv."""
    cluster: ClusterRequest = dataclasses.field(default_factory=ClusterRequest)

    def __post_init__(self) -> None:
        if self.cluster.hosts is not None and self.executor != "ray":
            if self.executor != "local":
                raise UsageError(f"--hosts has no effect with --on {self.executor}.")
            object.__setattr__(self, "executor", "ray")  # which is what runs there
        if self.cluster.hosts_setup and self.cluster.hosts is None and self.executor != "slurm":
            is_here = self.executor == "local"
            raise UsageError(_NO_SETUP, hint=_SETUP_HERE if is_here else None)
        check_least(self, retries=0, retry_exceptions=0, gpus_per_task=1)
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"--timeout {self.timeout_s} leaves no time to run.")
        if self.memory_mib is not None:
            self._check_memory(self.memory_mib)
        if self.export_interval_s <= 0:
            raise UsageError(f"--export-interval {self.export_interval_s} is not a time.")
        check_interval(self.monitor_interval_s, "--monitor-interval", may_be_0=True)
        if self.per_gpu != "auto" and self.per_gpu < 1:
            raise UsageError(
                f"--per-gpu {self.per_gpu} is too small.", hint="write 1, 2, … or auto."
            )
        self.check_devices()
        self.check_kept()

    def _check_memory(self, most_mib: float) -> None:
        """UsageError for a limit that cannot be kept; a cluster is asked for as much."""
        if self.executor not in ("local", *CLUSTERS):
            raise UsageError(
                f"--memory has no effect with --on {self.executor}, where no other process could "
                "end a task.",
                hint="drop it, or run on this machine, SLURM or Ray.",
            )
        if not 1 <= most_mib < 1 << 40:
            raise UsageError(f"--memory {most_mib:g} MiB is not an amount.", hint="write 12G.")
        if sys.platform != "linux":
            raise UsageError("--memory needs Linux, which tells what processes hold.")
        if self.executor in CLUSTERS:
            object.__setattr__(self, "cluster", self.cluster.with_memory(most_mib))


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """How records are handled."""

    batch_size: int = 0
    """Records per batch at the start; running out of memory halves it. 0: what the stages ask
    for."""
    chunk_rows: int | None = None
    """Records per chunk of the plan. Default: 8 chunks for each worker, 16 to 64 in all, of 256 to
    10,000 records."""
    keeps_ids: Annotated[bool, Flag(name="no-ids", is_negated=True)] = True
    """Add no id to records that have none."""
    row_retries: Annotated[int, Flag(name="retries")] = 1
    """How often a record that kills or hangs its worker is tried again before it is rejected."""
    exception_retries: Annotated[int, Flag(name="retry-exceptions")] = 0
    """How often a record for which a stage raised an exception is tried again."""
    unordered: bool = False
    """Write chunks as they are ready; the default is the order of the input."""
    stage_by_stage: bool = False
    """Write each stage's output before the next begins; default: all stages in one worker."""
    max_worker_memory_mib: Annotated[
        float | None, Flag(name="max-worker-memory", metavar="SIZE", read=parse_memory_mib)
    ] = None
    """Replace a worker that holds more than this, between two batches: 8G, 900M."""
    keep_parts: bool = False
    """Keep the chunks in the run folder when the output is written."""
    overwrite: bool = False
    """Replace an output that exists and was not made by this run."""

    def __post_init__(self) -> None:
        check_least(self, batch_size=0, chunk_rows=1, row_retries=0, exception_retries=0)
        if self.max_worker_memory_mib is not None and self.max_worker_memory_mib <= 0:
            raise UsageError("--max-worker-memory must be greater than 0, such as 8G.")


@dataclass(frozen=True, kw_only=True)
class GangOptions(DeviceOptions, KeptOptions):
    """How the ranks are started and watched. There is one rank per device.

    ``one_process``: one rank that sees all the devices, instead of one per device.
    ``restart_on``: after which failures the gang is started anew: all, or only deaths by a signal
    and stalls, where an exception would only come again. ``slurm``: what a job on SLURM asks for,
    instead of starting ranks here.
    """

    executor: Annotated[Literal["local", "slurm"], Flag(name="on")] = "local"
    """On this machine, or as a job of SLURM: the same command follows a job that is there."""
    num_ranks: Annotated[int | None, Flag(name="nproc-per-node")] = None
    """How many ranks: on as many GPUs, or on the CPU where there is none."""
    max_restarts: int = 0
    """How often all ranks are started again after a failure."""
    stall_timeout_s: Annotated[
        float, Flag(name="stall-timeout", metavar="TIME", read=parse_duration)
    ] = 20.0
    """Say who holds the others up, and end, after this time without progress; 0: never."""
    grace_s: Annotated[float, Flag(name="grace", metavar="TIME", read=parse_duration)] = 15.0
    """How long ranks may take to save after Ctrl-C or TERM; a second one kills them at once."""
    start: Annotated[Start | None, Flag(metavar="auto|exec|fork|spawn", read=_start)] = None
    """How a rank begins: exec or spawn (a fresh interpreter), fork (torch is imported once).
    Default: exec for scripts, fork for tasks where the system has it."""
    one_process: Annotated[bool, Flag(is_hidden=True)] = False
    restart_on: Annotated[Literal["failure", "crash"], Flag(is_hidden=True)] = "failure"
    num_nodes: Annotated[int, Flag(name="nodes", aliases=("num-nodes", "nnodes"))] = 1
    """How many nodes. The same command runs on each, with another --node-rank."""
    min_nodes: Annotated[int | None, Flag(engines=_LOCAL)] = None
    """Go on with as few nodes as this when others are lost; needs --max-restarts."""
    node_rank: Annotated[int, Flag(engines=_LOCAL)] = 0
    """Which node this is, from 0. Default: NODE_RANK of the environment, else 0."""
    master_addr: Annotated[str | None, Flag(metavar="HOST", engines=_LOCAL)] = None
    """Where node 0 is. Default: MASTER_ADDR of the environment."""
    master_port: Annotated[int | None, Flag(metavar="PORT", engines=_LOCAL)] = None
    """A free port on node 0; the same on all nodes. Default: MASTER_PORT of the environment."""
    hosts: Annotated[
        str | None, Flag(metavar="a,b:0-3|@FILE", chooses="the devices", engines=_LOCAL)
    ] = None
    """Run on these machines, reached by SSH, each a node: a rank on each GPU. HOST:0-3 chooses
    GPUs, HOST:cpu:4 ranks on its CPU; localhost is this machine. See docs/howto/hosts.md."""
    hosts_python: Annotated[str | None, Flag(metavar="PATH", engines=_LOCAL)] = None
    """With --hosts: the Python of the hosts that has Muster, if its path differs from the one
    here."""
    hosts_setup: Annotated[
        tuple[str, ...], Flag(name="setup", metavar="LINE", engines=("local", "slurm"))
    ] = ()
    """With --hosts or --on slurm: a line of bash that each host runs before Python is looked for,
    or each job before its work, such as 'module load cuda'. May be given several times."""
    ranks_of_nodes: Annotated[tuple[int, ...], Flag(is_hidden=True)] = ()
    slurm: Annotated[JobRequest | None, Flag(is_hidden=True)] = None

    def __post_init__(self) -> None:
        self.check_devices()
        self._check_hosts()
        if self.wait_s and self.num_nodes > 1:
            raise UsageError(
                f"--wait waits in the queue of one machine, and --nodes {self.num_nodes} needs its "
                "GPUs on all of them at once.",
                hint="drop it.",
            )
        check_least(self, max_restarts=0, num_nodes=1, stall_timeout_s=0, num_ranks=1)
        check_interval(self.monitor_interval_s, "--monitor-interval", may_be_0=True)
        self.check_kept()
        if self.slurm is not None:
            self.refuse_watching("SLURM ends the job", "give the job its --time.")
        chooses = self.gpu_ids is not None or self.max_gpus is not None or self.devices != "auto"
        if self.num_ranks is not None and chooses:
            raise UsageError(
                f"--nproc-per-node {self.num_ranks} and a choice of devices are both given.",
                hint="there is one rank per device: give one of them.",
            )
        if not 0 <= self.node_rank < self.num_nodes:
            raise UsageError(
                f"--node-rank {self.node_rank} is not below --nodes {self.num_nodes}.",
                hint="nodes are numbered from 0.",
            )
        num_nodes, of = self.num_nodes, "--nodes"
        if self.hosts is not None:
            num_nodes, of = len(parse_hosts(self.hosts)), "the number of hosts"
        if self.min_nodes is not None and not 1 <= self.min_nodes <= num_nodes:
            raise UsageError(f"--min-nodes {self.min_nodes} is not between 1 and {of}.")
        if self.num_nodes > 1 and (self.master_addr is None or self.master_port is None):
            raise UsageError(
                f"--nodes {self.num_nodes} needs a place to meet.",
                hint="add --master-addr HOST --master-port PORT (where node 0 is, the same on "
                "all), or set MASTER_ADDR and MASTER_PORT.",
            )
        if self.restart and self.num_nodes > 1:
            raise UsageError(
                "--restart moves the run folder aside, which other nodes may be using already.",
                hint="choose another --run-dir, the same on all nodes.",
            )

    def _check_hosts(self) -> None:
        if self.hosts is None:
            if self.hosts_python is not None:
                raise UsageError("--hosts-python has no effect without --hosts.")
            if self.hosts_setup and self.executor != "slurm":
                raise UsageError(_NO_SETUP, hint=_SETUP_HERE)
            return
        parse_hosts(self.hosts)
        if self.executor != "local" or self.slurm is not None:
            raise UsageError(
                "--hosts has no effect with --on slurm, which chooses the nodes.",
                hint="give one of them.",
            )
        if self.num_nodes > 1 or self.node_rank:
            raise UsageError(
                "--hosts starts all nodes from here, and --nodes is for starting each by hand.",
                hint="give one of them.",
            )
        given = {"devices": self.devices != "auto", "gpu-ids": self.gpu_ids is not None,
                 "max-gpus": self.max_gpus is not None,
                 "nproc-per-node": self.num_ranks is not None}  # fmt: skip
        for name in (name for name, is_given in given.items() if is_given):
            raise UsageError(
                f"--{name} chooses devices of this machine, and --hosts those of others.",
                hint="name the GPUs of each host (a:0-3), or ranks on its CPU (a:cpu:4).",
            )
        if self.wait_s:
            raise UsageError(
                "--wait waits in the queue of one machine, and --hosts needs several at once.",
                hint="drop it.",
            )

    @property
    def choice(self) -> dict[str, Any]:
        many = self.devices if self.num_ranks is None else str(self.num_ranks)
        return {**super().choice, "devices": many}

    def choosing(self, devices: str, gpu_ids: str | None) -> Self:
        return dataclasses.replace(super().choosing(devices, gpu_ids), num_ranks=None)


def as_trackers(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """The trackers that the keyword ``log_to`` of a call names."""
    text = names if isinstance(names, str) else ",".join(map(str, names or ()))
    return _trackers(text, "log_to")


def options_of_call(call: str, given: Mapping[str, Any], *kinds: type) -> list[Any]:
    """The keywords of a call as one value of each kind; UnknownNameError for one of none."""
    kind_of = {field.name: kind for kind in kinds for field in dataclasses.fields(kind)}
    if unknown := given.keys() - kind_of.keys():
        raise UnknownNameError(f"option of {call}", min(unknown), kind_of)
    places = {name: Path(given[name]) for name in ("run_dir", "python")
              if isinstance(given.get(name), str)}  # fmt: skip
    given = {**given, **places}
    if "log_to" in given:
        given = {**given, "log_to": as_trackers(given["log_to"])}
    if "notify" in given:
        places = given["notify"]
        given = {**given, "notify": (places,) if isinstance(places, str) else tuple(places or ())}
    return [
        kind(**{name: value for name, value in given.items() if kind_of[name] is kind})
        for kind in kinds
    ]
