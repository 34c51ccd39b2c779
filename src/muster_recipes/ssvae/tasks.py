"""What runs on a worker: the runs of a call, a few of them at a time as one ensemble.

Progress is shown while a call works, and saved so that a later attempt goes on from there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster import Context, batched
from muster_recipes.ssvae import measures
from muster_recipes.ssvae.config import CHOSEN, Hyper
from muster_recipes.ssvae.ensemble import (
    Ensemble,
    Failure,
    RunSpec,
    Settings,
    train_ensemble,
    train_supervised,
)
from muster_recipes.ssvae.networks import Parameters
from muster_recipes.ssvae.pool import Pool, load

Task = Mapping[str, Any]
Result = dict[str, Any]

#: Runs per program where --ensemble-size is not given. On a CPU more than 8 gain nothing; for GPUs
#: it is a choice that fits into 24 GiB with 28x28 images, not a measured optimum.
DEFAULT_SIZE = {"cpu": 8, "cuda": 64}


class Work(NamedTuple):
    """What all tasks of a call share, on the device."""

    splits: Mapping[str, Pool]
    hyper: Hyper
    settings: Settings
    device: str


class Kind(NamedTuple):
    """A method: how its runs are trained, and what is measured after an epoch and at the end."""

    train: Callable[..., Ensemble]
    after_epoch: Callable[[Parameters, Work], list[Result]]
    at_the_end: Callable[[Parameters, Work, Task], list[Result]]


@batched(static=("method", "dataset", "data_dir", "split_seed", "num_epochs", "eval_frequency", "batch_size", "lr", "num_style", "num_samples", "temperature", "unlabelled", "label_protocol", "factor_scores", "ensemble_size"), max_batch=128, max_batch_on_cpu=16)  # fmt: skip  # noqa: E501
def ssvae_runs(tasks: Sequence[Task], ctx: Context) -> list[Result | Exception]:
    """Semi-supervised runs."""
    return _run_all(tasks, Kind(train_ensemble, _ssvae_curve, _ssvae_end), ctx)


@batched(static=("method", "n_labels", "dataset", "data_dir", "split_seed", "num_epochs", "eval_frequency", "batch_size", "lr", "num_style", "num_samples", "temperature", "unlabelled", "label_protocol", "factor_scores", "ensemble_size"), max_batch=128, max_batch_on_cpu=16)  # fmt: skip  # noqa: E501
def supervised_runs(tasks: Sequence[Task], ctx: Context) -> list[Result | Exception]:
    """Classifiers alone; ``n_labels`` decides the size of a batch."""
    return _run_all(tasks, Kind(train_supervised, _supervised_curve, _supervised_end), ctx)


def _run_all(tasks: Sequence[Task], kind: Kind, ctx: Context) -> list[Result | Exception]:
    first = tasks[0]
    work = _work_of(first, ctx.device)
    size = first["ensemble_size"] or DEFAULT_SIZE[work.device.partition(":")[0]]
    progress = Progress(ctx, len(tasks))
    for chunk, state in progress.open_chunks(tasks, size):
        progress.finish(chunk, _train_chunk(chunk, state, kind, work, progress))
    return [_result_or_failure(progress.result_of(task)) for task in tasks]


def _train_chunk(
    chunk: Sequence[Task], state: Any, kind: Kind, work: Work, progress: Progress
) -> list[Result | Failure]:
    """Train and measure some runs as one program, from ``state`` if it is not None."""
    runs = [_spec_of(task) for task in chunk]
    begin = time.perf_counter()
    curves: list[list[Result]] = [] if state is None else state["curves"]
    before_s = 0.0 if state is None else state["seconds"]

    def on_epoch(ensemble: Ensemble) -> None:
        if work.settings.is_evaluated(ensemble.epoch):
            curves.append(kind.after_epoch(_plain(ensemble), work))
        seconds = before_s + time.perf_counter() - begin
        progress.epoch(chunk, ensemble, work.settings.num_epochs, curves, seconds)

    def on_step(ensemble: Ensemble, share: float) -> None:
        progress.within(chunk, ensemble.epoch + share, work.settings.num_epochs)

    ensemble = kind.train(
        work.splits["train"],
        runs,
        work.hyper,
        work.settings,
        work.device,
        on_epoch,
        None if state is None else state["ensemble"],
        on_step=on_step,
    )
    ends = kind.at_the_end(_plain(ensemble), work, chunk[0])
    seconds = (before_s + time.perf_counter() - begin) / len(chunk)
    return [
        ensemble.failures.get(row)
        or _unmeasured(end, curves[-1][row], ensemble.epoch)
        or {**end, **_curve_of(row, ensemble, curves, work.settings), "training_s": seconds}
        for row, end in enumerate(ends)
    ]


def _unmeasured(end: Result, last: Result, epoch: int) -> Failure | None:
    """The failure of a run whose weights are finite but so large that a measure is not; else None.

    Style leakage does not count: a probe that does not converge is no failure of the run.
    """
    for name in ("accuracy", "calibration_error", "elbo_nats"):
        if name in end and end[name] is None:
            value = last.get(name)  # the last point of the curve is of the same model
            return Failure(epoch, math.nan if value is None else value, name)
    return None


def _curve_of(
    row: int, ensemble: Ensemble, curves: Sequence[Sequence[Result]], settings: Settings
) -> Result:
    """One run's curve as lists of equal length."""
    epochs = [n for n in range(1, settings.num_epochs + 1) if settings.is_evaluated(n)]
    points = [point[row] for point in curves]
    return {
        "curve_epoch": epochs,
        "curve_objective": [ensemble.objectives[epoch - 1][row] for epoch in epochs],
        **{f"curve_{name}": [point[name] for point in points] for name in points[0]},
    }


