"""The command lines that the specification of the recipes names, on two ranks of the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.json_schemas import check_printed

FEW = ("--max-steps", "3", "--no-tensorboard")


def results(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "training_results.json").read_text())
    return found


def test_har_flatten_with_its_own_learning_rate(muster_cli: MusterCli, tmp_path: Path) -> None:
    done = muster_cli(
        "train", "har", "--multi-gpu", "ddp", "--mode", "flatten", "--epochs", "30",
        "--batch-size", "32", "--lr", "4e-3", "--warmup-epochs", "3",
        "--save-dir", "checkpoints/production_4gpu", "--devices", "cpu:2", *FEW,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "batch      2 ranks x 32 per rank x 1 accumulation = global batch 64" in done.stdout
    assert "lr         0.004 (of the global batch, not scaled)" in done.stdout
    found = results(tmp_path / "checkpoints" / "production_4gpu")
    assert (found["strategy"], found["num_ranks"], found["steps"]) == ("ddp", 2, 3)


def test_har_accumulates(muster_cli: MusterCli) -> None:
    done = muster_cli(
        "train", "har", "--multi-gpu", "ddp", "--batch-size", "16", "--grad-accum-steps", "2",
        "--lr", "8e-3", "--devices", "cpu:2", *FEW,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks x 16 per rank x 2 accumulation = global batch 64" in done.stdout


def test_dp_says_what_it_is_and_means_the_same_batch(muster_cli: MusterCli) -> None:
    done = muster_cli("train", "har", "--multi-gpu", "dp", "--devices", "cpu:2", *FEW)
    assert done.returncode == 0, done.stderr
    assert "strategy   dp (2 devices in one process: to compare; ddp is faster)" in done.stdout
    assert "2 ranks x 32 per rank x 1 accumulation = global batch 64" in done.stdout


@pytest.mark.quick
def test_gpus_that_are_not_there_are_a_clear_error(muster_main: MusterCli) -> None:
    done = muster_main("train", "har", "--multi-gpu", "dp", "--gpu-ids", "91,92")
    assert done.returncode == 3
    assert "91" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow  # the next one, of another recipe
def test_ranks_of_torchrun_are_taken_as_they_are(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "-m", "muster", "train", "har", "--multi-gpu", "ddp", "--run-dir", "runs/inside", *FEW,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "runs" / "inside")
    assert (found["strategy"], found["num_ranks"], found["steps"]) == ("ddp", 2, 3)
    assert done.stdout.count("strategy   ddp") == 1


def in_torchrun(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "muster",
        "train", "digits", "--run-dir", "inside", *FEW, *more,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_inside_a_launcher_a_dry_run_trains_nothing_and_json_is_json(tmp_path: Path) -> None:
    dry = in_torchrun(tmp_path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "inside").exists()
    done = in_torchrun(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = check_printed("train", done.stdout)["results"]
    assert (found["strategy"], found["num_ranks"], found["steps"]) == ("ddp", 2, 3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("train", "digitz"), 2, "did you mean 'digits'?"),
        (("train", "digits", "--global-batch", "5000"), 2, "larger than the training data"),
        (("train", "digits", "--dataset", "mnist"), 2, "--data-dir"),
        (("train", "digits", "--strategy", "fsdp", "--multi-gpu", "ddp"), 2, "contradict"),
        (("train", "digits", "--lr", "-1"), 2, "--lr must be greater than 0"),
        (("train", "nowhere.py:Task"), 2, "There is no file nowhere.py"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    muster_main: MusterCli, words: tuple[str, ...], code: int, text: str
) -> None:
    done = muster_main(*words)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_without_matplotlib_a_training_ends_with_its_model_and_a_remark(
    muster_cli: MusterCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 failed after the last step, before the model was written, and so at every resume."""
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = muster_cli("train", "digits", "--devices", "cpu:1", "--run-dir", "run", *FEW)
    assert done.returncode == 0, done.stderr
    assert "pip install 'muster-gpu[figures]'" in done.stdout
    assert results(tmp_path / "run")["steps"] == 3
    assert not (tmp_path / "run/curves.png").exists()
    fewer = (*FEW, "--max-steps", "2")
    done = muster_cli("train", "digits", "--devices", "cpu:1", "--run-dir", "run", *fewer)
    assert done.returncode == 0, done.stderr
    assert "none to go: it has taken 3, and 2 are asked for now" in done.stdout
