"""What the coordinator and a worker say to each other: length-prefixed frames over a stream.

A frame is ``u32 length of the rest | u16 length of the header | header (JSON) | body (bytes)``.
The body carries a task's parameters or result already encoded, so the coordinator stores what it
receives without looking inside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import orjson

from muster.farm.task import Finished, Outcome

_PREFIX = struct.Struct("<IH")
_MAX_HEADER = 0xFFFF
_MAX_MESSAGE = 8_000  # characters, which JSON may write as six bytes each

TASK, TOGETHER, REVOKE, STOP, SETUP = "task", "together", "revoke", "stop", "setup"
SHARE, DIVIDED, WARN = "share", "divided", "warn"
READY, BROKEN, RESULT, RETURNED, PROGRESS = "ready", "broken", "r", "returned", "progress"
UNFIT, STOP_TASK = "unfit", "stop_task"
METRICS, CONFIRMED = "metrics", "confirmed"


def pack(header: list[Any], body: bytes = b"") -> bytes:
    """One frame. Raises ValueError for a header above 64 kB: large things go into the body."""
    head = orjson.dumps(header)
    if len(head) > _MAX_HEADER:
        raise ValueError(f"frame header of {len(head)} bytes; put large values into the body")
    return _PREFIX.pack(len(head) + len(body) + 2, len(head)) + head + body


def unpack(buffer: bytearray) -> Iterator[tuple[list[Any], bytes]]:
    """The whole frames at the front of ``buffer``, which keeps the torn rest."""
    position, size = 0, len(buffer)
    view = memoryview(buffer)
    try:
        while position + 6 <= size:
            length, head_length = _PREFIX.unpack_from(view, position)
            end = position + 4 + length
            if end > size:
                break
            start = position + 6
            head = orjson.loads(view[start : start + head_length])
            yield head, bytes(view[start + head_length : end])
            position = end
    finally:
        view.release()
        del buffer[:position]


def clean(text: str) -> str:
    """``text`` with lone surrogates, which UTF-8 cannot hold, written out as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()


def pack_finished(f: Finished) -> bytes:
    body = f.value if f.outcome is Outcome.OK else f.trace.encode("utf-8", "backslashreplace")
    header = [
        RESULT, f.task_id, f.token, f.outcome.value, f.started_s, f.seconds, f.log_start,
        f.log_end, f.peak_mib, f.message and clean(f.message)[:_MAX_MESSAGE], f.signal, f.poisoned,
        f.files, f.on_device,
    ]  # fmt: skip
    return pack(header, body)


_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


def read_finished(header: list[Any], body: bytes) -> Finished:
    _, task_id, token, name, started, seconds, start, end, peak, message, sig, bad, *more = header
    outcome = _OUTCOMES[name]
    is_ok = outcome is Outcome.OK
    return Finished(
        task_id,
        token,
        outcome,
        started,
        seconds,
        start,
        end,
        peak,
        body if is_ok else b"{}",
        message,
        "" if is_ok else body.decode("utf-8", "replace"),
        sig,
        bad,
        *more,
    )
