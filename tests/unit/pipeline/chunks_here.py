"""A map in this process: the real reader, stages, journal and merge, without farm and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.pipeline.chunk import run_chunk
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sinks.merge import merge, write_the_output
from muster.pipeline.sinks.parts import Part
from muster.pipeline.sinks.parts_ahead import write_as_they_come
from muster.pipeline.sources.source import Source
from muster.pipeline.stages import StageSpec
from muster.pipeline.worker import MapPlan, write_plan
from muster.run.folder import RunFolder

STAGES = Path(__file__).parents[2] / "programs" / "typed_stages.py"


class Context:
    """Of a worker that is alone."""

    device, tries, num_waiting = "cpu", 0, 0

    def __init__(self, run_path: Path, key: str) -> None:
        self.run_path, self.key = run_path, key

    def divide(self, kept: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> None: ...
    def measure(self, text: str, numbers: Mapping[str, float]) -> None: ...
    def retire(self) -> None: ...


@dataclass
class Done:
    """The results of all chunks as the ledger has them, and the parts that they left."""

    results: list[dict[str, Any]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def merged(self, source: Source, path: Path) -> Path:
        """The output. Parquet is written here too, where a merge has a process for it."""
        kind: Any = path.suffix.removeprefix(".")
        sink = SinkSpec(path=path, format=kind)
        if kind == "parquet":
            metadata = tuple(source.metadata().items())
            sink = SinkSpec(path=path, format=kind, metadata=metadata, inputs=tuple(source.files))
            path.unlink(missing_ok=True)
            written, ahead = write_the_output(self.parts, sink, path), path.with_suffix(".ahead")
            found = write_as_they_come(iter(self.parts), sink, ahead)
            assert found in (None, written)  # a column may have to be read a second time
            assert found is None or ahead.read_bytes() == path.read_bytes()
            ahead.unlink(missing_ok=True)
        else:
            merge(self.parts, sink, errors=path.with_name("errors.jsonl"))
        return path


def run_chunks(
    source: Source, place: Path, stage: str = "same", *, rows_per_chunk: int = 10, **how: Any
) -> Done:
    folder = RunFolder(place / "run")
    folder.create()
    spec = StageSpec(location=str(STAGES), attribute=stage)
    plan = MapPlan(source=source.describe(), stages=(spec,), base_folder=str(place), **how)
    write_plan(folder.map_json, plan)
    done = Done()
    for shard in source.shards(rows_per_chunk):
        key = f"k{shard.order}"
        params = {**shard._asdict(), "place": list(shard.place)}
        result = run_chunk(Context(folder.path, key), **params, start=0, stop=shard.count)
        base = folder.parts_of(shard.order) / key
        errors = base.with_suffix(".errors.jsonl") if result["rejected"] else None
        part = Part(
            result["order"], result["start"], result["stop"], base.with_suffix(".jsonl"),
            result["rows_out"], result["bytes"], result["sha256"], errors, result["rejected"],
        )  # fmt: skip
        done.results.append(result)
        done.parts.append(part)
    return done
