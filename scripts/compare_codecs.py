"""Compare ``muster.base.codec`` with msgspec: time, import, messages. For decision 0048.

    pip install --target SITE msgspec
    PYTHONPATH=src:SITE python scripts/compare_codecs.py

Each pair is timed in turns, in processor seconds, because other work may run beside it; the ratio
is the median of the pairs' own ratios.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from muster.api.start.options import GangOptions
from muster.base.codec import MalformedError, as_read_back, decode, to_json
from muster.farm import wire
from muster.farm.task import Finished, Outcome
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, new_record

PAIRS = 15


def pair(name: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    number = max(1, round(0.05 / min(_seconds(ours, 20), _seconds(theirs, 20))))
    number = min(number, 20_000)
    turns = [(_seconds(ours, number), _seconds(theirs, number)) for _ in range(PAIRS)]
    us = [1e6 * statistics.median(one[i] for one in turns) for i in (0, 1)]
    ratio = statistics.median(a / b for a, b in turns)
    print(f"{name:44} {us[0]:9.2f} us {us[1]:9.2f} us   ours / msgspec {ratio:6.2f}")


def _seconds(call: Callable[[], object], number: int) -> float:
    began = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - began) / number


def hook(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


def plain_hook(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


class Result(msgspec.Struct, array_like=True):
    """The header of a result's frame, typed."""

    tag: str
    task_id: int
    token: int
    outcome: str
    started_s: float
    seconds: float
    log_start: int
    log_end: int
    peak_mib: float | None
    message: str
    signal: int | None
    poisoned: bool
    files: bool
    on_device: Any


def records() -> None:
    options = GangOptions(devices="cpu:2", notify=("slack:env:HOOK",), run_dir=Path("runs/x"))
    asked: dict[str, Any] = {
        "spec": {"grid": {f"p{n}": [0.1 * k for k in range(8)] for n in range(4)}, "seeds": [0, 1]},
        "code": {"work.py": "ab" * 16, "lib.py": "cd" * 16},
        "argv": ("muster", "sweep", "work.py:f", "--grid", "p0=0.1,0.2", "--devices", "cpu:2"),
    }
    record = new_record(RunFolder(Path("runs/x")), "sweep", options, **asked)
    data = to_json(record)
    print(f"run.json: {len(data)} bytes, {len(dataclasses.fields(record))} fields")
    assert decode(RunRecord, json.loads(data)) == msgspec.json.decode(data, type=RunRecord)
    reader = msgspec.json.Decoder(RunRecord)
    pair("read run.json", lambda: decode(RunRecord, json.loads(data)), lambda: reader.decode(data))
    pair(
        "write run.json, indented",
        lambda: to_json(record),
        lambda: msgspec.json.format(msgspec.json.encode(record), indent=2),
    )
    said = to_json(options)
    assert decode(GangOptions, json.loads(said)) == options
    of_options = msgspec.json.Decoder(GangOptions, dec_hook=hook)
    try:
        same = of_options.decode(said) == options
        print(f"options of a gang, {len(said)} bytes: the same value from both: {same}")
        pair(
            "read the options of a gang",
            lambda: decode(GangOptions, json.loads(said)),
            lambda: of_options.decode(said),
        )
    except Exception as error:
        print(f"options of a gang: msgspec refuses: {type(error).__name__}: {error}")


