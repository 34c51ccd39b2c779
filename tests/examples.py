"""How many examples a property test draws: few and the same, random ones, or many of these."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

# A newcomer's first `make test` must not draw an example that nobody has seen before; of those that
# are always the same, half are enough. max_examples says how many a profile draws for each hundred
# that a test asks for.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
#: `make test-all` and `make test-slow` choose theirs with --hypothesis-profile.
for _name, _times in (("random", 1), ("long", 10)):
    settings.register_profile(
        _name, deadline=None, derandomize=False, print_blob=True, max_examples=100 * _times
    )


def examples(count: int, **others: Any) -> settings:
    """Half of ``count`` examples, always the same; ``count`` random ones in `make test-all`, ten
    times as many in `make test-slow`.

    A failing random example is printed with the line that pins it (``@reproduce_failure``).
    ``others`` are further settings of Hypothesis.
    """
    return settings(max_examples=max(1, count * settings().max_examples // 100), **others)
