"""What a gang shows: lines of its ranks, remarks, a training's bar, and how it or its job ended."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from muster.api.gangs import GangAudience, GangEnding, GangPlan
from muster.base.clock import human_duration
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
from muster.base.shown_text import count
from muster.cli import output
from muster.run.folder import RunFolder
from muster.run.state import has_saved

if TYPE_CHECKING:
    from muster.api.slurm_gang import SlurmGang


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


def show_gang_plan(plan: GangPlan, what: str, *, is_json: bool) -> None:
    """What ``--dry-run`` prints."""
    if is_json:
        output.say_json(
            {
                "program": what,
                "run_dir": str(plan.folder.path),
                "ranks": [slot.label for slot in plan.slots],
                "threads_per_rank": plan.threads_per_rank,
                "start": plan.start,
                "nodes": plan.options.num_nodes,
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
        word = f"ended by {ending.stopped_by}"
    else:
        word = "failed"
    again = f", with {count(ending.restarts, 'restart')}" if ending.restarts else ""
    return f"{path}: {word} after {seconds:.1f} s{again}{next_step}"


def run_on_slurm(gang: SlurmGang, flags: Any) -> int:
    """Submit, follow, sum up; returns the exit code. ``flags``: all that was said."""
    from muster.api.slurm_gang import follow, hand_in

    folder = gang.folder
    is_silent = flags.shown.level in ("nothing", "warning")
    say = (lambda text: None) if is_silent else output.remark
    if flags.shown.dry_run:
        text, path = gang.script(), str(folder.path)
        script = {"run_dir": path, "script": text}
        output.say_json(script) if flags.shown.json else output.say(text.rstrip("\n"))
        return EXIT_OK
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

    def __init__(self, folder: RunFolder, flags: Any, argv: Sequence[str]) -> None:
        self._folder = folder
        self._all_ranks = flags.shown.all_ranks
        self._level = flags.shown.level
        output.show_events(are_shown=flags.shown.log_level == "debug")
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
