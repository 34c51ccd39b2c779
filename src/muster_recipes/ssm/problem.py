"""Teacher and data of a seed: pure functions of (seed, rank, settings).

A random stream has a name, such as ``("ssm-gnc", seed, rank, width, block)``, and its seed is a
hash of that name. So no draw depends on the number of workers or devices, on the order of the work,
or on the Python process (``hash()`` of a string differs between processes).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import UsageError

if TYPE_CHECKING:
    from muster_recipes.ssm.config import SsmConfig


@dataclass(frozen=True)
class Problem:
    """``alpha``: R teacher parameters. ``w``: N training sequences of K numbers each."""

    alpha: tuple[float, ...]
    w: tuple[tuple[float, ...], ...]

    @property
    def h(self) -> tuple[float, ...]:
        """The teacher's impulse response h_m = Σ_i α_i^m for the lags m = 1 … K."""
        return tuple(sum(a**m for a in self.alpha) for m in range(1, len(self.w[0]) + 1))


def problems(config: SsmConfig) -> Iterator[tuple[int, int, Problem]]:
    """(seed, rank, problem) for all of ``config``; a data file is read once."""
    pairs = None if config.data_file is None else read_data_file(config.data_file, config)
    for seed in config.all_seeds:
        for rank in config.teacher_ranks:
            yield seed, rank, _problem(config, pairs, seed, rank)


def _problem(config: SsmConfig, pairs: Sequence[Problem] | None, seed: int, rank: int) -> Problem:
    """α_i ~ N(0.5, 0.1²) and w ~ N(0, I), each from a stream of its own: the data of a seed are the
    same for every rank. A single α in a data file stands for R equal ones.
    """
    if pairs is not None:
        pair = pairs[seed % len(pairs)]
        return Problem(pair.alpha * rank, pair.w) if len(pair.alpha) == 1 else pair
    lags = config.num_lags
    if config.alpha is not None:
        alpha = (config.alpha,) * rank
    else:
        stream = random.Random(stream_seed("ssm-teacher", seed, rank))
        alpha = tuple(stream.gauss(0.5, 0.1) for _ in range(rank))
    if config.input_e1:
        w = tuple(tuple(float(m == 0) for m in range(lags)) for _ in range(config.num_sequences))
    else:
        stream = random.Random(stream_seed("ssm-data", seed))
        w = tuple(
            tuple(stream.gauss(0.0, 1.0) for _ in range(lags)) for _ in range(config.num_sequences)
        )
    return Problem(alpha, w)


def read_data_file(path: Path, config: SsmConfig) -> list[Problem]:
    """The pairs of a data file; UsageError names the entry that does not fit."""
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"Cannot read --data-file {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"--data-file {path} is not JSON: {error}.") from None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"--data-file {path} must hold a list with at least one entry.")
    return [_read_entry(path, number, entry, config) for number, entry in enumerate(entries)]


def _read_entry(path: Path, number: int, entry: Any, config: SsmConfig) -> Problem:
    where = f"--data-file {path}, entry {number}"
    if not isinstance(entry, dict) or not {"alpha", "w_sequences"} <= set(entry):
        raise UsageError(f'{where}: write {{"alpha": x or [..], "w_sequences": [[..]]}}.')
    alpha = entry["alpha"] if isinstance(entry["alpha"], list) else [entry["alpha"]]
    sequences = entry["w_sequences"]
    lags = config.num_lags
    if not alpha or not all(_is_number(pole) and has_finite_powers(pole, lags) for pole in alpha):
        raise UsageError(
            f"{where}: alpha must be a number or a list of numbers, and their powers finite."
        )
    misfit = [rank for rank in config.teacher_ranks if len(alpha) not in (1, rank)]
    if misfit:
        raise UsageError(
            f"{where}: alpha has {len(alpha)} values, but --teacher-ranks asks for rank "
            f"{misfit[0]}.",
            hint="give one value per rank, or a single value for any rank.",
        )
    if not isinstance(sequences, list) or not sequences:
        raise UsageError(f"{where}: w_sequences must be a list of lists.")
    if len(sequences) != config.num_sequences:
        raise UsageError(
            f"{where}: w_sequences has {len(sequences)} sequences, but --num-sequences is "
            f"{config.num_sequences}.",
            hint=f"add --num-sequences {len(sequences)}, or correct the entry.",
        )
    for w in sequences:
        if not isinstance(w, list) or len(w) != lags or not all(map(_is_number, w)):
            raise UsageError(
                f"{where}: each sequence needs {lags} numbers, because "
                f"--sequence-length is {config.sequence_length}; found {w!r:.80}."
            )
    return Problem(
        tuple(float(a) for a in alpha), tuple(tuple(float(x) for x in w) for w in sequences)
    )


def has_finite_powers(pole: float, lags: int) -> bool:
    """Whether the loss of a teacher with this parameter is a finite number."""
    largest: float = 1e100 ** (1 / lags)
    return abs(pole) < largest


def _is_number(value: object) -> bool:
    """A number whose square is finite; JSON may hold larger ones, and Python reads NaN from it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def stream_seed(*parts: str | int) -> int:
    """The seed in ``[0, 2**64)`` of the stream named by ``parts``; their order and types count.

    It stays as it is although `muster.seed_of` would do: another hash draws other teachers, data
    and students than the published tables have.
    """
    # Type and length before each part keep "1" apart from 1, and ("a", "bc") from ("ab", "c").
    kinds = [("s" if isinstance(part, str) else "i", str(part)) for part in parts]
    text = "".join(f"{kind}{len(part)}:{part};" for kind, part in kinds)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
