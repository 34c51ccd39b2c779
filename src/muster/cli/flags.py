"""The flags of a sweep as typed values, and how they become options. Defaults live here only
where a flag means "not given"; the rest come from ``SweepOptions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from muster.api.options import SweepOptions, parse_duration
from muster.base.errors import UsageError
from muster.cli.cluster_flags import ClusterFlags, cluster_request_from
from muster.cli.output import ShownLevel
from muster.farm.space import Space

Switch = tyro.conf.FlagCreatePairsOff[bool]
LogLevel = Literal["debug", "info", "warning"]
_D = SweepOptions()


@dataclass(frozen=True, kw_only=True)
class SpaceFlags:
    """Which settings are run."""

    grid: tuple[str, ...] = ()
    """NAME=V1,V2,…: all combinations of all grids. May be given several times."""
    zip: tuple[str, ...] = ()
    """NAME=V1,V2,…: the values of all zips advance together."""
    list: Path | None = None
    """A .csv (with a header) or .jsonl file with one setting per line."""
    seeds: str | None = None
    """How many (100), which (3,5,8; one: 3,) or from:to (10:20); each setting once per seed."""
    seed_offset: int = 0
    """Added to every seed."""

    def space(self) -> Space:
        return Space.from_texts(
            grid=self.grid,
            zipped=self.zip,
            list_file=self.list,
            seeds=self.seeds,
            seed_offset=self.seed_offset,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Which devices it runs on."""

    devices: str | None = None
    """auto (all free GPUs, else the CPU), 4 (GPUs), 0,2,3 (which), cpu, cpu:8."""
    gpus: str | None = None
    """The same as --devices."""
    gpu_ids: str | None = None
    """Which GPUs, as a list: 0 is GPU 0."""
    num_gpus: int | None = None
    """How many GPUs."""
    world_size: int | None = None
    """The same as --num-gpus."""
    max_gpus: int | None = None
    """At most this many GPUs; the CPU where there is none."""
    no_multi_gpu: Switch = False
    """Use one GPU at most; the same as --max-gpus 1."""
    force: Switch = False
    """Use GPUs that others hold."""


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """How the devices are shared out."""

    per_gpu: str = "1"
    """Workers that share a GPU, or auto: as many as the measured memory of tasks allows."""
    gpus_per_task: int = _D.gpus_per_task
    """GPUs that each task sees."""
    on: str = _D.executor
    """Where workers come from: local, slurm, ray, or inline (in this process, for a debugger)."""


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """What happens when something goes wrong."""

    retries: int = _D.retries
    """How often a task whose process crashed is tried again, on a fresh worker."""
    retry_exceptions: int = _D.retry_exceptions
    """How often a task that raised an exception is tried again."""
    timeout: str | None = None
    """Kill a task, with its process group, after this time: 90, 30m, 2h."""
    keep_going: Switch = False
    """Go on although the first tasks all fail in the same way."""


@dataclass(frozen=True, kw_only=True)
class EarlierWorkFlags:
    """What becomes of the work that the run folder holds already."""

    allow_changed_code: Switch = False
    """Go on with it although the code has changed since; old and new are then in one run."""
    restart: Switch = False
    """Begin anew; the old run is moved aside, to NAME.before-TIME."""


@dataclass(frozen=True, kw_only=True)
class ShownFlags:
    """What is shown."""

    log_level: LogLevel = "info"
    """warning: warnings and how it ended; info: how it goes as well; debug: every event of the
    run too, on standard error."""
    quiet: Switch = False
    """Show nothing but errors: --log-level warning without warnings and without how it ended."""
    json: Switch = False
    """Print the outcome as JSON and nothing else."""
    dry_run: Switch = False
    """Show what would run, where, and start nothing."""

    @property
    def level(self) -> ShownLevel:
        """What may be shown beside JSON; UsageError where two flags contradict each other."""
        if self.quiet and self.log_level == "debug":
            raise UsageError(
                "--quiet and --log-level debug contradict each other.", hint="give one of them."
            )
        return "nothing" if self.quiet or self.json else self.log_level


@dataclass(frozen=True, kw_only=True)
class RunFlags(ShownFlags):
    """Where results go and what is shown."""

    run_dir: Path | None = None
    """The run folder. Default: runs/<name>-<hash of the plan>."""
    name: str | None = None
    """The name in that default."""
    export_interval: Annotated[str, tyro.conf.arg(aliases=["--checkpoint-interval"])] = "60"
    """How often results.* are refreshed while running; nothing depends on it."""
    monitor_interval: str = "5"
    """How often GPUs and host are sampled into the run's monitor.csv; 0: never."""


def options_from(
    device: DeviceFlags,
    worker: WorkerFlags,
    fault: FaultFlags,
    run: RunFlags,
    cluster: ClusterFlags,
    earlier: EarlierWorkFlags,
) -> SweepOptions:
    """The options these flags mean; UsageError where two of them contradict each other."""
    devices, gpu_ids, max_gpus = chosen_devices(device)
    return SweepOptions(
        devices=devices or _D.devices,
        gpu_ids=gpu_ids,
        max_gpus=max_gpus,
        per_gpu="auto" if worker.per_gpu == "auto" else _whole("--per-gpu", worker.per_gpu),
        gpus_per_task=worker.gpus_per_task,
        force=device.force,
        retries=fault.retries,
        retry_exceptions=fault.retry_exceptions,
        timeout_s=None if fault.timeout is None else parse_duration(fault.timeout, "--timeout"),
        keep_going=fault.keep_going,
        allow_changed_code=earlier.allow_changed_code,
        restart=earlier.restart,
        run_dir=run.run_dir,
        name=run.name,
        export_interval_s=parse_duration(run.export_interval, "--export-interval"),
        monitor_interval_s=parse_duration(run.monitor_interval, "--monitor-interval"),
        executor=worker.on,
        cluster=cluster_request_from(cluster, worker.on),
    )


def chosen_devices(flags: DeviceFlags) -> tuple[str | None, str | None, int | None]:
    """``devices``, ``gpu_ids`` and ``max_gpus``, of which one at most is given."""
    given = {
        "--devices": flags.devices,
        "--gpus": flags.gpus,
        "--gpu-ids": flags.gpu_ids,
        "--num-gpus": flags.num_gpus,
        "--world-size": flags.world_size,
        "--max-gpus": flags.max_gpus,
        "--no-multi-gpu": flags.no_multi_gpu or None,
    }
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(
            f"{' and '.join(named)} each choose the devices.", hint="give one of them."
        )
    if flags.gpu_ids is not None:
        return None, flags.gpu_ids, None
    if flags.no_multi_gpu or flags.max_gpus is not None:
        return None, None, 1 if flags.no_multi_gpu else flags.max_gpus
    count = flags.num_gpus if flags.num_gpus is not None else flags.world_size
    if count is not None:
        return "auto" if count == -1 else str(count), None, None
    return flags.devices or flags.gpus, None, None


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: write a whole number or auto.") from None


def join_repeated(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """``--grid a=1 --grid b=2`` as ``--grid a=1 b=2``, which is what the parser understands."""
    rest: list[str] = []
    values: dict[str, list[str]] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        flag, equals, value = word.partition("=")
        position += 1
        if flag not in flags:
            rest.append(word)
            continue
        taken = values.setdefault(flag, [])
        if equals:
            taken.append(value)
        while position < len(argv) and not argv[position].startswith("--"):
            taken.append(argv[position])
            position += 1
    for flag, taken in values.items():
        rest += [flag, *taken]
    return rest


Positional = Annotated[str, tyro.conf.Positional]
