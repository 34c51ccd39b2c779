"""The sampler on a CUDA device: one fused Triton kernel, or plain torch where it cannot run.

Both draw the *same* students, equal up to float32 rounding, because both compute Philox-4x32-10 of
(student, launch, group, 0) under the block's seed: what a machine has installed does not change the
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
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from muster_recipes.ssm.moments import Moments

if TYPE_CHECKING:
    from muster_recipes.ssm.sampler import Block

# Part of the definition of the stream: the second counter word is the index of the launch.
STUDENTS_PER_LAUNCH = 1 << 26
STUDENTS_PER_PROGRAM = 256  # two per thread of four warps: enough to hide latencies, few registers
FUSED_MAX_LAGS = 8
PLAIN_STUDENTS = 1 << 20  # some tens of MiB per temporary

_MASK = 0xFFFF_FFFF
_PHILOX_ROUNDS = 10
_log = logging.getLogger("muster")


def sample_blocks_cuda(blocks: Sequence[Block], device: str) -> list[tuple[Moments, Moments]]:
    """Moments of L_gen over the accepted and over all students, of every block.

    All kernels are launched before the first result is read, because reading waits for the
    device: a block of two million students is half a millisecond of work at width 150, less than
    a round trip. What waits on the device is 48 bytes per launch, so memory sets no limit.
    """
    place = torch.device(device)
    launched: list[torch.Tensor] = []
    for block, (h, w, eps) in zip(blocks, staged(blocks, place), strict=True):
        launch_moments = fused_launch if _is_fused(place, len(block.h)) else plain_launch
        for launch, count in enumerate(_launches(block.num_samples)):
            launched.append(launch_moments(h, w, block.dim, count, launch, block.seed, eps))
    found = iter(torch.stack(launched).tolist())
    return [_merged(next(found) for _ in _launches(block.num_samples)) for block in blocks]


def _launches(num_samples: int) -> list[int]:
    """How many students each launch of a block draws."""
    starts = range(0, num_samples, STUDENTS_PER_LAUNCH)
    return [min(STUDENTS_PER_LAUNCH, num_samples - start) for start in starts]


def _merged(launches: Iterator[list[list[float]]]) -> tuple[Moments, Moments]:
    """One block's moments from those of its launches, [2, 3] each, in their order."""
    accepted, everything = Moments.none(), Moments.none()
    for rows in launches:
        fits, drawn = (Moments(int(count), mean, m2) for count, mean, m2 in rows)
        accepted, everything = accepted.merge(fits), everything.merge(drawn)
    return accepted, everything


