"""A search as a workload: a sweep whose tasks are chosen as results come."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from muster.api.options import SearchOptions
from muster.api.search_driver import SEARCH, SearchDriver, Setting, Stored
from muster.api.search_look import annotated_space
from muster.api.search_records import from_row
from muster.api.workload import Numbers, Workload, of_command, of_function
from muster.base.clock import Clock
from muster.base.errors import PlanMismatchError, UsageError
from muster.base.target import parse_target, ref_of
from muster.farm import canonical
from muster.farm import space as farm_space
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import NewTask
from muster.farm.look import look
from muster.farm.parameters import Signature, convert_space
from muster.farm.task import TargetSpec
from muster.farm.template import names_in
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.search.distributions import Choice, read_value, shown_value
from muster.search.ranking import pareto_front
from muster.search.records import Decision, Standing
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import (
    Budget,
    Constraint,
    SearchSpec,
    Stopping,
    objectives,
)


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
            trials=options.trials, seconds=options.search_time_s, gpu_hours=options.gpu_hours
        ),
        seeds=seeds,
        tries=tuple(map(_guess, options.tries)),
        constraints=tuple(map(Constraint.from_text, options.constraint)),
        stopping=Stopping.from_text(options.stop),
    )
    if spec.budget == Budget() and space.size is None:
        raise UsageError(
            "The search has no end: its space has too many settings to try them all.",
            hint="add --trials 100, --search-time 2h or --gpu-hours 50.",
        )
    if spec.stopping.rule == "pbt":
        raise UsageError(
            "--stop pbt is not built yet.",
            hint="leave it out, or take another rule: asha, asha-stop, hyperband or median.",
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
            f"{target.name} is batched: a joint call cannot log or end for one of its tasks.",
            hint="search with a function of one setting.",
        )
    _check_conditions(spec, target, signature)
    stored, setting = _conversions(spec, signature)
    fixed = {"target": target.name, "search": _fixed(spec)}

    def drive(
        folder: RunFolder, numbers: Numbers, clock: Clock, gpus_per_task: int
    ) -> SearchDriver:
        return SearchDriver(
            spec, numbers[target.name], target.name, folder, clock,
            stored=stored, setting=setting, gpus_per_task=gpus_per_task,
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
        drive=drive,
        search=spec,
    )


def _conversions(spec: SearchSpec, signature: Signature | None) -> tuple[Stored, Setting]:
    names = spec.space.names

    def stored(params: Mapping[str, Any]) -> dict[str, Any]:
        if signature is None:
            return {name: _as_word(value) for name, value in params.items()}
        rows = farm_space.Space.from_values(rows=[dict(params)], seeds=spec.seeds)
        return next(iter(dataclasses.replace(convert_space(rows, signature), seeds=None)))

    def setting(params: Mapping[str, Any]) -> dict[str, Any] | None:
        if params.keys() - set(names):
            return None  # a task with another parameter is no trial of this space
        if signature is None:
            params = {name: read_value(str(value)) for name, value in params.items()}
        try:
            return spec.space.check(params)
        except UsageError:
            return None

    return stored, setting


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else shown_value(value)


def _fixed(spec: SearchSpec) -> dict[str, Any]:
    """What may not change in a run: everything but the budget."""
    return {name: value for name, value in spec.to_json().items() if name != "budget"}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the fixed parts of two workloads, a sentence each."""
    before, after = _lines(old), _lines(new)
    return [
        f"{name}: {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def _lines(fixed: Mapping[str, Any]) -> dict[str, str]:
    lines = {"target": str(fixed.get("target"))}
    for name, value in (fixed.get("search") or {}).items():
        if name == "space":
            lines |= {f"space {axis}": text for axis, text in value.items()}
        elif name == "objectives":
            lines["objectives"] = ", ".join(f"{one['direction']} {one['name']}" for one in value)
        elif name == "stopping":
            lines |= {f"stop {key}": json.dumps(one) for key, one in value.items()}
        else:
            lines[name] = json.dumps(value)
    return lines


def check_same_search(folder: RunFolder, spec: SearchSpec) -> None:
    """PlanMismatchError where the run holds another search, also if a grid came after it."""
    if not folder.ledger.exists():
        return
    with LedgerReader(folder.ledger) as ledger:
        known = ledger.meta(SEARCH)
    if known is None:
        return
    before = {"search": _fixed(SearchSpec.from_json(orjson.loads(known)))}
    lines = differences(before, {"search": json.loads(orjson.dumps(_fixed(spec)))})
    if lines:
        raise PlanMismatchError(
            "This run folder holds another search:\n  " + "\n  ".join(lines),
            hint="only its budget may grow. Choose another --run-dir or --name for the new one, or "
            "begin anew with --restart, which keeps the old run.",
        )


# ---------------------------------------------------------------------- looking at one


@dataclass(frozen=True)
class SearchState:
    """How a search stands, from its ledger."""

    spec: SearchSpec
    search: Search
    decisions: tuple[Decision, ...]
    spent_s: float
    gpu_hours: float

    @property
    def num_by_rung(self) -> dict[float, int]:
        """Trials that were stopped or paused at each rung and have not been promoted since."""
        at: dict[int, float] = {}
        for decision in self.decisions:
            if decision.kind == "promote":
                at.pop(decision.trial, None)
            elif decision.rung is not None and decision.seed is None:
                at[decision.trial] = decision.rung
        rungs = [
            rung
            for trial, rung in at.items()
            if self.search.trials[trial].state in ("waiting", "stopped")
        ]
        return {rung: rungs.count(rung) for rung in sorted(set(rungs))}

    @property
    def num_trials(self) -> int:
        return len(self.search.trials)

    @property
    def num_asked(self) -> int:
        """Trials that count against the budget."""
        return sum(trial.by not in ("copy", "given") for trial in self.search.trials)

    def best(self, count: int = 1) -> list[Standing]:
        return self.search.best(count)

    def unbeaten(self) -> list[Standing]:
        """Of one objective the best trial, of several the finished ones that none beats in all."""
        front = pareto_front(self.spec, self.search.trials)
        return front if len(self.spec.objectives) > 1 and front else self.best()


def read_search(folder: RunFolder) -> SearchState | None:
    """The search of a run, which may be at work; None where it has none."""
    if not folder.ledger.exists():
        return None
    with LedgerReader(folder.ledger) as ledger:
        text = ledger.meta(SEARCH)
        rows = ledger.search_rows()
        seconds = ledger.seconds_of_attempts()
    if text is None:
        return None
    spec = SearchSpec.from_json(orjson.loads(text))
    records = [from_row(row) for row in rows]
    spent_s = max(
        (
            canonical.decode(row.body).get("spent_s", 0.0)
            for row in rows
            if row.kind in ("proposal", "ended")
        ),
        default=0.0,
    )
    decisions = tuple(record for record in records if isinstance(record, Decision))
    # Its proposals are recorded, so what chose them is not needed to look at it.
    search = Search.replay(dataclasses.replace(spec, sampler="random"), records)
    gpus_per_task = int(read_run(folder).options.get("gpus_per_task", 1))
    return SearchState(spec, search, decisions, spent_s, seconds * gpus_per_task / 3600)


#: Strings that, typed bare, a function would not get as strings.
_NO_WORDS = frozenset(
    ("true", "false", "yes", "no", "on", "off", "none", "null", "nan", "inf", "infinity")
)


def again(target: Mapping[str, Any], spec: SearchSpec, params: Mapping[str, Any]) -> str:
    """The command that runs a setting with all of its seeds again. ``target``: as in run.json."""
    words = ["muster", "sweep"]
    command = target.get("kind") == "command"
    if not command:
        words.append(str(target["name"]))
    for name, value in params.items():
        words += ["--grid", f"{name}={_grid_text(value, of_command=command)}"]
    if spec.seeds is not None:
        words += ["--seeds", ",".join(map(str, spec.seeds)) + ("," if len(spec.seeds) == 1 else "")]
    if command:
        if source := target.get("metrics_from"):
            words += ["--metrics-from", str(source)]
        words += [*(["--shell"] if target.get("shell") else []), "--", *target["argv"]]
    return shlex.join(words)


def _grid_text(value: Any, *, of_command: bool) -> str:
    """What ``--grid`` reads back as this value: JSON, unless it is plainly a number or a word."""
    if of_command:  # whose values stay texts
        value = _as_word(value)
        is_plain = re.fullmatch(r"[\w.+-]+", value, re.ASCII) is not None
    elif isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z]\w*", value, re.ASCII) is not None
        is_plain = is_word and value.lower() not in _NO_WORDS
    else:
        is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return str(_as_word(value)) if is_plain else json.dumps([value])
