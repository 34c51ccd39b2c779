"""Hugging Face: whether the hub can be reached, and its data sets as Arrow files or JSON lines."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.errors import (
    MissingPackageError,
    MusterError,
    SetupError,
    UnknownNameError,
    UsageError,
)
from muster.pipeline.sources.files import spool_stream
from muster.pipeline.sources.source import Selection

_LIMIT_S = 3.0
_PAUSE_S = 1.0
_CONSTANTS = "huggingface_hub.constants"
#: Names of errors that mean, in any HTTP library, that the hub cannot be reached at all.
_NO_WAY = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "SSLError"}


def is_hub_reachable() -> bool:
    """Whether the hub answers. True without its package: what needs that reports it itself."""
    try:
        # Names, because the package is optional and its types change from version to version.
        constants: Any = importlib.import_module(_CONSTANTS)
        utils: Any = importlib.import_module("huggingface_hub.utils")
    except ImportError:
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    if _answers(constants, utils):
        return True
    time.sleep(_PAUSE_S)  # a name server that was busy for a moment
    return _answers(constants, utils)


def use_cache_if_unreachable() -> None:
    """Without a connection, let this process take what is in the cache and nothing else.

    The libraries would try each file six times otherwise, for half a minute, with a line each.
    """
    if not is_hub_reachable():
        constants: Any = importlib.import_module(_CONSTANTS)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has made a copy
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _answers(constants: Any, utils: Any) -> bool:
    try:
        utils.get_session().head(constants.ENDPOINT, timeout=_LIMIT_S)
    except Exception as error:  # each version has its own HTTP library
        return type(error).__name__ not in _NO_WAY
    return True


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How the input is read."""

    config: str | None = None
    """The configuration of a Hugging Face data set."""
    split: str | None = None
    """The split of a Hugging Face data set."""
    streaming: bool = False
    """Download a Hugging Face data set once as a stream, and no more than is read, instead of
    through the cache."""
    delimiter: str | None = None
    """What separates the columns of CSV: ';', tab. Default: a comma, in .tsv files a tab."""
    encoding: str | None = None
    """The encoding of text files, such as latin-1 or utf-16. Default: utf-8."""


def arrow_files(name: str, options: InputOptions) -> list[Path]:
    """The memory-mappable files of a data set, in order. Downloads and converts it when needed."""
    import pyarrow as pa

    data = _load(name, options)
    paths = [Path(item["filename"]) for item in data.cache_files]
    num_rows = 0
    for path in paths:
        with pa.memory_map(str(path)) as mapped:
            num_rows += pa.ipc.open_stream(mapped).read_all().num_rows
    if not paths or num_rows != data.num_rows:
        raise UsageError(
            f"hf:{name}, split {options.split}, is a part that has no files of its own.",
            hint="name the whole split, and the part with --skip and --limit.",
        )
    return paths


def streamed_file(name: str, options: InputOptions, selection: Selection, folder: Path) -> Path:
    """The records that are asked for, as JSON lines. An interrupted download goes on."""
    data = _load(name, options)
    most = selection.first_rows
    key = hashlib.blake2b(repr((name, options, most)).encode(), digest_size=8).hexdigest()

    def open_at(number: int) -> Iterable[Any]:
        return data.skip(number) if number else data  # type: ignore[no-any-return]

    try:
        return spool_stream(open_at, folder / f"stream-{key}.jsonl", most, f"hf:{name}")
    except MusterError:
        raise
    except ConnectionError as error:
        raise SetupError(
            f"The connection to hf:{name} was lost: {error}.",
            hint="run the same command again; it goes on where it was.",
        ) from None


def _load(name: str, options: InputOptions) -> Any:
    try:
        import datasets  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise MissingPackageError("Reading hf: data sets", "datasets", "datasets") from None
    folder = Path(name).expanduser()
    if not folder.exists():
        use_cache_if_unreachable()
    try:
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(folder)
        else:
            found = datasets.load_dataset(
                str(folder) if folder.exists() else name,
                options.config,
                split=options.split,
                streaming=options.streaming,
            )
    except ConnectionError as error:
        raise SetupError(
            f"Cannot reach the hub for hf:{name}: {error}.",
            hint="check the network; a data set that is in the cache needs none.",
        ) from None
    except Exception as error:  # the library raises what the data set's files make it raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"Cannot load the data set hf:{name}"
            f"{_said('config', options.config)}{_said('split', options.split)}: {reason}.",
            hint="check the name, --config and --split; private data sets need `hf auth login`.",
        ) from None
    if isinstance(found, dict):
        found = _split_of(found, name, options)
    is_stored = isinstance(found, datasets.Dataset)
    return found.to_iterable_dataset() if options.streaming and is_stored else found


def _split_of(splits: Any, name: str, options: InputOptions) -> Any:
    if options.split is None and len(splits) > 1:
        raise UsageError(
            f"hf:{name} has {len(splits)} splits: {', '.join(splits)}.",
            hint=f"choose one, such as --split {next(iter(splits))}.",
        )
    if options.split is not None and options.split not in splits:
        raise UnknownNameError(f"split of hf:{name}", options.split, splits)
    return splits[options.split or next(iter(splits))]


def _said(what: str, value: str | None) -> str:
    return "" if value is None else f", {what} {value}"
