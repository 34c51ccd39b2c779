"""What the commands that start a gang share: options, lines of ranks, a bar, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

from muster.api.gangs.gang import GangPlan
from muster.api.gangs.work import GangAudience, GangEnding, GangWork
from muster.api.start.limits import LimitOptions
from muster.api.start.options import GangOptions
from muster.base.clock import human_duration
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, UsageError
from muster.base.flags import Flag
from muster.base.journal import Tail
from muster.base.shown_text import count
from muster.base.signals import shown_request
from muster.cli import output
from muster.cli.flags import ShownFlags, job_digest, refuse_without_effect
from muster.cli.options import Part
from muster.cli.parse import Parsed
from muster.gang.blame import RankError, read_rank_error
from muster.gang.topology import Meeting, read_meeting
from muster.run.folder import RunFolder
from muster.run.state import has_saved, last_report
from muster.slurm.request import JobRequest, setup_of_job
from muster.slurm.script import gang_warning_s

if TYPE_CHECKING:
    from muster.api.gangs.host_plan import HostsPlan
    from muster.api.slurm.gang import SlurmGang

_RANK_LOG = re.compile(r"rank-(\d+)\.log")


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
              "log_to", "notify", "hosts", "hosts_python", "hosts_setup",
              *(f.name for f in dataclasses.fields(LimitOptions)))  # fmt: skip
    groups: dict[str, Any] = {
        "options": Part(
            of=options, without=() if may_leave else of_run, texts={"run_dir": run_dir}
        ),
        "shown": GangShownFlags
        if may_leave
        else Part(of=ShownFlags, without=("dry_run", "detach")),
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
            setup_lines=setup_of_job(options.get("hosts_setup", ())),
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


def gang_audience(
    argv: Sequence[str], *, all_ranks: bool, level: output.ShownLevel
) -> GangAudience:
    """Lines of ranks on standard output, ``[rank] line``; remarks on standard error."""
    output.show_events(are_shown=level == "debug")

    def hear(rank: int, line: str) -> None:
        if all_ranks or rank == 0:
            output.say(f"[{rank}] {line}")

    if level == "nothing":
        return GangAudience(argv=tuple(argv))
    if level == "warning":
        return GangAudience(warn=output.remark, argv=tuple(argv))
    return GangAudience(hear=hear, say=output.remark, warn=output.remark, argv=tuple(argv))


class RankLogs:
    """Logs of ranks from where they end now, also of ranks that come; without the tracebacks that
    end them, of which the report shows the culprit's, where there is one."""

    def __init__(self, folder: RunFolder, hear: Callable[[int, str], None]) -> None:
        self._folder = folder
        self._hear = hear
        self._tails: dict[int, Tail] = {}
        self._ended: dict[int, tuple[RankError, int]] = {}  # with the size of its log then
        self._shows_all = False
        self._look()

    def _look(self, start: int | None = None) -> None:
        for path in self._folder.logs.glob("rank-*.log"):
            found = _RANK_LOG.fullmatch(path.name)
            if found is not None and (rank := int(found[1])) not in self._tails:
                hear, hidden_from = partial(self._hear, rank), partial(self._traceback_start, rank)
                self._tails[rank] = Tail(path, hear, hidden_from, start=start)

    def _traceback_start(self, rank: int) -> int | None:
        error = self._error(rank)
        if error is not None and self._ended.get(rank, (error, 0))[0] == error:
            self._ended[rank] = error, self._folder.rank_log(rank).stat().st_size
        if self._shows_all or rank not in self._ended:
            return None
        return self._ended[rank][0].log_start

    def _error(self, rank: int) -> RankError | None:
        return read_rank_error(self._folder.rank_error(rank))

    def read(self, is_last: bool) -> None:
        self._shows_all = is_last and not last_report(self._folder)  # its launcher was killed
        self._look(start=0)
        for rank, tail in self._tails.items():
            if rank in self._ended and self._error(rank) != self._ended[rank][0]:
                error, log_size = self._ended.pop(rank)
                tail.skip_to(log_size, error.log_start)
                self._hear(rank, f"(it starts again after {error.text})")
            tail.read(is_last=is_last)


