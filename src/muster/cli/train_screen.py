"""What a training shows: rank 0's lines, and on a terminal a bar with rate and time to go."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from muster.api.gangs import GangAudience
from muster.base.clock import human_duration
from muster.cli import output
from muster.run.folder import RunFolder

_EVERY_S = 0.25


class TrainScreen:
    """A context. Lines go to standard output, or above the bar; remarks to standard error."""

    def __init__(self, folder: RunFolder, flags: Any, argv: Sequence[str]) -> None:
        self._folder = folder
        self._all_ranks = flags.shown.all_ranks
        self._level = flags.shown.level
        output.show_events(are_shown=flags.shown.log_level == "debug")
        # Lines of events would break into a bar.
        has_bar = self._level == "info" and output.is_terminal()
        self._bar = output.make_bar() if has_bar else None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="muster-screen")
        self.audience = GangAudience(
            hear=self._hear, say=self._say, warn=self._warn, argv=tuple(argv)
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._is_over.set()
            self._thread.join()
            self._bar.stop()

    def _hear(self, rank: int, line: str) -> None:
        if not (self._is_talking and (self._all_ranks or rank == 0)):
            return
        text = f"[{rank}] {line}" if self._all_ranks else line
        if self._bar is None:
            output.say(text)
        elif not line.startswith("step "):  # the bar says it
            self._bar.line(text)

    def _say(self, text: str) -> None:
        if self._is_talking:
            self._warn(text)

    def _warn(self, text: str) -> None:
        if self._level == "nothing":
            return
        if self._bar is None:
            output.remark(text)
        else:
            self._bar.line(text)

    @property
    def _is_talking(self) -> bool:
        return self._level in ("info", "debug")

    def _watch(self) -> None:
        assert self._bar is not None
        while not self._is_over.wait(_EVERY_S):
            with suppress(OSError, ValueError, LookupError, TypeError):
                picture = json.loads(self._folder.status_json.read_bytes())
                self._bar.show(picture["step"], picture["total_steps"], _words(picture))


def _words(picture: dict[str, Any]) -> str:
    """The most wanted first: a narrow terminal cuts the rest off."""
    parts = [] if picture["eta_s"] is None else [f"ETA {human_duration(picture['eta_s'])}"]
    parts += _of_agent(picture) if picture["kind"] == "agent" else _of_model(picture)
    if picture["memory_mib"] is not None:
        parts.append(f"{picture['memory_mib']:,.0f} MiB")
    return " · ".join(parts)


def _of_agent(picture: dict[str, Any]) -> list[str]:
    parts = [f"{picture['episodes']:,} episodes"]
    if picture["return"] is not None:
        parts.append(f"return {picture['return']:.4g}")
    parts.append(f"{picture['steps_per_s']:,.0f} steps/s")
    if picture["learning_share"] is not None:
        parts.append(f"learning {picture['learning_share']:.0%}")
    return parts


def _of_model(picture: dict[str, Any]) -> list[str]:
    parts = []
    parts.append(f"epoch {min(picture['epoch'] + 1, picture['epochs'])}/{picture['epochs']}")
    if picture["loss"] is not None:
        parts.append(f"loss {picture['loss']:.4f}")
    if picture["samples_per_s"] is not None:
        parts.append(f"{picture['samples_per_s']:,.0f} samples/s")
        parts.append(f"data {picture['data_wait']:.0%}")
        if picture["communication"] is not None:
            parts.append(f"comm {picture['communication']:.0%}")
    if picture["mfu"] is not None:
        parts.append(f"MFU {picture['mfu']:.0%}")
    return parts
