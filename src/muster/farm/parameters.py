"""What a target takes, and how values typed on a command line become its arguments.

Three forms of one value: the text a user types (``"1e-3"``), the stored form that is part of the
task's identity (``0.001``; JSON only), and the argument of the call (a Path, an Enum member).
`convert_space` goes from the first to the second, `to_call` from the second to the third;
`muster.farm.kinds` has the table of annotations.

Defaults are not filled in: a task is what was asked for, and the function knows the rest.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

from muster.base.errors import TargetError, UnknownNameError, UsageError
from muster.farm.batched import BatchSpec, batch_spec_of
from muster.farm.converters import Converter, Unreadable, caller_for, converter_for
from muster.farm.kinds import ANY, Kind, kind_from_record, kind_of, kind_to_record
from muster.farm.results import note_on
from muster.farm.space import SEED, Axis, Space, check_space_distinct
from muster.farm.space_texts import MISSING, ListRows, Text

CONTEXT = "ctx"


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool = True
    kind: Kind = ANY


@dataclass(frozen=True)
class Signature:
    """What a target takes per task.

    ``extra``: the kind of any other name (``**kwargs``), or None when there is none. ``batch`` is
    set for a batched function, whose ``parameters`` are those of one task in the batch. ``note``
    warns of a return annotation whose values do not become columns.
    """

    parameters: tuple[Parameter, ...] = ()
    extra: Kind | None = None
    takes_ctx: bool = False
    batch: BatchSpec | None = None
    note: str = field(default="", compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def required(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if p.required)

    @cached_property
    def takes_seed(self) -> bool:
        """Whether ``seed`` is handed over as an argument; ``ctx.seed`` is there in any case."""
        return self.extra is not None or SEED in self.names

    @cached_property
    def converters(self) -> dict[str, Converter]:
        """From a typed text or a Python value to the stored form, for each named parameter."""
        return {p.name: converter_for(p.kind) for p in self.parameters}

    @cached_property
    def callers(self) -> dict[str, Converter]:
        """From the stored form to the argument, only for parameters where the two differ."""
        found = ((p.name, caller_for(p.kind)) for p in self.parameters)
        return {name: caller for name, caller in found if caller is not None}

    def to_record(self) -> dict[str, Any]:
        """As JSON, to be sent by a process that imported the target to one that did not."""
        return {
            "parameters": [[p.name, p.required, kind_to_record(p.kind)] for p in self.parameters],
            "extra": None if self.extra is None else kind_to_record(self.extra),
            "takes_ctx": self.takes_ctx,
            "note": self.note,
            "batch": self.batch
            and [list(self.batch.static), self.batch.max_batch, self.batch.max_batch_on_cpu],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Signature:
        """The inverse of `to_record`, except that Enum arguments stay names in `to_call`."""
        return cls(
            tuple(Parameter(n, r, kind_from_record(k)) for n, r, k in record["parameters"]),
            None if record["extra"] is None else kind_from_record(record["extra"]),
            record["takes_ctx"],
            record["batch"] and _batch_from_record(*record["batch"]),
            record["note"],
        )


def _batch_from_record(static: list[str], max_batch: int, on_cpu: int | None) -> BatchSpec:
    return BatchSpec(tuple(static), max_batch, max_batch_on_cpu=on_cpu)


def signature_of(function: Callable[..., Any]) -> Signature:
    """What ``function`` takes, from its signature, annotations and `batched` mark.

    Annotations that cannot be evaluated (names imported for type checkers only) count as none.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function):
        raise TargetError(
            f"{name} is an async function; a task is a plain call.",
            hint="wrap it: def task(...): return asyncio.run(...).",
        )
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        raise TargetError(
            f"{name} has a yield in it: a call of it runs nothing.",
            hint="return what it makes; for progress there is ctx.report.",
        )
    try:
        inspected = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"Cannot tell the parameters of {name}: {error}.",
            hint="wrap it in a function of your own.",
        ) from error
    hints = _hints(function)
    entries = [
        (p.name, str(p.kind.description), p.default is p.empty, hints.get(p.name, Any))
        for p in inspected.parameters.values()
    ]
    kinds = [(n, how, required, kind_of(hint)) for n, how, required, hint in entries]
    spec = batch_spec_of(function)
    if spec is None:
        found = build_signature(name, kinds)
    else:
        found = build_batched(name, kinds, spec, _declared(spec.params))
    returned = inspected.return_annotation
    if returned is inspected.empty:
        return found
    text = returned if isinstance(returned, str) else inspect.formatannotation(returned)
    return replace(found, note=note_on(text))


