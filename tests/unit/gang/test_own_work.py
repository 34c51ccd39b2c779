"""Whose work a GPU that stands has not finished, by the events of its stream."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from muster.rank.sync import Marks


@dataclass
class Event:
    is_done: bool

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize(
    ("num_done", "wanted"),
    [
        (6, None),  # all is done
        (5, False),  # in the backward of the third step
        (4, True),  # the third step has not begun: the gradients of the second are on their way
        (3, False),
        (1, False),
        (0, True),
    ],
)
def test_the_first_unfinished_event_says_it(num_done: int, wanted: bool | None) -> None:
    marks = Marks()
    for number in range(6):  # a step begins, its own work ends; three times
        marks.add(Event(number < num_done), is_own=number % 2 == 1)
    assert marks.own_done() is wanted
