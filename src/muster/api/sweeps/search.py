"""A search as a workload: a sweep whose tasks are chosen as results come."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import orjson

from muster.api.sweeps.search_driver import SearchDriver, Setting, Stored
from muster.api.sweeps.search_options import SearchOptions
from muster.api.sweeps.search_state import SEARCH
from muster.api.sweeps.workload import Workload, of_command, of_function
from muster.base.clock import Clock
from muster.base.errors import PlanMismatchError, TargetError, UsageError
from muster.base.settings import child_environment
from muster.base.target import load, parse_target, ref_of, see_working_folder
from muster.farm import space as farm_space
from muster.farm.ledger.read import LedgerReader
from muster.farm.look import look
from muster.farm.parameters import Signature, convert_space
from muster.farm.plan import Numbers
from muster.farm.space_difference import changed_lines
from muster.farm.task import NewTask, TargetSpec
from muster.farm.template import OWN_PROGRAM, names_in
from muster.run.folder import RunFolder
from muster.search.distributions import Choice, read_value, word_of
from muster.search.space import Space
from muster.search.spec import (
    Budget,
    Constraint,
    SearchSpec,
    Stopping,
    objectives,
)

_MARK = b"\nmuster-space "


def spec_of(
    options: SearchOptions, space: Space | None, seeds: tuple[int, ...] | None
) -> SearchSpec:
    """What the options mean. ``space``: that of the function's annotations; None where it has none.

    Raises UsageError where something is missing, or is said twice.
    """
    given = options.space
    if given:
        named = given if isinstance(given, Mapping) else None
        space = Space.from_values(named) if named is not None else Space.from_texts(given)
    if space is None:
        raise UsageError(
            "The search has no space.",
            hint="--space 'lr=log(1e-5,1e-1)', or annotate a parameter of the function: "
            "lr: Annotated[float, muster.Space.log(1e-5, 1e-1)].",
        )
    spec = SearchSpec(
        space=space,
        objectives=objectives(minimize=options.minimize, maximize=options.maximize),
        sampler=options.sampler,
        seed=options.search_seed,
        budget=Budget(
            trials=options.trials,
            seconds=options.search_time_s,
            gpu_hours=options.gpu_hours,
            cost=options.max_cost,
            price_per_gpu_hour=options.price_per_gpu_hour,
        ),
        seeds=seeds,
        tries=tuple(map(_guess, options.tries)),
        constraints=tuple(map(Constraint.from_text, options.constraint)),
        stopping=Stopping.from_text(options.stop),
    )
    if (options.max_cost is None) != (options.price_per_gpu_hour is None):
        raise UsageError(
            "--max-cost and --price-per-gpu-hour need each other.",
            hint="give both, in the same money, such as --max-cost 40 --price-per-gpu-hour 2.5.",
        )
    if spec.budget == Budget() and space.size is None:
        raise UsageError(
            "The search has no end: its space has too many settings to try them all.",
            hint="add --trials 100, --search-time 2h or --gpu-hours 50.",
        )
    return spec


def _guess(text: str) -> dict[str, Any]:
    """``lr=1e-3,opt=sgd``, or the same as a JSON object: a setting, or a part of one."""
    if text.startswith("{"):
        try:
            return dict(orjson.loads(text))
        except ValueError as error:
            raise UsageError(f"--try {text} is not JSON: {error}") from None
    found = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not sign:
            raise UsageError(f"--try {text}: {part!r} is not NAME=VALUE.", hint="--try lr=1e-3")
        found[name.strip()] = read_value(value)
    return found


def annotated_space(target: str) -> Space | None:
    """The space that a function's annotations describe; None where no parameter is annotated with a
    range. It is read in another process, which imports what the target imports.

    Raises TargetError where the target cannot be imported.
    """
    argv = [sys.executable, "-P", "-m", "muster.api.sweeps.search", target]
    done = subprocess.run(argv, capture_output=True, check=False, env=child_environment({}))
    _, mark, text = done.stdout.rpartition(_MARK)
    if done.returncode or not mark:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise TargetError(f"The space of {target} cannot be read: {said[-1]}")
    found = orjson.loads(text)
    return Space.from_json(found) if found else None


def main(target: str) -> int:
    """Be that process."""
    see_working_folder()
    space = Space.of_function(load(parse_target(target), Path.cwd()))
    sys.stdout.flush()
    found = {} if space is None else space.to_json()
    sys.stdout.buffer.write(_MARK + orjson.dumps(found))
    sys.stdout.flush()
    return 0


def search_of_function(
    target: Callable[..., Any] | str, options: SearchOptions, seeds: tuple[int, ...] | None
) -> Workload:
    """A function as a search; its space may be that of its annotations."""
    if isinstance(target, str):
        ref = parse_target(target)
        annotated = None if options.space else annotated_space(target)
    else:
        ref = ref_of(target)
        annotated = None if options.space else Space.of_function(target)
    spec, known = spec_of(options, annotated, seeds), look(ref)
    return as_search(of_function(ref, _example(spec), known), spec, known)


def search_of_command(
    argv: list[str],
    options: SearchOptions,
    seeds: tuple[int, ...] | None,
    *,
    shell: bool,
    metrics_from: str = "",
) -> Workload:
    """A command as a search."""
    spec = spec_of(options, None, seeds)
    return as_search(
        of_command(argv, _example(spec), shell=shell, metrics_from=metrics_from), spec, None
    )


def _example(spec: SearchSpec) -> farm_space.Space:
    """Settings with each value of the choices, and one of each range, so that what the target
    cannot take is refused before anything starts."""
    pools = {
        axis.name: own.values if isinstance(own, Choice) else (own.draw(Random(0)),)
        for axis in spec.space.axes
        for own in (axis.distribution,)
    }
    rows = [
        {name: values[number % len(values)] for name, values in pools.items()}
        for number in range(max(map(len, pools.values())))
    ]
    return farm_space.Space.from_values(rows=rows, seeds=spec.seeds)


def _check_conditions(spec: SearchSpec, target: TargetSpec, signature: Signature | None) -> None:
    """UsageError for a parameter that is there only sometimes and that the target always needs."""
    for axis in (axis for axis in spec.space.axes if axis.when):
        condition = " and ".join(when.to_text() for when in axis.when)
        if signature is not None and axis.name in signature.required:
            raise UsageError(
                f"{axis.name} is there only if {condition}, but has no default in {target.name}.",
                hint=f"give {axis.name} a default in the function.",
            )
        if signature is None and any(axis.name in names_in(part) for part in target.argv):
            raise UsageError(
                f"{axis.name} is there only if {condition}, but the command always holds "
                f"{{{axis.name}}}.",
                hint="hand over all parameters, as JSON: --shell -- '… \"$MUSTER_PARAMS\"'.",
            )


def as_search(workload: Workload, spec: SearchSpec, signature: Signature | None) -> Workload:
    """``workload``, a target over an empty space, as a search. ``signature``: None of a command."""
    (target,) = workload.targets
    if target.is_batched:
        raise UsageError(
            f"{target.name} is batched: a joint call cannot end for one of its tasks.",
            hint="search with a function of one setting.",
        )
    if spec.stopping.rule == "pbt" and target.argv[:1] == (OWN_PROGRAM,):
        raise UsageError(
            "--stop pbt gives a trial the checkpoint of another and settings of its own, and a "
            "training of `muster train` goes on only with the settings that it began with.",
            hint="--stop asha or hyperband; or write the training as a function with "
            "ctx.checkpoint.",
        )
    _check_conditions(spec, target, signature)
    stored, setting = _conversions(spec, signature)
    fixed: dict[str, Any] = {"target": target.name, "search": _fixed(spec)}

    def drive(
        folder: RunFolder, numbers: Numbers, clock: Clock, gpus_per_worker: float
    ) -> SearchDriver:
        return SearchDriver(
            spec, numbers[target.name], target.name, folder, clock,
            stored=stored, setting=setting, gpus_per_worker=gpus_per_worker,
        )  # fmt: skip

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        return iter(())

    goal, rungs = spec.objectives[0].name, spec.stopping.rungs()
    return dataclasses.replace(
        workload,
        targets=(dataclasses.replace(target, goal=goal, rungs=rungs),),
        spec={"target": target.name, "search": spec.to_json()},
        fixed=fixed,
        total=(spec.budget.trials or spec.space.size or 0) * len(spec.seeds or (None,)),
        feed=feed,
        parameters=spec.space.names,
        space=None,
        difference=differences,
        check=partial(_check_same, fixed["search"]),
        drive=drive,
        search=spec,
    )


def _conversions(spec: SearchSpec, signature: Signature | None) -> tuple[Stored, Setting]:
    names = spec.space.names

    def stored(params: Mapping[str, Any]) -> dict[str, Any]:
        if signature is None:
            return {name: word_of(value) for name, value in params.items()}
        rows = farm_space.Space.from_values(rows=[dict(params)], seeds=spec.seeds)
        return next(iter(dataclasses.replace(convert_space(rows, signature), seeds=None)))

    def setting(params: Mapping[str, Any]) -> dict[str, Any] | None:
        if params.keys() - set(names):
            return None  # a task with another parameter is not a trial of this space
        if signature is None:
            params = {name: read_value(str(value)) for name, value in params.items()}
        try:
            return spec.space.check(params)
        except UsageError:
            return None

    return stored, setting


def _fixed(spec: SearchSpec) -> dict[str, Any]:
    """What may not change in a run: everything but the budget."""
    return {name: value for name, value in spec.to_json().items() if name != "budget"}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the fixed parts of two workloads, a sentence each."""
    return changed_lines(_lines(old), _lines(new))


