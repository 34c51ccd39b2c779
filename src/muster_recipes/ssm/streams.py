"""Seeds of random streams, derived from what a stream is for.

A block of samples is named by values such as ``("gnc", seed, rank, width, block)``. Its seed is a
hash of that name, so it does not depend on the number of workers or devices, on the order of the
work, or on the Python process (``hash()`` of a string differs between processes).
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 8


def stream_seed(*parts: str | int | float) -> int:
    """Return a seed in ``[0, 2**64)`` for the stream named by ``parts``.

    Parts of different type are different names: ``1``, ``1.0`` and ``"1"`` give three seeds. The
    order counts. Two names share a seed with probability 2**-64; streams of different seeds are
    independent only as far as the generator mixes its seeds.

    >>> stream_seed("gnc", 3, 0.5) == stream_seed("gnc", 3, 0.5)
    True
    >>> stream_seed("ab", "c") == stream_seed("a", "bc")
    False
    """
    if not parts:
        raise ValueError(
            "stream_seed() got no parts: a stream without a name would be shared by everything. "
            "Hint: name at least its purpose, as in stream_seed('gnc', seed, width, block)."
        )
    text = "".join(_canonical(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little")


def _canonical(part: str | int | float) -> str:
    """Type, length and text of one part; the length keeps neighbours from running together."""
    if isinstance(part, str):
        kind, text = "s", part
    elif isinstance(part, int):  # True and 1 are the same number and name the same stream
        kind, text = "i", str(int(part))
    else:  # hex is exact, and the same on every platform
        kind, text = "f", float(part).hex()
    return f"{kind}{len(text)}:{text};"
