"""The door to inputs: from the user's words to a source, and from its description to it again."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.base.errors import UsageError
from muster.pipeline.sources.columnar import ArrowStream, Footer, Parquet, footers_of
from muster.pipeline.sources.conditions import parse_conditions
from muster.pipeline.sources.files import (
    changes,
    check_start,
    find_files,
    fingerprint,
    identity,
    recode,
    spool,
    text_encoding,
    unpack,
)
from muster.pipeline.sources.hub import InputOptions, arrow_files, streamed_file
from muster.pipeline.sources.source import DataFile, Format, Selection, Source
from muster.pipeline.sources.text import Delimited, JsonLines

__all__ = ["InputOptions", "changes", "identity", "open_input", "reopen"]

_OF_THE_HUB = ("config", "split", "streaming")
_OF_TEXT = ("delimiter", "encoding")
_NO_OPTIONS = InputOptions()


def open_input(
    what: str | Path | Iterable[Any],
    selection: Selection,
    options: InputOptions = _NO_OPTIONS,
    folder: Path = Path("input"),
    known: Collection[str] = (),
) -> Source:
    """Open a path, folder, glob, ``hf:NAME`` or iterable of records, without scanning it.

    ``folder`` keeps the index and what has to be unpacked; a second start finds both there.
    ``known``: places of files that it has read from, which are read although runs have them.
    Raises UsageError (UnknownNameError for a column of ``where``) and SetupError.
    """
    _check_selection(selection)
    if not isinstance(what, str | Path):
        _refuse(options, "an iterable", (*_OF_THE_HUB, *_OF_TEXT))
        path = spool(what, folder, selection.first_rows)
        return _opened("jsonl", [_entry(path, "the iterable")], selection, folder, "the iterable")
    text = str(what)
    if text.startswith("hf:"):
        _refuse(options, text, _OF_TEXT)
        return _from_hub(text.removeprefix("hf:"), selection, options, folder)
    _refuse(options, text, _OF_THE_HUB)
    files: list[dict[str, Any]] = []
    found, left_out = find_files(text, known)
    kind = found[0].kind
    if kind == "parquet":
        _refuse(options, text, _OF_TEXT)
    elif kind == "jsonl":
        _refuse(options, text, ("delimiter",))
    encoding = None if options.encoding is None else text_encoding(options.encoding)
    for item in found:
        try:
            entry = {"path": str(item.path), **fingerprint(item.path)}
            if item.packed:
                entry["unpacked"] = str(unpack(item, folder).absolute())
            if encoding is not None:
                packed = Path(entry.get("unpacked", entry["path"]))
                plain = recode(packed, item.path.name, folder, encoding)
                entry["unpacked"] = str(plain.absolute())
            check_start(Path(entry.get("unpacked", entry["path"])), item.path.name, item.kind)
        except PermissionError:
            raise UsageError(f"You may not read {item.path}.") from None
        files.append(entry)
    source = _opened(kind, files, selection, folder, text, _reading(options, encoding))
    return dataclasses.replace(source, left_out=left_out)


def _reading(options: InputOptions, encoding: str | None) -> dict[str, str]:
    """What a description says of how text is read, where it is not the default."""
    said = {}
    if options.delimiter is not None:
        said["delimiter"] = _delimiter(options.delimiter)
    if encoding is not None:
        said["encoding"] = encoding
    return said


def _delimiter(text: str) -> str:
    found = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(found) != 1 or found in '"\r\n':
        raise UsageError(
            f"--delimiter {text!r} cannot separate columns.",
            hint="write one character, such as ';', or tab.",
        )
    return found


def reopen(
    description: Mapping[str, Any],
    folder: Path | None = None,
    footers: dict[str, Footer] | None = None,
) -> Source:
    """The source that ``describe()`` described; reads data only of a file with another time.
    ``folder`` as in ``open_input``; ``footers`` of its files as far as they are known.

    UsageError when a file is gone or is another one: its shards would hold other rows.
    """
    for file in description["files"]:
        _check_still_there(file)
    chosen = dict(description["selection"])
    selection = Selection(**{**chosen, "where": tuple(chosen["where"])})
    kind = description["kind"]
    where = parse_conditions(
        selection.where, description["columns"], reads_numbers=kind in ("csv", "tsv")
    )
    return Source(
        description=dict(description),
        format=_format(kind, where, description.get("delimiter"), footers or {}),
        selection=selection,
        conditions=where,
        folder=folder,
    )


def _check_still_there(file: Mapping[str, Any]) -> None:
    path = Path(file.get("unpacked", file["path"]))
    if not path.exists():
        raise UsageError(f"{path} is gone since the run began.", hint="put it back, or --restart.")
    if "unpacked" in file:
        return
    stat = path.stat()
    if stat.st_size != file["size"]:
        raise UsageError(
            f"{path} has changed since the run began: {file['size']:,} -> {stat.st_size:,} bytes.",
            hint="put the old one back, or begin anew with --restart.",
        )
    # The time decides where it is the same. On another host a copy may have another.
    if stat.st_mtime_ns != file["mtime_ns"] and not _is_copy(path, file):
        raise UsageError(
            f"{path} on {socket.gethostname()} has other content than when the run began, and as "
            "many bytes.",
            hint="put the old one back, or begin anew with --restart; where hosts have files of "
            "their own, give them the same one at that place, or none: then it is sent to them.",
        )


def _is_copy(path: Path, file: Mapping[str, Any]) -> bool:
    """Also as version 0.1.0 recorded it, whose hash of a large Parquet file had the time in it."""
    hashes = (
        fingerprint(path, always_timed=timed, time_ns=file["mtime_ns"])["hash"]
        for timed in (False, True)
    )
    return file["hash"] in hashes


def _from_hub(name: str, selection: Selection, options: InputOptions, folder: Path) -> Source:
    shown = f"hf:{name}"
    if options.streaming:
        path = streamed_file(name, options, selection, folder)
        return _opened("jsonl", [_entry(path, shown)], selection, folder, shown)
    files = [{"path": str(path), **fingerprint(path)} for path in arrow_files(name, options)]
    return _opened("arrow", files, selection, folder, shown)


def _entry(path: Path, name: str) -> dict[str, Any]:
    return {"path": name, **fingerprint(path), "unpacked": str(path.absolute())}


def _opened(
    kind: str,
    files: list[dict[str, Any]],
    selection: Selection,
    folder: Path,
    text: str,
    reading: Mapping[str, str] | None = None,
) -> Source:
    if not sum(file["size"] for file in files):
        raise UsageError(f"There are no records in {text}: it is empty.")
    reading = reading or {}
    found = [
        DataFile(path, Path(file["path"]).name)
        for file in files
        if (path := Path(file.get("unpacked", file["path"]))).stat().st_size
    ]
    footers = footers_of(kind, found)
    form = _format(kind, (), reading.get("delimiter"), footers)
    columns = dict.fromkeys(name for file in found for name in form.columns(file))
    description: dict[str, Any] = {
        "kind": kind,
        "files": files,
        "columns": list(columns),
        **reading,
        "selection": {**dataclasses.asdict(selection), "where": list(selection.where)},
    }
    return reopen(description, folder, footers)


def _format(kind: str, where: Any, delimiter: str | None, footers: dict[str, Footer]) -> Format:
    if kind == "jsonl":
        return JsonLines()
    if kind in ("csv", "tsv"):
        usual = "," if kind == "csv" else "\t"
        return Delimited(delimiter or usual, is_given=delimiter is not None)
    return Parquet(where, footers) if kind == "parquet" else ArrowStream(footers)


def _check_selection(selection: Selection) -> None:
    for name, value in (("skip", selection.skip), ("limit", selection.limit)):
        if value is not None and value < 0:
            raise UsageError(f"--{name} {value} is negative.")


def _refuse(options: InputOptions, text: str, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(options, name)]
    if given:
        what = "Hugging Face data sets: --input hf:NAME"
        if given[0] in _OF_TEXT:
            what = "text files" if given == ["encoding"] else "CSV files"
        flags = " and ".join(f"--{name}" for name in given)
        raise UsageError(
            f"{flags} has no effect on {text}.",
            hint=f"{'this belongs' if len(given) == 1 else 'these belong'} to {what}.",
        )
