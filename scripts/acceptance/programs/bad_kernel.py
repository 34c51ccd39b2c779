"""A kernel that writes where nothing is, which ends the context of its process."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def bad_kernel(start, BLOCK: tl.constexpr):
    place = start + (tl.arange(0, BLOCK).to(tl.int64) + 1) * 1_000_000_000_000
    tl.store(place, tl.full([BLOCK], 1.0, tl.float32))
