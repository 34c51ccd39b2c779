"""A user's dataclass as a group of flags."""

from __future__ import annotations

import dataclasses
from typing import Any

from muster.base.errors import TargetError


def settings_of(task: Any) -> type:
    """The fields of a task or a stage as a class of their own, which the parser can fill."""
    fields = []
    for field in dataclasses.fields(task):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise TargetError(
                f"The field {field.name} of {task.__name__} has no default.",
                hint="give every field one; the command line overrides it.",
            )
        fields.append((field.name, field.type, _copied(field)))
    made = dataclasses.make_dataclass(f"{task.__name__}Settings", fields, frozen=True)
    made.__doc__ = (task.__doc__ or "").strip() or "The task's own settings."
    made.__module__ = task.__module__
    return made


def _copied(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return dataclasses.field(default=field.default)
    factory: Any = field.default_factory
    return dataclasses.field(default_factory=factory)
