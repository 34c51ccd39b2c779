"""How far a call has come: shown while it runs, and saved so that a later attempt goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muster import Context
from muster_recipes.ssvae.ensemble import Ensemble, Failure

Task = Mapping[str, Any]

#: A checkpoint holds the weights of an ensemble, and costs some milliseconds.
SAVE_EVERY_S = 30.0
_SHOW_EVERY_S = 10.0
_NAMES = ("n_labels", "alpha", "corruption_rate", "seed")


class Progress:
    """How far one call is: results of the runs that are over, and the ensemble in training.

    A checkpoint belongs to the first task of a call, so it is found again by a call that begins
    with the same task; runs in it that are not in this call are ignored.
    """

    def __init__(self, ctx: Context, num_runs: int) -> None:
        self._ctx = ctx
        self._num_runs = num_runs
        state = ctx.restore() or {"results": "{}", "chunk": [], "training": None}
        self._results: dict[str, Any] = json.loads(state["results"])
        self._training = (list(state["chunk"]), state["training"])
        self._num_over = 0
        self._saved_s = time.monotonic()
        self._shown_s = self._saved_s

    def open_chunks(self, tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
        """The runs that are not over, so many at a time; those in training first."""
        chunk, training = self._training
        left = [task for task in tasks if name_of(task) not in self._results]
        self._num_over = len(tasks) - len(left)
        if training is not None:
            begun = [task for task in left if name_of(task) in chunk]
            if [name_of(task) for task in begun] == chunk:
                yield begun
                left = [task for task in left if name_of(task) not in chunk]
        for first in range(0, len(left), size):
            yield left[first : first + size]

    def state_of(self, chunk: Sequence[Task]) -> Any:
        """The state in which an earlier attempt left these runs, or None."""
        names, training = self._training
        return training if [name_of(task) for task in chunk] == names else None

    def epoch(
        self,
        chunk: Sequence[Task],
        ensemble: Ensemble,
        num_epochs: int,
        curves: list[list[dict[str, Any]]],
        seconds: float,
    ) -> None:
        """Save an epoch if the last time was long ago, and show it."""
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            training = {"ensemble": ensemble.state(), "curves": curves, "seconds": seconds}
            self._save([name_of(task) for task in chunk], training)
        self._show(chunk, ensemble.epoch, num_epochs)

    def within(self, chunk: Sequence[Task], epochs: float, num_epochs: int) -> None:
        """Show how far an epoch is, now and then: on a CPU it may take long."""
        if time.monotonic() - self._shown_s >= _SHOW_EVERY_S:
            self._show(chunk, epochs, num_epochs)

    def _show(self, chunk: Sequence[Task], epochs: float, num_epochs: int) -> None:
        self._shown_s = time.monotonic()
        share = (self._num_over + len(chunk) * epochs / num_epochs) / self._num_runs
        self._ctx.report(
            share,
            f"{len(chunk)} of {self._num_runs} runs together, epoch {epochs:.4g}/{num_epochs}",
        )

    def finish(self, chunk: Sequence[Task], results: Sequence[dict[str, Any] | Failure]) -> None:
        """Keep the results of a chunk."""
        for task, result in zip(chunk, results, strict=True):
            is_failure = isinstance(result, Failure)
            self._results[name_of(task)] = list(result) if is_failure else result
        self._num_over += len(chunk)
        if self._num_over < self._num_runs:
            self._save([], None)

    def result_of(self, task: Task) -> dict[str, Any] | Failure:
        """The result of a run that is over."""
        result = self._results[name_of(task)]
        return Failure(*result) if isinstance(result, list) else result

    def _save(self, chunk: list[str], training: dict[str, Any] | None) -> None:
        # As text: a checkpoint without tensors takes flat values only.
        state = {"results": json.dumps(self._results), "chunk": chunk, "training": training}
        self._ctx.checkpoint(state)
        self._saved_s = time.monotonic()


def name_of(task: Task) -> str:
    """Names a run within a call, whose tasks agree on everything else."""
    return " ".join(str(task[name]) for name in _NAMES)
