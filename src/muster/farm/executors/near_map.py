"""A map's plan and input, for workers that do not see the run folder.

Reads ``map.json`` as ``muster.pipeline.stages`` has written it, as far as it names places: the
input's files, the folder the map was started in, and the files in which its stages are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.farm import wire
from muster.farm.executors.ray_pilot import CODE, RUNS, moved_path
from muster.farm.executors.shipping import FILE, pack_file
from muster.farm.model import TargetSpec

#: What is put into the object store at once.
OBJECT_BYTES = 64 << 20


class MapToSend:
    """``files``: what the workers read, with the size that each must have."""

    def __init__(self, path: Path, run_name: str) -> None:
        self._record: dict[str, Any] = json.loads(path.read_bytes())
        self._folder = f"{RUNS}/{run_name}"
        entries = self._record["source"]["files"]
        self._paths = [str(Path(entry.get("unpacked", entry["path"]))) for entry in entries]
        self.files = {path: Path(path).stat().st_size for path in self._paths}

    @property
    def stages(self) -> list[TargetSpec]:
        """Where the code of the stages is, said as of targets."""
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
