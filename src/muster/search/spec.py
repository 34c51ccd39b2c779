"""What a search is: its space, its goal, how it chooses, when it ends trials, and its budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from muster.base import codec
from muster.base.errors import UnknownNameError, UsageError
from muster.search.names import Direction, SamplerName, StopRule
from muster.search.space import Space


@dataclass(frozen=True)
class Objective:
    """A number that a task logs or returns, and which end of it is good."""

    name: str
    direction: Direction = "minimize"

    @property
    def maximize(self) -> bool:
        return self.direction == "maximize"


@dataclass(frozen=True)
class Constraint:
    """A trial whose ``name`` is beyond ``bound`` does not count among the best."""

    name: str
    sign: Literal["<=", ">="]
    bound: float

    @classmethod
    def from_text(cls, text: str) -> Constraint:
        """The constraint of a text such as ``latency_ms<=20``."""
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=)\s*(\S+)\s*", text)
        try:
            if found is None:
                raise ValueError
            bound = float(found[3])
            if math.isnan(bound):
                raise ValueError
        except ValueError:
            raise UsageError(
                f"The constraint {text!r} is not NAME<=NUMBER or NAME>=NUMBER.",
                hint="--constraint 'latency_ms<=20'",
            ) from None
        return cls(found[1], "<=" if found[2] == "<=" else ">=", bound)

    def violation(self, value: float) -> float:
        """How far ``value`` is beyond the bound; 0 or less is inside, a NaN is infinitely far."""
        if math.isnan(value):
            return math.inf
        return value - self.bound if self.sign == "<=" else self.bound - value


#: A step that no trial reaches, and the number of rungs that a task is told of at most.
_FAR, _MANY = 1e12, 1000


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """How trials end early. Steps are those of the logged points.

    =============  =========================================================================
    ``asha``       pauses each trial at each rung, promotes the best of a rung at any time
    ``asha-stop``  ends a trial for good that is not among the best of its rung when it comes
    ``hyperband``  brackets of successive halving; a rung is decided when all of it is there
    ``median``     ends a trial whose best is worse than the median of the others' means
    ``pbt``        gives the places of the worst to trials that go on from the best, changed
    =============  =========================================================================
    """

    rule: StopRule = "none"
    min_step: float = 1
    """The first rung; for ``median`` and ``pbt`` the first step at which they are asked."""
    max_step: float | None = None
    """The last rung, where a trial is whole; None for rungs without end. A trial that logs
    beyond it is stopped."""
    eta: int = 3
    """Of each rung one in ``eta`` goes on, and the next rung is ``eta`` times as far."""
    every: float | None = None
    """``median`` and ``pbt``: how many steps lie between two questions. None: ``median`` is asked
    at ``min_step``, twice that, four times that and so on, ``pbt`` every ``min_step``."""
    startup_trials: int = 5
    """``median``: how many trials must have finished before one is stopped."""
    quantile: float = 0.2
    """``pbt``: this share of the trials, the worst, is replaced by trials that go on from the same
    share at the top."""

    def __post_init__(self) -> None:
        if self.rule not in get_args(StopRule):
            raise UnknownNameError("early stopping", self.rule, get_args(StopRule))
        if not self.min_step > 0 or not math.isfinite(self.min_step):
            raise UsageError(f"The first rung must be above 0, not {self.min_step}.")
        if self.max_step is not None and not self.max_step >= self.min_step:
            raise UsageError(
                f"The last rung, {self.max_step}, lies before the first, {self.min_step}."
            )
        if self.max_step == math.inf:
            raise UsageError("The last rung must be finite.", hint="leave max out for no last one.")
        if self.rule == "hyperband" and self.max_step is None:
            raise UsageError(
                "hyperband needs the last step: its brackets are divided from there.",
                hint="--stop hyperband:max=81",
            )
        if self.rule == "pbt" and self.max_step is None:
            raise UsageError(
                "pbt needs the last step: without it all members would be paused at the end of "
                "their training as well.",
                hint="--stop pbt:min=3,max=27, where the last step that a task logs is 27.",
            )
        if self.eta < 2:
            raise UsageError(f"eta must be 2 or more, not {self.eta}.")
        if self.every is not None and not 0 < self.every < math.inf:
            raise UsageError(f"every must be above 0 and finite, not {self.every}.")
        if not 0 < self.quantile <= 0.5:
            raise UsageError(f"quantile must be above 0 and at most 0.5, not {self.quantile}.")

    def rungs(self) -> tuple[float, ...]:
        """The steps at which a trial may be ended, as far as they are known before it begins."""
        most = self.max_step or _FAR
        if self.rule in ("asha", "asha-stop", "hyperband"):
            count = int(math.log(most / self.min_step, self.eta) + 1e-9) + 1
            if self.rule == "hyperband":  # its brackets are divided from the last step
                return tuple(most / self.eta**k for k in reversed(range(count)))
            return tuple(self.min_step * float(self.eta) ** k for k in range(count))
        if self.rule in ("median", "pbt"):
            steps = map(self.regular_step, range(_MANY))
            return tuple(itertools.takewhile(lambda step: step <= most, steps))
        return ()

    def regular_step(self, index: int) -> float:
        """The step at which ``median`` or ``pbt`` is asked for the time number ``index``."""
        if self.every is None and self.rule == "median":
            return self.min_step * 2.0**index
        return self.min_step + index * (self.every or self.min_step)

    @classmethod
    def from_text(cls, text: str) -> Stopping:
        """The rule of a text such as ``asha`` or ``asha:min=1,max=81,eta=3``."""
        rule, _, rest = text.partition(":")
        if rule not in get_args(StopRule):
            raise UnknownNameError("early stopping", rule, get_args(StopRule))
        options: dict[str, Any] = {"rule": rule}
        for part in filter(None, rest.split(",")):
            word, _, value = part.partition("=")
            name = {"min": "min_step", "max": "max_step", "startup": "startup_trials"}.get(
                word.strip(), word.strip()
            )
            if name == "rule" or name not in {f.name for f in dataclasses.fields(cls)}:
                known = ("min", "max", "eta", "every", "startup", "quantile")
                raise UnknownNameError(f"option of {rule}", word.strip(), known)
            whole = name in ("eta", "startup_trials")
            try:
                options[name] = int(value) if whole else float(value)
            except ValueError:
                raise UsageError(
                    f"--stop {text}: {word.strip()} is {value!r}, which is not a "
                    f"{'whole ' if whole else ''}number."
                ) from None
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits beyond which nothing new begins; None is no limit. With a larger one the search goes
    on later."""

    trials: int | None = None
    seconds: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    price_per_gpu_hour: float | None = None
    """In the money that ``cost`` is in."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"The budget {field.name.replace('_', ' ')} must be above 0, not {value}."
                )


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Everything that a search depends on. `to_json` is kept in ``run.json``."""

    space: Space
    objectives: tuple[Objective, ...]
    sampler: SamplerName = "random"
    seed: int = 0
    """Of the search's own draws; not a seed of the tasks."""
    budget: Budget = Budget()
    seeds: tuple[int, ...] | None = None
    """The replicates of each trial: a task each. None: one task without a seed."""
    tries: tuple[Mapping[str, Any], ...] = ()
    """First guesses: settings that are tried before the sampler is asked. What a guess leaves
    out is drawn."""
    constraints: tuple[Constraint, ...] = ()
    stopping: Stopping = Stopping()

    def __post_init__(self) -> None:
        if not self.objectives:
            raise UsageError(
                "The search has no goal.", hint="--maximize accuracy or --minimize loss"
            )
        names = [objective.name for objective in self.objectives]
        if len(set(names)) < len(names):
            raise UsageError(f"An objective is given twice: {', '.join(names)}.")
        if self.sampler not in get_args(SamplerName):
            raise UnknownNameError("sampler", self.sampler, get_args(SamplerName))
        if len(names) > 1 and self.stopping.rule != "none":
            raise UsageError(
                f"--stop {self.stopping.rule} compares trials by one number, but the search has "
                f"{len(names)} objectives: {', '.join(names)}.",
                hint="leave --stop out, or make one of them a --constraint.",
            )
        if len(names) > 1 and self.sampler == "cmaes":
            raise UsageError(
                f"The sampler {self.sampler} knows one objective, not {len(names)}.",
                hint="--sampler nsga2, tpe or gp",
            )
        if self.stopping.rule == "pbt":
            self._check_population()
        if self.seeds is not None and not self.seeds:
            raise UsageError("The search has an empty list of seeds.")
        if self.seeds is not None and len(set(self.seeds)) < len(self.seeds):
            raise UsageError("The search is given a seed twice.")
        if "seed" in self.space.names and self.seeds is not None:
            raise UsageError("seed is a parameter of the space, and seeds are given as well.")
        for guess in self.tries:
            _check_guess(self.space, guess)

    def _check_population(self) -> None:
        if (self.budget.trials or 0) < 2:
            raise UsageError(
                "--stop pbt needs the size of its population: 2 trials or more.", hint="--trials 10"
            )
        if self.seeds is not None:
            raise UsageError(
                "--stop pbt and --seeds cannot be combined: each member of a population has a "
                "checkpoint of its own to go on from.",
                hint="leave --seeds out, and run the whole search with another --search-seed.",
            )
        budget = self.budget
        if any(limit is not None for limit in (budget.seconds, budget.gpu_hours, budget.cost)):
            raise UsageError(
                "--stop pbt cannot be combined with --search-time, --gpu-hours or --max-cost: a "
                "paused member waits for all others, and none of them begins once these are used "
                "up.",
                hint="leave them out: --trials and the last step (max) say how much is trained.",
            )
        if self.constraints:
            raise UsageError(
                "--stop pbt and --constraint cannot be combined: a trial that breaks one might be "
                "the one from which others go on.",
                hint="leave --constraint out. A trial whose goal is nan ranks last.",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` turns back into an equal specification."""
        return {**codec.plain(self), "space": self.space.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SearchSpec:
        hints = typing.get_type_hints(cls)
        fields = {
            name: codec.decode(hints[name], item, ignore_unknown=True)
            for name, item in value.items()
            if name in hints and name != "space"
        }
        return cls(space=Space.from_json(value["space"]), **fields)


def objectives(
    *, minimize: Iterable[str] = (), maximize: Iterable[str] = ()
) -> tuple[Objective, ...]:
    """The objectives of names, the minimized first."""
    return (
        *(Objective(name, "minimize") for name in minimize),
        *(Objective(name, "maximize") for name in maximize),
    )


def _check_guess(space: Space, guess: Mapping[str, Any]) -> None:
    known = space.distributions
    for name, value in guess.items():
        if name not in known:
            raise UnknownNameError("parameter of the space", name, known)
        if not known[name].holds(value):
            raise UsageError(
                f"The first guess {name}={value!r} is not in {known[name].to_text()}.",
                hint="widen the space, or guess inside it.",
            )
