"""Arrays without a coordinator, and the collecting of what they have done."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.json_schemas import check_printed
from tests.slurm_cluster import SlurmCluster

from muster.api.runs import Run

TARGET = """
from pathlib import Path

def square(x: int, seed: int = 0, ctx=None):
    (ctx.folder / "note.txt").write_text(str(x))
    return {"y": x * x + seed, "text": "long" * (2000 if x == 1 else 1)}

def sometimes(x: int):
    if x == 2:
        raise ValueError("two")
    return {"x": x}
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target.py"
    path.write_text(TARGET)
    return path


def table(folder: Path) -> list[dict[str, object]]:
    names = ("x", "y", "seed", "state", "text", "task")
    found = [{k: row.get(k) for k in names} for row in Run(folder).results().to_pylist()]
    return sorted(found, key=lambda row: str(row["task"]))


def await_end(slurm: SlurmCluster) -> None:
    deadline = time.monotonic() + 300
    while slurm.squeue():
        assert time.monotonic() < deadline, slurm.squeue()
        time.sleep(0.1)


@pytest.mark.slurm
def test_an_element_per_seed_gives_what_one_sweep_gives(
    slurm: SlurmCluster,
    target: Path,
    muster_cli: MusterCli,
    muster_main: MusterCli,
    tmp_path: Path,
) -> None:
    words = ("sweep", f"{target}:square", "--grid", "x=1,2", "--seeds", "3", "--seed-offset", "5")
    array = (*words, "--on", "slurm", "--array", "3", "--run-dir", "there")
    dry = muster_main(*array, "--dry-run")
    assert "#SBATCH --array=0-2" in dry.stdout
    assert f'resume {tmp_path}/there --element "$SLURM_ARRAY_TASK_ID" --quiet' in dry.stdout
    assert not (tmp_path / "there").exists()
    sent = muster_cli(*array, "--json")
    assert sent.returncode == 0, sent.stderr
    check_printed("sweep", sent.stdout)
    await_end(slurm)
    collected = muster_main("collect", "there", "--json")
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert json.loads(collected.stdout)["new"] == 6
    here = muster_cli(*words, "--devices", "cpu:1", "--run-dir", "here")
    assert here.returncode == 0, here.stderr
    assert table(tmp_path / "there") == table(tmp_path / "here")
    notes = sorted(path.read_text() for path in (tmp_path / "there").glob("artifacts/*/*/note.txt"))
    assert notes == ["1", "1", "1", "2", "2", "2"]
    again = muster_main("collect", "there", "--json")
    assert (json.loads(again.stdout)["new"], json.loads(again.stdout)["known"]) == (0, 6)


@pytest.mark.slurm
def test_a_script_that_is_sent_by_hand_is_collected_too(
    slurm: SlurmCluster, target: Path, muster_main: MusterCli, tmp_path: Path
) -> None:
    words = ("sweep", f"{target}:square", "--grid", "x=1,2", "--run-dir", "run")
    alone = muster_main("slurm-script", *words)
    assert alone.returncode == 2 and "--array" in alone.stderr
    written = muster_main("slurm-script", "--output", "job.sh", *words, "--array", "2")
    assert written.returncode == 0, written.stderr
    assert not slurm.squeue()
    slurm.run("sbatch", "job.sh", cwd=tmp_path)
    await_end(slurm)
    collected = muster_main("collect", "run", "--json")
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert {row["y"] for row in table(tmp_path / "run")} == {1, 4}