def build_signature(function: str, entries: Iterable[tuple[str, str, bool, Kind]]) -> Signature:
    """A Signature from (name, how it is passed, required, kind), the words being `inspect`'s."""
    parameters: list[Parameter] = []
    extra: Kind | None = None
    takes_ctx = False
    for name, how, required, kind in entries:
        if how in ("positional-only", "variadic positional"):
            shown = f"*{name}" if how.startswith("variadic") else f"{name} (before the /)"
            raise TargetError(
                f"{function} takes {shown}, which can only be passed by position; "
                "tasks pass every parameter by name.",
                hint="make it an ordinary parameter.",
            )
        if how == "variadic keyword":
            extra = kind
        elif name == CONTEXT:
            takes_ctx = True
        else:
            parameters.append(Parameter(name, required, kind))
    return Signature(tuple(parameters), extra, takes_ctx)


def build_batched(
    function: str,
    entries: Iterable[tuple[str, str, bool, Kind]],
    spec: BatchSpec,
    declared: tuple[Parameter, ...] | None,
) -> Signature:
    """The Signature of one task of a batched function; ``declared`` None accepts any names."""
    own = build_signature(function, entries)
    if len(own.parameters) != 1:
        found = ", ".join(own.names) or "none"
        raise TargetError(
            f"The batched function {function} takes {found}; it takes one list of parameter "
            "dicts, and ctx if it likes.",
            hint=f"write def {function}(tasks, ctx): and read task['name'] for each task.",
        )
    known = {parameter.name for parameter in declared or ()}
    for name in spec.static:
        if declared is not None and name not in known:
            raise UnknownNameError(f"static parameter of {function}", name, known)
    return Signature(
        declared or (), ANY if declared is None else None, own.takes_ctx, replace(spec, params=None)
    )


