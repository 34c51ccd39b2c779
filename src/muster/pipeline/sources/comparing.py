"""What makes an input the same input, and sentences about what is different."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST = 10
#: Larger files are known by samples and their time, see `files.fingerprint`.
HASHED_WHOLE = 64 << 20


def identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description less what may differ for the same input: times, and where it was unpacked."""
    files = [
        {key: value for key, value in file.items() if key not in ("mtime_ns", "unpacked")}
        for file in description["files"]
    ]
    return {**description, "files": files}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A sentence per difference, such as "data.jsonl: size 10 MB -> 12 MB"; none when equal."""
    lines = []
    if old["kind"] != new["kind"]:
        lines.append(f"input: {old['kind']} -> {new['kind']}")
    before = {file["path"]: file for file in old["files"]}
    after = {file["path"]: file for file in new["files"]}
    lines += [f"{_name(path)}: is gone" for path in before if path not in after]
    lines += [f"{_name(path)}: is new" for path in after if path not in before]
    for path in before:
        if path in after:
            lines += _file_changes(path, before[path], after[path])
    if not lines and list(before) != list(after):
        lines.append("the files of the input have another order")
    if not lines and old["columns"] != new["columns"]:
        lines.append(f"columns: {', '.join(old['columns'])} -> {', '.join(new['columns'])}")
    lines += [
        f"{name}: {old.get(name, 'the default')} -> {new.get(name, 'the default')}"
        for name in ("delimiter", "encoding")
        if old.get(name) != new.get(name)
    ]
    for name, value in new["selection"].items():
        if old["selection"].get(name) != value:
            lines.append(f"{name}: {old['selection'].get(name)} -> {value}")
    more = len(lines) - _MOST
    return lines if more <= 0 else [*lines[:_MOST], f"and {more:,} more differences"]


def _file_changes(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if old["size"] != new["size"]:
        before, after = _size(old["size"]), _size(new["size"])
        if before == after:
            before, after = f"{old['size']:,} bytes", f"{new['size']:,} bytes"
        return [f"{_name(path)}: size {before} -> {after}"]
    if old["hash"] != new["hash"]:
        return [f"{_name(path)}: other content of the same size{_unsure(new['size'])}"]
    return []


def _unsure(size: int) -> str:
    if size <= HASHED_WHOLE:
        return ""
    return ", or just another time: it is too large to be compared as a whole"


def _name(path: str) -> str:
    return Path(path).name


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:,.0f} bytes"
        size /= 1000
    return f"{size:,.3g} TB"
