"""What the driver sends to pilots that do not see its files: code, a map's plan and its input.

Such a pilot has a log, a run folder and code of its own. What it says of them is said of the
driver's (``DriverView``), or the same failure on two nodes would look like two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

from muster.base.errors import SetupError
from muster.farm import wire
from muster.farm.events import Event, Results, TargetBroken, WorkerDied
from muster.farm.executors.ray_pilot import CODE, RUNS, digest_of
from muster.farm.executors.remote import FILE, pack_file
from muster.farm.task import Finished, Outcome, TargetSpec
from muster.hosts.code import moved_path, pack_code

#: What is put into the object store at once.
OBJECT_BYTES = 64 << 20


class CodeToSend:
    """The code of a run's targets. ``roots``: folders with code, the working folder first.

    Read when first asked for.
    """

    def __init__(self, targets: Iterable[TargetSpec], home: Path) -> None:
        self._targets = tuple(targets)
        self._home = home

    @cached_property
    def roots(self) -> tuple[str, ...]:
        found = [str(self._home)]
        folders = [target.base_folder for target in self._targets if target.base_folder]
        folders += [str(path.parent) for path in self._files]
        for folder in folders:
            if not any(Path(folder).is_relative_to(known) for known in found):
                found.append(folder)
        return tuple(found)

    @cached_property
    def digests(self) -> dict[str, str]:
        return {str(path): digest_of(path) for path in self._files}

    @property
    def is_needed(self) -> bool:
        """Whether a target lies in these folders; one in an installed package does not."""
        return bool(self._files) or any(target.kind == "command" for target in self._targets)

    def pack(self) -> bytes:
        """The frame of the code. Raises SetupError when it is too large to be sent."""
        return wire.pack([CODE], self._packed)

    @cached_property
    def digest(self) -> str:
        """A hash of all of it; "" where it is too large to be sent, which only matters if it has
        to be."""
        with suppress(SetupError):
            return sha256(self._packed).hexdigest()[:32]
        return ""

    @cached_property
    def _packed(self) -> bytes:
        return pack_code([Path(root) for root in self.roots])

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        """Where the targets are defined."""
        found = (_file_of(target) for target in self._targets if target.kind == "function")
        return tuple(dict.fromkeys(path for path in found if path is not None))


def _file_of(target: TargetSpec) -> Path | None:
    base = Path(target.base_folder)
    if target.location.endswith(".py"):
        return Path(os.path.abspath(base / target.location))
    inner = base.joinpath(*target.location.split("."))
    for path in (inner.with_suffix(".py"), inner / "__init__.py"):
        if path.is_file():
            return path
    return None


class MapToSend:
    """Reads ``map.json`` as ``muster.pipeline.stages`` has written it, as far as it names places:
    the input's files, the folder the map was started in, and the files in which its stages are.

    ``files``: what the workers read, with the size that each must have.
    """

    def __init__(self, path: Path, run_name: str) -> None:
        self._record: dict[str, Any] = json.loads(path.read_bytes())
        self._folder = f"{RUNS}/{run_name}"
        entries = self._record["source"]["files"]
        self._paths = [str(Path(entry.get("unpacked", entry["path"]))) for entry in entries]
        self.files = {path: Path(path).stat().st_size for path in self._paths}

    @property
    def stages(self) -> list[TargetSpec]:
        """The targets in which the code of the stages is."""
        return [
            TargetSpec(
                name=stage["attribute"],
                location=stage["location"],
                attribute=stage["attribute"],
                base_folder=self._record["base_folder"],
            )
            for stage in self._record["stages"]
        ]

    def place(self, path: str) -> str:
        """Where a file of the input goes, below a pilot's scratch folder."""
        return f"{self._folder}/input/{self._paths.index(path)}/{Path(path).name}"

    def pack_input(self, path: str) -> Iterator[bytes]:
        """The frames of one file, many to a piece."""
        parts: list[bytes] = []
        size = 0
        for frame in pack_file(Path(path), self.place(path)):
            parts.append(frame)
            size += len(frame)
            if size >= OBJECT_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join(parts)

    def pack_plan(self, scratch: str, sent: Sequence[str], roots: Sequence[str]) -> bytes:
        """The frame of ``map.json`` as it is true for a pilot with this scratch folder, which has
        been sent these files; ``roots``: the folders whose code it has been sent.
        """
        there = {path: str(Path(scratch) / self.place(path)) for path in sent}
        code = Path(scratch) / CODE
        record = {
            **self._record,
            "source": self._moved_source(there),
            "base_folder": moved_path(self._record["base_folder"], roots, code),
            "stages": [_moved_stage(stage, roots, code) for stage in self._record["stages"]],
        }
        body = json.dumps(record).encode()
        return wire.pack([FILE, f"{self._folder}/map.json", 0, True, 0o644], body)

    def _moved_source(self, there: Mapping[str, str]) -> dict[str, Any]:
        source = self._record["source"]
        files = [
            {**entry, "unpacked": there[path]} if path in there else entry
            for entry, path in zip(source["files"], self._paths, strict=True)
        ]
        return {**source, "files": files}


def _moved_stage(stage: Mapping[str, Any], roots: Sequence[str], code: Path) -> dict[str, Any]:
    return {**stage, "location": moved_path(stage["location"], roots, code)}


@dataclass(frozen=True, kw_only=True)
class DriverView:
    """Rewrites what a pilot says of its own log and folders to those of the driver.

    ``log_base``: the byte of the driver's log where the pilot's begins. ``places``: pairs of a
    folder of the pilot and the driver's.
    """

    log_base: int
    places: Mapping[str, str]

    def of(self, event: Event) -> Event:
        match event:
            case Results(worker_id, finished):
                return Results(worker_id, [self._finished(item) for item in finished])
            case WorkerDied():
                return event._replace(
                    trace=self._text(event.trace),
                    log_start=event.log_start + self.log_base,
                    log_end=event.log_end + self.log_base,
                )
            case TargetBroken(worker_id, message, trace):
                return TargetBroken(worker_id, self._text(message), self._text(trace))
        return event

    def _finished(self, item: Finished) -> Finished:
        moved = item._replace(
            log_start=item.log_start + self.log_base, log_end=item.log_end + self.log_base
        )
        if item.outcome is Outcome.OK:
            return moved
        return moved._replace(message=self._text(item.message), trace=self._text(item.trace))

    def _text(self, text: str) -> str:
        for theirs, ours in self.places.items():
            text = text.replace(theirs, ours)
        return text


def places_of_pilot(scratch: str, run_name: str, num_roots: int) -> list[str]:
    """Where a pilot has the run folder and the roots of its code."""
    home = PurePath(scratch)
    roots = [str(home / CODE / str(number)) for number in range(num_roots)]
    return [str(home / RUNS / run_name), *roots]
