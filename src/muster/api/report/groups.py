"""Tasks that differ in their seed only, as one group: means and standard deviations of results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster.api.report.content import Given, Spread
from muster.farm.canonical import encode_canonical

SEED = "seed"


@dataclass
class Moments:
    """Count, mean and squared deviations by Welford's update (Technometrics 4, 1962)."""

    num: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        delta = value - self.mean
        self.mean += delta / self.num
        self.m2 += delta * (value - self.mean)

    @property
    def sd(self) -> float | None:
        """The standard deviation, with num - 1 in the denominator; None for a single value."""
        return math.sqrt(self.m2 / (self.num - 1)) if self.num > 1 else None


@dataclass
class Group:
    """All tasks with these ``params``, whatever their seeds."""

    params: dict[str, Any]
    num_runs: int = 0
    num_done: int = 0
    results: dict[str, Moments] = field(default_factory=dict)


class Groups(NamedTuple):
    """Groups in the order of the plan, and what their parameters and results are.

    Attributes
        varying: the parameters, without the seed, that have more than one value.
        fixed: the others.
        metrics: names of results that are numbers.
        others: names of results that are not numbers, and so have no mean.
        num_unusable: how many numbers are not finite, and so are left out of every mean.
    """

    groups: list[Group]
    varying: tuple[str, ...]
    fixed: dict[str, Any]
    metrics: tuple[str, ...]
    others: tuple[str, ...]
    num_unusable: int

    @property
    def is_repeated(self) -> bool:
        """Whether any setting ran more than once."""
        return any(group.num_runs > 1 for group in self.groups)


def grouped(tasks: Iterable[tuple[Mapping[str, Any], Mapping[str, Any], bool]]) -> Groups:
    """The groups of tasks, each task given as (parameters, results, whether it is done)."""
    groups: dict[bytes, Group] = {}
    metrics: dict[str, bool] = {}  # whether it is a number
    values: dict[str, set[bytes]] = {}
    num_unusable = 0
    for params, results, is_done in tasks:
        setting = {name: value for name, value in params.items() if name != SEED}
        group = groups.setdefault(encode_canonical(setting), Group(setting))
        if group.num_runs == 0:
            for name, value in setting.items():
                values.setdefault(name, set()).add(encode_canonical(value))
        group.num_runs += 1
        group.num_done += is_done
        for name, value in results.items():
            number = _number(value)
            metrics[name] = metrics.get(name, False) or number is not None
            if number is None:
                continue
            if math.isfinite(number):
                group.results.setdefault(name, Moments()).add(number)
            else:
                num_unusable += 1
    found = list(groups.values())
    varying = tuple(
        name
        for name, seen in values.items()
        if len(seen) > 1 or any(name not in group.params for group in found)
    )
    return Groups(
        groups=found,
        varying=varying,
        fixed={n: v for n, v in (found[0].params if found else {}).items() if n not in varying},
        metrics=tuple(name for name, is_number in metrics.items() if is_number),
        others=tuple(name for name, is_number in metrics.items() if not is_number),
        num_unusable=num_unusable,
    )


#: Results of which more is better; of all others, such as losses and times, less is.
_MORE_IS_BETTER = re.compile(
    r"(^|[^a-z])(acc|accuracy|score|reward|returns?|auc|auroc|f1|r2|precision|recall|throughput|"
    r"quality|speed(_?up)?|success|hits?)([^a-z]|$)|per_s$",
    re.IGNORECASE,
)


def best_first(found: Groups) -> tuple[Groups, str]:
    """The groups in the order of their first result, and words for what comes first.

    Groups without that result are last. Only its name says whether more or less of it is better,
    so the sentence says which was taken.
    """
    metric = found.metrics[0]
    sign = -1.0 if (more := _MORE_IS_BETTER.search(metric) is not None) else 1.0

    def place(group: Group) -> float:
        known = group.results.get(metric)
        return math.inf if known is None else sign * known.mean

    groups = sorted(found.groups, key=place)
    return found._replace(
        groups=groups
    ), f"those with the {'highest' if more else 'lowest'} {metric}"


def shown_rows(found: Groups) -> list[dict[str, Any]]:
    """Rows for people: mean ± SD in one cell; how many are done, where that is not all of them."""
    runs = {group.num_runs for group in found.groups}
    tells_done = len(runs) > 1 or any(group.num_done < group.num_runs for group in found.groups)
    rows = []
    for group in found.groups:
        row: dict[str, Any] = {
            name: Given(group.params[name]) if name in group.params else None
            for name in found.varying
        }
        if tells_done:
            row["done"] = f"{group.num_done:,} of {group.num_runs:,}"
        for name in found.metrics:
            known = group.results.get(name)
            row[_apart(name, row)] = (
                None if known is None else Spread(known.mean, known.sd, known.num, group.num_done)
            )
        rows.append(row)
    return rows


def whole_rows(found: Groups) -> list[dict[str, Any]]:
    """Rows for programs: a column per number."""
    rows = []
    for group in found.groups:
        row: dict[str, Any] = {**group.params, "num_runs": group.num_runs}
        row["num_done"] = group.num_done
        for name in found.metrics:
            known = group.results.get(name)
            row[f"{name}_mean"] = None if known is None else known.mean
            row[f"{name}_sd"] = None if known is None else known.sd
            row[f"{name}_num"] = 0 if known is None else known.num
        rows.append(row)
    return rows


def as_number(value: Any) -> float | None:
    """A parameter as a number, if it is one; those of a command are numbers written as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None if isinstance(value, bool) else _number(value)


def _number(value: Any) -> float | None:
    """A result as a number, if it is one. True is 1 and False 0, so their mean is a share."""
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _apart(name: str, row: Mapping[str, Any]) -> str:
    """The name of a result's column, which differs from that of a parameter of the same name."""
    return f"{name} (result)" if name in row else name
