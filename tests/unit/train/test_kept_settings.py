"""What an optimizer keeps in its parameter groups: what has changed is told from what has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from muster.rank.state import _copied, _is_same
from muster.rank.sync import modules_with_extra_state


class Settings:
    """Somebody's, with no idea of being equal to another."""


@dataclass
class Comparable:
    rate: float


def in_place(group: dict[str, Any]) -> None:
    group["views"][1].add_(1)


def deeper(group: dict[str, Any]) -> None:
    group["nested"]["steps"].append(3)


def another(group: dict[str, Any]) -> None:
    group["object"] = Settings()


def group() -> dict[str, Any]:
    return {
        "object": Settings(), "equal": Comparable(0.1), "views": [torch.ones(2), torch.zeros(3)],
        "nested": {"steps": [1, 2]}, "betas": (0.9, 0.99), "none": None,
    }  # fmt: skip


def test_a_group_that_nobody_changed_is_the_same() -> None:
    values = group()
    assert _is_same(_copied(values), _copied(values))


def test_what_has_no_one_answer_is_not_called_the_same() -> None:
    assert _is_same(array := np.ones(2), array)
    assert not _is_same(np.ones(2), np.ones(2))


@pytest.mark.parametrize("change", [in_place, deeper, another])
def test_a_change_is_seen_however_deep_it_lies(change: Any) -> None:
    values = group()
    before = _copied(values)
    change(values)
    assert not _is_same(before, _copied(values))


def test_a_module_that_cannot_take_its_extra_state_back_keeps_none() -> None:
    class GetOnly(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 2}

    class Both(GetOnly):
        def set_extra_state(self, state: Any) -> None:
            pass

    found = modules_with_extra_state(nn.Sequential(GetOnly(1, 1), Both(1, 1)))
    assert [name for name, _ in found] == ["1._extra_state"]
