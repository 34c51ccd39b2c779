"""What a stage of ``muster map`` is.

A stage is one of
- a function of one record (a dict) that returns the new record, None to drop it, or a list of
  records to put several in its place;
- a class with ``process(batch)``: a list of records in, a list as long out, in the same order,
  whose entries are what a function may return, or a ``Reject``;
- a class with ``async def process_one(record)``, for stages that wait: up to ``concurrency``
  records (one where it has no such attribute) are in it at once, and they leave it in the order in
  which they are done.

Classes may have ``setup(device)``, called once per worker before the first record, ``close()``, and
``columns()``, asked after the set-up, with types of output columns: ``{"vector": "float32[384]"}``.
A class that is a dataclass gets its fields as flags of the command line.
A stage that raises ``Reject`` (or returns one for an entry) sends that record to errors.jsonl with
the reason; any other exception of ``process`` is tried again on halves of the batch until the
record that causes it is alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import threading
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from muster.base.device_faults import looks_like_lost_device
from muster.base.errors import MusterError, TargetError, cause_of
from muster.base.target import TargetRef, load_value, parse_target, ref_of


class Reject(Exception):
    """Raise or return it in a stage for a record that cannot be processed.

    The record goes to errors.jsonl with the text as its reason, and is not tried again.
    """


class EngineError(Exception):
    """The engine is broken or gone; its requests may be repeated on a fresh one."""


def seed_of(*parts: str | int) -> int:
    """A seed from 0 to 2**63 - 1 that depends on ``parts`` alone, the same on every machine.

    Parts are whatever a random draw should depend on: a seed of the run, the record's id, the
    stage, the number of the round.
    """
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Meter:
    """Sums by name since the worker started. Threads may add at the same time."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float) -> None:
        """Add to a sum. ``name`` is in the plural: ``"tokens"``, ``"requests"``."""
        with self._lock:
            self._sums[name] += amount

    def read(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)


METER = Meter()
#: In the numbers that a worker reports, before the name of a stage: how many records it rejected.
REJECTED_IN = "rejected in "


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
    if is_dataclass(stage) and not isinstance(stage, type):
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
    """Make the stage, in the worker."""
    found: Any = load_value(spec.ref, base)
    if spec.index is not None:
        found = found[spec.index]
    if not isinstance(found, type):
        return found
    try:
        return _built(found, spec.values) if is_dataclass(found) else found(**spec.values)
    except TypeError as error:
        if is_dataclass(found):
            raise _not_made(spec, error, found) from error
        raise TargetError(
            f"The stage {spec.attribute} cannot be made without arguments: {error}.",
            hint="make it a dataclass, so that its fields become flags, with a default each.",
        ) from None
    except MusterError:
        raise
    except Exception as error:
        if looks_like_lost_device(str(error)):
            raise
        raise _not_made(spec, error, found) from error


def _not_made(spec: StageSpec, error: Exception, kind: type[Any]) -> TargetError:
    # Most causes are there the next time as well, as those of a setup are.
    cause = cause_of(error, kind.__init__)
    return TargetError(f"The stage {spec.attribute} cannot be made: {cause}.")


def _built(kind: type, values: Mapping[str, Any]) -> Any:
    """A dataclass from JSON values; fields that are dataclasses, tuples and paths as annotated."""
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(value, Mapping) and isinstance(hint, type) and is_dataclass(hint):
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
            f"{name} is not a stage: the class {kind.__name__} has neither process nor "
            "process_one.",
            hint="write def process(self, batch): return [… one entry per record …].",
        )
    if inspect.isfunction(stage):
        _check_takes_one(stage, name)
    if not is_class and not callable(stage):
        raise TargetError(f"{name} is not a stage: {type(stage).__name__} cannot be called.")


def _check_takes_one(function: Callable[..., Any], name: str) -> None:
    """TargetError for a function that cannot be called with one record.

    A decorator may give the function that it wraps more than it gets, so its own signature counts.
    """
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind({})
    except TypeError:
        needed = [
            one.name
            for one in signature.parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        takes = f"needs {' and '.join(needed)}" if needed else "takes nothing"
        raise TargetError(
            f"{name} is not a stage: it {takes}, and a stage gets one record.",
            hint="write def stage(record): …, with a default for whatever else it takes.",
        ) from None
