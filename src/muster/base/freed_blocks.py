"""Memory that a process frees and will want again."""

from __future__ import annotations


def keep_freed_blocks(num_bytes: int) -> None:
    """Have glibc keep up to twice ``num_bytes`` (at most 32 MiB) that are free, for the next block.

    It keeps twice the largest block that it has mapped and freed, which is 256 KiB before the
    first: the kernel would clear every page of every larger block anew. Nothing is touched here,
    and other allocators do as they do.
    """
    bytes(num_bytes)
