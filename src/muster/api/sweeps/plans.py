"""The run folder of a plan: choosing it, its record, refusing another plan, going on from it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from muster.api.start.limits import refuse_to_begin
from muster.api.start.options import SweepOptions
from muster.api.sweeps.workload import Workload, as_texts, over_space, plan_id_of, ref_of_spec
from muster.base import codec
from muster.base.cells import moved_with
from muster.base.code import Code, code_of, code_of_command
from muster.base.errors import PlanMismatchError, SetupError, UsageError
from muster.base.settings import job_place
from muster.base.shown_text import shell_word
from muster.base.signals import Requests
from muster.farm.canonical import decode, encode_canonical
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.look import look
from muster.farm.parameters import convert_space
from muster.farm.space import SEED, Space
from muster.farm.task import TargetSpec, TaskState
from muster.farm.template import check_places
from muster.run.folder import RunFolder, folder_for
from muster.run.record import RunRecord, environment, new_record, plain_options, read_run

if TYPE_CHECKING:
    from muster.api.runs import Run
    from muster.run.session import Renew


def choose_folder(workload: Workload, options: SweepOptions) -> RunFolder:
    """``--run-dir``, or ``runs/<name>-<hash of what may not change>``.

    In an element of a SLURM array its number follows: the elements run at the same time, and one
    process works on a folder.
    """
    if options.run_dir is not None:
        return RunFolder(options.run_dir)
    place = job_place()
    element = "" if place is None else f"-{place.element}"
    return folder_for(options.name or workload.name, workload.digest, element)


def refuse_past_limits(
    folder: RunFolder, workload: Workload, options: SweepOptions, requests: Requests
) -> None:
    """Raise LimitReached where it would pause at once; with no task left it only sums up."""
    if options.limits and (options.restart or not _has_ended(folder, workload)):
        refuse_to_begin(folder, options, requests, is_new=options.restart)


def _has_ended(folder: RunFolder, workload: Workload) -> bool:
    """Whether a start would find no task to run."""
    if not folder.ledger.exists():
        return False
    from muster.farm.ledger.read import LedgerReader  # here, as below: a new run has no ledger

    with LedgerReader(folder.ledger) as ledger:
        counts = ledger.counts()
    left = (TaskState.READY, TaskState.CLAIMED, *workload.reopens)
    return sum(counts.values()) >= workload.total and not any(counts[one] for one in left)


def is_done(folder: RunFolder, workload: Workload) -> bool:
    """Whether the ledger holds all of exactly this plan, and nothing of it is left to do."""
    if not folder.ledger.exists():
        return False
    from muster.farm.ledger.read import LedgerReader

    with LedgerReader(folder.ledger) as ledger:
        is_whole = ledger.meta("enqueued") == workload.plan_id
    return is_whole and _has_ended(folder, workload)


def renewal(
    workload: Workload, options: SweepOptions, folder: RunFolder, argv: Sequence[str]
) -> Renew:
    """What makes the record of a new run, or that of an old one with what this start may change.

    ``argv``: empty for a call of the library, which keeps the command in the record. What is
    returned raises PlanMismatchError for a folder of another plan.
    """

    # Here, as below: a dry run of a new run has none.
    from muster.api.start.earlier_work import check_code

    def renew(before: RunRecord | None) -> RunRecord:
        asked: dict[str, Any] = {
            "spec": workload.spec, "fixed": workload.fixed, "code": dict(workload.code),
        }  # fmt: skip
        if before is None:
            check_code(
                folder, workload.code, workload.code_before, may_change=options.allow_changed_code
            )
            targets = tuple(dataclasses.asdict(spec) for spec in workload.targets)
            record = new_record(
                folder, workload.kind, options, targets=targets, argv=tuple(argv), **asked
            )
            return dataclasses.replace(record, environment=_versions(options, record.environment))
        check_same_plan(folder, before, workload, options)
        if options.python is not None or before.options.get("python") is not None:
            asked["environment"] = _versions(options, environment())
        if argv:  # paths in it are relative to where it was typed
            asked |= {"argv": tuple(argv), "cwd": str(Path.cwd())}
        if workload.targets and workload.targets[0].kind == "command":
            source = workload.targets[0].metrics_from
            asked["targets"] = ({**before.targets[0], "metrics_from": source},)
        return dataclasses.replace(before, options=plain_options(options), **asked)

    return renew


def other_sources(folder: RunFolder, workload: Workload) -> tuple[str, ...]:
    """A remark where tasks are done whose numbers were read in another way than is asked for."""
    if not folder.exists():
        return ()
    from muster.api.start.earlier_work import has_results

    if not has_results(folder):
        return ()
    before = {str(old.get("metrics_from") or "") for old in read_run(folder).targets}
    now = {spec.metrics_from for spec in workload.targets}
    if before == now:
        return ()
    said = " and ".join(sorted(text for text in before if text))
    earlier = f"with --metrics-from {said}" if said else "without --metrics-from"
    return (
        f"Tasks that are done were started {earlier}; their numbers are not read again. "
        "Hint: --restart runs all of them with the new one, and keeps the old run.",
    )


def _versions(options: SweepOptions, ours: Mapping[str, str]) -> dict[str, str]:
    """What tasks find: with --python what is in that interpreter, beside this muster."""
    if options.python is None:
        return dict(ours)
    from muster.farm.executors.worker_process import worker_python

    kept = {name: version for name, version in ours.items() if name == "muster-gpu"}
    return {**worker_python(options.python).versions, **kept}


def check_same_plan(
    folder: RunFolder, stored: RunRecord, workload: Workload, options: SweepOptions
) -> None:
    """Raise PlanMismatchError, with the difference, when the folder was made for something else.

    More seeds (and what a recipe calls extendable) are no difference, and neither are more values
    of a grid, a zip or a list: tasks are known by their content, so these only add some. Changed
    code is one as soon as there are results of the old code.
    """
    stored.check_kind(workload.kind, folder)
    if stored.fixed.get("target") == workload.fixed.get("target"):
        workload.check(folder)
    if _plain(stored.fixed) != _plain(workload.fixed) and not _grows(folder, stored, workload):
        lines = workload.difference(stored.fixed, workload.fixed) or ["the plan"]
        other = "--output or --run-dir" if workload.is_map else "--run-dir or --name"
        grows = "" if workload.is_map else "values can be added to a sweep and not taken away; "
        raise PlanMismatchError(
            "This run folder was made for another plan:\n  " + "\n  ".join(lines),
            hint=f"{grows}choose another {other} for the new plan, or begin anew with --restart, "
            "which keeps the old run.",
        )
    from muster.api.start.earlier_work import check_code

    check_code(folder, workload.code, workload.code_before, may_change=options.allow_changed_code)


def _grows(folder: RunFolder, stored: RunRecord, workload: Workload) -> bool:
    """Whether every setting that the run has is among the workload's.

    The settings of a run are those in its ledger; where it was ended before all of them were listed
    there, also those that its record tells of. A seed from ``--seeds`` is no part of one.
    """
    space = workload.space
    # A grid may be the start of a search, and a search that of a grid: tasks are known by content.
    if ("search" in workload.fixed) != ("search" in stored.fixed):
        return stored.fixed.get("target") == workload.fixed.get("target")
    if workload.search is not None:
        return not workload.difference(stored.fixed, workload.fixed)
    if space is None or stored.fixed.get("target") != workload.fixed["target"]:
        return False
    axes = {*_axes(stored.fixed), *_axes(workload.fixed)}
    dropped = set() if SEED in axes else {SEED}
    missing: set[bytes] = set()
    is_whole = False
    if folder.ledger.exists():
        from muster.farm.ledger.read import LedgerReader

        with LedgerReader(folder.ledger) as ledger:
            is_whole = ledger.meta("enqueued") == plan_id_of(stored.spec)
            missing = {_setting(decode(payload), dropped) for payload in ledger.payloads()}
    if not is_whole and not space.holds(stored.fixed["space"]):
        return False
    for params in dataclasses.replace(space, seeds=None):
        missing.discard(_setting(params, dropped))
    return not missing


def _setting(params: Mapping[str, Any], dropped: set[str]) -> bytes:
    kept = {name: value for name, value in params.items() if name not in dropped}
    return blake2b(encode_canonical(kept), digest_size=16).digest()


def _axes(fixed: Mapping[str, Any]) -> list[str]:
    space = fixed.get("space", {})
    listed = space.get("list", {}).get("names", ())
    return [*space.get("grid", {}), *space.get("zip", {}), *listed]


def _plain(value: Any) -> Any:
    return json.loads(codec.to_json(value))


# ---------------------------------------------------------------------- from the folder alone


def stored_options(run: Run) -> SweepOptions:
    """The options the run was last started with, in its own folder."""
    names = {field.name for field in dataclasses.fields(SweepOptions)}
    values: dict[str, Any] = {k: v for k, v in run.stored.options.items() if k in names}
    values["run_dir"] = run.path
    if values.get("python") is not None:
        values["python"] = Path(values["python"])
    if isinstance(values.get("cluster"), dict):
        values["cluster"] = codec.decode(ClusterRequest, values["cluster"], ignore_unknown=True)
    return SweepOptions(**values)


def stored_workload(run: Run, budget: Mapping[str, Any] = MappingProxyType({})) -> Workload:
    """The run's own tasks, which are all in its ledger. ``budget``: what of a search's is another
    one now.

    Raises SetupError when the run was killed before all of them were listed there.
    """
    stored = run.stored
    status = run.status()
    if not status.is_enqueued and "search" not in stored.fixed:
        raise SetupError(
            f"{run.path} was interrupted before all of its tasks were listed, so it cannot go on "
            "from its folder alone.",
            hint="run the same call of muster.sweep again with this run_dir; nothing is lost.",
        )
    targets, base = _stored_targets(run), Path(stored.cwd)
    workload = Workload(
        name=stored.name,
        kind="sweep",
        targets=targets,
        code=_stored_code(targets, base),
        spec=stored.spec,
        fixed=stored.fixed,
        total=status.total,
        feed=lambda numbers: iter(()),
        parameters=(),
    )
    if "search" not in stored.fixed:
        return workload
    from muster.api.sweeps.search import as_search  # few runs are searches
    from muster.search.spec import SearchSpec

    known = None if targets[0].kind == "command" else look(ref_of_spec(targets[0]))
    spec = SearchSpec.from_json(stored.spec["search"])
    spec = dataclasses.replace(spec, budget=dataclasses.replace(spec.budget, **budget))
    return as_search(workload, spec, known)


def workload_over(run: Run, space: Space) -> Workload:
    """What the run does, over another space. UsageError for a recipe, which plans its tasks."""
    stored = run.stored
    if "recipe" in stored.fixed:
        raise UsageError(
            f"{run.path} is of the recipe {stored.fixed['recipe']}, which plans its tasks itself.",
            hint="say in its own flags what it is to plan: "
            f"muster add {shell_word(run.path)} --help",
        )
    (spec,) = _stored_targets(run)
    code = _stored_code((spec,), Path(stored.cwd))
    if spec.kind == "command":
        check_places(list(spec.argv), space.names)
        return over_space(stored.name, spec, as_texts(space), code)
    ref = ref_of_spec(spec)
    if ref.kind == "file":  # named from where the run was started
        ref = dataclasses.replace(ref, location=str(Path(stored.cwd, ref.location)))
    return over_space(stored.name, spec, convert_space(space, look(ref)), code)


def _stored_targets(run: Run) -> tuple[TargetSpec, ...]:
    specs = (codec.decode(TargetSpec, record) for record in run.stored.targets)
    return tuple(
        dataclasses.replace(spec, location=moved_with(spec.location, run.path)) for spec in specs
    )


def go_to(cwd: str) -> None:
    """Enter the folder the run was started from: its target and files are named from there.

    Raises SetupError where it cannot be entered.
    """
    try:
        os.chdir(cwd)
    except OSError as error:
        raise SetupError(
            f"The run was started in {cwd}, which cannot be entered: {error.strerror}.",
            hint="its target is looked up from there; restore that folder.",
        ) from None


def _stored_code(targets: tuple[TargetSpec, ...], base: Path) -> Code:
    refs = [ref_of_spec(target) for target in targets if target.kind == "function"]
    commands = [target.argv for target in targets if target.kind == "command"]
    found = code_of(refs, base)
    for argv in commands:
        found.update(code_of_command(argv, base))
    return found
