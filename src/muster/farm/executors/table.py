"""Making executors by name.

A module of its own, because snapshots of notebooks in run folders import ``make_executor`` from it;
see tests/unit/api/test_old_names.py.
"""

from __future__ import annotations

import importlib
from typing import cast

from muster.base.errors import MusterError, TargetError, cause_of
from muster.farm.executors.base import EXECUTORS, Assignment, Executor, class_of


def make_executor(name: str, assignment: Assignment) -> Executor:
    """The executor called ``name``, for which ``check_executor`` holds.

    Raises TargetError for one of a file or package that cannot be loaded or made.
    """
    if name in EXECUTORS:
        module, _, attribute = EXECUTORS[name].partition(":")
        return cast("Executor", getattr(importlib.import_module(module), attribute)(assignment))
    kind = class_of(name)
    try:
        return cast("Executor", kind(assignment))
    except MusterError:
        raise
    except Exception as error:
        raise TargetError(
            f"The executor {name} cannot be made: {cause_of(error, kind.__init__)}.",
            hint="correct it and start the same command again.",
        ) from error
