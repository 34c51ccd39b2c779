from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UsageError
from muster.rl.environment import Continuous, Discrete
from muster.rl.gymnasium_spaces import ActionWriter, Reader

leaf = st.one_of(
    st.builds(
        lambda shape, kind: spaces.Box(-5, 5, shape, kind),
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from([np.float32, np.float64, np.int64]),
    ),
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 4), st.integers(-2, 2)
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
    st.builds(
        lambda sizes, start: spaces.MultiDiscrete(sizes, start=[start] * len(sizes)),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.integers(-1, 1),
    ),
)
nested = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("dbca"), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
)


@examples(60)
@given(space=nested, seed=st.integers(0, 99), data=st.data())
def test_flat_observations_are_gymnasiums(space: Any, seed: int, data: Any) -> None:
    batch = gymnasium.vector.utils.batch_space(space, 3)
    batch.seed(seed)
    sample = batch.sample()
    rows = list(gymnasium.vector.utils.iterate(batch, sample))
    each: list[Any] = [spaces.flatten(space, row) for row in rows]
    expected = np.stack(each).astype(np.float32)

    reader = Reader.of("env", space, None)
    assert reader.size == expected.shape[1]
    flat = reader.flat(sample, 3)
    assert flat.dtype == np.float32
    assert np.array_equal(flat, expected)
    assert np.array_equal(reader.flat_one(rows[1]), expected[1])

    kept = data.draw(st.lists(st.integers(0, reader.size - 1), min_size=1, unique=True))
    part = Reader.of("env", space, tuple(kept))
    assert np.array_equal(part.flat(sample, 3), expected[:, kept])
    assert np.array_equal(part.flat_one(rows[2]), expected[2, kept])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 3, 2], start=[0, 1, -1]),
        spaces.MultiDiscrete(np.array([[2, 2], [3, 1]])),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 2]),
    ],
    ids=str,
)
def test_every_number_is_a_different_action(space: Any) -> None:
    writer = ActionWriter.of("env", space)
    assert isinstance(writer.actions, Discrete)
    count = writer.actions.num_actions
    batch = writer.batch(np.arange(count))
    batch_space = gymnasium.vector.utils.batch_space(space, count)
    assert batch_space.contains(batch)
    rows = list(gymnasium.vector.utils.iterate(batch_space, batch))
    assert all(space.contains(row) for row in rows)
    assert len({np.asarray(row).tobytes() for row in rows}) == count


def test_numbers_are_clipped_to_the_bounds() -> None:
    space = spaces.Box(
        np.array([[-1, 0], [-2, -np.inf]], np.float32),
        np.array([[1, 0.5], [2, np.inf]], np.float32),
    )
    writer = ActionWriter.of("env", space)
    assert writer.actions == Continuous((-1, 0, -2, -np.inf), (1, 0.5, 2, np.inf))
    batch = writer.batch(np.array([[3, -3, 1, -9], [0, 0.25, -7, 9]], np.float32))
    assert batch.tolist() == [[[1, 0], [1, -9]], [[0, 0.25], [-2, 9]]]
    assert batch.dtype == space.dtype


SPACE_ERRORS = [
    (spaces.Text(3), None, "has no flat form of fixed size"),
    (spaces.Dict(a=spaces.Sequence(spaces.Discrete(2))), None, "has no flat form of fixed size"),
    (spaces.Box(0, 255, (8, 9, 3), np.uint8), None, r"observes images \(8, 9, 3\)"),
    (spaces.Box(0, 1, (4,)), (0, 4), "cannot observe 4: .* components 0 to 3"),
    (spaces.Box(0, 1, (4,)), (-1,), "cannot observe -1: "),
    (spaces.Box(0, 1, (4,)), (2, 2), "cannot observe 2: .* each can be named once"),
    (spaces.Box(0, 1, (4,)), (), "cannot observe nothing"),
    (spaces.Dict(), None, "is empty"),
]


@pytest.mark.parametrize(("space", "observe", "message"), SPACE_ERRORS)
def test_observations_without_a_flat_form_are_refused(
    space: Any, observe: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=f"env: .*{message}"):
        Reader.of("env", space, observe)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.MultiDiscrete([100, 100]), "10000 combinations, more than the 1024"),
        (spaces.Tuple([spaces.Discrete(2)]), "is not supported"),
        (spaces.Box(0, 5, (2,), np.int64), "is not supported"),
    ],
)
def test_actions_of_other_kinds_are_refused(space: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"env: .*{message}"):
        ActionWriter.of("env", space)