def staged(
    blocks: Sequence[Block], place: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """``h`` [K], ``w`` [N, K] and ``eps`` [1] of every block, float64 on the device.

    In one copy ahead of all kernels: a copy from ordinary memory waits for the kernels before it.
    """
    parts = [part for b in blocks for part in (b.h, [x for row in b.w for x in row], [b.eps])]
    # Each part begins on 16 bytes: Triton compiles another kernel for pointers that do not.
    places = list(accumulate((len(part) + len(part) % 2 for part in parts), initial=0))
    table = torch.zeros(places[-1], dtype=torch.float64)
    for begin, part in zip(places, parts, strict=False):
        table[begin : begin + len(part)] = torch.tensor(part, dtype=torch.float64)
    table = table.to(place)
    views = [table[begin : begin + len(part)] for begin, part in zip(places, parts, strict=False)]
    for h, w, eps in zip(views[::3], views[1::3], views[2::3], strict=True):
        yield h, w.view(-1, len(h)), eps


@functools.cache
def _is_fused(place: torch.device, lags: int) -> bool:
    """Whether the kernel runs on this device, tested by a launch for one student."""
    if place.type != "cuda" or lags > FUSED_MAX_LAGS:
        return False
    ones = torch.ones(1, lags, dtype=torch.float64, device=place)
    return does_run(lambda: fused_launch(ones[0], ones, 1, 1, 0, 0, ones[0, :1]))


def does_run(launch: Callable[[], object]) -> bool:
    """Whether the first launch succeeds; if not, the log says why and what happens instead.

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


def fused_launch(
    h: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    num_students: int,
    launch: int,
    seed: int,
    eps: torch.Tensor,
) -> torch.Tensor:
    """One launch of the kernel: count, mean and sum of squared deviations of L_gen, float64
    [2, 3], over the accepted and over all. Nothing here waits for the device.

    ``h`` [K], ``w`` [N, K] and ``eps`` [1] are float64 on the device that runs it.
    """
    from muster_recipes.ssm.sampler_triton import sample_kernel

    programs = -(-num_students // STUDENTS_PER_PROGRAM)
    partials = torch.empty((2, 3, programs), dtype=torch.float64, device=h.device)
    # Triton launches on the current device, whatever the tensors live on.
    index = h.get_device()
    with torch.cuda.device(index):
        sample_kernel[(programs,)](
            partials,
            h,
            w,
            eps,  # in memory: a float argument of a kernel would be rounded to float32
            _signed_word(seed),
            _signed_word(seed >> 32),
            launch,
            num_students,
            dim,
            -2.0 / dim,
            len(w),
            LAGS=len(h),
            BLOCK=STUDENTS_PER_PROGRAM,
            num_warps=4,
        )
    return merge_partials(partials)


def _signed_word(value: int) -> int:
    """The low 32 bits of ``value`` as the signed number of the same bits."""
    low = value & _MASK
    return low - (1 << 32) if low >> 31 else low


def merge_partials(partials: torch.Tensor) -> torch.Tensor:
    """Merge counts, means and sums of squared deviations, [..., 3, programs] to [..., 3]."""
    counts, means, squares = partials.unbind(-2)
    # Counts are whole numbers below 2**53, which float64 adds exactly.
    count = counts.sum(-1)
    mean = (counts * means).sum(-1) / count.clamp(min=1)
    m2 = squares.sum(-1) + (counts * (means - mean.unsqueeze(-1)) ** 2).sum(-1)
    return torch.stack([count, mean, m2], -1)


def plain_launch(
    h: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    num_students: int,
    launch: int,
    seed: int,
    eps: torch.Tensor,
) -> torch.Tensor:
    """What `fused_launch` computes, from tensor operations on the device of ``h``."""
    accepted, everything = Moments.none(), Moments.none()
    for start in range(0, num_students, PLAIN_STUDENTS):
        stop = min(start + PLAIN_STUDENTS, num_students)
        students = torch.arange(start, stop, dtype=torch.int64, device=h.device)
        errors = power_sums(students, len(h), dim, launch, seed).double() - h[:, None]
        train = (w @ errors).square().mean(dim=0)
        gen = errors.square().sum(dim=0)
        accepted = accepted.merge(_moments_of(gen[train < eps]))
        everything = everything.merge(_moments_of(gen))
    rows = [(part.count, part.mean, part.m2) for part in (accepted, everything)]
    return torch.tensor(rows, dtype=torch.float64, device=h.device)


def _moments_of(values: torch.Tensor) -> Moments:
    """`Moments.of` for a float64 tensor [students]."""
    if values.numel() == 0:
        return Moments.none()
    mean = values.mean()
    squares = (values - mean).square().sum()
    return Moments(values.numel(), float(mean.item()), float(squares.item()))


def power_sums(students: torch.Tensor, lags: int, dim: int, launch: int, seed: int) -> torch.Tensor:
    """Running power sums [lags, students], float32, of the students with these indices."""
    sums = torch.zeros((lags, len(students)), dtype=torch.float32, device=students.device)
    num_pairs = (dim + 1) // 2
    for group in range((num_pairs + 1) // 2):
        words = philox(students, launch, group, seed)
        for pair in (2 * group, 2 * group + 1):
            if pair < num_pairs:
                radius, angle = words[:2] if pair % 2 == 0 else words[2:]
                add_pair(radius, angle, dim, dim % 2 == 1 and pair == num_pairs - 1, sums)
    return sums


def add_pair(
    radius_word: torch.Tensor,
    angle_word: torch.Tensor,
    dim: int,
    lone: bool,
    sums: torch.Tensor,
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
    students: torch.Tensor, launch: int, group: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011) of counters (student, launch, group, 0) under ``seed``.

    int64 in, four int64 tensors of 32-bit words out: torch has no arithmetic on unsigned words.
    """
    c0 = students
    c1 = torch.full_like(students, launch)
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