def show_gang_plan(plan: GangPlan | HostsPlan, what: str, *, is_json: bool) -> None:
    """What ``--dry-run`` prints."""
    if is_json:
        output.say_json(
            {
                "program": what,
                "run_dir": str(plan.folder.path),
                "ranks": plan.ranks,
                "threads_per_rank": plan.threads_per_rank,
                "start": plan.start,
                "nodes": plan.num_nodes,
            }
        )
        return
    output.say(f"program  {what}")
    output.say(f"folder   {plan.folder.path}")
    output.say(f"start    {plan.start}")
    for line in plan.lines():
        output.say(f"devices  {line}")
    output.say("Nothing was started (--dry-run).")


def sum_up_gang(
    path: Path, ending: GangEnding, seconds: float, *, is_quiet: bool, is_json: bool
) -> int:
    """Say how it ended; returns the exit code."""
    if is_json:
        output.say_json(_outcome(path, ending, seconds))
        return ending.exit_code
    if ending.report:
        output.complain(ending.report[0])
        for line in ending.report[1:]:
            output.remark(line)
    if not is_quiet:
        output.remark(_last_line(path, ending, seconds))
    return ending.exit_code


def _outcome(path: Path, ending: GangEnding, seconds: float) -> dict[str, Any]:
    values = dataclasses.asdict(ending)
    del values["word"], values["ends"]
    return {"path": str(path), "seconds": round(seconds, 3), **values}


def _last_line(path: Path, ending: GangEnding, seconds: float) -> str:
    next_step = ""
    if ending.exit_code == 0:
        word = "done"
    elif ending.exit_code == EXIT_REQUEUE and has_saved(RunFolder(path)):
        word, next_step = "saved", "; start it again to go on"
    elif ending.exit_code == EXIT_REQUEUE:
        word = "stopped before its first save (the same command begins again)"
    elif ending.stopped_by:
        word = f"ended by {shown_request(ending.stopped_by)}"
    else:
        word = "failed"
    again = f", with {count(ending.restarts, 'restart')}" if ending.restarts else ""
    return f"{path}: {word} after {seconds:.1f} s{again}{next_step}"


def gang_on_slurm(
    work: GangWork, options: GangOptions, parsed: Parsed, typed: Sequence[str]
) -> SlurmGang:
    """What is sent to SLURM. ``typed``: the command line that goes into the record."""
    from muster.api.slurm.gang import SlurmGang

    assert options.slurm is not None
    return SlurmGang(
        folder=work.folder, request=options.slurm, kind=work.kind, restart=options.restart,
        renew=work.renewal(options, typed), of=job_digest(parsed),
    )  # fmt: skip


def run_on_slurm(gang: SlurmGang, flags: Any) -> int:
    """Submit, follow, sum up; returns the exit code. ``flags``: all that was said."""
    from muster.api.slurm.gang import follow, hand_in

    folder = gang.folder
    is_silent = flags.shown.level in ("nothing", "warning")
    say = (lambda text: None) if is_silent else output.remark
    if flags.shown.dry_run:
        text, path = gang.script(), str(folder.path)
        script = {"run_dir": path, "script": text}
        output.say_json(script) if flags.shown.json else output.say(text.rstrip("\n"))
        return EXIT_OK
    flags.shown.refuse_detach("SLURM does the work", "--no-wait returns once the job is submitted.")
    job = hand_in(gang)
    if job.aside is not None:
        say(f"the run so far is kept in {job.aside}")
    if job.is_new:
        say(f"job {job.job_id} submitted; run folder {folder.path}")
    else:
        other = "" if job.is_same else ", which was submitted with other options"
        say(f"job {job.job_id} of this run is there{other}; what it printed before: {job.log}")
    if flags.shown.no_wait:
        what = {"path": str(folder.path), "job_id": job.job_id, "is_new": job.is_new}
        output.say_json(what) if flags.shown.json else output.say(job.job_id)
        return EXIT_OK
    try:
        end = follow(job, (lambda line: None) if is_silent else output.say, say)
    except KeyboardInterrupt:
        output.complain(
            f"The job {job.job_id} goes on. The same command follows it again; "
            f"end it with: scancel {job.job_id}"
        )
        return EXIT_INTERRUPTED
    if flags.shown.json:
        values = {"state": end.state, "exit_code": end.exit_code, "sentence": end.sentence}
        output.say_json({"path": str(folder.path), "job_id": job.job_id, **values})
    elif end.exit_code != EXIT_OK:
        output.complain(end.sentence)
    elif not flags.shown.quiet:
        output.remark(f"{folder.path}: {end.sentence}")
    return end.exit_code


