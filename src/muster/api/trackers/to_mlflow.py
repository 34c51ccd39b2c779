"""MLflow: the server that MLFLOW_TRACKING_URI names, or a database in the run folder.

A point is known by its metric, step, time and value, so one that is sent twice is there once; and a
run is found again by its tag ``muster.id``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muster.api.trackers.tracker import (
    PROJECT,
    Ended,
    Place,
    Point,
    Tracked,
    as_utf8,
    from_tracker,
    to_tracker,
)
from muster.base.settings import variable

#: A dot is left out where a name would be a path such as ``a/../b``, see `_name`.
_ALLOWED = re.compile(r"[A-Za-z0-9_.: /-]")
_NOT_A_PATH = re.compile(r"(^/)|(/$)|(//)|(^|/)\.{1,2}(/|$)")
_STATES = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
#: MLflow's own limits.
_METRICS, _SETTINGS, _LONGEST_NAME, _LONGEST_VALUE, _LONGEST_TAG = 1000, 100, 250, 6000, 5000


class MLflow:
    most_open = 1000

    def __init__(self, place: Place) -> None:
        from mlflow.tracking import MlflowClient

        uri = variable("MLFLOW_TRACKING_URI")
        if not uri:
            place.trackers.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(place.trackers / 'mlflow.db').absolute()}"
        self._client = MlflowClient(uri)
        self._experiment = ""

    def open(self, tracked: Tracked) -> MLflowRun:
        if not self._experiment:
            self._experiment = _experiment(self._client)
        return MLflowRun(self._client, self._experiment, tracked)


class MLflowRun:
    def __init__(self, client: Any, experiment: str, tracked: Tracked) -> None:
        from mlflow.entities import Param, RunTag

        self._client = client
        mine = f"tags.`muster.id` = '{tracked.id}'"
        found = client.search_runs([experiment], mine, max_results=1)
        tags = {"muster.id": tracked.id, "muster.group": as_utf8(tracked.group)}
        tags |= {f"muster.{name}": value for name, value in tracked.tags.items()}
        name = as_utf8(tracked.name)
        run = found[0] if found else client.create_run(experiment, run_name=name, tags=tags)
        self._id = run.info.run_id
        if run.info.status != "RUNNING":
            client.update_run(self._id, status="RUNNING")
        given = tracked.settings.items()
        settings = {_name(key): as_utf8(value)[:_LONGEST_VALUE] for key, value in given}
        known = run.data.params
        # MLflow refuses to change a parameter; what a later start has changed becomes a tag.
        new = [Param(key, value) for key, value in settings.items() if key not in known]
        changed = [
            RunTag(f"changed.{key}", value[:_LONGEST_TAG])
            for key, value in settings.items()
            if known.get(key, value) != value
        ]
        for part in _parts(new, _SETTINGS):
            client.log_batch(self._id, params=part)
        for part in _parts(changed, _SETTINGS):
            client.log_batch(self._id, tags=part)
        self.last_steps = _last_steps(run)

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_name(p.name), p.value, int(p.time_s * 1000), p.step) for p in points]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=part)

    def settle(self) -> None:
        return  # `log` comes back when the server has it

    def finish(self, ended: Ended) -> None:
        from mlflow.entities import Metric, RunTag

        when = int((ended.time_s or time.time()) * 1000)
        result = {f"result/{name}": value for name, value in ended.result.items()}
        numbers = {k: v for k, v in result.items() if type(v) in (int, float)}
        metrics = [Metric(_name(name), float(value), when, 0) for name, value in numbers.items()]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=part)
        texts = {name: value for name, value in result.items() if name not in numbers}
        tags = [RunTag(_name(name), as_utf8(value)[:_LONGEST_TAG]) for name, value in texts.items()]
        for some in _parts(tags, _SETTINGS):
            self._client.log_batch(self._id, tags=some)
        self._client.set_terminated(self._id, _STATES[ended.state], when)

    def leave(self) -> None:
        return


def _experiment(client: Any) -> str:
    """Its id. Another run may make it at the same moment."""
    from mlflow.exceptions import MlflowException

    name = variable("MLFLOW_EXPERIMENT_NAME") or PROJECT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _last_steps(run: Any) -> Mapping[str, int]:
    """Of each metric of a run the step that MLflow calls its latest."""
    latest: Iterable[Any] = getattr(run.data, "_metric_objs", ())
    return {from_tracker(metric.key): int(metric.step) for metric in latest}


def _name(name: str) -> str:
    mapped = to_tracker(name, _ALLOWED)
    if _NOT_A_PATH.search(mapped):
        mapped = to_tracker(name, re.compile(r"[A-Za-z0-9_: -]"))
    if len(mapped) > _LONGEST_NAME:
        from hashlib import sha256

        mapped = f"{mapped[: _LONGEST_NAME - 17]}-{sha256(mapped.encode()).hexdigest()[:16]}"
    return mapped


def _parts(items: Sequence[Any], most: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))
