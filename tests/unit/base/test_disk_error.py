"""Which errors are the disk's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from muster.base.atomic_files import DISK_REFUSALS, disk_error, explain_os_error, refusal_of

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
        (OSError(errno.EFBIG, "File too large"), True),
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


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="it writes instead")
@pytest.mark.parametrize("number", sorted(DISK_REFUSALS))
def test_what_a_disk_refuses_is_said_alike_when_it_happens_and_when_it_is_asked_for(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal_of(tmp_path, 1 << 20) is None
    assert list(tmp_path.iterdir()) == [], "to ask leaves nothing"

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    found = refusal_of(tmp_path, 1 << 20)
    assert found == DISK_REFUSALS[number]
    told = str(explain_os_error(OSError(number, os.strerror(number)), "write", tmp_path))
    begin = f"Cannot write {tmp_path}: {os.strerror(number)}.\nHint: "
    assert told.startswith(f"{begin}{found.reason}{found.hint}") and told.endswith(".")
    verb = found.hint.split()[0]
    assert verb in ("free", "raise", "start"), "what is so is said before what to do"
    error = OSError(number, os.strerror(number))
    beside = str(explain_os_error(error, "write", tmp_path, other="choose another --output"))
    assert beside.startswith(f"{begin}{found.reason}") and "--run-dir" not in beside
    assert beside.endswith("choose another --output.")


def test_a_limit_on_the_size_of_files_is_a_refusal(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
    try:
        assert refusal_of(path, 1 << 20) is None
        assert refusal_of(path, 4 << 20) == DISK_REFUSALS[errno.EFBIG]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_one_may_not_write_nothing_is_known(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "gone" / "file", 1) is None
