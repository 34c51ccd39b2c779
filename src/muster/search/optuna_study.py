"""A search in Optuna's words: its samplers, which choose settings; a study, written to a file; and
the importance of parameters. Imported where one of these is asked for.

Optuna is told through its storage in memory, so that a trial costs one entry and no sampler is
asked twice.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.base.errors import MissingPackageError
from muster.search.distributions import Choice, Distribution, Float, shown_value
from muster.search.space import is_active
from muster.search.spec import SearchSpec
from muster.search.trials import Trial, seed_for

if TYPE_CHECKING:
    import optuna

#: These keep something in the study, so a study is rebuilt by asking them again.
_STATEFUL = frozenset({"qmc", "cmaes", "nsga2"})
_NEEDS = {"qmc": ("scipy",), "gp": ("scipy", "torch"), "cmaes": ("cmaes",)}


class StudySampler:
    """A sampler of Optuna's, made anew for each question with a seed of its own.

    The study grows by an entry for each trial that is asked for, and by another when a paused one
    has come further: a trial at a rung and the same trial at the next are two observations. Those
    that keep something of their own in the study hear of a paused trial when it has ended.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec
        self._optuna = import_optuna(f"The sampler {spec.sampler}", *_NEEDS.get(spec.sampler, ()))
        with quiet(self._optuna):
            self._storage = self._optuna.storages.InMemoryStorage()
            self._study = self._optuna.create_study(
                storage=self._storage,
                directions=[objective.direction for objective in spec.objectives],
                sampler=self._optuna.samplers.RandomSampler(seed=0),
            )
        self._distributions = optuna_distributions(spec)
        self._running: dict[int, int] = {}
        self._in_common: Any = None

    def pick(self, number: int) -> dict[str, Any]:
        with quiet(self._optuna), _one_thread(self._spec.sampler == "gp"):
            self._study.sampler = self._with_known_space(self._sampler_for(number))
            trial = self._study.ask()
            params: dict[str, Any] = {}
            for axis in self._spec.space.axes:
                if is_active(axis, params):
                    found = trial._suggest(axis.name, self._distributions[axis.name])
                    params[axis.name] = _from_optuna(axis.distribution, found)
        self._running[number] = trial.number
        return params

    def fix(self, number: int, params: Mapping[str, Any]) -> None:
        state = self._optuna.trial.TrialState
        if number in self._running:
            self._storage.set_trial_state_values(self._id(self._running.pop(number)), state.FAIL)
        self._running[number] = self._add(params, state.RUNNING, {}, None, {})

    def recall(self, number: int, params: Mapping[str, Any], by: str) -> None:
        if by == self._spec.sampler and self._spec.sampler in _STATEFUL:
            if self.pick(number) != params:
                self.fix(number, params)
        elif is_inside(self._spec, params):
            self.fix(number, params)

    def tell(self, trial: Trial) -> None:
        if not is_inside(self._spec, trial.params):
            return
        if trial.state == "waiting" and self._spec.sampler in _STATEFUL:
            return  # they learn from trials of their own that finish, and this one still may
        state, values, steps = outcome_of(self._spec, trial)
        marks = constraints_of(self._spec, trial)
        at = self._running.pop(trial.number, None)
        if at is None:
            self._add(trial.params, self._optuna.trial.TrialState[state], steps, values, marks)
            return
        identity = self._id(at)
        for step, value in steps.items():
            self._storage.set_trial_intermediate_value(identity, step, value)
        for key, mark in marks.items():
            self._storage.set_trial_system_attr(identity, key, mark)
        self._storage.set_trial_state_values(identity, self._optuna.trial.TrialState[state], values)

    def _id(self, number: int) -> int:
        study_id = self._study._study_id
        found: int = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return found

    def _add(
        self,
        params: Mapping[str, Any],
        state: optuna.trial.TrialState,
        steps: dict[int, float],
        values: list[float] | None,
        marks: dict[str, Any],
    ) -> int:
        made = _made(
            self._spec, self._distributions, params, state=state, intermediate_values=steps,
            values=values, system_attrs=marks,
        )  # fmt: skip
        self._study.add_trial(made)
        count: int = self._storage.get_n_trials(self._study._study_id)
        return count - 1

    def _with_known_space(self, sampler: Any) -> Any:
        """``sampler``, with what the one before has found out about the parameters that all trials
        have in common, so that it need not look at all trials again: half of what a question
        costs. The attribute is private to Optuna; where it is gone, only that time is lost.
        """
        if hasattr(sampler, "_search_space"):
            self._in_common = self._in_common or sampler._search_space
            sampler._search_space = self._in_common
        return sampler

    def _sampler_for(self, number: int) -> Any:
        samplers = self._optuna.samplers
        seed = seed_for(self._spec.seed, self._spec.sampler, number)
        by_itself = samplers.RandomSampler(seed=seed)
        match self._spec.sampler:
            case "qmc":
                return samplers.QMCSampler(
                    seed=seed_for(self._spec.seed, "qmc"),
                    scramble=True,
                    independent_sampler=by_itself,
                    warn_asynchronous_seeding=False,
                    warn_independent_sampling=False,
                )
            case "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=True)
            case "gp":
                return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
            case "cmaes":
                return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
            case "nsga2":
                return samplers.NSGAIISampler(seed=seed, population_size=_population(self._spec))
        return by_itself


