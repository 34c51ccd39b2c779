"""The command lines of the recipe's specification, as typed, on the digits of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli

FEW = ("--dataset", "DIGITS", "--num-samples", "2", "--no-tensorboard", "--run-dir", "here")


def results(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "here" / "training_results.json").read_text())
    return found


def test_without_several_gpus(muster_cli: MusterCli, tmp_path: Path) -> None:
    done = muster_cli(
        "train", "ssvae", "--num_epochs", "2", "--no_multi_gpu", "--num-style", "50", *FEW
    )
    assert done.returncode == 0, done.stderr
    assert "1 rank: " in done.stderr and "strategy   single" in done.stdout
    assert "model      the last one" in done.stdout
    found = results(tmp_path)
    assert (found["num_ranks"], found["epochs"]) == (1, 2)
    measured = json.loads((tmp_path / "here" / "model" / "style_leakage.json").read_text())
    assert measured["style_leakage"] < 1


def test_on_several_devices_with_loaders(muster_cli: MusterCli, tmp_path: Path) -> None:
    done = muster_cli(
        "train", "ssvae", "--num_epochs", "2", "--devices", "cpu:2", "--num_workers", "2",
        "--eval_frequency", "1", "--strategy", "ddp", *FEW,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks: cpu:0, cpu:1" in done.stderr
    found = results(tmp_path)
    assert (found["strategy"], found["num_ranks"]) == ("ddp", 2)
    evaluations = found["evaluations"]
    assert isinstance(evaluations, list) and [line["epoch"] for line in evaluations] == [1, 2]


def test_gpus_that_are_not_there_are_named(muster_main: MusterCli) -> None:
    done = muster_main(
        "train", "ssvae", "--num_epochs", "1", "--gpu_ids", "90,91,92,93", "--num_workers", "8",
        "--eval_frequency", "5", *FEW,
    )  # fmt: skip
    assert done.returncode == 3
    assert "--gpu-ids 90,91,92,93" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "dp", "--devices", "cpu:2", "--unlabelled", "sampled"),
        (
            "--strategy",
            "single",
            "--label-protocol",
            "per-batch",
            "--corruption-rate",
            "0.2",
            "--alpha",
            "10",
            "--n-labels",
            "600",
            "--report",
            "best",
        ),
    ],
    ids=["dp", "single"],
)
@pytest.mark.slow  # other models are trained so in tests/integration/test_train_commands.py
def test_other_ways_to_train(muster_cli: MusterCli, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = muster_cli("train", "ssvae", "--num-epochs", "1", *words, *FEW)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["strategy"] == ("dp" if "dp" in words else "single")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--dataset", "cifar"), "write one of digits, mnist, fashion-mnist"),
        (("--dataset", "MNIST", "--data-dir", "nowhere"), "does not exist"),
        (("--precision", "bf16", "--devices", "cpu"), "16 bits"),
    ],
)
def test_mistakes_are_told(muster_main: MusterCli, words: tuple[str, ...], text: str) -> None:
    done = muster_main("train", "ssvae", "--num-epochs", "1", *words)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr and "Traceback" not in done.stdout + done.stderr
