"""Standard streams that a run outlives: ``| head``, a full disk, a terminal that is gone."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from muster.base.errors import EXIT_SOME_FAILED, MusterError
from muster.base.shown_text import with_names_read


class OutputLost(MusterError):
    """A command that only shows something could not show it."""

    exit_code = EXIT_SOME_FAILED


class ReaderGone(Exception):
    """Whoever read our output has had enough (``muster list | head``)."""


#: Of our own signs, what stands for them where an encoding does not have them.
_PLAIN_SIGNS = {
    "·": "-", "–": "-", "—": "-", "→": "->", "×": "x", "…": "...", "±": "+-", "≥": ">=",
    "≤": "<=", "≈": "~", "°": "deg ", "µ": "u", "²": "^2", "•": "*", "│": "|", "─": "-",
    "’": "'", "“": '"', "”": '"',
}  # fmt: skip


@contextmanager
def steady(*, is_vital: bool) -> Iterator[None]:
    """A context in which writing to standard output and error never ends what is running.

    What cannot be written any more is dropped; runs keep their own logs. ``is_vital``: standard
    output is all that the command is for, so it ends with ReaderGone or OutputLost instead.
    """
    _open_closed_ones()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Steady(sys.stdout, is_vital=is_vital))
    sys.stderr = cast(TextIO, _Steady(sys.stderr, is_vital=False))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OutputLost, ReaderGone):
                stream.flush()
        sys.stdout, sys.stderr = before


class _Steady:
    """A text stream; anything but writing is the real one's."""

    def __init__(self, stream: TextIO, *, is_vital: bool) -> None:
        self._stream = stream
        self._is_vital = is_vital

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(self._fit(text))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def _fit(self, text: str) -> str:
        """``text`` as the stream can write it: standard error would write our own signs out."""
        encoding, errors = self._stream.encoding, self._stream.errors
        if encoding is None or text.isascii():
            return text
        try:
            text.encode(encoding, "strict" if errors == "backslashreplace" else errors or "strict")
        except UnicodeEncodeError:
            return plainly(text, encoding)
        return text

    def write_raw(self, data: bytes) -> None:
        """Bytes as they are; they come after what was written before, and are there at once."""
        self.flush()
        buffer = getattr(self._stream, "buffer", None)
        if buffer is None:  # a stream of a program that has no bytes
            self.write(data.decode("utf-8", "replace"))
            return
        try:
            buffer.write(data)
            buffer.flush()
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Into nowhere from here on, the rest of the buffer as well, also when Python ends."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if not self._is_vital:
            return
        if error.errno in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
            raise ReaderGone from None
        raise OutputLost(f"The output cannot be written: {error.strerror}.") from None


def plainly(text: str, encoding: str) -> str:
    """``text`` for an encoding that lacks some of its signs, such as that of LANG=C.

    >>> plainly("1.5 ± 0.2 s · é", "ascii")
    '1.5 +- 0.2 s - \\\\xe9'
    """
    known = "".join(_PLAIN_SIGNS.get(sign, sign) for sign in with_names_read(text))
    return known.encode(encoding, "backslashreplace").decode(encoding)


def _open_closed_ones() -> None:
    """Descriptors 0 to 2, where the caller closed them: the next file opened would be one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdin is None:  # who asks whether it is a terminal, or reads, finds nothing there
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
