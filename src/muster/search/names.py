"""The words of a search's flags, by themselves: every sweep reads them, and few are searches."""

from __future__ import annotations

from typing import Literal

Direction = Literal["minimize", "maximize"]
SamplerName = Literal["random", "qmc", "tpe", "gp", "cmaes", "nsga2"]
StopRule = Literal["none", "asha", "asha-stop", "hyperband", "median", "pbt"]
