"""The sampler on a CUDA device: one fused Triton kernel, or plain torch where it cannot run.

Both draw the *same* students, equal up to float32 rounding, because both compute Philox-4x32-10 of
(student, part, group, 0) under the block's seed: what a machine has installed does not change the
experiment. The plain path is for more than eight lags and for machines on which Triton is missing
or cannot compile; it keeps running power sums of many students at a time, needs about a hundred
passes over memory per four entries, and runs on any torch device, which is how the tests reach it.

Power sums are float32, added one pair after the other: S is good to about 1e-6 at widths up to
10 000, losses and moments are float64.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from muster_recipes.ssm.sampler import Block, BlockResult, Moments

# Part of the definition of the stream: the second counter word is the number of the part.
STUDENTS_PER_PART = 1 << 26
STUDENTS_PER_PROGRAM = 256  # two per thread of four warps: enough to hide latencies, few registers
FUSED_MAX_LAGS = 8
PROGRAMS_PER_GRID = 1 << 20  # whose moments take 48 MiB
PLAIN_STUDENTS = 1 << 20  # some tens of MiB per temporary

_MASK = 0xFFFF_FFFF
_PHILOX_ROUNDS = 10
_log = logging.getLogger("muster")


class Part(NamedTuple):
    """``num_students`` of a block, of which it is the part ``number``."""

    block: Block
    number: int
    num_students: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the parts of a grid share: width, lags, training sequences."""
        return self.block.dim, len(self.block.h), len(self.block.w)

    @property
    def programs(self) -> int:
        return -(-self.num_students // STUDENTS_PER_PROGRAM)


#: Parts of one shape that are drawn together.
Grid = Sequence[Part]


def sample_blocks_cuda(blocks: Sequence[Block], device: str) -> list[BlockResult]:
    """Moments of L_gen over the accepted and over all students, of every block.

    All blocks of one shape are one launch of the kernel, and nothing is read before the last
    launch: a block of two million students is half a millisecond of work at width 150 and a
    sixteenth of one at width 16, less than what a launch of its own costs the host.
    """
    place = torch.device(device)
    parts = [Part(block, n, count) for block in blocks for n, count in enumerate(_counts(block))]
    grids = list(_grids(parts))
    drawn = [
        (fused_grid if _is_fused(place, len(grid[0].block.h)) else plain_grid)(grid, table)
        for grid, table in zip(grids, staged(grids, place), strict=True)
    ]
    found = iter(torch.cat(drawn).tolist())
    return [_merged(next(found) for _ in _counts(block)) for block in blocks]


def _counts(block: Block) -> list[int]:
    """How many students each part of a block has."""
    starts = range(0, block.num_samples, STUDENTS_PER_PART)
    return [min(STUDENTS_PER_PART, block.num_samples - start) for start in starts]


def _grids(parts: Sequence[Part]) -> Iterator[Grid]:
    """Neighbouring parts of one shape, as many as a launch holds."""
    grid: list[Part] = []
    widest = 0
    for part in parts:
        widest = max(widest, part.programs)
        is_full = (len(grid) + 1) * widest > PROGRAMS_PER_GRID
        if grid and (is_full or part.shape != grid[0].shape):
            yield grid
            grid, widest = [], part.programs
        grid.append(part)
    yield grid


def _merged(parts: Iterator[list[list[float]]]) -> BlockResult:
    """One block's moments from those of its parts, [2, 3] each, in their order."""
    accepted, everything = Moments.none(), Moments.none()
    for rows in parts:
        fits, drawn = (Moments(int(count), mean, m2) for count, mean, m2 in rows)
        accepted, everything = accepted.merge(fits), everything.merge(drawn)
    return BlockResult(accepted, everything)


def staged(grids: Sequence[Grid], place: torch.device) -> Iterator[torch.Tensor]:
    """The table of every grid, [parts, width] float64 on the device, as the kernel reads it.

    In one copy ahead of all kernels: a copy from ordinary memory waits for the kernels before it.
    """
    rows = [[x for part in grid for x in _row(part)] for grid in grids]
    flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64).to(place)
    tables = torch.split(flat, [len(row) for row in rows])
    for grid, table in zip(grids, tables, strict=True):
        yield table.view(len(grid), -1)


def _row(part: Part) -> list[float]:
    """A part as numbers, each of which float64 holds exactly.

    Their number is made even, so that every table begins at a multiple of 16 bytes: Triton compiles
    another kernel for pointers that do not.
    """
    block = part.block
    seed = (block.seed & _MASK, block.seed >> 32)
    row = [*seed, part.number, part.num_students, block.eps, *block.h]
    row += [x for sequence in block.w for x in sequence]
    return row + [0.0] * (len(row) % 2)


@functools.cache
def _is_fused(place: torch.device, lags: int) -> bool:
    """Whether the kernel runs on this device, tested by a launch for one student."""
    if place.type != "cuda" or lags > FUSED_MAX_LAGS:
        return False
    ones = (1.0,) * lags
    grid = [Part(Block(h=ones, w=(ones,), dim=1, num_samples=1, seed=0, eps=1.0), 0, 1)]
    return does_run(lambda: fused_grid(grid, next(staged([grid], place))))


def does_run(launch: Callable[[], object]) -> bool:
    """Whether the first launch succeeds; if not, a warning says why and what is done instead.

    Triton compiles when a kernel is launched, for which it needs a C compiler: slim containers
    have none. A device that is broken or full is not the kernel's fault, and fails the plain
    operations as well.
    """
    try:
        launch()
    except Exception as error:
        # Triton says it in a RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _log.warning(
            "The fused kernel of the sampler cannot run (%s: %s): plain tensor operations draw the "
            "same students, more slowly.",
            type(error).__name__,
            reason,
        )
        return False
    return True


