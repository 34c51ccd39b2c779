"""Flags of a gang on SLURM: which have an effect where, and which job they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli

from muster.api.slurm.array import Array
from muster.api.slurm.gang import SlurmGang
from muster.cli.commands.resume import _merged
from muster.cli.commands.run import flags_of_run, slurm_gang
from muster.cli.commands.slurm import FileFlags, element_of
from muster.cli.main import read_command
from muster.cli.values import wants_slurm
from muster.run.folder import RunFolder
from muster.run.record import write_run


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


def test_the_program_keeps_flags_that_look_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    argv = ["--on", "slurm", "--gpus", "2", "--slurm-arg", "nice=1", "train.py", "--time", "3"]
    assert list(flags_of_run(argv).program) == ["train.py", "--time", "3"]
    gang = slurm_gang(flags_of_run(argv))
    record = gang.renew(None)
    assert read_command(record.argv).argv() == flags_of_run(argv).argv()
    assert (record.spec["program"]["path"], record.spec["program"]["args"]) == (
        "train.py", ("--time", "3"),
    )  # fmt: skip
    assert (gang.request.gpus_per_node, gang.request.slurm_args) == (2, ("nice=1",))
    same = _sent("--on slurm --no-wait --gpus 2 train.py --time 3")
    assert same.folder == gang.folder  # found again while its job lives
    other = _sent("--on slurm --gpus 2 train.py --time 4")
    nodes = _sent("--on slurm --gpus 2 --nodes 2 train.py --time 3")
    ranks = _sent("--on slurm --gpus 3 train.py --time 3")
    assert len({gang.folder, other.folder, nodes.folder, ranks.folder}) == 4


def _sent(line: str) -> SlurmGang:
    return slurm_gang(flags_of_run(line.split()))


def test_a_job_that_an_older_muster_has_named_in_its_way_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    before = ["muster", "run", "--on", "slurm", "--gpus", "2", "--no-wait", "train.py", "--lr", "1"]
    old = RunFolder(Path("runs/train-abc123"))
    old.slurm.mkdir(parents=True)
    record = {"job_id": "7", "script": "", "argv": before, "cwd": str(tmp_path)}
    old.slurm_job.write_text(json.dumps(record))
    words = ["--on", "slurm", "--devices", "2", "train.py", "--lr"]
    assert slurm_gang(flags_of_run([*words, "1"])).folder == old
    assert slurm_gang(flags_of_run([*words, "2"])).folder != old
    old.slurm_job.write_text(json.dumps({**record, "cwd": "/elsewhere"}))
    assert slurm_gang(flags_of_run([*words, "1"])).folder != old
    # Submitted again by this muster, which has what was typed in the record of the run.
    write_run(old, slurm_gang(flags_of_run([*words, "1"])).renew(None))
    old.slurm_job.write_text(json.dumps({"job_id": "8", "script": ""}))
    assert slurm_gang(flags_of_run([*words, "1"])).folder == old
    assert slurm_gang(flags_of_run([*words, "2"])).folder != old


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
    [folder] = (tmp_path / "runs").iterdir()
    record = json.loads((folder / "run.json").read_bytes())  # what the job will start from
    typed = read_command(["muster", *words, "--on", "slurm"])
    assert record["argv"] == typed.argv()
    assert f"muster resume {folder} --node-rank" in shown.stdout
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
    parsed = read_command(["muster", command, *words], {"file": FileFlags})
    assert parsed.file.output == (target and Path(target))
    left = parsed.saying(("file.output",))
    assert left.argv() == read_command(["muster", command, *rest]).argv()


def test_a_script_that_was_only_printed_starts_no_other_run(
    muster_main: MusterCli, tmp_path: Path
) -> None:
    """The node started whatever the folder held by then, without a word."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def task(x: int):\n    return x\n")
    for words in (("run", "--devices", "cpu:1", "--run-dir", "gang"),
                  ("sweep", "--array", "2", "--grid", "x=1,2", "--run-dir", "array")):  # fmt: skip
        what = ":task" if words[0] == "sweep" else ""
        printed = muster_main("slurm-script", *words, f"b.py{what}")
        assert printed.returncode == 0 and "--output FILE writes the record" in printed.stderr
        kept = muster_main("slurm-script", "--output", "job.sh", *words, f"a.py{what}")
        assert kept.returncode == 0, kept.stderr
        folder = words[-1]
        which = ("--element", "0") if words[0] == "sweep" else ("--node-rank", "0")

        def start(script: str, place: str = folder, which: tuple[str, ...] = which) -> str:
            of = script.rpartition("--of-script ")[2].split()[0].strip("'")
            words = (place, *which, "--dry-run", "--of-script", of)
            alone = muster_main("resume", *words).stderr
            # What is added behind the words of the script does not hide them.
            assert muster_main("resume", *words, "--allow-changed-code").stderr == alone
            return alone

        assert "This script was made for another run than" in start(printed.stdout)
        assert "made for another" not in start((tmp_path / "job.sh").read_text())


def test_elements_of_an_array_send_nothing_to_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does when it is collected; a tracker would have every task twice."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("def f(x):\n    return {'y': x}\n")
    line = "muster sweep t.py:f --grid x=1,2 --on slurm --array 2 --log-to tensorboard"
    array = Array(elements=2, argv=tuple(line.split()))
    _, options = element_of(array, RunFolder(tmp_path / "run"), 0)
    assert options.log_to == ()


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "--grid", "x=1", "--array", "1"),
        ("run", "--gpus", "1"),
        ("train", "digits", "--gpus", "1"),
    ],
)
def test_lines_of_setup_are_in_the_script(
    muster_main: MusterCli, words: tuple[str, ...], tmp_path: Path
) -> None:
    what = {"sweep": ("--", "echo", "{x}"), "run": ("train.py",)}.get(words[0], ())
    lines = ("--setup", "module load cuda", "--setup=echo 'a b'")
    (tmp_path / "train.py").touch()
    done = muster_main(*words, "--on", "slurm", *lines, "--dry-run", *what)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "eval 'module load cuda' || { echo 'muster: --setup has failed: module load" in said
    assert said.index("eval 'module load cuda'") < said.index("eval 'echo '") < said.index("srun ")


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (("sweep", "--grid", "x=1"), "without --hosts or --on slurm.", "before muster"),
        (("sweep", "--grid", "x=1", "--on", "ray"), "without --hosts or --on slurm.", ""),
        (("run",), "without --hosts or --on slurm.", "before muster"),
    ],
)
def test_lines_of_setup_without_a_machine_they_are_for_are_refused(
    muster_main: MusterCli, words: tuple[str, ...], says: str, hint: str
) -> None:
    done = muster_main(*words, "--setup", "true", "--dry-run", "--", "echo", "{x}")
    assert done.returncode == 2
    first, _, more = done.stderr.partition("\n")
    assert first == f"muster: --setup has no effect {says}" and hint in more
    assert bool(more) == bool(hint)


def test_a_run_that_goes_on_elsewhere_leaves_lines_of_setup_behind() -> None:
    line = ["muster", "sweep", "--grid", "x=1", "--on", "slurm", "--setup", "true", "--", "echo"]
    before = read_command(line)
    for more, is_kept in ((["--on", "ray"], False), (["--on", "slurm"], True), ([], True)):
        typed = read_command(["muster", "sweep", *more, "--retries", "2", "--", "echo"])
        assert ("--setup" in _merged(Path("r"), before, typed).argv()) is is_kept
