"""Flags of a gang on SLURM: which have an effect where, and which words reach the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import MusterCli

from muster.cli.commands.run import flags_of_run, slurm_gang
from muster.cli.commands.slurm_script import output_among
from muster.cli.parse import wants_slurm
from muster.cli.slurm_gang import words_for_nodes


@pytest.mark.parametrize(
    ("words", "wants"),
    [
        (["--on", "slurm"], True),
        (["har", "--on=slurm", "--nodes", "2"], True),
        (["--on", "local"], False),
        (["slurm", "--on"], False),
        ([], False),
    ],
)
def test_whether_it_goes_to_slurm(words: list[str], wants: bool) -> None:
    assert wants_slurm(words) is wants


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            ["--gpus", "4", "--on", "slurm", "--nodes=2", "--grace", "1"],
            ["--devices", "4", "--grace", "1"],
        ),
        (["--no_wait", "-m", "--slurm-arg", "a=b", "--slurm_arg=c"], ["--module"]),
        (["--run-dir", "x", "--quiet", "--all-ranks", "--dry-run"], ["--all-ranks"]),
    ],
)
def test_the_words_for_the_nodes(words: list[str], kept: list[str]) -> None:
    assert words_for_nodes(flags_of_run(words)) == kept


def test_the_program_keeps_flags_that_look_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    argv = ["--on", "slurm", "--gpus", "2", "--slurm-arg", "nice=1", "train.py", "--time", "3"]
    assert list(flags_of_run(argv).program) == ["train.py", "--time", "3"]
    gang = slurm_gang(argv)
    assert list(gang.command.rest)[-4:] == ["--", "train.py", "--time", "3"]
    assert (gang.request.gpus_per_node, gang.request.slurm_args) == (2, ("nice=1",))
    same = slurm_gang(["--on", "slurm", "--no-wait", "--gpus", "2", "train.py", "--time", "3"])
    assert same.folder == gang.folder  # found again while its job lives
    other = slurm_gang(["--on", "slurm", "--gpus", "2", "train.py", "--time", "4"])
    assert other.folder != gang.folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "gpu"], "--partition has no effect with --on local."),
        (["--no-wait"], "--no-wait has no effect with --on local."),
        (["--slurm-arg", "nice=1"], "--slurm-arg has no effect with --on local."),
        (["--on", "slurm"], "the number of GPUs of each node must be said."),
        (["--on", "slurm", "--gpus", "auto"], "must be said, not auto: SLURM chooses which."),
        (["--on", "slurm", "--gpu-ids", "0,2"], "must be said, not 0,2: SLURM chooses which."),
        (["--on", "slurm", "--nproc-per-node", "2"], "not --nproc-per-node 2: SLURM chooses"),
        (["--on", "slurm", "--gpus", "2", "--node-rank", "1"], "--node-rank has no effect"),
        (["--on", "slurm", "--gpus", "2", "--master-port", "1"], "--master-port has no effect"),
        (["--on", "slurm", "--gpus", "2", "--time", "4h"], "--time 4h: SLURM cannot read this"),
        (["--on", "slurm", "--gpus", "2", "--nodes", "0"], "--nodes 0 is too small"),
    ],
)
def test_flags_without_effect_are_refused(
    words: list[str], message: str, muster_main: MusterCli
) -> None:
    done = muster_main("train", "digits", *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_without_slurm(muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = muster_main("train", "digits", "--on", "slurm", "--devices", "cpu:1")
    assert done.returncode == 3 and "There is no sbatch on this machine." in done.stderr


def test_the_script_can_be_had_as_a_file(muster_main: MusterCli, tmp_path: Path) -> None:
    words = ("train", "digits", "--devices", "cpu:2", "--nodes", "2", "--time", "10")
    shown = muster_main(*words, "--on", "slurm", "--dry-run")
    printed = muster_main("slurm-script", *words)
    written = muster_main("slurm-script", "--output", "job.sh", *words)
    assert shown.returncode == printed.returncode == written.returncode == 0
    assert shown.stdout == printed.stdout == (tmp_path / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in shown.stdout and "#SBATCH --time=10\n" in shown.stdout
    behind = muster_main("slurm-script", *words, "--output=behind.sh")
    assert behind.returncode == 0, behind.stderr
    assert (tmp_path / "behind.sh").read_text() == shown.stdout
    wrong = muster_main("slurm-script", "trian", "digits")
    assert wrong.returncode == 2 and "did you mean 'train'?" in wrong.stderr


@pytest.mark.parametrize(
    ("command", "words", "target", "rest"),
    [
        ("train", ["har", "--output", "a.sh", "--lr", "1"], "a.sh", ["har", "--lr", "1"]),
        ("run", ["--gpus", "2", "-o", "a.sh", "x.py"], "a.sh", ["--gpus", "2", "x.py"]),
        ("run", ["x.py", "--output", "mine"], None, ["x.py", "--output", "mine"]),
        ("sweep", ["--seeds", "2", "--", "x", "-o", "y"], None,
         ["--seeds", "2", "--", "x", "-o", "y"]),
        ("sweep", ["--output=a.sh", "--", "x", "-o", "y"], "a.sh", ["--", "x", "-o", "y"]),
    ],
)  # fmt: skip
def test_where_the_script_goes_may_be_said_behind_the_command(
    command: str, words: list[str], target: str | None, rest: list[str]
) -> None:
    found, left = output_among(command, words)
    assert (found and str(found), left) == (target, rest)
