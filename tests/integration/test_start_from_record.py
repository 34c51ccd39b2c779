"""A job of SLURM starts from the record of its run: nodes of a gang and elements of an array.

``muster slurm-script --output`` writes the record that a submission writes; what the script would
run on a node is run here, so that no SLURM is needed. With one: test_slurm_gang.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.programs import slow_task

from muster.api.runs import Run

PROGRAM = "import sys\nimport helper\nprint('words', sys.argv[1:], helper.k)\n"
TARGET = """
def task(x: int, seed: int = 0):
    if x == 2:
        raise ValueError("two")
    return {"y": x + seed}
"""
QUIET = ("--monitor-interval", "0")


def write_down(cli: MusterCli, place: Path, *words: str) -> list[str]:
    """What `run.json` says was asked for, once the run is written down for its job."""
    done = cli("slurm-script", "--output", "job.sh", *words)
    assert done.returncode == 0, done.stderr
    folder = place / words[words.index("--run-dir") + 1]
    argv: list[str] = json.loads((folder / "run.json").read_bytes())["argv"]
    assert argv[:2] == ["muster", words[0]] and "--on slurm" in " ".join(argv)
    return argv


def test_a_program_is_started_with_what_was_typed_and_not_once_it_is_another(
    muster_cli: MusterCli, muster_main: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("k = 1\n")
    words = ("run", "--devices", "cpu:2", *QUIET, "--quiet", "--all-ranks", "--run-dir", "run",
             "p.py", "--time", "3 4")  # fmt: skip
    typed = write_down(muster_cli, tmp_path, *words)
    assert muster_main("status", "run").stdout.startswith("run: not begun\n")

    (tmp_path / "helper.py").write_text("k = 2\n")
    refused = muster_cli("resume", "run", "--node-rank", "0")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "has changed since" in refused.stderr and "submitted to SLURM: helper.py" in (
        refused.stderr
    )
    assert not (tmp_path / "run" / "events.jsonl").exists(), "it has not begun"

    (tmp_path / "helper.py").write_text("k = 1\n")
    done = muster_cli("resume", "run", "--node-rank", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] words ['--time', '3 4'] 1" in done.stdout, "what it prints is the job's log"
    assert "[1] words ['--time', '3 4'] 1" in done.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert (record["argv"], record["cwd"]) == (typed, str(tmp_path))
    assert muster_main("status", "run").stdout.startswith("run: done\n")

    (tmp_path / "helper.py").write_text("k = 3\n")
    write_down(muster_cli, tmp_path, *words[:1], "--allow-changed-code", *words[1:])
    (tmp_path / "helper.py").write_text("k = 4\n")
    allowed = muster_cli("resume", "run", "--node-rank", "0")
    assert allowed.returncode == 0 and "[0] words ['--time', '3 4'] 4" in allowed.stdout


def test_a_training_goes_on_when_its_job_starts_again(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(slow_task(0.0))
    words = ("train", "task.py:Slow", "--epochs", "2", "--devices", "cpu:2", *QUIET,
             "--no-tensorboard", "--run-dir", "run")  # fmt: skip
    typed = write_down(muster_cli, tmp_path, *words)
    first = muster_cli("resume", "run", "--node-rank", "0")
    assert first.returncode == 0, first.stdout + first.stderr
    assert (tmp_path / "run" / "training_results.json").exists()
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()
    again = muster_cli("resume", "run", "--node-rank", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert record["argv"] == typed
    (tmp_path / "task.py").write_text(slow_task(0.0) + "# edited\n")
    changed = muster_cli("resume", "run", "--node-rank", "0")
    assert changed.returncode == 2 and "task.py" in changed.stderr


def test_elements_do_what_one_sweep_does_and_go_on_by_their_own_folder(
    muster_cli: MusterCli, muster_main: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(TARGET)
    space = ("t.py:task", "--grid", "x=1,2,3", "--seeds", "2", "--seed-offset", "5")
    for name, count in (("seeds", "2"), ("parts", "4")):
        write_down(muster_cli, tmp_path, "sweep", *space, "--array", count, "--run-dir", name)
        for number in range(int(count)):
            done = muster_cli("resume", name, "--element", str(number), "--quiet")
            assert done.returncode in (0, 1), done.stdout + done.stderr
        collected = json.loads(muster_main("collect", name, "--json").stdout)
        assert collected["new"] == 6
    here = muster_cli("sweep", *space, "--devices", "cpu:1", *QUIET, "--run-dir", "here")
    assert here.returncode == 1, here.stderr

    def table(name: str) -> list[tuple[object, ...]]:
        rows = Run(tmp_path / name).results().to_pylist()
        return sorted((row["task"], row["state"], row["y"]) for row in rows)

    assert table("seeds") == table("parts") == table("here")
    element = tmp_path / "seeds" / "elements" / "1"
    shown = muster_main("resume", str(element), "--dry-run")
    assert shown.returncode == 0 and "(continued)" in shown.stdout, shown.stdout + shown.stderr
    assert "tasks    3" in shown.stdout
    (tmp_path / "t.py").write_text(TARGET.replace("x == 2", "x == 9"))
    refused = muster_main("resume", str(element))
    assert refused.returncode == 2 and "t.py" in refused.stderr
    (tmp_path / "t.py").write_text(TARGET)
    again = muster_cli("retry", str(element))
    assert again.returncode == 1 and "1 failed" in again.stdout, again.stdout + again.stderr
    alone = muster_main("resume", "here", "--element", "0")
    assert alone.returncode == 2 and "was not made with --array" in alone.stderr


def test_a_job_that_an_older_muster_has_submitted_runs_by_its_words(
    muster_cli: MusterCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has no run.json while it waits, and its script names what each node starts."""
    (tmp_path / "p.py").write_text("print('begun')\n")
    typed = ["muster", "run", "--on", "slurm", "--devices", "cpu:1", "--run-dir", "run", "p.py"]
    job = {"job_id": "90", "script": "", "argv": typed, "cwd": str(tmp_path)}
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    (tmp_path / "run" / "slurm" / "job.json").write_text(json.dumps(job))
    monkeypatch.setenv("SLURM_JOB_ID", "90")
    words = ("run", "--devices", "cpu:1", "--run-dir", str(tmp_path / "run"), "--", "p.py")
    done = muster_cli(*words)
    assert done.returncode == 0 and "[0] begun" in done.stdout, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert record["argv"] == typed, "so that `muster resume` means a job again"
