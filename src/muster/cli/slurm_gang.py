"""``--on slurm`` of ``muster train`` and ``muster run``: what is shown while its job lives."""

from __future__ import annotations

from typing import Any

from muster.api.slurm_gang import SlurmGang, follow, hand_in
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK
from muster.cli import output


def run_on_slurm(gang: SlurmGang, flags: Any) -> int:
    """Submit, follow, sum up; returns the exit code. ``flags``: all that was said."""
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
