"""A run is found again by the folder that its settings name: these names may never change."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.cli.main import main
from muster.cli.recipes import AGENTS, RECIPES, TASKS
from muster.cli.train_flags import flags_of_train, train_job

NAMES = {
    "arith": "arith-4832a6",
    "clstm-ppo": "clstm-ppo-eb7597",
    "digits": "digits-4fbb1c",
    "har": "har-f8adcd",
    "ppo": "ppo-323a21",
    "ssvae": "ssvae-d493be",
}
SWEEPS = {"ssm": "ssm-084f44", "ssvae": "ssvae-e195e1"}


@pytest.mark.parametrize("recipe", sorted({**TASKS, **AGENTS}))
def test_a_recipes_default_folder_keeps_its_name(recipe: str) -> None:
    job, _ = train_job(flags_of_train([recipe], "train", ""))
    assert job.folder.path.name == NAMES[recipe]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_sweeps_default_folder_keeps_its_name(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", recipe, "--dry-run", "--devices", "cpu"]) == 0
    assert f"runs/{SWEEPS[recipe]} (new)" in capsys.readouterr().out
