"""A sample of flags, each of which changes what ``--dry-run`` says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.conftest import MusterCli

SWEEP = "sweep t.py:f --grid x=1,2,3 --devices cpu:2"
ARRAY = f"{SWEEP} --on slurm --workers 2".replace(" --devices cpu:2", "")
MAP = "map t.py:up --input in.jsonl --output out.jsonl --devices cpu:1"
TRAIN = "train digits --devices cpu:1"
GANG = "train digits --on slurm --gpus 1"
RUN = "run --devices cpu:2"
OF_SLURM = ("--partition p", "--account a", "--time 1:00:00", "--mem 4G", "--slurm-arg nice=3")
CASES = [
    *((SWEEP, flag) for flag in (
        "--grid y=1,2", "--zip z=1,2", "--list list.csv", "--seeds 2", "--seeds 3 --seed-offset 7",
        "--part 0/3", "--devices cpu:1", "--run-dir b", "--name other",
    )),
    *((ARRAY, flag) for flag in (
        "--workers 3", "--gpus-per-worker 1", "--cpus-per-worker 3", "--warn-before 30",
        "--run-dir b", *OF_SLURM,
    )),
    *((MAP, flag) for flag in (
        "--limit 2", "--skip 1", "--chunk-rows 1", "--devices cpu:2", "--run-dir b",
        "--output other.jsonl",
    )),
    *((TRAIN, flag) for flag in (
        "--devices cpu:2", "--start exec", "--run-dir b", "--lr 0.5", "--seed 3", "--width 8",
    )),
    *((GANG, flag) for flag in (
        "--gpus 2", "--nodes 2", "--cpus-per-node 3", "--grace 99", "--run-dir b", *OF_SLURM,
    )),
    *((RUN, flag) for flag in ("--devices cpu:1", "--start spawn", "--run-dir b")),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_flag_changes_the_plan(
    command: str, flag: str, tmp_path: Path, muster_main: MusterCli
) -> None:
    (tmp_path / "t.py").write_text(
        "def f(x, y=0, z=0, seed=0):\n    return x\n\n\ndef up(record):\n    return record\n"
    )
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n{"x": 2}\n{"x": 3}\n')
    (tmp_path / "list.csv").write_text("y\n5\n")
    program = ["t.py"] if command == RUN else []
    run_dir = [] if flag.startswith(("--run-dir", "--name", "--lr", "--seed", "--width")) else [
        "--run-dir", "a"
    ]  # fmt: skip

    def plan(*flags: str) -> str:
        words = [*shlex.split(command), *run_dir, *flags, "--dry-run", "--json", *program]
        done = muster_main(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before, after = plan(), plan(*flag.split())
    assert before != after


def test_an_option_that_a_recipe_decides_is_refused(muster_main: MusterCli) -> None:
    """It was taken, and the recipe's own was used."""
    words = ("map", "reasoning", "--dataset", "gsm8k", "--output", "o.jsonl", "--dry-run")
    done = muster_main(*words, "--config", "main")
    assert done.returncode == 2
    assert "--config has no effect on reasoning" in done.stderr
