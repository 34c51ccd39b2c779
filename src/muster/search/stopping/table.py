"""The rules of early stopping by name."""

from __future__ import annotations

from muster.search.spec import SearchSpec
from muster.search.stopping.asha import Asha, AshaStop
from muster.search.stopping.hyperband import Hyperband
from muster.search.stopping.median import Median
from muster.search.stopping.rule import NoRule, Rule


def make_rule(spec: SearchSpec) -> Rule:
    """The rule that the specification names, with nothing seen yet."""
    stopping, goal = spec.stopping, spec.objectives[0]
    match stopping.rule:
        case "asha":
            return Asha(stopping, goal)
        case "asha-stop":
            return AshaStop(stopping, goal)
        case "hyperband":
            return Hyperband(stopping, goal)
        case "median":
            return Median(stopping, goal)
    return NoRule()