def frames() -> None:
    done = Finished(123456, 3, Outcome.OK, 1.5e9, 0.0123, 100, 200, 55.5, value=b'{"y": 1.0}')
    frame = wire.pack_finished(done)
    head_size = int.from_bytes(frame[4:6], "little")
    head = frame[6 : 6 + head_size]
    fields = orjson.loads(head)
    typed = msgspec.json.Decoder(Result)
    assert list(msgspec.structs.astuple(typed.decode(head))) == fields
    packed = msgspec.msgpack.encode(fields)
    of_packed = msgspec.msgpack.Decoder(Result)
    value = typed.decode(head)
    encode, pack = msgspec.json.Encoder().encode, msgspec.msgpack.Encoder().encode
    print(f"header of a result: {len(head)} bytes as JSON, {len(packed)} as msgpack")
    pair(
        "read a header, untyped JSON", lambda: orjson.loads(head), lambda: msgspec.json.decode(head)
    )
    pair("read a header, typed JSON", lambda: orjson.loads(head), lambda: typed.decode(head))
    pair(
        "read a header, typed msgpack", lambda: orjson.loads(head), lambda: of_packed.decode(packed)
    )
    pair("write a header, JSON", lambda: orjson.dumps(fields), lambda: encode(value))
    pair("write a header, msgpack", lambda: orjson.dumps(fields), lambda: pack(value))
    pair(
        "a whole result there and back",
        lambda: [
            wire.read_finished(*one) for one in wire.unpack(bytearray(wire.pack_finished(done)))
        ],
        lambda: _there_and_back(done, encode, typed.decode),
    )


def _there_and_back(done: Finished, encode: Any, read: Any) -> Finished:
    head = encode(
        ["r", done.task_id, done.token, done.outcome.value, done.started_s, done.seconds,
         done.log_start, done.log_end, done.peak_mib, done.message, done.signal, done.poisoned,
         done.files, done.on_device]
    )  # fmt: skip
    frame = bytearray((len(head) + len(done.value) + 2).to_bytes(4, "little"))
    frame += len(head).to_bytes(2, "little") + head + done.value
    f = read(memoryview(frame)[6 : 6 + len(head)])
    return Finished(
        f.task_id, f.token, wire._OUTCOMES[f.outcome], f.started_s, f.seconds, f.log_start,
        f.log_end, f.peak_mib, bytes(frame[6 + len(head) :]), f.message, "", f.signal, f.poisoned,
        f.files, f.on_device,
    )  # fmt: skip


def imports() -> None:
    """What each adds to an interpreter that has what the codec of Muster needs, in turns."""
    code = (
        "import {}; import time; b = time.process_time(); import {}; print(time.process_time() - b)"
    )
    needs = "json, dataclasses, typing, muster.base.errors, muster.base.atomic_files"
    found: dict[str, list[float]] = {"muster.base.codec": [], "msgspec": [], "orjson": []}
    for _ in range(PAIRS):
        for name, times in found.items():
            words = [sys.executable, "-c", code.format(needs, name)]
            times.append(float(subprocess.run(words, capture_output=True, check=True).stdout))
    for name, times in found.items():
        print(f"import {name:20} {1e3 * statistics.median(times):7.2f} ms")


def messages() -> None:
    asked: dict[str, Any] = {"spec": {}, "code": {}, "argv": ("muster",)}
    good = as_read_back(new_record(RunFolder(Path("runs/x")), "sweep", GangOptions(), **asked))
    for what, changes in (
        ("a number for a text", {"name": 5}),
        ("an unknown kind", {"kind": "sweeep"}),
        ("a wrong entry", {"targets": [{"a": 1}, 7]}),
        ("true for a number", {"created_s": True}),
        ("8.0 for 8", {"format": 8.0}),
        ("a missing field", {"run_id": None, "-": "run_id"}),
    ):
        value = {**good, **changes}
        if missing := value.pop("-", None):
            del value[str(missing)]
        print(f"\n{what}:")
        for name, read in (("ours", lambda v: decode(RunRecord, v)), ("msgspec", _by_msgspec)):
            try:
                read(value)
                print(f"  {name:8} takes it")
            except (MalformedError, msgspec.ValidationError) as error:
                print(f"  {name:8} {error}")


def _by_msgspec(value: Any) -> Any:
    return msgspec.json.decode(json.dumps(value), type=RunRecord)


def values() -> None:
    """What a result or a path may hold, and one of the two does not write as it is."""
    for value in (math.nan, "a\udcffb"):
        try:
            text: object = msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            text = f"refuses: {error}"
        print(f"{value!r:10} ours {to_json(value)!r}, msgspec {text!r}")


if __name__ == "__main__":
    python = sys.version.split()[0]
    print(f"msgspec {msgspec.__version__}, orjson {orjson.__version__}, Python {python}")
    records()
    frames()
    imports()
    messages()
    values()
