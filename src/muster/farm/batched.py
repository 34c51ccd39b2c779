"""The mark on a function that computes many tasks of the same shape together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from muster.base.errors import TargetError

#: The attribute that carries the `BatchSpec` of a marked function.
MARK = "__muster_batched__"
DEFAULT_MAX_BATCH = 256

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class BatchSpec:
    """Which tasks may share a call: those that agree on the parameters named in ``static``.

    A call takes ``max_batch`` tasks at most, and on a CPU ``max_batch_on_cpu`` (None: as many).

    ``params`` gives the names and types of one task's parameters (a dataclass, a TypedDict or a
    mapping of name to type); None accepts any names.
    """

    static: tuple[str, ...] = ()
    max_batch: int = DEFAULT_MAX_BATCH
    params: type | Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    max_batch_on_cpu: int | None = None


def batched(
    *,
    static: Sequence[str] = (),
    max_batch: int = DEFAULT_MAX_BATCH,
    params: type | Mapping[str, Any] | None = None,
    max_batch_on_cpu: int | None = None,
) -> Callable[[_Function], _Function]:
    """Mark a function that takes a list of parameter dicts and returns a list of results.

    The function stays callable as it is. It takes that one list and, if it likes, ``ctx``, and
    returns one result per dict in the same order. Each task keeps its own record. Tasks share a
    call only where they agree on every parameter that ``static`` names.

    In place of a result it may return an exception: that task alone fails with it. A call that
    raises is computed again in halves, until the task to blame is alone.

    A call takes up to ``max_batch`` tasks; on a CPU, where large batches seldom pay, up to
    ``max_batch_on_cpu``, so that results come sooner. ``params`` names the parameters of a task and
    their types (a dataclass, a TypedDict or a mapping), so that they are checked before the run.

    Raises TargetError for arguments that make no sense, such as a batch of 0.
    """
    spec = check_batch_spec(static, max_batch, params, max_batch_on_cpu)

    def mark(function: _Function) -> _Function:
        setattr(function, MARK, spec)
        return function

    return mark


def check_batch_spec(
    static: object,
    max_batch: object,
    params: type | Mapping[str, Any] | None = None,
    max_batch_on_cpu: object = None,
) -> BatchSpec:
    """The `BatchSpec` for the decorator's arguments, or a TargetError that says what is wrong."""
    if isinstance(static, str):
        raise TargetError(
            f"@batched(static={static!r}): static is a sequence of names, not one string.",
            hint=f"write static=({static!r},).",
        )
    if not isinstance(static, Sequence) or not all(isinstance(name, str) for name in static):
        raise TargetError(
            f"@batched(static={static!r}): static is a sequence of parameter names.",
            hint='write for example static=("depth", "width").',
        )
    largest = _check_size("max_batch", max_batch)
    on_cpu = None
    if max_batch_on_cpu is not None:
        on_cpu = _check_size("max_batch_on_cpu", max_batch_on_cpu)
    return BatchSpec(tuple(static), largest, params, on_cpu)


def _check_size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TargetError(
            f"@batched({name}={value!r}): the largest batch is a whole number of tasks, 1 or more.",
            hint=f"leave it out for {DEFAULT_MAX_BATCH}.",
        )
    return value


def batch_spec_of(function: object) -> BatchSpec | None:
    """The mark on ``function``, or None when it runs one task per call."""
    spec = getattr(function, MARK, None)
    return spec if isinstance(spec, BatchSpec) else None
