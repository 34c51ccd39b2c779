"""The trials of a search as a study of Optuna: written to a file, or weighed by its parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from muster.search.optuna_study import (
    as_optuna,
    constraints_of,
    import_optuna,
    is_inside,
    optuna_distributions,
    outcome_of,
    quiet,
)
from muster.search.spec import SearchSpec
from muster.search.trials import Trial

#: Trials of which the importance is computed: 2 s for 200, 30 s for 1,000 of eight parameters.
_MOST_WEIGHED = 200


def to_optuna(
    spec: SearchSpec,
    trials: list[Trial],
    storage: Any = None,
    name: str = "muster",
    spans: Mapping[int, tuple[float, float]] | None = None,
) -> Any:
    """An ``optuna.Study`` of these trials, numbered as here; ``storage`` is what Optuna takes, such
    as ``sqlite:///optuna.db``; ``spans``: when a trial began and ended, in seconds since 1970, now
    where that is unknown. Raises what Optuna raises where there is a study of that name."""
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
            own = {name: trial.params[name] for name in trial.params if name in known}
            inside = own if is_inside(spec, own) else {}
            made = package.trial.create_trial(
                state=package.trial.TrialState["RUNNING" if trial.state == "running" else state],
                params=as_optuna(spec, inside),
                distributions={name: known[name] for name in inside},
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
    """The same study as an SQLite file, which is made in memory first: so it is whole, and its path
    need not fit into a URL. ``path`` is a new or an empty file.

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
            str(seed): {o.name: _finite(task.value_of(o.name)) for o in spec.objectives}
            for seed, task in trial.tasks.items()
        }
    outside = {n: v for n, v in trial.params.items() if n not in spec.space.names}
    if outside:
        remarks["other parameters"] = json.dumps(outside)
    return remarks


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def importances(spec: SearchSpec, compared: Sequence[tuple[Trial, float]]) -> dict[str, float]:
    """How much of the variation of these values each parameter explains (fANOVA, Hutter et al.
    2014), the largest first.

    Only parameters that all of the trials have can be told; empty where there are fewer than two of
    them, or where all have one value. Of many trials a few hundred are taken, evenly, because the
    time grows faster than their number.
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
            study.add_trial(
                package.trial.create_trial(
                    params=as_optuna(spec, own),
                    distributions={name: known[name] for name in own},
                    value=value,
                )
            )
        evaluator = package.importance.FanovaImportanceEvaluator(seed=0)
        found = package.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in found.items()}