def fused_grid(grid: Grid, table: torch.Tensor) -> torch.Tensor:
    """Draw the parts of a grid by one launch: count, mean and sum of squared deviations of L_gen,
    float64 [parts, 2, 3], over the accepted and over all. Nothing here waits for the device.

    ``table`` is what `staged` makes of the grid, on the device that runs it.
    """
    from muster_recipes.ssm.sampler_triton import sample_kernel

    dim, lags, num_sequences = grid[0].shape
    programs = max(part.programs for part in grid)
    partials = torch.empty((len(grid), 2, 3, programs), dtype=torch.float64, device=table.device)
    # Triton launches on the current device, whatever the tensors live on.
    with torch.cuda.device(table.get_device()):
        sample_kernel[(len(grid) * programs,)](
            partials,
            table,
            table.shape[1],
            programs,
            dim,
            -2.0 / dim,
            num_sequences,
            LAGS=lags,
            BLOCK=STUDENTS_PER_PROGRAM,
            num_warps=4,
        )
    return merge_partials(partials)


def merge_partials(partials: torch.Tensor) -> torch.Tensor:
    """Merge counts, means and sums of squared deviations, [..., 3, programs] to [..., 3].

    The bits of a part do not depend on the others of its grid: programs without students add
    exact zeros to sums whose order is fixed, where torch's own depends on the shape.
    """
    counts, means, squares = partials.unbind(-2)
    # Counts are whole numbers below 2**53, which float64 adds exactly.
    count, total = _sums(torch.stack([counts, counts * means])).unbind(0)
    mean = total / count.clamp(min=1)
    m2 = _sums(squares + counts * (means - mean.unsqueeze(-1)) ** 2)
    return torch.stack([count, mean, m2], -1)


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, each half added to the other until one number is left."""
    width = values.shape[-1]
    values = torch.nn.functional.pad(values, (0, (1 << (width - 1).bit_length()) - width))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def plain_grid(grid: Grid, table: torch.Tensor) -> torch.Tensor:
    """What `fused_grid` computes, from tensor operations on the device of ``table``."""
    return torch.stack([_plain(part, row) for part, row in zip(grid, table, strict=True)])


def _plain(part: Part, row: torch.Tensor) -> torch.Tensor:
    dim, lags, num_sequences = part.shape
    eps, h = row[4], row[5 : 5 + lags]
    w = row[5 + lags :][: num_sequences * lags].view(num_sequences, lags)
    accepted, everything = Moments.none(), Moments.none()
    for start in range(0, part.num_students, PLAIN_STUDENTS):
        stop = min(start + PLAIN_STUDENTS, part.num_students)
        students = torch.arange(start, stop, dtype=torch.int64, device=row.device)
        sums = power_sums(students, lags, dim, part.number, part.block.seed)
        errors = sums.double() - h[:, None]
        train = (w @ errors).square().mean(dim=0)
        gen = errors.square().sum(dim=0)
        accepted = accepted.merge(Moments.of(gen[train < eps].cpu()))
        everything = everything.merge(Moments.of(gen.cpu()))
    rows = [(each.count, each.mean, each.m2) for each in (accepted, everything)]
    return torch.tensor(rows, dtype=torch.float64, device=row.device)


def power_sums(students: torch.Tensor, lags: int, dim: int, part: int, seed: int) -> torch.Tensor:
    """Running power sums [lags, students], float32, of the students with these indices."""
    sums = torch.zeros((lags, len(students)), dtype=torch.float32, device=students.device)
    num_pairs = (dim + 1) // 2
    for group in range((num_pairs + 1) // 2):
        words = philox(students, part, group, seed)
        for pair in (2 * group, 2 * group + 1):
            if pair < num_pairs:
                radius, angle = words[:2] if pair % 2 == 0 else words[2:]
                add_pair(radius, angle, dim, dim % 2 == 1 and pair == num_pairs - 1, sums)
    return sums


def add_pair(
    radius_word: torch.Tensor, angle_word: torch.Tensor, dim: int, lone: bool, sums: torch.Tensor
) -> None:
    """Add x^m + y^m of one pair per student, or x^m of a ``lone`` entry, to ``sums`` [K, n]."""
    uniform = radius_word.float() * 2.0**-32 + 2.0**-33
    p2 = uniform.log() * (-2.0 / dim)
    signed = torch.where(angle_word >= 1 << 31, angle_word - (1 << 32), angle_word)
    p1 = (2.0 * p2).sqrt() * (signed.float() * (math.pi * 2.0**-32)).sin()
    if lone:
        p1 = p1 * math.sqrt(0.5)
        p2 = p1 * p1
    product = 0.5 * (p1 * p1 - p2)
    older, newer = p1, p2
    for lag, row in enumerate(sums):
        if lag >= 2:
            older, newer = newer, p1 * newer - product * older
        row += p1 if lag == 0 else newer


def philox(
    students: torch.Tensor, part: int, group: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011) of counters (student, part, group, 0) under ``seed``.

    int64 in, four int64 tensors of 32-bit words out: torch has no arithmetic on unsigned words.
    """
    c0 = students
    c1 = torch.full_like(students, part)
    c2 = torch.full_like(students, group)
    c3 = torch.zeros_like(students)
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_PHILOX_ROUNDS):
        # The product may exceed int64 and wrap; both of its halves are right all the same.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product2 >> 32 & _MASK) ^ c1 ^ k0, (product0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = product2 & _MASK, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
