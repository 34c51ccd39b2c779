"""Going on with a run from its folder alone."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from muster.api.options import SweepOptions
from muster.api.runs import Run
from muster.api.workload import Workload
from muster.base.code import Code, code_of, code_of_command
from muster.base.codec import decode
from muster.base.errors import SetupError
from muster.base.target import TargetRef
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.task import TargetSpec
from muster.run.record import RunRecord


def stored_options(run: Run) -> SweepOptions:
    """The options the run was last started with, in its own folder."""
    names = {field.name for field in dataclasses.fields(SweepOptions)}
    values: dict[str, Any] = {k: v for k, v in run.stored.options.items() if k in names}
    values["run_dir"] = run.path
    if isinstance(values.get("cluster"), dict):
        values["cluster"] = decode(ClusterRequest, values["cluster"], ignore_unknown=True)
    return SweepOptions(**values)


def stored_workload(run: Run) -> Workload:
    """The run's own tasks, which are all in its ledger.

    Raises SetupError when the run was killed before all of them were listed there.
    """
    stored = run.stored
    status = run.status()
    if not status.is_enqueued:
        raise SetupError(
            f"{run.path} was interrupted before all of its tasks were listed, so it cannot go on "
            "from its folder alone.",
            hint="run the same call of muster.sweep again with this run_dir; nothing is lost.",
        )
    targets = tuple(decode(TargetSpec, record) for record in stored.targets)
    base = Path(stored.cwd)
    return Workload(
        name=stored.name,
        kind="sweep",
        targets=targets,
        code=_code(targets, base),
        spec=stored.spec,
        fixed=stored.fixed,
        total=status.total,
        feed=lambda numbers: iter(()),
        parameters=(),
    )


def go_to(stored: RunRecord) -> None:
    """Enter the folder the run was started from: its target and files are named from there."""
    try:
        os.chdir(stored.cwd)
    except OSError as error:
        raise SetupError(
            f"The run was started in {stored.cwd}, which cannot be entered: {error.strerror}.",
            hint="its target is looked up from there; restore that folder.",
        ) from None


def _code(targets: tuple[TargetSpec, ...], base: Path) -> Code:
    refs = [_ref(target) for target in targets if target.kind == "function"]
    commands = [target.argv for target in targets if target.kind == "command"]
    found = code_of(refs, base)
    for argv in commands:
        found.update(code_of_command(argv, base))
    return found


def _ref(spec: TargetSpec) -> TargetRef:
    is_file = spec.location.endswith(".py")
    return TargetRef("file" if is_file else "module", spec.location, spec.attribute)
