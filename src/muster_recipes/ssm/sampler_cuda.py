"""The sampler on a CUDA device: one fused Triton kernel, or plain torch where it cannot run.

Both draw the *same* students, equal up to float32 rounding, because both compute Philox-4x32-10 of
(student, launch, group, 0) under the block's seed: what a machine has installed does not change the
experiment. The plain path is for missing Triton and for more than eight lags; it keeps running
power sums of many students at a time, needs about a hundred passes over memory per four entries,
and runs on any torch device, which is how the tests reach it.

Power sums are float32, added one pair after the other: S is good to about 1e-6 at widths up to
10 000, losses and moments are float64.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch

from muster_recipes.ssm.moments import Moments

# Part of the definition of the stream: the second counter word is the index of the launch.
STUDENTS_PER_LAUNCH = 1 << 26
STUDENTS_PER_PROGRAM = 256  # two per thread of four warps: enough to hide latencies, few registers
FUSED_MAX_LAGS = 8
PLAIN_STUDENTS = 1 << 20  # some tens of MiB per temporary

_MASK = 0xFFFF_FFFF
_PHILOX_ROUNDS = 10


def sample_block_cuda(
    h: Sequence[float],
    w: Sequence[Sequence[float]],
    dim: int,
    num_samples: int,
    seed: int,
    eps: float,
    device: str,
) -> tuple[Moments, Moments]:
    """Moments of L_gen over the accepted and over all of ``num_samples`` students.

    The arguments are those of `muster_recipes.ssm.sampler.sample_block`, which checks them.
    """
    place = torch.device(device)
    target = torch.tensor([float(value) for value in h], dtype=torch.float64, device=place)
    inputs = torch.tensor(
        [[float(value) for value in row] for row in w], dtype=torch.float64, device=place
    )
    accepted, everything = Moments.none(), Moments.none()
    fused = place.type == "cuda" and len(h) <= FUSED_MAX_LAGS and has_triton()
    launch_moments = fused_launch if fused else plain_launch
    for launch, start in enumerate(range(0, num_samples, STUDENTS_PER_LAUNCH)):
        count = min(STUDENTS_PER_LAUNCH, num_samples - start)
        fits, drawn = launch_moments(target, inputs, dim, count, launch, seed, eps)
        accepted, everything = accepted.merge(fits), everything.merge(drawn)
    return accepted, everything


def has_triton() -> bool:
    """Whether the fused kernel can be imported here."""
    return importlib.util.find_spec("triton") is not None


def fused_launch(
    h: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    num_students: int,
    launch: int,
    seed: int,
    eps: float,
) -> tuple[Moments, Moments]:
    """One launch of the kernel: moments over the accepted and over all.

    ``h`` [K] and ``w`` [N, K] are float64 on the device that runs it.
    """
    from muster_recipes.ssm.sampler_triton import sample_kernel

    programs = -(-num_students // STUDENTS_PER_PROGRAM)
    partials = torch.empty((6, programs), dtype=torch.float64, device=h.device)
    # A float argument of a kernel is float32: the threshold travels in memory, in full.
    threshold = torch.tensor([eps], dtype=torch.float64, device=h.device)
    # Triton launches on the current device, whatever the tensors live on.
    index = h.get_device()
    with torch.cuda.device(index):
        sample_kernel[(programs,)](
            partials,
            h,
            w,
            threshold,
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
    return merge_partials(partials[:3]), merge_partials(partials[3:])


def _signed_word(value: int) -> int:
    """The low 32 bits of ``value`` as the signed number of the same bits."""
    low = value & _MASK
    return low - (1 << 32) if low >> 31 else low


def merge_partials(partials: torch.Tensor) -> Moments:
    """Merge counts, means and sums of squared deviations, [3, programs] float64, in one step."""
    counts, means, squares = partials
    # Counts are whole numbers below 2**53, which float64 adds exactly.
    count = counts.sum()
    if count.item() == 0:
        return Moments.none()
    mean = (counts * means).sum() / count
    m2 = squares.sum() + (counts * (means - mean) ** 2).sum()
    return Moments(int(count.item()), float(mean.item()), float(m2.item()))


def plain_launch(
    h: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    num_students: int,
    launch: int,
    seed: int,
    eps: float,
) -> tuple[Moments, Moments]:
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
    return accepted, everything


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
