"""The rules of early stopping by name."""

from __future__ import annotations

from muster.search.spec import SearchSpec
from muster.search.stopping.rule import NoRule, Rule


def make_rule(spec: SearchSpec) -> Rule:
    return NoRule()