def import_optuna(doing: str, *others: str) -> Any:
    """The package, or a MissingPackageError that names the extra; ``others`` are the packages that
    Optuna itself imports only when they are used, long after a search has begun."""
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError(doing, "optuna", "search") from error
    for other in others:
        if importlib.util.find_spec(other) is None:
            raise MissingPackageError(doing, other, "search")
    return optuna


def optuna_distributions(spec: SearchSpec) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna import distributions as known

    found: dict[str, known.BaseDistribution] = {}
    for axis in spec.space.axes:
        own = axis.distribution
        if isinstance(own, Choice):
            found[axis.name] = known.CategoricalDistribution(_choices(own))
        elif isinstance(own, Float):
            step, high = own.step, own.high
            if step is not None and own.size is not None:
                high = own.low + (own.size - 1) * step
            found[axis.name] = known.FloatDistribution(own.low, high, log=own.log, step=step)
        else:
            last = own.low + (own.size - 1) * own.step
            found[axis.name] = known.IntDistribution(own.low, last, log=own.log, step=own.step)
    return found


def outcome_of(spec: SearchSpec, trial: Trial) -> tuple[str, list[float] | None, dict[int, float]]:
    """State, values and numbers at the marks, as Optuna calls them. What has no finite number
    has failed."""
    steps = {int(report.step): report.value for report in trial.reports}
    steps = {step: value for step, value in steps.items() if math.isfinite(value)}
    if trial.state == "done":
        values = [trial.value_of(objective.name) for objective in spec.objectives]
        if all(map(math.isfinite, values)):
            return "COMPLETE", values, steps
    elif trial.state in ("waiting", "stopped") and steps:
        return "PRUNED", [steps[max(steps)]], steps
    return "FAIL", None, steps


def constraints_of(spec: SearchSpec, trial: Trial) -> dict[str, Any]:
    """How far the trial is beyond each constraint, as Optuna keeps it."""
    if not spec.constraints or trial.state != "done":
        return {}
    return {"constraints": [c.violation(trial.value_of(c.name)) for c in spec.constraints]}


def is_inside(spec: SearchSpec, params: Mapping[str, Any]) -> bool:
    """Whether the space has this setting; a task from before the search may lie outside."""
    known = spec.space.distributions
    return all(name in known and known[name].holds(value) for name, value in params.items())


def _made(
    spec: SearchSpec, known: Mapping[str, Any], params: Mapping[str, Any], **others: Any
) -> optuna.trial.FrozenTrial:
    """A trial of Optuna's with this setting; ``known``: the distributions of the space."""
    from optuna.trial import create_trial

    distributions = {name: known[name] for name in params}
    return create_trial(params=as_optuna(spec, params), distributions=distributions, **others)


