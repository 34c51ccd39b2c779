"""How many examples a property test draws: few and the same, or many and random."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

#: `make test-all` chooses it with --hypothesis-profile.
RANDOM = "random"
_TIMES_WHEN_RANDOM = 2

# A newcomer's first `make test` must not draw an example that nobody has seen before.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile(RANDOM, deadline=None, derandomize=False, print_blob=True)


def examples(count: int, **others: Any) -> settings:
    """``count`` examples that are always the same; twice as many random ones in `make test-all`.

    A failing random example is printed with the line that pins it (``@reproduce_failure``).
    ``others`` are further settings of Hypothesis.
    """
    is_random = not settings().derandomize
    return settings(max_examples=count * (_TIMES_WHEN_RANDOM if is_random else 1), **others)
