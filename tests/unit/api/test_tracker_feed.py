"""What a tracker gets: every point once, whatever repeats it and wherever the process dies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.api.trackers.feed import Position, PositionTaken, feed
from muster.api.trackers.tracker import Ended, Point, Tracked

Frame = tuple[int, list[Point]]


class Frames:
    """A source: frames of tasks, of which two are read at a time."""

    def __init__(self, frames: Sequence[Frame], ended: Collection[int] = ()) -> None:
        self.frames = list(frames)
        self.ended = set(ended)

    def read(self, mark: Any) -> tuple[Any, Mapping[int, Sequence[Point]]]:
        start = mark or 0
        found: dict[int, list[Point]] = {}
        for task, points in self.frames[start : start + 2]:
            found.setdefault(task, []).extend(points)
        end = min(start + 2, len(self.frames))
        return (end, found) if end > start else (mark, {})

    def looking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before(self, task: int, mark: Any) -> Iterable[Point]:
        frames = self.frames[: mark or 0]
        return [point for owner, some in frames if owner == task for point in some]

    def tracked(self, task: int) -> Tracked:
        return Tracked(id=str(task), name=str(task), group="g", folder=str(task))

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        new = [(task, 1) for task in sorted(self.ended) if (task, 1) not in known]
        return [(key, Ended(state="done", result={"task": key[0]})) for key in new[:2]]

    def num_after(self, mark: Any) -> int:
        return sum(len(points) for _, points in self.frames[mark or 0 :])


class Dies(Exception):
    pass


class Store:
    """A tracker that outlives the process that feeds it, which dies after ``lives`` steps."""

    most_open = 2

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[str, int, float]]] = {}
        self.states: dict[str, list[str]] = {}
        self.lives = 1 << 60
        self.open_now: set[str] = set()

    def open(self, tracked: Tracked) -> StoreRun:
        self.step()
        assert len(self.open_now) < self.most_open
        self.open_now.add(tracked.id)
        return StoreRun(self, tracked.id)

    def step(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Dies


class StoreRun:
    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.last_steps: dict[str, int] = {}
        for metric, step, _ in store.points.get(name, ()):
            self.last_steps[metric] = max(step, self.last_steps.get(metric, step))

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._store.step()
            mine = self._store.points.setdefault(self._name, [])
            mine.append((point.name, point.step, point.value))

    def settle(self) -> None:
        self._store.step()

    def finish(self, ended: Ended) -> None:
        self._store.step()
        self._store.states.setdefault(self._name, []).append(ended.state)
        self.leave()

    def leave(self) -> None:
        self._store.open_now.discard(self._name)


def fed(frames: Frames, store: Store, folder: Path, run_id: str = "r") -> None:
    store.open_now.clear()
    with Position(folder / "store.jsonl", run_id) as position:
        feed(frames, store, position, lambda _: True)


def points(*steps: int, name: str = "loss", value: float = 0.0, attempt: int = 1) -> list[Point]:
    return [Point(name, step, 1.0, value, attempt) for step in steps]


def test_a_repeated_attempt_sends_nothing_twice(tmp_path: Path) -> None:
    frames = Frames([(1, points(1, 2, 3)), (1, points(2, 3, 4, value=9.0, attempt=2))], ended=[1])
    store = Store()
    fed(frames, store, tmp_path)
    assert store.points == {
        "1": [("loss", 1, 0.0), ("loss", 2, 0.0), ("loss", 3, 0.0), ("loss", 4, 9.0)]
    }
    assert store.states == {"1": ["done"]}


@pytest.mark.parametrize("lives", [1 << 60, 3, 7])
def test_folds_of_one_attempt_have_the_same_steps(tmp_path: Path, lives: int) -> None:
    folds = [(1, points(0, 1, 2, value=float(fold))) for fold in range(5)]
    store = Store()
    store.lives = lives
    with suppress(Dies):
        fed(Frames(folds, ended=[1]), store, tmp_path)
    store.lives = 1 << 60
    fed(Frames(folds, ended=[1]), store, tmp_path)
    found = store.points["1"]
    assert set(found) == {("loss", step, float(fold)) for fold in range(5) for step in range(3)}
    assert lives < 1 << 60 or len(found) == 15


def test_late_points_of_an_earlier_attempt_do_not_begin_a_done_task_again(tmp_path: Path) -> None:
    frames, store = Frames([(1, points(1, 2, attempt=2))], ended=[1]), Store()
    fed(frames, store, tmp_path)
    frames.frames.append((1, points(1, attempt=1)))
    fed(frames, store, tmp_path)
    assert store.states == {"1": ["done"]}


def test_what_has_not_ended_is_stopped_and_goes_on_the_next_time(tmp_path: Path) -> None:
    frames, store = Frames([(1, points(1))]), Store()
    fed(frames, store, tmp_path)
    assert store.states == {"1": ["stopped"]}
    frames.frames.append((1, points(1, 2, attempt=2)))
    frames.ended.add(1)
    fed(frames, store, tmp_path)
    assert [step for _, step, _ in store.points["1"]] == [1, 2]
    assert store.states == {"1": ["stopped", "done"]}
    fed(frames, store, tmp_path)
    assert store.states == {"1": ["stopped", "done"]}, "a third time has nothing to say"


def test_a_copy_of_the_folder_begins_anew(tmp_path: Path) -> None:
    frames = Frames([(1, points(1))], ended=[1])
    fed(frames, Store(), tmp_path)
    copy = Store()
    fed(frames, copy, tmp_path, run_id="another")
    assert copy.points == {"1": [("loss", 1, 0.0)]}


def test_two_processes_of_one_tracker_are_refused(tmp_path: Path) -> None:
    with Position(tmp_path / "x.jsonl", "r"), pytest.raises(PositionTaken, match="Another process"):
        Position(tmp_path / "x.jsonl", "r").__enter__()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 6)), max_size=4),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 12), max_size=6),
    st.sets(st.integers(1, 4)),
)
def test_dying_anywhere_neither_loses_nor_doubles(
    tmp_path_factory: pytest.TempPathFactory,
    raw: list[tuple[int, set[tuple[str, int]]]],
    lives: list[int],
    ended: set[int],
) -> None:
    made = [(task, [Point(n, step, 0.0, float(i), attempt=i) for n, step in sorted(some)])
            for i, (task, some) in enumerate(raw)]  # fmt: skip
    whole, killed = Store(), Store()
    fed(Frames(made, ended), whole, tmp_path_factory.mktemp("whole"))
    folder = tmp_path_factory.mktemp("killed")
    for count in lives:
        killed.lives = count
        try:
            fed(Frames(made, ended), killed, folder)
        except Dies:
            continue
    killed.lives = 1 << 60
    fed(Frames(made, ended), killed, folder)

    def sets(store: Store) -> dict[str, list[tuple[str, int, float]]]:
        return {name: sorted(some) for name, some in store.points.items()}

    assert sets(killed) == sets(whole)
    assert {name: states[-1] for name, states in killed.states.items()} == {
        name: states[-1] for name, states in whole.states.items()
    }
