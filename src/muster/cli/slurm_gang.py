"""``--on slurm`` of ``muster train`` and ``muster run``: the words that its nodes are given, and
what is shown meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.api.slurm_gang import NodeCommand, SlurmGang, follow, hand_in
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK
from muster.cli import output
from muster.run.folder import RunFolder

#: What is for the one who submits, and no word for the launchers; True: a value follows.
_NOT_FOR_NODES = {
    "on": True, "partition": True, "account": True, "time": True, "mem": True,
    "cpus_per_node": True, "slurm_arg": True, "no_wait": False, "nodes": True, "num_nodes": True,
    "nnodes": True, "run_dir": True, "save_dir": True, "dry_run": False, "no_dry_run": False,
    "restart": False, "log_level": True, "quiet": False, "no_quiet": False, "json": False,
    "no_json": False,
}  # fmt: skip


def words_for_nodes(words: Sequence[str]) -> list[str]:
    """The flags in ``words`` that the launchers on the nodes need.

    >>> words_for_nodes(["--gpus", "4", "--time=1:00", "--on", "slurm", "--no-wait", "--lr", "1"])
    ['--gpus', '4', '--lr', '1']
    """
    kept, skips = [], False
    for word in words:
        name, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if skips:
            skips = False
        elif word.startswith("--") and name in _NOT_FOR_NODES:
            skips = _NOT_FOR_NODES[name] and not equals
        else:
            kept.append(word)
    return kept


def run_on_slurm(gang: SlurmGang, shown: Any, argv: Sequence[str]) -> int:
    """Submit, follow, sum up; returns the exit code. ``shown``: the flags on what is shown."""
    folder = gang.folder
    is_silent = shown.run.level in ("nothing", "warning")
    say = (lambda text: None) if is_silent else output.remark
    if shown.run.dry_run:
        text, path = gang.script(), str(folder.path)
        script = {"run_dir": path, "script": text}
        output.say_json(script) if shown.run.json else output.say(text.rstrip("\n"))
        return EXIT_OK
    job = hand_in(gang, argv)
    if job.aside is not None:
        say(f"the run so far is kept in {job.aside}")
    if job.is_new:
        say(f"job {job.job_id} submitted; run folder {folder.path}")
    else:
        other = "" if job.is_same_script else ", which was submitted with other options"
        say(f"job {job.job_id} of this run is there{other}; what it printed before: {job.log}")
    if shown.place.no_wait:
        what = {"path": str(folder.path), "job_id": job.job_id, "is_new": job.is_new}
        output.say_json(what) if shown.run.json else output.say(job.job_id)
        return EXIT_OK
    try:
        end = follow(job, (lambda line: None) if is_silent else output.say, say)
    except KeyboardInterrupt:
        output.complain(
            f"The job {job.job_id} goes on. The same command follows it again; "
            f"end it with: scancel {job.job_id}"
        )
        return EXIT_INTERRUPTED
    if shown.run.json:
        values = {"state": end.state, "exit_code": end.exit_code, "sentence": end.sentence}
        output.say_json({"path": str(folder.path), "job_id": job.job_id, **values})
    elif end.exit_code != EXIT_OK:
        output.complain(end.sentence)
    elif not shown.run.quiet:
        output.remark(f"{folder.path}: {end.sentence}")
    return end.exit_code


def node_command(head: Sequence[str], flags: Sequence[str], folder: RunFolder) -> NodeCommand:
    """What each node runs for a command with these flags."""
    rest = [*words_for_nodes(flags), "--run-dir", str(folder.path.absolute())]
    return NodeCommand(head=head, rest=rest, cwd=Path.cwd())