def _lines(fixed: Mapping[str, Any]) -> dict[str, str]:
    lines = {"target": str(fixed.get("target"))}
    for name, value in (fixed.get("search") or {}).items():
        if name == "space":
            lines |= {f"space {axis}": text for axis, text in value.items()}
        elif name == "objectives":
            lines["objectives"] = ", ".join(f"{one['direction']} {one['name']}" for one in value)
        elif name == "stopping":
            known = dataclasses.asdict(Stopping())  # earlier ones had other options
            lines |= {f"stop {key}": json.dumps(value.get(key, known[key])) for key in known}
        else:
            lines[name] = json.dumps(value)
    return lines


def _check_same(fixed: Mapping[str, Any], folder: RunFolder) -> None:
    """PlanMismatchError where the run holds another search, also if a grid came after it."""
    if not folder.ledger.exists():
        return
    with LedgerReader(folder.ledger) as ledger:
        known = ledger.meta(SEARCH)
    if known is None:
        return
    before = {"search": _fixed(SearchSpec.from_json(orjson.loads(known)))}
    lines = differences(before, {"search": json.loads(orjson.dumps(fixed))})
    if lines:
        raise PlanMismatchError(
            "This run folder holds another search:\n  " + "\n  ".join(lines),
            hint="only its budget may grow. Choose another --run-dir or --name for the new one, or "
            "begin anew with --restart, which keeps the old run.",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
