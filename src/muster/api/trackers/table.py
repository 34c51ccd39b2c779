"""The trackers by their names: what each needs, and the class that feeds it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from typing import NamedTuple

from muster.api.trackers.tracker import Place, Tracker
from muster.base.errors import UnknownNameError, UsageError, how_to_install
from muster.base.settings import variable


class _Row(NamedTuple):
    package: str  # which is also the name of the extra
    make: str


TRACKERS = {
    "tensorboard": _Row("tensorboard", "muster.api.trackers.to_tensorboard:TensorBoard"),
    "wandb": _Row("wandb", "muster.api.trackers.to_wandb:Wandb"),
    "mlflow": _Row("mlflow", "muster.api.trackers.to_mlflow:MLflow"),
    "trackio": _Row("trackio", "muster.api.trackers.to_trackio:Trackio"),
}


def read_trackers(text: str, flag: str) -> tuple[str, ...]:
    """The names in ``wandb,mlflow``, each once; none for an empty text or "none".

    Raises UnknownNameError for an unknown tracker.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == ("none",):
        return ()
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError(f"tracker of {flag}", name, TRACKERS)
    return names


def check_installed(names: Collection[str]) -> None:
    """UsageError for a tracker whose package is not installed; nothing is imported."""
    for name in names:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"--log-to {name} needs the package {package}, which is not installed.",
                hint=f"{how_to_install(name)}. Nothing was started.",
            )
    has_no_server = "mlflow" in names and not variable("MLFLOW_TRACKING_URI")
    if has_no_server and importlib.util.find_spec("sqlalchemy") is None:  # mlflow-skinny
        raise UsageError(
            "--log-to mlflow without a server needs the whole package mlflow.",
            hint="set MLFLOW_TRACKING_URI, or: pip install mlflow. Nothing was started.",
        )


def make_tracker(name: str, place: Place) -> Tracker:
    module, _, attribute = TRACKERS[name].make.partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), attribute)(place)
    return tracker
