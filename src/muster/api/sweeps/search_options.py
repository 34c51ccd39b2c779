"""The options of a search; see `options` for how a field is a flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from muster.api.start.options import SweepOptions
from muster.base.errors import UsageError
from muster.base.flags import Flag, parse_duration, typed_flag
from muster.search.names import SamplerName

#: A search ends by them, and any other run pauses.
OF_ALL = ("max_cost", "price_per_gpu_hour")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which settings a search tries; it replaces --grid, --zip and --list."""

    space: Annotated[tuple[str, ...] | Mapping[str, Any], Flag(metavar="NAME=log(1e-5,1e-1)")] = ()
    """What a parameter may be: log(1e-5,1e-1), uniform(0,1), int(16,256,step=16), logint(1,64) or
    choice(adam,sgd), with " if opt=sgd" behind it where it depends on another. May be given several
    times."""
    maximize: Annotated[tuple[str, ...], Flag(metavar="METRIC")] = ()
    """A metric that tasks log or return, to be made large. With several metrics the search looks
    for their Pareto front."""
    minimize: Annotated[tuple[str, ...], Flag(metavar="METRIC")] = ()
    """A metric that tasks log or return, to be made small."""
    trials: int | None = None
    """How many settings are tried; each with every seed of --seeds."""
    sampler: Annotated[SamplerName, Flag(metavar="NAME")] = "random"
    """What chooses settings: random, qmc, tpe, gp, cmaes or nsga2 (all but random need Optuna)."""
    stop: Annotated[str, Flag(metavar="RULE[:OPTIONS]")] = "none"
    """The rule that ends bad trials early, by what they log: asha, asha-stop, hyperband, median or
    pbt, with options such as asha:min=1,max=81,eta=3."""
    tries: Annotated[tuple[str, ...], Flag(name="try", metavar="NAME=V,…")] = ()
    """A setting to try first, or a part of one. May be given several times."""
    constraint: Annotated[tuple[str, ...], Flag(metavar="METRIC<=V")] = ()
    """A limit for a metric: a trial that breaks it is not among the best. May be given several
    times."""
    search_seed: int = 0
    """The seed of the search's own random draws."""
    search_time_s: Annotated[
        float | None, Flag(name="search-time", metavar="TIME", read=parse_duration)
    ] = None
    """Begin nothing new after this time: 90, 30m, 2h. With more time the search goes on later."""
    gpu_hours: float | None = None
    """Begin nothing new after this many hours of all GPUs together; a worker on CPU cores, or with
    --per-gpu auto, counts as one."""
    max_cost: float | None = None
    """In a search: begin nothing new after the GPU hours have cost this much, by
    --price-per-gpu-hour. In a sweep: pause then."""
    price_per_gpu_hour: float | None = None
    """What an hour of a GPU, or of a worker on CPU cores, costs, in the money of --max-cost."""

    def limiting(self, options: SweepOptions) -> SweepOptions:
        """The options of a sweep with what is the budget of a search, and a limit of all others."""
        given = {name: getattr(self, name) for name in OF_ALL}
        return options if self.is_search else dataclasses.replace(options, **given)

    @property
    def is_search(self) -> bool:
        """Whether a search is asked for."""
        return bool(self.space or self.maximize or self.minimize)

    def check_used(self) -> None:
        """UsageError for an option that has no effect without a search."""
        if self.is_search:
            return
        for one in dataclasses.fields(self):
            if one.name not in OF_ALL and getattr(self, one.name) != one.default:
                raise UsageError(
                    f"{typed_flag(self, one.name)} has no effect without a search.",
                    hint="add --space 'lr=log(1e-5,1e-1)' and --maximize METRIC, or drop it.",
                )