_EVERY_S = 0.25


class TrainScreen:
    """A context. Lines go to standard output, or above the bar; remarks to standard error."""

    def __init__(self, folder: RunFolder, shown: GangShownFlags, argv: Sequence[str]) -> None:
        self._folder = folder
        self._all_ranks = shown.all_ranks
        self._level = shown.level
        output.show_events(are_shown=shown.log_level == "debug")
        # Lines of events would break into a bar.
        has_bar = self._level == "info" and output.is_terminal()
        self._bar = output.make_bar() if has_bar else None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="muster-screen")
        self.audience = GangAudience(
            hear=self._hear, say=self._say, warn=self._warn, argv=tuple(argv)
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._is_over.set()
            self._thread.join()
            self._bar.stop()

    def _hear(self, rank: int, line: str) -> None:
        if not (self._is_talking and (self._all_ranks or rank == 0)):
            return
        text = f"[{rank}] {line}" if self._all_ranks else line
        if self._bar is None:
            output.say(text)
        elif not line.startswith("step "):  # the bar says it
            self._bar.line(text)

    def _say(self, text: str) -> None:
        if self._is_talking:
            self._warn(text)

    def _warn(self, text: str) -> None:
        if self._level == "nothing":
            return
        if self._bar is None:
            output.remark(text)
        else:
            self._bar.line(text)

    @property
    def _is_talking(self) -> bool:
        return self._level in ("info", "debug")

    def _watch(self) -> None:
        assert self._bar is not None
        while not self._is_over.wait(_EVERY_S):
            with suppress(OSError, ValueError, LookupError, TypeError):
                picture = json.loads(self._folder.status_json.read_bytes())
                self._bar.show(picture["step"], picture["total_steps"], _words(picture))


def _words(picture: dict[str, Any]) -> str:
    """The most wanted first: a narrow terminal cuts the rest off."""
    parts = [] if picture["eta_s"] is None else [f"ETA {human_duration(picture['eta_s'])}"]
    parts += _of_agent(picture) if picture["kind"] == "agent" else _of_model(picture)
    if picture["memory_mib"] is not None:
        parts.append(f"{picture['memory_mib']:,.0f} MiB")
    return " · ".join(parts)


def _of_agent(picture: dict[str, Any]) -> list[str]:
    parts = [f"{picture['episodes']:,} episodes"]
    if picture["return"] is not None:
        parts.append(f"return {picture['return']:.4g}")
    parts.append(f"{picture['steps_per_s']:,.0f} steps/s")
    if picture["learning_share"] is not None:
        parts.append(f"learning {picture['learning_share']:.0%}")
    return parts


def _of_model(picture: dict[str, Any]) -> list[str]:
    parts = []
    parts.append(f"epoch {min(picture['epoch'] + 1, picture['epochs'])}/{picture['epochs']}")
    if picture["loss"] is not None:
        parts.append(f"loss {picture['loss']:.4f}")
    if picture["samples_per_s"] is not None:
        parts.append(f"{picture['samples_per_s']:,.0f} samples/s")
        parts.append(f"data {picture['data_wait']:.0%}")
        if picture["communication"] is not None:
            parts.append(f"comm {picture['communication']:.0%}")
    if picture["mfu"] is not None:
        parts.append(f"MFU {picture['mfu']:.0%}")
    return parts
