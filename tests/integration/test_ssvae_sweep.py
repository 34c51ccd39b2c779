"""``muster sweep ssvae`` from the command line to the table, on tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli
from tests.unit.recipes.digits.published_files import write_mnist

TINY = (
    "--num-epochs", "2", "--eval-frequency", "1", "--batch-size", "512", "--num-samples", "1",
    "--num-style", "2", "--unlabelled", "sampled", "--devices", "cpu:1", "--run-dir", "run",
)  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    found: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "results.parquet").to_pylist()
    return found


def test_a_sweep_ends_with_a_row_per_run_and_is_not_repeated(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    # The command of a SLURM array, with flags that make it small.
    command = (
        "sweep", "ssvae", "--dataset", "DIGITS", "--num_seeds", "1", "--seed_offset", "3",
        "--n-labels", "20", "--alpha-values", "1", "10", "--corruption-rates", "0", "0.5",
        *TINY,
    )  # fmt: skip
    done = muster_cli(*command, timeout_s=300)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "run")
    assert len(found) == 4 + 2
    assert {row["state"] for row in found} == {"done"}
    assert {row["seed"] for row in found} == {45}
    for row in found:
        assert row["curve_epoch"] == [1, 2] and len(row["curve_accuracy"]) == 2
        assert (row["elbo_nats"] is None) == (row["method"] == "supervised")
        assert (row["alpha"] is None) == (row["method"] == "supervised")
    table = json.loads((tmp_path / "run" / "table.json").read_text())
    cells = table if isinstance(table, list) else table["rows"]
    assert len(cells) == 6
    assert list((tmp_path / "run" / "figures").glob("*.png"))

    again = muster_cli(*command, timeout_s=300)
    assert again.returncode == 0, again.stderr
    assert rows(tmp_path / "run") == found  # to the second that a task took: none ran again


def test_a_run_that_leaves_the_finite_numbers_is_a_failed_row_beside_good_ones(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    done = muster_cli(
        "sweep", "ssvae", "--n-labels", "20", "--alpha-values", "1", "1e38", "10",
        "--corruption-rates", "0", "--num-seeds", "1", "--no-supervised", *TINY,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    states = {row["alpha"]: row for row in rows(tmp_path / "run")}
    assert [states[a]["state"] for a in (1.0, 1e38, 10.0)] == ["done", "failed", "done"]
    assert "the objective became -inf in epoch 1" in states[1e38]["error"]
    assert states[1e38]["attempts"] == states[1.0]["attempts"] == 1


def test_published_files_are_swept_and_damaged_ones_refused(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_mnist(folder, packed=True)
    command = (
        "sweep", "ssvae", "--dataset", "fashion_mnist", "--data-dir", "files", "--n-labels", "10",
        "--alpha-values", "1", "--corruption-rates", "0", "--num-seeds", "1", *TINY,
    )  # fmt: skip
    done = muster_cli(*command)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "run")
    assert [row["state"] for row in found] == ["done", "done"]
    assert {row["dataset"] for row in found} == {"fashion-mnist"}

    folder.rename(tmp_path / "moved")
    made = muster_cli("report", "run")
    assert made.returncode == 0, made.stderr
    (tmp_path / "moved").rename(folder)

    labels = folder / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-4])
    broken = muster_cli(*command)
    assert broken.returncode == 2
    assert labels.name in broken.stderr and "Traceback" not in broken.stderr


def test_a_set_that_is_not_there_says_both_ways(
    muster_cli: MusterCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    done = muster_cli("sweep", "ssvae", "--dataset", "MNIST", "--num_seeds", "1")
    assert done.returncode == 3
    assert "--data-dir FOLDER" in done.stderr and "muster-gpu[datasets]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_recipe_is_named_before_its_flags(muster_main: MusterCli) -> None:
    done = muster_main("sweep", "ssvaee", "--n-labels", "100")
    assert done.returncode == 2
    assert "Unknown recipe 'ssvaee'" in done.stderr and "did you mean 'ssvae'" in done.stderr
