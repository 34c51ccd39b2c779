"""How a gang's job ended, by what the controller says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.api.slurm.gang import SlurmJob, follow
from muster.run.folder import RunFolder


@pytest.mark.parametrize(
    ("fields", "log", "says"),
    [
        ("ExitCode=3:0", "out", "has failed with exit code 3; what it printed: "),
        ("ExitCode=3:0", None, "has failed with exit code 3; it has printed nothing."),
        ("ExitCode=0:53", None, "has been ended by signal 53; it has printed nothing."),
        (
            "Reason=RaisedSignal ExitCode=0:0", None,
            "has ended in the state FAILED (RaisedSignal); it has printed nothing.",
        ),
    ],
)  # fmt: skip
def test_a_failure_is_never_told_as_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: str, log: str | None, says: str
) -> None:
    job = failed_job(tmp_path, monkeypatch, fields, log)
    end = follow(job, lambda line: None, lambda line: None)
    assert end.sentence.startswith("SLURM job 7 ") and says in end.sentence
    assert end.exit_code != 0


@pytest.mark.parametrize(("is_new", "heard"), [(True, ["out"]), (False, [])])
def test_a_job_that_is_over_before_it_is_followed_is_heard_where_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool, heard: list[str]
) -> None:
    job = failed_job(tmp_path, monkeypatch, "ExitCode=3:0", "out", is_new=is_new)
    lines: list[str] = []
    follow(job, lines.append, lambda line: None)
    assert lines == heard


def failed_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: str, log: str | None, *,
    is_new: bool = False,
) -> SlurmJob:  # fmt: skip
    """A job of which the controller says that it has failed; ``log``: what it has printed."""
    command = folder / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho JobId=7 JobState=FAILED {fields}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    job = SlurmJob(folder=RunFolder(folder / "run"), job_id="7", is_new=is_new)
    job.log.parent.mkdir(parents=True)
    if log is not None:
        job.log.write_text(log)
    return job
