"""The fused kernel of the sampler: draw, sum, judge and reduce without touching memory.

Import this module only where Triton is installed and a CUDA device is used; everything else of the
sampler for CUDA, with the constants both share, is in `muster_recipes.ssm.sampler_cuda`.

One program draws BLOCK students. A thread keeps the running power sums of its students in
registers; one call of Philox-4x32 gives the four words of two pairs of entries. Only six float64
numbers per program are written. The accumulators have names rather than an index because Triton
has no arrays of registers; those above LAGS are never touched and the compiler drops them.
"""

# Kernels are compiled from these functions with types of the device, which Python cannot name.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_pair(
    radius_word, angle_word, present, lone, scale,
    s1, s2, s3, s4, s5, s6, s7, s8, LAGS: tl.constexpr,
):  # fmt: skip
    """Add the power sums of one pair of entries per student to s1..s8 (float32, [BLOCK]).

    ``present`` is 1.0, or 0.0 for a pair beyond the width; ``lone`` says that the pair is a single
    entry; ``scale`` is -2 / d.
    """
    uniform = radius_word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    # The hardware's logarithm may be a rounding above 0 at 1, where a root would give NaN.
    p2 = tl.maximum(tl.log(uniform) * scale, 0.0) * present
    # A sine of a uniform angle needs half a turn only, [-pi/2, pi/2], where its series to the
    # eleventh power is exact to 6e-8 and cheaper than a sine for all arguments.
    angle = angle_word.to(tl.int32, bitcast=True).to(tl.float32) * 7.314590396335798e-10
    v = angle * angle
    sine = -2.505210838544172e-08 * v + 2.7557319223985893e-06
    sine = sine * v - 1.984126984126984e-04
    sine = sine * v + 8.333333333333333e-03
    sine = sine * v - 1.6666666666666666e-01
    sine = (sine * v + 1.0) * angle
    p1 = tl.sqrt(2.0 * p2) * sine
    p1 = tl.where(lone, p1 * 0.7071067811865476, p1)
    p2 = tl.where(lone, p1 * p1, p2)
    e = 0.5 * (p1 * p1 - p2)
    s1 += p1
    if LAGS > 1:
        s2 += p2
    if LAGS > 2:
        p3 = p1 * p2 - e * p1
        s3 += p3
    if LAGS > 3:
        p4 = p1 * p3 - e * p2
        s4 += p4
    if LAGS > 4:
        p5 = p1 * p4 - e * p3
        s5 += p5
    if LAGS > 5:
        p6 = p1 * p5 - e * p4
        s6 += p6
    if LAGS > 6:
        p7 = p1 * p6 - e * p5
        s7 += p7
    if LAGS > 7:
        p8 = p1 * p7 - e * p6
        s8 += p8
    return s1, s2, s3, s4, s5, s6, s7, s8


@triton.jit
def project(
    row_ptr, s1, s2, s3, s4, s5, s6, s7, s8, LAGS: tl.constexpr
):  # fmt: skip
    """Scalar product of LAGS float64 numbers at ``row_ptr`` with the errors s1..s8."""
    dot = tl.load(row_ptr) * s1
    if LAGS > 1:
        dot += tl.load(row_ptr + 1) * s2
    if LAGS > 2:
        dot += tl.load(row_ptr + 2) * s3
    if LAGS > 3:
        dot += tl.load(row_ptr + 3) * s4
    if LAGS > 4:
        dot += tl.load(row_ptr + 4) * s5
    if LAGS > 5:
        dot += tl.load(row_ptr + 5) * s6
    if LAGS > 6:
        dot += tl.load(row_ptr + 6) * s7
    if LAGS > 7:
        dot += tl.load(row_ptr + 7) * s8
    return dot


@triton.jit
def error(sums, h_ptr, LAG: tl.constexpr, LAGS: tl.constexpr):
    """S_LAG in float64, or 0 beyond the last lag."""
    result = sums.to(tl.float64)
    if LAG <= LAGS:
        result -= tl.load(h_ptr + (LAG - 1))
    return result


@triton.jit
def store_moments(values, chosen, out_ptr, stride):
    """Write count, mean and sum of squared deviations of the chosen values, ``stride`` apart."""
    count = tl.sum(chosen.to(tl.float64), axis=0)
    mean = tl.sum(tl.where(chosen, values, 0.0), axis=0) / tl.maximum(count, 1.0)
    deviation = tl.where(chosen, values - mean, 0.0)
    tl.store(out_ptr, count)
    tl.store(out_ptr + stride, mean)
    tl.store(out_ptr + 2 * stride, tl.sum(deviation * deviation, axis=0))