def as_optuna(spec: SearchSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    known = spec.space.distributions
    found = dict(params)
    for name, value in params.items():
        if isinstance(own := known[name], Choice):
            at = own.index(value)
            assert at is not None
            found[name] = _choices(own)[at]
    return found


def _from_optuna(distribution: Distribution, value: Any) -> Any:
    if isinstance(distribution, Choice):
        return distribution.values[_choices(distribution).index(value)]
    return float(value) if isinstance(distribution, Float) else int(value)


def _choices(choice: Choice) -> tuple[Any, ...]:
    """The values where Optuna can tell them apart, otherwise their texts."""
    plain = all(isinstance(value, bool | int | float | str | None) for value in choice.values)
    if plain and len(set(choice.values)) == len(choice.values):
        return choice.values
    return tuple(map(shown_value, choice.values))


def _population(spec: SearchSpec) -> int:
    """A population of NSGA-II that leaves room for some generations in the budget."""
    trials = spec.budget.trials
    return 50 if trials is None else max(4, min(50, trials // 5))


@contextmanager
def quiet(package: Any) -> Iterator[None]:
    """A context in which Optuna prints nothing; afterwards its settings are as before."""
    before = package.logging.get_verbosity()
    package.logging.set_verbosity(package.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        package.logging.set_verbosity(before)


@contextmanager
def _one_thread(is_needed: bool) -> Iterator[None]:
    """A context in which torch uses one thread, if ``is_needed``: more make the small matrices of a
    Gaussian process slower, as they wait for each other and take processors from the trials."""
    if not is_needed:
        yield
        return
    torch = importlib.import_module("torch")  # Optuna's sampler needs it, and Muster's do not
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: From how many trials the importance is computed: 200 take 2 s, 1,000 of 8 parameters 30 s.
_MOST_WEIGHED = 200


def to_optuna(
    spec: SearchSpec,
    trials: list[Trial],
    storage: Any = None,
    name: str = "muster",
    spans: Mapping[int, tuple[float, float]] | None = None,
) -> Any:
    """An ``optuna.Study`` of these trials, numbered as here. ``storage`` is what Optuna takes, such
    as ``sqlite:///optuna.db``; ``spans``: when a trial began and ended, in seconds since 1970,
    instead of now. Raises what Optuna raises where there is a study of that name."""
    package = import_optuna("An export to Optuna")
    known = optuna_distributions(spec)
    with quiet(package):
        study = package.create_study(
            storage=storage,
            study_name=name,
            directions=[objective.direction for objective in spec.objectives],
        )
        study.set_metric_names([objective.name for objective in spec.objectives])
        for trial in trials:
            state, values, steps = outcome_of(spec, trial)
            own = {name: value for name, value in trial.params.items() if name in known}
            made = _made(
                spec,
                known,
                own if is_inside(spec, own) else {},
                state=package.trial.TrialState["RUNNING" if trial.state == "running" else state],
                values=values,
                intermediate_values=steps,
                user_attrs=_remarks(spec, trial),
                system_attrs=constraints_of(spec, trial),
            )
            if spans and trial.number in spans:  # Optuna keeps them without a time zone
                begin, end = map(datetime.fromtimestamp, spans[trial.number])
                made.datetime_start = begin
                made.datetime_complete = end if made.state.is_finished() else None
            study.add_trial(made)
    return study


def write_study(
    spec: SearchSpec,
    trials: list[Trial],
    spans: Mapping[int, tuple[float, float]],
    path: Path,
    name: str,
) -> None:
    """The same study as an SQLite file. It is made in memory first, so that the file is whole, and
    its path need not fit into a URL. ``path`` is a new or an empty file.

    Raises OSError where it cannot be written.
    """
    package = import_optuna("An export to Optuna", "sqlalchemy")
    from sqlalchemy.exc import SQLAlchemyError

    with quiet(package):
        storage = package.storages.RDBStorage("sqlite://")
    try:
        to_optuna(spec, trials, storage, name, spans)
        storage.remove_session()
        with storage.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as made:
            made.exec_driver_sql("VACUUM INTO ?", (str(path),))
    except SQLAlchemyError as error:
        raise OSError(str(error.__cause__ or error)) from error
    finally:
        storage.engine.dispose()


def _remarks(spec: SearchSpec, trial: Trial) -> dict[str, Any]:
    remarks: dict[str, Any] = {"by": trial.by, "state": trial.state}
    if trial.parent is not None:
        remarks |= {"parent": trial.parent, "start": trial.start}
    if spec.seeds is not None:
        remarks["seeds"] = {
            str(seed): {
                one.name: value if math.isfinite(value := task.value_of(one.name)) else str(value)
                for one in spec.objectives
            }
            for seed, task in trial.tasks.items()
        }
    outside = {n: v for n, v in trial.params.items() if n not in spec.space.names}
    if outside:
        remarks["other parameters"] = json.dumps(outside)
    return remarks


def importances(spec: SearchSpec, compared: Sequence[tuple[Trial, float]]) -> dict[str, float]:
    """How much of the variation of these values each parameter explains (fANOVA, Hutter et al.
    2014), the largest first.

    Only parameters that all of the trials have are weighed. The result is empty where there are
    fewer than two trials, or all have the same value. Of many trials 200 at most are taken, evenly,
    because the time grows faster than their number.
    """
    package = import_optuna("The importance of parameters", "sklearn")
    usable = [
        (trial, value)
        for trial, value in compared
        if math.isfinite(value) and is_inside(spec, trial.params)
    ]
    taken = usable[:: math.ceil(len(usable) / _MOST_WEIGHED) or 1]
    shared = set(spec.space.names).intersection(*(trial.params for trial, _ in taken))
    if len({value for _, value in taken}) < 2 or not shared:
        return {}
    known = optuna_distributions(spec)
    with quiet(package):
        study = package.create_study()
        for trial, value in taken:
            own = {name: trial.params[name] for name in spec.space.names if name in shared}
            study.add_trial(_made(spec, known, own, value=value))
        evaluator = package.importance.FanovaImportanceEvaluator(seed=0)
        found = package.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in found.items()}