def _ssvae_curve(parameters: Parameters, work: Work) -> list[Result]:
    test = work.splits["test"]
    accuracies = measures.class_measures(measures.classify(parameters, test.x), test.labels)
    bounds = measures.elbo(parameters, test.x, work.hyper).tolist()
    return [
        {"accuracy": each["accuracy"], "elbo_nats": bound}
        for each, bound in zip(accuracies, bounds, strict=True)
    ]


def _ssvae_end(parameters: Parameters, work: Work, task: Task) -> list[Result]:
    test, train = work.splits["test"], work.splits["train"]
    ends: list[Result] = [*measures.measure(parameters, test, train, work.hyper)]
    if task["factor_scores"]:
        assert test.size is not None
        images = test.x.view(-1, *test.size)
        scores = measures.factor_scores(parameters, images, seed=0)
        ends = [{**end, **score} for end, score in zip(ends, scores, strict=True)]
    return ends


def _supervised_curve(parameters: Parameters, work: Work) -> list[Result]:
    return [{"accuracy": end["accuracy"]} for end in _supervised_end(parameters, work, {})]


def _supervised_end(parameters: Parameters, work: Work, task: Task) -> list[Result]:
    test = work.splits["test"]
    logits = measures.classify(parameters, test.x)
    return [*measures.class_measures(logits, test.labels)]


def _result_or_failure(result: Result | Failure) -> Result | Exception:
    if isinstance(result, Failure):
        return ArithmeticError(
            f"the {result.what} became {result.value} in epoch {result.epoch}: the run was stopped "
            "there. A smaller --lr or --alpha-values may help."
        )
    return result


def _spec_of(task: Task) -> RunSpec:
    return RunSpec(
        seed=task["seed"],
        num_labels=task["n_labels"],
        alpha=0.0 if task["alpha"] is None else task["alpha"],
        corruption_rate=task["corruption_rate"],
    )


def _work_of(task: Task, device: str) -> Work:
    splits = _splits(task["dataset"], task["data_dir"], task["split_seed"], device)
    chosen = {name: task[name] for name in CHOSEN}
    hyper = Hyper(num_pixels=splits["train"].x.shape[1], **chosen)
    settings = Settings(**{each.name: task[each.name] for each in dataclasses.fields(Settings)})
    return Work(splits, hyper, settings, device)


@functools.lru_cache(maxsize=1)
def _splits(dataset: str, data_dir: str | None, split_seed: int, device: str) -> dict[str, Pool]:
    """The splits of a data set, read once per process and kept on the device."""
    read = load(dataset, None if data_dir is None else Path(data_dir), split_seed)
    return {part: pool.to(device) for part, pool in read.items()}


def _plain(ensemble: Ensemble) -> Parameters:
    return {name: value.detach() for name, value in ensemble.parameters.items()}


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
        self._begun, self._training = list(state["chunk"]), state["training"]
        self._num_over = 0
        self._saved_s = time.monotonic()
        self._shown_s = self._saved_s

    def open_chunks(self, tasks: Sequence[Task], size: int) -> Iterator[tuple[Sequence[Task], Any]]:
        """The runs that are not over, so many at a time, and the state of their training or None.

        First those that an earlier attempt has begun, if all of them are in this call.
        """
        left = [task for task in tasks if name_of(task) not in self._results]
        self._num_over = len(tasks) - len(left)
        begun = [task for task in left if name_of(task) in self._begun]
        if self._training is not None and [name_of(task) for task in begun] == self._begun:
            yield begun, self._training
            left = [task for task in left if name_of(task) not in self._begun]
        for first in range(0, len(left), size):
            yield left[first : first + size], None

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