def element(cli: MusterCli, target: Path, number: int, *more: str) -> None:
    """What an element runs, without SLURM."""
    words = ("--part", f"{number}/3", "--run-dir", f"run/elements/{number}")
    done = cli("sweep", f"{target}:sometimes", "--grid", "x=1,2,3,4", *words, "--devices", "cpu:1")
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.slurm
@pytest.mark.slow
def test_what_is_missing_is_named_and_failures_are_told(
    slurm: SlurmCluster,
    target: Path,
    muster_cli: MusterCli,
    muster_main: MusterCli,
    tmp_path: Path,
) -> None:
    words = ("sweep", f"{target}:sometimes", "--grid", "x=1,2,3,4", "--on", "slurm")
    held = ("--array", "3", "--slurm-arg", "hold", "--run-dir", "run")
    sent = muster_cli(*words, *held)
    assert sent.returncode == 0, sent.stderr
    assert "muster collect" in sent.stdout
    slurm.clear()
    element(muster_cli, target, 0)  # x = 1 and 4
    first = muster_main("collect", "run")
    assert first.returncode == 1
    assert "2 new results; 2 done, 0 failed, 2 not there yet" in first.stdout
    assert "2 elements have not begun: 1, 2" in first.stdout
    element(muster_cli, target, 1)
    element(muster_cli, target, 2)
    last = muster_main("collect", "run")
    assert last.returncode == 1, "a task has failed"
    assert "2 new results; 3 done, 1 failed, 0 not there yet" in last.stdout
    assert [f.message for f in Run(tmp_path / "run").failures()] == ["ValueError: two"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--array", "3"), "--on slurm"),
        (("--array", "0", "--on", "slurm"), "--array 0"),
        (("--array", "2", "--part", "0/2", "--on", "slurm"), "contradict"),
        (("--part", "3/3"), "--part 3/3"),
    ],
)
def test_an_array_that_makes_no_sense_is_refused(
    target: Path, muster_main: MusterCli, words: tuple[str, ...], says: str
) -> None:
    done = muster_main("sweep", f"{target}:square", "--grid", "x=1", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


def test_a_run_without_elements_has_nothing_to_collect(
    target: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    made = muster_cli(
        "sweep", f"{target}:sometimes", "--grid", "x=1", "--devices", "cpu:1", "--run-dir", "run"
    )
    assert made.returncode == 0, made.stderr
    done = muster_main("collect", "run")
    assert done.returncode == 2
    assert "nothing to collect" in done.stderr


WORDS = ("--grid", "x=1,2", "--seeds", "4", "--run-dir", "run")


def prepare(cli: MusterCli, target: Path, *more: str) -> None:
    """The run folder of an array as it is before anything was sent."""
    words = ("sweep", f"{target}:square", *(more or WORDS), "--array", "4")
    made = cli("slurm-script", *words, "--output", "job.sh")
    assert made.returncode == 0, made.stderr


def seed(cli: MusterCli, target: Path, number: int, grid: str = "x=1,2") -> str:
    """What an element for one seed runs; what it complained of."""
    words = ("--seeds", "1", "--seed-offset", str(number), "--run-dir", f"run/elements/{number}")
    place = ("--devices", "cpu:1", "--quiet")
    return cli("sweep", f"{target}:square", "--grid", grid, *words, *place).stderr


def test_another_count_of_elements_is_refused(
    target: Path, muster_cli: MusterCli, tmp_path: Path
) -> None:
    prepare(muster_cli, target)
    words = ("sweep", f"{target}:square", "--on", "slurm", "--dry-run")
    other = muster_cli(*words, *WORDS, "--array", "2")
    assert other.returncode == 2, other.stdout
    assert "was begun as an array of 4 elements: with --array 2 each would" in other.stderr
    assert "--array 4" in other.stderr and "--run-dir" in other.stderr
    assert json.loads((tmp_path / "run/elements/array.json").read_bytes())["elements"] == 4
    assert muster_cli(*words, *WORDS, "--array", "4").returncode == 0
    # One seed each: more of them change nothing for the elements that are there.
    more = ("--grid", "x=1,2", "--seeds", "5", "--run-dir", "run", "--array", "5")
    assert muster_cli(*words, *more).returncode == 0


def test_every_element_that_is_there_is_collected(
    target: Path, muster_cli: MusterCli, muster_main: MusterCli, tmp_path: Path
) -> None:
    """Also those beyond the count that the array was sent with last."""
    prepare(muster_cli, target)
    assert muster_main("wait", "run").returncode == 2, "it has not begun"
    for number in range(4):
        seed(muster_cli, target, number)
        waited = muster_main("wait", "run")
        assert waited.returncode == (75 if number < 3 else 0)
        assert "bring the results here: muster collect run" in waited.stdout
    record = tmp_path / "run/elements/array.json"
    record.write_text(json.dumps({"elements": 2, "job_id": None}))
    collected = muster_main("collect", "run")
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "8 new results; 8 done, 0 failed, 0 not there yet" in collected.stdout
    assert muster_main("wait", "run").stdout == "run: done\n"


def test_it_is_said_why_an_element_ended_and_how_far_the_others_are(
    target: Path, muster_cli: MusterCli, muster_main: MusterCli, tmp_path: Path
) -> None:
    prepare(muster_cli, target)
    jobs = tmp_path / "run" / "pilots" / "jobs"
    seed(muster_cli, target, 0)
    seed(muster_cli, target, 1)
    (jobs / "7_1.out").write_text("muster: from an earlier job\n")
    (jobs / "8_1.out").write_text("what the task printed\n")
    seed(muster_cli, target, 2, "x=3")
    refused = seed(muster_cli, target, 2)
    (jobs / "8_2.out").write_text("set up\n" + refused)
    (jobs / "8_3.out").write_text("hello\nmodule: command not found\n")
    status = muster_main("status", "run").stdout
    assert "run: not collected" in status and "stopped" not in status
    assert "array of 4 elements: 3 ended" in status and "5 done, 0 failed; bring" in status
    told = muster_main("collect", "run").stdout.splitlines()
    assert told[1].startswith(
        "element 2 ended with: muster: This run folder was made for another plan: grid x: 3 -> 1, 2"
    )
    assert told[1].endswith("(all of it: run/pilots/jobs/8_2.out)")
    assert told[2].startswith("element 3 ended with: hello; module: command not found")
    assert len(told) == 4, "nothing of element 1, whose last job was well"
    as_json = check_printed("collect", muster_main("collect", "run", "--json").stdout)
    assert list(as_json["ended_elements"]) == ["2", "3"]


@pytest.mark.slurm
def test_an_array_in_the_queue_is_not_called_stopped(
    slurm: SlurmCluster, target: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    words = ("sweep", f"{target}:square", *WORDS, "--on", "slurm", "--array", "4")
    sent = muster_cli(*words, "--slurm-arg", "hold")
    assert sent.returncode == 0, sent.stderr
    status = muster_main("status", "run").stdout
    assert "run: queued" in status
    assert "array of 4 elements: 4 queued" in status
    assert muster_main("collect", "run").stdout.count("elements have not begun: 0, 1, 2, 3") == 1
