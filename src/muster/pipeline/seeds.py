"""Seeds that belong to a record, so that a sample depends on nothing else."""

from __future__ import annotations

import hashlib


def seed_of(*parts: str | int) -> int:
    """From 0 to 2**63 - 1, a function of ``parts``: run seed, record, stage, round."""
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
