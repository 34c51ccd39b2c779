"""TensorBoard: a folder of event files for each task, without importing torch or TensorFlow."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.api.trackers.tracker import (
    PRINTABLE,
    Ended,
    Place,
    Point,
    Tracked,
    as_utf8,
    from_tracker,
    to_tracker,
)

_COUNT = itertools.count()
#: Of the hparams plugin: what a run's settings were, and how it ended.
_STATES = {"done": 1, "failed": 2, "stopped": 0}


class TensorBoard:
    """Writes below the run folder's ``tb``."""

    most_open = 64

    def __init__(self, place: Place) -> None:
        self._folder = place.tensorboard

    def open(self, tracked: Tracked) -> EventFile:
        return EventFile(self._folder / tracked.folder, tracked)


class EventFile:
    """One run: each opening has a file of its own, because a killed writer leaves a torn one."""

    def __init__(self, folder: Path, tracked: Tracked) -> None:
        self._folder = folder
        self._tracked = tracked
        self.last_steps = dict(_last_steps(folder))
        self._file: Any = None

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto import summary_pb2

        for point in points:
            value = summary_pb2.Summary.Value(tag=_tag(point.name), simple_value=point.value)
            self._write(point.time_s, point.step, summary_pb2.Summary(value=[value]))

    def settle(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self, ended: Ended) -> None:
        from tensorboard.compat.proto import summary_pb2

        when = ended.time_s or time.time()
        result = {f"result/{name}": value for name, value in ended.result.items()}
        numbers = {
            name: float(value)
            for name, value in result.items()
            if isinstance(value, int | float)
            and math.isfinite(value)
            and name not in self.last_steps
        }
        for name, value in numbers.items():
            one = summary_pb2.Summary.Value(tag=_tag(name), simple_value=value)
            self._write(when, 0, summary_pb2.Summary(value=[one]))
        self._write(when, 0, _ending(ended, when))
        self.leave()

    def leave(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, time_s: float, step: int, summary: Any) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            place = f"{socket.gethostname()}.{os.getpid()}.{next(_COUNT)}"
            name = f"events.out.tfevents.{time.time_ns() // 1000}.{place}"
            self._file = RecordWriter((self._folder / name).open("xb"))
            first = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
            self._file.write(first.SerializeToString())
            settings = event_pb2.Event(wall_time=time.time(), summary=_settings(self._tracked))
            self._file.write(settings.SerializeToString())
        event = event_pb2.Event(wall_time=time_s, step=step, summary=summary)
        self._file.write(event.SerializeToString())


def _last_steps(folder: Path) -> Mapping[str, int]:
    """Of every metric in the whole records of a folder."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    last: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    name = from_tracker(value.tag)
                    last[name] = max(event.step, last.get(name, event.step))
    return last


def _tag(name: str) -> str:
    return to_tracker(name, PRINTABLE)


def _settings(tracked: Tracked) -> Any:
    """For TensorBoard's table of hyper-parameters."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(group_name=tracked.id, start_time_secs=time.time())
    for name, value in {**tracked.settings, **tracked.tags}.items():
        field = info.hparams[_tag(name)]
        if isinstance(value, bool):
            field.bool_value = value
        elif isinstance(value, int | float):
            field.number_value = value
        else:
            field.string_value = as_utf8(value)
    data = plugin_data_pb2.HParamsPluginData(session_start_info=info)
    return _summary(metadata.SESSION_START_INFO_TAG, data)


def _ending(ended: Ended, when: float) -> Any:
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionEndInfo(status=_STATES[ended.state], end_time_secs=when)
    data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
    return _summary(metadata.SESSION_END_INFO_TAG, data)


def _summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    value = summary_pb2.Summary.Value(
        tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    return summary_pb2.Summary(value=[value])
