"""Which errors are the disk's."""

from __future__ import annotations

import errno

import pytest

from muster.base.atomic_files import disk_error

FULL = OSError(errno.ENOSPC, "No space left on device")


class Wrapped(Exception):
    """As torch's CheckpointException."""

    def __init__(self, failures: dict[int, object]) -> None:
        super().__init__("ranks")
        self.failures = failures


def caused(outer: Exception, inner: BaseException, *, handled: bool) -> Exception:
    if handled:
        outer.__context__ = inner
    else:
        outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "is_disk"),
    [
        (FULL, True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (ValueError("full"), False),
        (caused(RuntimeError("write failed"), FULL, handled=False), True),
        (caused(RuntimeError("unexpected pos"), FULL, handled=True), True),
        (Wrapped({0: (FULL, "stack")}), True),
        (Wrapped({1: (caused(RuntimeError("a"), FULL, handled=True), "stack")}), True),
        (Wrapped({0: (KeyError("x"), "stack")}), False),
        (None, False),
    ],
)
def test_a_full_disk_is_found_behind_what_wraps_it(
    error: BaseException | None, is_disk: bool
) -> None:
    assert (disk_error(error) is not None) is is_disk


def test_a_loop_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert disk_error(first) is None
