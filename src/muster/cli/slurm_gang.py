"""``--on slurm`` of ``muster train`` and ``muster run``: the words that its nodes are given, and
what is shown meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from muster.api.slurm_gang import NodeCommand, SlurmGang, follow, hand_in
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK
from muster.cli import output
from muster.cli.flags import ShownFlags
from muster.cli.parse import Parsed
from muster.run.folder import RunFolder
from muster.slurm.request import JobRequest

#: What is for the one who submits, and not for the launchers on the nodes.
_NOT_FOR_NODES = {
    *(field.name for kind in (JobRequest, ShownFlags) for field in fields(kind)),
    "on", "no_wait", "run_dir", "restart",
}  # fmt: skip


def words_for_nodes(parsed: Parsed) -> list[str]:
    """The flags that the launchers on the nodes need."""
    return parsed.words(without=_NOT_FOR_NODES)


def run_on_slurm(gang: SlurmGang, flags: Any, argv: Sequence[str]) -> int:
    """Submit, follow, sum up; returns the exit code. ``flags``: all that was said."""
    folder = gang.folder
    is_silent = flags.shown.level in ("nothing", "warning")
    say = (lambda text: None) if is_silent else output.remark
    if flags.shown.dry_run:
        text, path = gang.script(), str(folder.path)
        script = {"run_dir": path, "script": text}
        output.say_json(script) if flags.shown.json else output.say(text.rstrip("\n"))
        return EXIT_OK
    job = hand_in(gang, argv)
    if job.aside is not None:
        say(f"the run so far is kept in {job.aside}")
    if job.is_new:
        say(f"job {job.job_id} submitted; run folder {folder.path}")
    else:
        other = "" if job.is_same_script else ", which was submitted with other options"
        say(f"job {job.job_id} of this run is there{other}; what it printed before: {job.log}")
    if flags.place.no_wait:
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


def node_command(head: Sequence[str], parsed: Parsed, folder: RunFolder) -> NodeCommand:
    """What each node runs for a command with these flags."""
    rest = [*words_for_nodes(parsed), "--run-dir", str(folder.path.absolute())]
    return NodeCommand(head=head, rest=rest, cwd=Path.cwd())
