"""What the process that hands out the tasks imports, and in which order it hands them out."""

from __future__ import annotations

import subprocess
import sys

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import forecast, plan

_PROGRAM = """
import sys
from muster_recipes.ssm.recipe import RECIPE
config = RECIPE.config(num_seeds=3)
assert len(list(RECIPE.plan(config))) == RECIPE.count(config)
RECIPE.forecast(config)
print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules])
"""


def test_planning_stays_light() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_widest_blocks_of_all_seeds_come_first() -> None:
    tasks = list(plan(SsmConfig(num_seeds=3, student_dims=(8, 64, 16))))
    drawn = [task.params["dim"] for task in tasks if task.target == "gnc"]
    assert drawn == sorted(drawn, reverse=True)
    assert {t.priority for t in tasks if t.target == "gd"} == {1}


def test_a_forecast_of_many_cells_is_one_sentence() -> None:
    (sentence,) = forecast(SsmConfig(num_seeds=50, gnc_num_samples=100))
    assert sentence.startswith("200 cells will accept fewer than 10 of 100 guesses")
    assert "and 197 more" in sentence
    assert forecast(SsmConfig(gnc=False)) == []
