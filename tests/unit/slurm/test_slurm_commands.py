"""Errors of SLURM's commands: one message for a cluster that is away, and what to do about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.errors import SetupError
from muster.run.folder import RunFolder
from muster.slurm.commands import RefusedError, elements_of, job_status, submit, submit_array

#: As commands of SLURM 20 to 24 print it.
AWAY = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
    "squeue: error: slurm_receive_msg: Socket timed out on send/recv operation",
    "sbatch: error: fetch_config: DNS SRV lookup failed; unable to establish configuration source",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
]


class Programs:
    """SLURM's commands as programs that print what they are told to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, name: str, *, out: str = "", err: str = "", code: int = 0) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\ncat <<'E'\n{out}\nE\ncat >&2 <<'E'\n{err}\nE\nexit {code}\n")
        path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Programs(tmp_path)


@pytest.mark.parametrize("words", AWAY)
@pytest.mark.parametrize("command", ["squeue", "scontrol", "sbatch"])
def test_a_cluster_that_is_away_is_told_alike_by_all(
    programs: Programs, tmp_path: Path, command: str, words: str
) -> None:
    programs.say(command, err=words, code=1)
    with pytest.raises(SetupError) as caught:
        match command:
            case "squeue":
                elements_of("name")
            case "scontrol":
                job_status("7")
            case "sbatch":
                submit(tmp_path / "script", tmp_path)
    assert str(caught.value).startswith("SLURM does not answer: ")
    assert "Hint: `scontrol ping` says whether its controller is up;" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Batch job submission failed: Invalid job array specification", "at most 1001 elements"),
        ("Batch job submission failed: Invalid job array specification", "lower --workers"),
        ("invalid partition specified: gpu", "the partitions here are fast, slow"),
        ("Batch job submission failed: Invalid account or account/partition", "partition"),
        ("Batch job submission failed: Requested node configuration is not available",
         "4 cores are asked for with each GPU"),
        ("something else", "--dry-run shows the script"),
    ],
)  # fmt: skip
def test_what_sbatch_refuses_comes_with_what_to_do(
    programs: Programs, tmp_path: Path, words: str, hint: str
) -> None:
    programs.say("sbatch", err=f"sbatch: error: {words}", code=1)
    programs.say("sinfo", out="slow\nfast\n")
    programs.say("scontrol", out="MaxArraySize            = 1001\nMaxJobCount = 10000")
    with pytest.raises(SetupError) as caught:
        submit(tmp_path / "script", tmp_path)
    assert f"SLURM has refused the job: {words}" in str(caught.value)
    assert hint in str(caught.value)


def test_the_script_of_an_array_stays_where_nobody_knows_whether_it_was_taken(
    programs: Programs, tmp_path: Path
) -> None:
    """SLURM may have taken it before it fell silent."""
    folder = RunFolder(tmp_path / "run")
    programs.say("sbatch", err=AWAY[0], code=1)
    with pytest.raises(SetupError):
        submit_array("#!/bin/sh\n", folder)
    assert [path.read_text() for path in folder.job_files.iterdir()] == ["#!/bin/sh\n"]
    programs.say("sbatch", err="invalid partition specified: gpu", code=1)
    with pytest.raises(RefusedError):
        submit_array("#!/bin/sh\n", folder)
    assert not list(folder.job_files.iterdir())
