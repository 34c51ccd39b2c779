"""What a gang is told to do, and what holds for its starts wherever the ranks are."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.api.start.options import GangOptions
from muster.api.start.services import Services
from muster.base.atomic_files import explain_os_error
from muster.base.code import Code
from muster.base.errors import UsageError
from muster.gang.launch import GangEnding
from muster.gang.spec import Entry, Script, Start
from muster.gang.topology import read_topology
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord, new_record
from muster.run.session import Renew, Session
from muster.run.state import last_word

__all__ = ["Entry", "GangEnding", "Script"]


@dataclass(frozen=True, kw_only=True)
class GangAudience:
    """Who watches: ``hear`` gets (rank, line) of what ranks print, ``say`` remarks on the run,
    ``warn`` what may be wrong. ``argv`` is the command line, kept in run.json."""

    hear: Callable[[int, str], None] = lambda rank, line: None
    say: Callable[[str], None] = lambda line: None
    warn: Callable[[str], None] = lambda line: None
    argv: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class GangWork:
    """What ranks do, and in which folder; ``about``: what else the run's record says of it."""

    folder: RunFolder
    program: Script | Entry
    kind: Kind = "run"
    code: Code = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def renewal(self, options: GangOptions, argv: Sequence[str]) -> Renew:
        """The record of a start, which replaces that of the run, except for its id and its age."""

        def renew(before: RunRecord | None) -> RunRecord:
            if before is not None:
                before.check_kind(self.kind, self.folder)
            spec = {"program": dataclasses.asdict(self.program), **self.about}
            now = new_record(
                self.folder, self.kind, options, spec=spec, code=dict(self.code), argv=tuple(argv)
            )
            if before is None:
                return now
            return dataclasses.replace(now, run_id=before.run_id, created_s=before.created_s)

        return renew


def check_gang(options: GangOptions) -> None:
    """Refuse what needs no look at devices or folders; a dry run does as well."""
    here = read_topology()
    if here is not None:
        raise UsageError(
            f"This is rank {here.rank} of {here.world_size} of a gang that {here.launcher} has "
            "started: a gang inside every rank would make more ranks than there are devices.",
            hint="start muster outside the launcher, or unset RANK and WORLD_SIZE.",
        )
    options.check_services()


def choose_start(program: Script | Entry, options: GangOptions) -> Start:
    """How ranks begin; fork is safe on Linux only (elsewhere system libraries start threads)."""
    if options.start is not None:
        if options.start == "fork" and sys.platform != "linux":
            raise UsageError(f"--start fork is for Linux; this is {sys.platform}.")
        return options.start
    return "fork" if isinstance(program, Entry) and sys.platform == "linux" else "exec"


def wants_limits(work: GangWork, options: GangOptions) -> bool:
    """Whether a start is to keep the limits of the run."""
    return bool(options.limits) and (options.restart or not _is_finished(work))


def note_ending(
    ending: GangEnding, session: Session, folder: RunFolder, audience: GangAudience
) -> None:
    """Write down in the run's journal how a start ended."""
    values = dataclasses.asdict(ending)
    fields = {k: v for k, v in values.items() if v and k not in ("word", "ends")}
    if ending.word.get("ending") == "restart" and not ending.stopped_by:
        fields["starts_again"] = True
    try:
        session.end(**{"exit_code": 0, **fields})
    except OSError as error:  # how it ended is known all the same
        audience.warn(str(explain_os_error(error, "write", folder.events)))


def tell_ending(ending: GangEnding, services: Services) -> None:
    """Send it to those whom ``--notify`` names, unless the run goes on at once."""
    path = services.folder.path
    if ending.stall:
        services.tell("stalled", f"{path}: {ending.stall}")
    if not ending.is_moving and ending.word.get("ending") != "restart":
        words = ending.report[0] if ending.report else f"exit code {ending.exit_code}"
        services.tell("ended", f"{path}: {words}", ending.exit_code)


def _is_finished(work: GangWork) -> bool:
    """Whether it is a training that would only say that it is finished."""
    return work.kind != "run" and last_word(work.folder).get("ending") == "finished"