def convert_space(space: Space, signature: Signature) -> Space:
    """``space`` with every value in its stored form, each distinct value converted once.

    Checks what does not depend on single tasks: unknown and missing names, seeds that nothing
    would read, and values that turn out to be the same.
    """
    if space.seeds is not None and not (signature.takes_seed or signature.takes_ctx):
        count = len(space.seeds)
        given = "1 seed is given" if count == 1 else f"{count} seeds are given"
        raise UsageError(
            f"{given}, but the target takes neither seed nor ctx: every seed would compute "
            "the same.",
            hint="add a parameter seed to the function, or leave the seeds out.",
        )
    check_names(signature, space.names)
    _check_space_required(signature, space)

    def convert(name: str, values: Sequence[object]) -> tuple[object, ...]:
        converter = signature.converters.get(name) or converter_for(signature.extra or ANY)
        known: dict[Text, object] = {}
        converted: list[object] = []
        for value in values:
            try:
                if type(value) is not Text:
                    converted.append(value if value is MISSING else converter(value))
                    continue
                if value not in known:
                    known[value] = converter(value)
                converted.append(known[value])
            except Unreadable as error:
                raise _cannot_read(signature, name, value, str(error)) from None
        return tuple(converted)

    def axes(pairs: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple((name, convert(name, values)) for name, values in pairs)

    typed = replace(
        space,
        grid=axes(space.grid),
        zipped=axes(space.zipped),
        listed=space.listed and _convert_rows(space.listed, convert),
    )
    check_space_distinct(typed, space)
    return typed


def to_call(signature: Signature, params: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for the call: Paths, Enum members and tuples made from stored values.

    ``seed`` is left out when the function reads it from ``ctx``. May return ``params`` itself.
    """
    if signature.callers:
        callers = signature.callers
        params = {n: callers[n](v) if n in callers else v for n, v in params.items()}
    if SEED in params and not signature.takes_seed:
        return {name: value for name, value in params.items() if name != SEED}
    return params


def check_names(signature: Signature, names: Iterable[str]) -> None:
    """UnknownNameError for a name the target does not take; ``ctx`` is never a value."""
    known = signature.names
    for name in names:
        if name == CONTEXT:
            raise UsageError(
                "Parameter ctx cannot be given a value: muster passes the task's context there.",
                hint="give the parameter another name.",
            )
        if name in known or signature.extra is not None:
            continue
        if name == SEED and signature.takes_ctx:
            continue
        raise UnknownNameError("parameter", name, known)


def _hints(function: Any) -> dict[str, Any]:
    target = inspect.unwrap(function)
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:
        pass
    # One annotation that cannot be evaluated should not hide the others.
    hints: dict[str, Any] = {}
    namespace = getattr(target, "__globals__", {})
    for name, annotation in getattr(target, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints.update(typing.get_type_hints(holder, namespace, include_extras=True))
        except Exception:
            hints[name] = Any
    return hints


def _declared(params: type | Mapping[str, Any] | None) -> tuple[Parameter, ...] | None:
    """The parameters that ``@batched(params=...)`` lists, None when it lists none."""
    if params is None:
        return None
    if isinstance(params, Mapping):
        return tuple(Parameter(name, True, kind_of(hint)) for name, hint in params.items())
    hints = _hints(params)
    if is_dataclass(params):
        return build_signature(
            params.__name__,
            [
                (p.name, "keyword-only", p.default is p.empty, kind_of(hints.get(p.name, Any)))
                for p in inspect.signature(params).parameters.values()
            ],
        ).parameters
    required = getattr(params, "__required_keys__", frozenset(hints))
    return tuple(Parameter(name, name in required, kind_of(hint)) for name, hint in hints.items())


def _convert_rows(
    listed: ListRows, convert: Callable[[str, Sequence[object]], tuple[object, ...]]
) -> ListRows:
    columns = zip(*listed.rows, strict=True)
    converted = [convert(name, col) for name, col in zip(listed.names, columns, strict=True)]
    return replace(listed, rows=tuple(zip(*converted, strict=True)))


def _check_required(signature: Signature, given: Iterable[str]) -> None:
    missing = signature.required.difference(given)
    if not missing:
        return
    names = ", ".join(name for name in signature.names if name in missing)
    first = next(name for name in signature.names if name in missing)
    how = "--seeds 1" if first == SEED else f"--grid {first}=VALUE"
    raise UsageError(
        f"The target needs a value for {names}: without a default it cannot be called.",
        hint=f"add {how}, or give the parameter a default.",
    )


def _check_space_required(signature: Signature, space: Space) -> None:
    _check_required(signature, space.names)
    if space.listed is None:
        return
    for column, name in enumerate(space.listed.names):
        if name not in signature.required:
            continue
        for number, row in enumerate(space.listed.rows, 1):
            if row[column] is MISSING:
                raise UsageError(
                    f"Row {number} of {space.listed.source} leaves out {name}, "
                    "which has no default.",
                    hint=f"give {name} in every row, or give it a default in the function.",
                )


def _cannot_read(signature: Signature, name: str, value: object, inside: str) -> UsageError:
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters}
    kind = kinds.get(name, signature.extra or ANY)
    shown = repr(str(value)) if isinstance(value, str) else repr(value)
    if kind.form == "any":
        return UsageError(
            f"Parameter {name}: cannot store {shown} of type {type(value).__name__}.",
            hint="annotate the parameter with its class (an Enum, a dataclass), or give numbers, "
            "strings or lists.",
        )
    hint = inside or None
    if kind.form == "dataclass" and isinstance(value, str) and not inside:
        hint = f"write it as JSON inside a list of values: --grid '{name}=[{{\"field\": 1}}]'."
    if kind.form in ("list", "tuple", "tuple_of"):
        hint = (
            f"one list is written as JSON inside a list of values: --grid '{name}=[[1, 2], [3]]'."
        )
    return UsageError(f"Parameter {name}: cannot read {shown} as {kind.describe()}.", hint=hint)