# Numbers that change from grid to grid must not select another compilation.
@triton.jit(do_not_specialize=["width", "programs", "dim"])
def sample_kernel(
    partials_ptr, table_ptr, width, programs, dim, scale, num_sequences,
    LAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moments of L_gen of BLOCK students of one part to ``partials`` [parts, 6, programs], float64.

    Rows 0..2 are count, mean and sum of squared deviations of the accepted, rows 3..5 of all.
    The grid has ``programs`` programs for each part; those beyond its students draw nothing. A row
    of ``table`` [parts, width] is a part in float64, which holds whole words exactly: the halves of
    the seed, the number of the part in its block, its students, eps, ``h`` [LAGS] and
    ``w`` [num_sequences, LAGS]. The counter of student i, group g is (i, part, g, 0).
    """
    part = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    row_ptr = table_ptr + part * width
    partials_ptr += part * 6 * programs
    key_low = tl.load(row_ptr).to(tl.int64).to(tl.uint32)
    key_high = tl.load(row_ptr + 1).to(tl.int64).to(tl.uint32)
    number = tl.load(row_ptr + 2).to(tl.int64).to(tl.uint32)
    num_students = tl.load(row_ptr + 3).to(tl.int32)
    eps = tl.load(row_ptr + 4)
    h_ptr = row_ptr + 5
    w_ptr = h_ptr + LAGS
    student = program * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    signed_zero = tl.zeros([BLOCK], dtype=tl.int32)
    c0 = student.to(tl.uint32)
    c1 = zero + number
    k0 = zero + key_low
    k1 = zero + key_high
    num_pairs = (dim + 1) // 2
    odd = dim % 2 == 1
    s1 = tl.zeros([BLOCK], dtype=tl.float32)
    s2 = tl.zeros([BLOCK], dtype=tl.float32)
    s3 = tl.zeros([BLOCK], dtype=tl.float32)
    s4 = tl.zeros([BLOCK], dtype=tl.float32)
    s5 = tl.zeros([BLOCK], dtype=tl.float32)
    s6 = tl.zeros([BLOCK], dtype=tl.float32)
    s7 = tl.zeros([BLOCK], dtype=tl.float32)
    s8 = tl.zeros([BLOCK], dtype=tl.float32)
    has_students = (program * BLOCK < num_students).to(tl.int32)
    for group in range(has_students * ((num_pairs + 1) // 2)):
        c2 = (signed_zero + group).to(tl.uint32)
        r0, r1, r2, r3 = tl.philox_impl(c0, c1, c2, zero, k0, k1)
        last = num_pairs - 1
        s1, s2, s3, s4, s5, s6, s7, s8 = add_pair(
            r0, r1, 1.0, odd & (2 * group == last), scale,
            s1, s2, s3, s4, s5, s6, s7, s8, LAGS,
        )  # fmt: skip
        present = (2 * group + 1 <= last).to(tl.float32)
        s1, s2, s3, s4, s5, s6, s7, s8 = add_pair(
            r2, r3, present, odd & (2 * group + 1 == last), scale,
            s1, s2, s3, s4, s5, s6, s7, s8, LAGS,
        )  # fmt: skip
    e1 = error(s1, h_ptr, 1, LAGS)
    e2 = error(s2, h_ptr, 2, LAGS)
    e3 = error(s3, h_ptr, 3, LAGS)
    e4 = error(s4, h_ptr, 4, LAGS)
    e5 = error(s5, h_ptr, 5, LAGS)
    e6 = error(s6, h_ptr, 6, LAGS)
    e7 = error(s7, h_ptr, 7, LAGS)
    e8 = error(s8, h_ptr, 8, LAGS)
    train = tl.zeros([BLOCK], dtype=tl.float64)
    for n in range(num_sequences):
        dot = project(w_ptr + n * LAGS, e1, e2, e3, e4, e5, e6, e7, e8, LAGS)
        train += dot * dot
    train = train / num_sequences
    gen = e1 * e1 + e2 * e2 + e3 * e3 + e4 * e4 + e5 * e5 + e6 * e6 + e7 * e7 + e8 * e8
    exists = student < num_students
    store_moments(gen, exists & (train < eps), partials_ptr + program, programs)
    store_moments(gen, exists, partials_ptr + 3 * programs + program, programs)
