"""``muster.sweep``: the call behind everything that runs independent tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from muster.api.launch import Audience, Show, run_workload
from muster.api.options import SearchOptions, SweepOptions, options_of_call
from muster.api.recipe import Recipe
from muster.api.runs import Run
from muster.api.search import search_of_command, search_of_function
from muster.api.workload import of_command, of_function, of_recipe, of_target_text
from muster.base.errors import UsageError
from muster.base.target import ref_of, refuse_while_imported
from muster.farm.space import Space


def sweep(
    target: Callable[..., Any] | str | Sequence[str] | Recipe,
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    zipped: Mapping[str, Iterable[Any]] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    seed_offset: int = 0,
    config: Any = None,
    shell: bool = False,
    metrics_from: str = "",
    show: Show | None = None,
    try_: Iterable[Mapping[str, Any]] = (),
    **options: Any,
) -> Run:
    """Run ``target`` once for every parameter set, on every device, and record every result.

    Args:
        target: a function, ``"file.py:function"``, ``"package.module:function"``, a list of
            command arguments with ``{name}`` places, or a recipe.
        grid: values per parameter; all combinations run.
        zipped: values per parameter that advance together; all lists equally long.
        rows: parameter sets one by one.
        seeds: a number of seeds from 0, or the seeds themselves; a task gets its ``seed``.
        seed_offset: added to every seed.
        config: a recipe's configuration; its defaults without one.
        shell: hand a command to ``sh -c``.
        metrics_from: where a command that logs nothing has its numbers over time:
            ``"stdout:REGEX"`` with named groups, or ``"tensorboard:DIR"`` below the task's folder.
        show: called about ten times a second with a picture of the run, a ``RunView``.
        try_: first guesses of a search, as mappings.
        options: see ``SweepOptions`` (``devices="auto"``, ``retries=1``, ``run_dir=…``), and for a
            search ``SearchOptions``: ``space={"lr": muster.Space.log(1e-5, 1e-1)}``,
            ``maximize="accuracy"``, ``trials=100``, ``sampler``, ``stop``. ``seeds`` are then the
            replicates of each trial, and ``grid``, ``zipped`` and ``rows`` cannot be given.

    Returns:
        The run; ``run.results()`` is the table. Calling again with the same arguments continues.

    Raises:
        UsageError: the call is wrong. TargetError: the target cannot be loaded or called.
        PlanMismatchError: the run folder holds another plan. SetupError: this machine or disk
        cannot do it. Failed tasks raise nothing: they are rows of the table.
    """
    refuse_while_imported("muster.sweep")
    if metrics_from and (isinstance(target, str | Recipe) or callable(target)):
        raise UsageError("metrics_from is for a command; a function logs with ctx.log.")
    for name in ("maximize", "minimize", "constraint"):
        if isinstance(options.get(name), str):
            options[name] = (options[name],)
    if guesses := [orjson.dumps(dict(guess)).decode() for guess in try_]:
        options["tries"] = tuple(guesses)
    made, search = options_of_call("sweep", options, SweepOptions, SearchOptions)
    search.check_used()
    space = Space.from_values(
        grid=grid, zipped=zipped, rows=rows, seeds=seeds, seed_offset=seed_offset
    )
    if search.is_search:
        if grid or zipped or rows is not None or config is not None:
            raise UsageError(
                "A search chooses its settings: grid, zipped, rows and config have no place in it.",
                hint="put what they hold into space, as choice(...).",
            )
        replicates = None if space.seeds is None else tuple(space.seeds)
        if isinstance(target, Recipe):
            raise UsageError(
                f"{target.name} is a recipe, which has a plan of its own: it cannot be searched.",
                hint="search over the function that it calls.",
            )
        if callable(target) or isinstance(target, str):
            workload = search_of_function(target, search, replicates)
        else:
            workload = search_of_command(
                list(target), search, replicates, shell=shell, metrics_from=metrics_from
            )
    elif isinstance(target, Recipe):
        workload = of_recipe(target, config if config is not None else target.config())
    elif callable(target):
        workload = of_function(ref_of(target), space)
    elif isinstance(target, str):
        workload = of_target_text(target, space)
    else:
        workload = of_command(list(target), space, shell=shell, metrics_from=metrics_from)
    audience = Audience() if show is None else Audience(show=show)
    return run_workload(workload, made, audience)
