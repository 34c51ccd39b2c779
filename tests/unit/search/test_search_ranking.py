"""How many trials beat each other one, against what the words say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.search.trials import num_better

NUMBER = st.sampled_from([-1.5, -0.0, 0.0, 2.0, 7.0, float("inf")])


@given(st.integers(2, 4).flatmap(lambda many: st.lists(st.tuples(*[NUMBER] * many), max_size=20)))
def test_a_trial_is_beaten_by_those_that_are_nowhere_worse_and_somewhere_better(
    costs: list[tuple[float, ...]],
) -> None:
    assert num_better(costs) == [
        sum(
            all(o <= c for o, c in zip(other, own, strict=True)) and other != own for other in costs
        )
        for own in costs
    ]


def test_ten_thousand_trials_are_compared_block_by_block() -> None:
    """In a line where each beats all that follow it, so that every number is known."""
    numbers = num_better([(float(at), float(at)) for at in range(10_000)])
    assert numbers == list(range(10_000))
