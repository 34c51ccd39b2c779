"""What trackers have of a run, read by their own readers: run, then metric, then steps and values.

The name of a run ends with its part of the id, as ``runs`` cuts it; names of metrics are as they
were logged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from muster.api.trackers.tracker import from_tracker
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord, write_run

Curves = dict[str, dict[str, list[tuple[int, float]]]]


def gang_folder(
    path: Path, lines: Iterable[Mapping[str, object]] = (), kind: Kind = "train"
) -> RunFolder:
    """The folder of a training, or a program, that has ended well and wrote these lines."""
    folder = RunFolder(path)
    folder.create()
    record = RunRecord(
        run_id="r", name=path.name, kind=kind, created_s=0.0, code={}, options={}, argv=(),
        spec={"config": {"lr": 0.5, "tensorboard": False}}, cwd="/", environment={},
    )  # fmt: skip
    write_run(folder, record)
    events = ({"event": "start"}, {"event": "end", "exit_code": 0})
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    add_lines(folder, lines)
    return folder


def add_lines(folder: RunFolder, lines: Iterable[Mapping[str, object]]) -> None:
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def in_tensorboard(folder: RunFolder) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curves = {}
    for place in {path.parent for path in folder.tensorboard.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        name = "" if place == folder.tensorboard else place.name
        found[name] = {
            from_tracker(tag): [(point.step, point.value) for point in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
    return _sorted(found)


def in_mlflow(folder: RunFolder, uri: str = "") -> Curves:
    with warnings.catch_warnings():
        return _in_mlflow(folder, uri)


def _in_mlflow(folder: RunFolder, uri: str) -> Curves:
    from mlflow.tracking import MlflowClient

    warnings.simplefilter("ignore")  # SQLAlchemy's, of what MLflow does
    client = MlflowClient(uri or f"sqlite:///{folder.trackers.absolute() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("muster")
    found: Curves = {}
    for run in client.search_runs([experiment.experiment_id], max_results=1000):
        identity = run.data.tags["muster.id"]
        if identity[:32] != _own_id(folder):
            continue
        assert identity[33:] not in found, "one run of MLflow for each task"
        found[identity[33:]] = {
            from_tracker(key): [
                (metric.step, metric.value)
                for metric in client.get_metric_history(run.info.run_id, key)
            ]
            for key in run.data.metrics
        }
    return _sorted(found)


def in_wandb(folder: RunFolder) -> Curves:
    from muster.api.trackers.to_wandb import Log

    found: Curves = {}
    rows: dict[str, list[int]] = {}
    for path in sorted((folder.trackers / "wandb" / "wandb").glob("offline-run-*/run-*.wandb")):
        name = path.stem.removeprefix("run-")[33:]
        for number, row in Log(path).rows():
            rows.setdefault(name, []).append(number)
            step = int(row.pop("step"))
            for key, value in row.items():
                found.setdefault(name, {}).setdefault(from_tracker(key), []).append(
                    (step, float(value))
                )
    for numbers in rows.values():
        assert len(numbers) == len(set(numbers)), "W&B drops a row whose number it has"
    return _sorted(found)


def in_trackio(folder: RunFolder) -> Curves:
    """In a process of its own: trackio reads TRACKIO_DIR once."""
    done = subprocess.run(
        [sys.executable, "-c", _TRACKIO], capture_output=True, check=True, text=True
    )
    found: Curves = {}
    for identity, rows in json.loads(done.stdout.splitlines()[-1]):
        if identity[:32] == _own_id(folder):
            for row in rows:
                step, _ = row.pop("step"), row.pop("timestamp")
                for key, value in row.items():
                    curves = found.setdefault(identity[33:], {})
                    curves.setdefault(from_tracker(key), []).append((step, value))
    return _sorted(found)


_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage as storage
runs = storage.get_run_records("muster")
print(json.dumps([
    (run["id"], storage.get_logs("muster", run["name"], run_id=run["id"])) for run in runs
]))
"""

READERS = {
    "tensorboard": in_tensorboard, "mlflow": in_mlflow, "wandb": in_wandb, "trackio": in_trackio,
}  # fmt: skip


def logged(curves: Curves) -> Curves:
    """Without the results."""
    return {
        run: {name: some for name, some in metrics.items() if not name.startswith("result/")}
        for run, metrics in curves.items()
    }


def _own_id(folder: RunFolder) -> str:
    return str(json.loads(folder.identity_json.read_text())["id"])


def _sorted(found: Curves) -> Curves:
    return {
        run: {name: sorted(some) for name, some in metrics.items()}
        for run, metrics in found.items()
    }
