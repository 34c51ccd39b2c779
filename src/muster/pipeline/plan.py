"""What every worker of a map is told: ``map.json`` in the run folder, and stages from names."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.codec import read_json, write_json
from muster.base.errors import TargetError
from muster.base.target import TargetRef, load_value, parse_target, ref_of

DEFAULT_BATCH = 32
#: Functions of one record cost little: larger batches keep the journal's share small.
DEFAULT_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage by name. ``values``: the fields of a dataclass; ``index``: its place in a list."""

    location: str
    attribute: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    index: int | None = None

    @property
    def ref(self) -> TargetRef:
        kind: typing.Literal["file", "module"]
        kind = "file" if self.location.endswith(".py") else "module"
        return TargetRef(kind, self.location, self.attribute)

    @property
    def name(self) -> str:
        short = self.attribute.rpartition(".")[2]
        return short if self.index is None else f"{short}[{self.index}]"


@dataclass(frozen=True, kw_only=True)
class MapPlan:
    """``batch_size`` 0: what the stages ask for. Memory in MiB of resident set; None: no limit.

    ``keeps_types``: the output has types, so values do not become what JSON has for them.
    """

    source: Mapping[str, Any]
    stages: tuple[StageSpec, ...]
    base_folder: str
    batch_size: int = 0
    keeps_ids: bool = True
    row_retries: int = 1
    exception_retries: int = 0
    keep_going: bool = False
    keeps_types: bool = False
    max_worker_memory_mib: float | None = None


def write_plan(path: Path, plan: MapPlan) -> None:
    write_json(path, plan)


def read_plan(path: Path) -> MapPlan:
    record = read_json(path, "map.json")
    stages = tuple(StageSpec(**stage) for stage in record.pop("stages"))
    return MapPlan(**record, stages=stages)


def specs_of_text(text: str, values: Mapping[str, Any], base: Path) -> tuple[StageSpec, ...]:
    """The stages that ``file.py:name`` names: a function, a class or a list of stages."""
    ref = parse_target(text, base)
    found: Any = load_value(ref, base)
    if isinstance(found, list | tuple):
        for item in found:
            _check_stage(item, text)
        indices = range(len(found))
        return tuple(
            StageSpec(location=ref.location, attribute=ref.attribute, index=i) for i in indices
        )
    _check_stage(found, text)
    return (StageSpec(location=ref.location, attribute=ref.attribute, values=dict(values)),)


def spec_of_object(stage: Any) -> StageSpec:
    """The name of a stage given in Python: a function, a class or a dataclass instance."""
    if dataclasses.is_dataclass(stage) and not isinstance(stage, type):
        kind = type(stage)
        _check_stage(kind, kind.__qualname__)
        ref = ref_of(kind)
        values = dataclasses.asdict(stage)
        return StageSpec(location=ref.location, attribute=ref.attribute, values=values)
    if not isinstance(stage, type) and not hasattr(stage, "__code__"):
        raise TargetError(
            f"Cannot use {type(stage).__name__} object as a stage: workers are other processes "
            "and make their own from its name and fields.",
            hint="make its class a dataclass, or give the class itself.",
        )
    _check_stage(stage, getattr(stage, "__qualname__", str(stage)))
    ref = ref_of(stage)
    return StageSpec(location=ref.location, attribute=ref.attribute)


def make_stage(spec: StageSpec, base: Path) -> Any:
    """The stage itself, in the worker."""
    found: Any = load_value(spec.ref, base)
    if spec.index is not None:
        found = found[spec.index]
    if not isinstance(found, type):
        return found
    if dataclasses.is_dataclass(found):
        return _built(found, spec.values)
    try:
        return found(**spec.values)
    except TypeError as error:
        raise TargetError(
            f"The stage {spec.attribute} cannot be made without arguments: {error}.",
            hint="make it a dataclass, so that its fields become flags, with a default each.",
        ) from None


def _built(kind: type, values: Mapping[str, Any]) -> Any:
    """A dataclass from JSON values; fields that are dataclasses, tuples and paths as annotated."""
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(value, Mapping) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
            arguments[name] = _built(hint, value)
        elif isinstance(value, list) and typing.get_origin(hint) is tuple:
            arguments[name] = tuple(value)
        elif isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
            arguments[name] = Path(value)
        else:
            arguments[name] = value
    return kind(**arguments)


def _check_stage(stage: Any, name: str) -> None:
    kind = stage if isinstance(stage, type) else type(stage)
    is_class = isinstance(stage, type) or not callable(stage)
    if is_class and not (hasattr(kind, "process") or hasattr(kind, "process_one")):
        raise TargetError(
            f"{name} is no stage: the class {kind.__name__} has neither process nor process_one.",
            hint="write def process(self, batch): return [… one entry per record …].",
        )
    if not is_class and not callable(stage):
        raise TargetError(f"{name} is no stage: {type(stage).__name__} cannot be called.")


def first_batch(stages: Sequence[Any], asked: int) -> int:
    """How many rows go in together at first."""
    if asked:
        return asked
    sizes = [getattr(stage, "batch_size", 0) or DEFAULT_BATCH for stage in stages
             if hasattr(stage, "process")]  # fmt: skip
    return min(sizes) if sizes else DEFAULT_ROWS
