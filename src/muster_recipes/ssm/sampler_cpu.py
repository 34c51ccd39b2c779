"""The sampler on one core: numpy, single-threaded, tiles that stay in the second-level cache.

See `muster_recipes.ssm.sampler` for the mathematics. A tile holds ``rows`` pairs of entries of
``width`` students, students along the fast axis, so that the sum over entries adds whole rows. All
element-wise work is float32 (six digits of a power), sums over tiles, losses and moments are
float64. Against float64 arithmetic on the same draws L_gen differs by less than 1e-5 relative, and
S by about 1e-6, far below the sqrt(eps) = 3e-3 that decides on acceptance.

Matrix products would sum the rows somewhat faster, but BLAS may start threads and may add in
another order on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from muster_recipes.ssm.sampler import Block, BlockResult, Moments

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# These three constants define the stream: changing one changes which students a seed draws.
TILE_PAIRS = 49_152  # 3 float32 buffers and the raw bits: 1 MB, half a second-level cache of 2 MB
MAX_TILE_ROWS = 128  # float32 row sums stay short; wider students take several tiles
LOSS_STUDENTS = 8_192  # losses are evaluated for about so many at once, to amortise the calls


class Layout(NamedTuple):
    """How students of one width are cut into tiles."""

    dim: int
    num_pairs: int  # the last one is a single entry where dim is odd
    rows: int  # pairs per tile, at most
    width: int  # students per tile, at most

    @staticmethod
    def of(dim: int) -> Layout:
        num_pairs = (dim + 1) // 2
        rows = min(num_pairs, MAX_TILE_ROWS)
        # A multiple of 16 keeps the rows on whole vectors.
        width = min(TILE_PAIRS // rows, LOSS_STUDENTS) // 16 * 16
        return Layout(dim, num_pairs, rows, width)


def sample_block_cpu(block: Block) -> BlockResult:
    """Moments of L_gen over the accepted and over all students of ``block``."""
    bits = np.random.SFC64(block.seed)
    layout = Layout.of(block.dim)
    work = buffers(layout.rows * layout.width)
    target = np.asarray(block.h, dtype=np.float64)
    inputs = np.asarray(block.w, dtype=np.float64)
    # Whole tiles per evaluation, so that a tile is never split by it.
    step = max(1, LOSS_STUDENTS // layout.width) * layout.width
    accepted, everything = Moments.none(), Moments.none()
    for start in range(0, block.num_samples, step):
        sums = np.zeros((len(target), min(step, block.num_samples - start)))
        for column in range(0, sums.shape[1], layout.width):
            add_student_sums(bits, layout, work, sums[:, column : column + layout.width])
        train, gen = losses(sums, target, inputs)
        accepted = accepted.merge(Moments.of(gen[train < block.eps]))
        everything = everything.merge(Moments.of(gen))
    return BlockResult(accepted, everything)


def buffers(size: int) -> list[Float32]:
    """Three buffers for a tile, allocated once: fresh pages would cost more than the arithmetic."""
    # Different distances from a page boundary: buffers at equal ones compete for cache sets.
    pool = np.empty(3 * (size + 2_048), dtype=np.float32)
    return [pool[start : start + size] for start in (i * (size + 336) for i in range(3))]


def add_student_sums(
    bits: np.random.SFC64, layout: Layout, work: Sequence[Float32], sums: Float64
) -> None:
    """Draw one student per column of ``sums`` [K, students] and add its K power sums there."""
    students = sums.shape[1]
    for row in range(0, layout.num_pairs, layout.rows):
        rows = min(layout.rows, layout.num_pairs - row)
        raw = bits.random_raw(rows * students)
        lone_last = layout.dim % 2 == 1 and row + rows == layout.num_pairs
        add_tile_sums(raw, layout.dim, lone_last, work, sums)


def add_tile_sums(
    raw: npt.NDArray[np.uint64],
    dim: int,
    lone_last: bool,
    work: Sequence[Float32],
    sums: Float64,
) -> None:
    """Turn random bits into pairs of entries and add their power sums to ``sums`` [K, students].

    ``raw`` holds rows * students words and is overwritten; with ``lone_last`` the last row is one
    entry each instead of a pair. ``work``: three buffers of at least as many numbers.
    """
    students = sums.shape[1]
    p1, p2, product = (buffer[: raw.size] for buffer in work)
    polar_pairs(raw.view(np.uint32), dim, p1, p2)
    p1, p2, product = (buffer.reshape(-1, students) for buffer in (p1, p2, product))
    if lone_last:
        p1[-1] *= np.float32(math.sqrt(0.5))
        np.multiply(p1[-1], p1[-1], out=p2[-1])
    # The bits are spent: their memory is warm in the cache and serves as the other two buffers.
    spare = raw.view(np.float32).reshape(2, -1, students)
    add_power_sums(p1, p2, product, spare[0], spare[1], sums)


def polar_pairs(halves: npt.NDArray[np.uint32], dim: int, p1: Float32, p2: Float32) -> None:
    """Write x + y and x^2 + y^2 of pairs (x, y) of N(0, 1/dim) entries to ``p1`` and ``p2`` [n].

    ``halves`` [2n] are uniform 32-bit words, overwritten; the first n make radii, the others
    angles. The uniform of a radius has 31 bits and is never 0: |x| reaches 6.6 standard deviations.
    """
    size = p1.size
    # Signed integers convert to float32 in one instruction on every x86-64, unsigned ones do not.
    np.right_shift(halves[:size], 1, out=halves[:size])
    np.copyto(p2, halves[:size].view(np.int32), casting="unsafe")
    np.multiply(p2, np.float32(2.0**-31), out=p2)
    np.add(p2, np.float32(2.0**-32), out=p2)
    np.log(p2, out=p2)
    np.multiply(p2, np.float32(-4.0 / dim), out=p2)  # 2 r^2, the square of sqrt(2) r
    angle = halves[:size].view(np.float32)
    np.copyto(p1, halves[size:].view(np.int32), casting="unsafe")
    # Half a turn, [-pi/2, pi/2]: the other half repeats the sines, with x and y exchanged.
    np.multiply(p1, np.float32(math.pi * 2.0**-32), out=p1)
    np.sin(p1, out=p1)
    np.sqrt(p2, out=angle)
    np.multiply(p1, angle, out=p1)
    np.multiply(p2, np.float32(0.5), out=p2)


def add_power_sums(
    p1: Float32, p2: Float32, product: Float32, spare: Float32, scratch: Float32, sums: Float64
) -> None:
    """Add sum over rows of x^m + y^m, m = 1..K, to ``sums`` [K, students].

    All other arrays are [rows, students] and float32, which is enough for sums of at most
    MAX_TILE_ROWS terms. ``p1`` = x + y is kept; ``p2`` = x^2 + y^2 and the three working arrays are
    overwritten.
    """
    lags = len(sums)
    sums[0] += p1.sum(axis=0)
    if lags == 1:
        return
    sums[1] += p2.sum(axis=0)
    if lags == 2:
        return
    np.multiply(p1, p1, out=product)
    np.subtract(product, p2, out=product)
    np.multiply(product, np.float32(0.5), out=product)  # x y
    older, newer = p1, p2
    for lag in range(2, lags - 1):
        out = spare if older is p1 else older
        np.multiply(product, older, out=out)
        np.multiply(p1, newer, out=scratch)
        np.subtract(scratch, out, out=out)
        sums[lag] += out.sum(axis=0)
        older, newer = newer, out
    # Nothing follows the last power: only its sum is needed, which two dot products give.
    sums[-1] += np.einsum("rs,rs->s", p1, newer)
    sums[-1] -= np.einsum("rs,rs->s", product, older)


def losses(sums: Float64, h: Float64, w: Float64) -> tuple[Float64, Float64]:
    """(L_train, L_gen), each [students], from power sums [K, students], h [K] and w [N, K].

    Overwrites ``sums``.
    """
    sums -= h[:, None]
    train = np.zeros(sums.shape[1])
    for row in w:
        train += np.einsum("k,kc->c", row, sums) ** 2
    return train / len(w), np.einsum("kc,kc->c", sums, sums)
