"""One block of the unit-vector sampler, as the tests call it."""

from __future__ import annotations

from typing import Any

from muster_recipes.ssm.sampler import Block, BlockResult, sample_blocks


def sample_block(*, device: str = "cpu", **block: Any) -> BlockResult:
    """The result of one `Block`, whose fields are the arguments."""
    return sample_blocks([Block(**block)], device)[0]
