"""A training is found again by the folder that its settings name: these names may never change."""

from __future__ import annotations

import pytest

from muster.cli.recipes import AGENTS, TASKS
from muster.cli.train_flags import parse_train

NAMES = {
    "arith": "arith-4832a6",
    "clstm-ppo": "clstm-ppo-eb7597",
    "digits": "digits-4fbb1c",
    "har": "har-f8adcd",
    "ppo": "ppo-323a21",
    "ssvae": "ssvae-d493be",
}


@pytest.mark.parametrize("recipe", sorted({**TASKS, **AGENTS}))
def test_a_recipes_default_folder_keeps_its_name(recipe: str) -> None:
    job, _, _ = parse_train([recipe], "train", "")
    assert job.folder.path.name == NAMES[recipe]
