"""What the coordinator and a worker say to each other: length-prefixed frames over a stream.

A frame is ``u32 length of the rest | u16 length of the header | header (JSON) | body (bytes)``.
The body carries a task's parameters or result already encoded, so the coordinator stores what it
receives without looking inside.

Nearly all frames are results of short tasks that ended well. One of these may have fixed fields in
the place of a header, which takes half of the time at both ends (`pack_plain`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import orjson

from muster.farm.task import FINISHED, ORDER, Finished, Order, Outcome, Task

_PREFIX = struct.Struct("<IH")
_MAX_HEADER = 0xFFFF
_MAX_MESSAGE = 8_000  # characters, which JSON may write as six bytes each

TASK, TASKS, REVOKE, STOP, SETUP = "task", "tasks", "revoke", "stop", "setup"
SHARE, DIVIDED, WARN = "share", "divided", "warn"
READY, BROKEN, RESULT, RETURNED, PROGRESS = "ready", "broken", "r", "returned", "progress"
PLAIN = "plain"  # what `unpack` makes of results without a header
UNFIT, STOP_TASK = "unfit", "stop_task"
METRICS, CONFIRMED = "metrics", "confirmed"


def pack(header: list[Any], body: bytes = b"") -> bytes:
    """One frame. Raises ValueError for a header above 64 kB: large things go into the body."""
    head = orjson.dumps(header)
    if len(head) > _MAX_HEADER:
        raise ValueError(f"frame header of {len(head)} bytes; put large values into the body")
    return _PREFIX.pack(len(head) + len(body) + 2, len(head)) + head + body


def unpack(buffer: bytearray) -> Iterator[tuple[list[Any], bytes]]:
    """The whole frames at the front of ``buffer``, which keeps the torn rest. Results without a
    header that follow each other come together (see `read_results`).
    """
    position, size = 0, len(buffer)
    if size < _PREFIX.size or _PREFIX.unpack_from(buffer)[0] + 4 > size:
        return  # not even one: a large frame arrives in many pieces
    data = bytes(buffer)
    try:
        while position + 6 <= size:
            length, head_length = _PREFIX.unpack_from(data, position)
            end = position + 4 + length
            if end > size:
                break
            if head_length:
                start = position + 6
                yield (
                    orjson.loads(data[start : start + head_length]),
                    data[start + head_length : end],
                )
            else:
                finished, end = _read_plain(data, position)
                if not finished:
                    raise ValueError(f"a frame of {length} bytes is no result")
                yield [PLAIN, finished], b""
            position = end
    finally:
        del buffer[:position]


def pack_tasks(tasks: Sequence[Task], *, together: bool) -> bytes:
    """One frame for tasks that a worker runs one after the other or, ``together``, in one call.

    They travel column by column, which costs a few of them a little and many of them a third.
    """
    ids, keys, target_ids, payloads, _, tokens, tries, *_ = zip(*tasks, strict=True)
    sizes, names = list(map(len, payloads)), [key.hex() for key in keys]
    columns = orjson.dumps([ids, tokens, target_ids, names, tries, sizes])
    return pack([TASKS, together, len(columns)], columns + b"".join(payloads))


def read_tasks(header: list[Any], body: bytes) -> tuple[list[Order], bool]:
    """The tasks of such a frame, and whether they are one call."""
    _, together, length = header
    ids, tokens, target_ids, names, tries, sizes = orjson.loads(body[:length])
    ends = list(accumulate(sizes, initial=length))
    payloads = map(body.__getitem__, map(slice, ends, ends[1:]))
    return list(
        map(ORDER, zip(ids, tokens, target_ids, names, tokens, payloads, tries, strict=True))
    ), together


def clean(text: str) -> str:
    """``text`` with lone surrogates, which UTF-8 cannot hold, written out as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()


#: Nearly all attempts end well and have none of what stands behind the value. Their header leaves
#: it out, and the outcome.
_NOTHING_MORE = Finished(0, 0, Outcome.OK, 0.0, 0.0, 0, 0, None)[9:]
_NUM_OF_PLAIN = 8


def pack_finished(f: Finished) -> bytes:
    if f[2] is Outcome.OK and f[9:] == _NOTHING_MORE:
        return pack([RESULT, f[0], f[1], *f[3:8]], f[8])
    body = f.value if f.outcome is Outcome.OK else f.trace.encode("utf-8", "backslashreplace")
    header = [
        RESULT, f.task_id, f.token, f.outcome.value, f.started_s, f.seconds, f.log_start,
        f.log_end, f.peak_mib, f.message and clean(f.message)[:_MAX_MESSAGE], f.signal, f.poisoned,
        f.files, f.on_device,
    ]  # fmt: skip
    return pack(header, body)


#: Prefix, task, token, started, seconds, start and end of its log, peak (NaN: not known).
_PLAIN = struct.Struct("<IHqqddqqd")
_NAN = float("nan")


def pack_plain(f: Finished) -> bytes:
    """`pack_finished` for a reader that knows frames without a header: not for what older musters
    may read.
    """
    if f[2] is not Outcome.OK or f[9:] != _NOTHING_MORE:
        return pack_finished(f)
    task_id, token, _, started, seconds, start, end, peak, value = f[:9]
    if peak is None:
        peak = _NAN
    size = _PLAIN.size - 4 + len(value)
    return _PLAIN.pack(size, 0, task_id, token, started, seconds, start, end, peak) + value


def _read_plain(data: bytes, position: int) -> tuple[list[Finished], int]:
    """The results without a header from there on, and where they end."""
    found, ok, nothing, last = [], Outcome.OK, _NOTHING_MORE, len(data) - _PLAIN.size
    while position <= last:
        length, head_length, task_id, token, started, seconds, log_start, log_end, peak = (
            _PLAIN.unpack_from(data, position)
        )
        end = position + 4 + length
        if head_length or end > len(data):
            break
        value = data[position + _PLAIN.size : end]
        mib = peak if peak == peak else None
        found.append(
            FINISHED(
                (task_id, token, ok, started, seconds, log_start, log_end, mib, value, *nothing)
            )
        )
        position = end
    return found, position


_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


def read_finished(header: list[Any], body: bytes) -> Finished:
    if len(header) == _NUM_OF_PLAIN:
        return FINISHED((header[1], header[2], Outcome.OK, *header[3:], body, *_NOTHING_MORE))
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


def read_results(header: list[Any], body: bytes) -> list[Finished]:
    """The attempts of a frame of one result, or of what `unpack` has made of some."""
    return header[1] if header[0] == PLAIN else [read_finished(header, body)]
