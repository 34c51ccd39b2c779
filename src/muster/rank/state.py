"""The state of a training, a model's as well as an agent's: how it is kept, found and brought back.

A checkpoint has the tensors of the model and of its optimizer, and JSON values: how far it is, the
code that made it, the loss scaling. What a model or an agent has beside these is added by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muster.base.code import Code
from muster.base.errors import TargetError
from muster.rank.checkpoint import (
    CheckpointWriter,
    Snapshot,
    agree_on_best,
    intact_best,
    newest_intact,
    put_back,
)
from muster.rank.checkpoint_files import (
    load_state,
    model_scalars,
    model_tensors,
    optimizer_scalars,
    optimizer_tensors,
    read_extra,
    step_folder,
)
from muster.rank.checkpoint_travel import bring
from muster.rank.process_group import Gang
from muster.rank.seeding import MODEL, mix, seed_everything
from muster.rank.sync import kept_text
from muster.rank.task import check_code
from muster.run.folder import RunFolder

Say = Callable[[str], None]
#: Entries of a parameter group that are made or set by every start.
_SET_ANEW = ("params", "param_names", "lr", "initial_lr")


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank begins with. ``say`` is silent on all ranks but the first."""

    gang: Gang
    folder: RunFolder
    say: Say
    code: Code
    allow_changed_code: bool


@dataclass(kw_only=True)
class Standing:
    """What every training knows of its evaluations. ``best``: of the monitored number."""

    best: float | None = None
    best_step: int | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def improves(self, value: float, step: int, *, higher_is_better: bool) -> bool:
        """Take note of a monitored value; True when it is the best so far. NaN never is."""
        best = self.best
        if value != value or (
            best is not None and not (value > best if higher_is_better else value < best)
        ):
            return False
        self.best, self.best_step = value, step
        return True


class State:
    """What every training keeps. Every rank has one and calls it at the same places.

    ``model`` has its own names, whatever wraps it. ``is_sharded``: tensors are spread over the
    ranks, and every rank writes its own. ``readers``: the ranks that read a sharded model together.
    """

    def __init__(
        self,
        start: Start,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        is_sharded: bool,
        keep: int,
        readers: dist.ProcessGroup | None = None,
    ) -> None:
        self._start = start
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._readers = readers
        self._made = [_kept_values(group) for group in optimizer.param_groups]
        self._writer = CheckpointWriter(
            start.folder.checkpoints,
            rank=start.gang.rank,
            num_ranks=start.gang.num_ranks,
            is_sharded=is_sharded,
            keep=keep,
            say=start.say,
        )

    def reserve(self) -> None:
        """Make room in memory for the first checkpoint."""
        self._writer.prepare(self._tensors())

    def save(
        self,
        step: int,
        progress: Standing,
        extra: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        is_best: bool,
    ) -> None:
        """Keep the state as it is now; the writing goes on in the background.

        ``extra`` and ``tensors``: what this training has beside what all have.
        """
        values = {
            "progress": dataclasses.asdict(progress),  # a copy: it is written later
            "code": self._start.code,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "model_scalars": model_scalars(self._model),
            "optimizer_scalars": optimizer_scalars(self._model, self._optimizer),
            "optimizer_groups": self._changed_groups(),
            "num_ranks": self._start.gang.num_ranks,
            **extra,
        }
        best = progress.best if is_best else None
        tensors = {**self._tensors(), **(tensors or {})}
        self._writer.save(Snapshot(step=step, tensors=tensors, extra=values, best=best))

    def wait(self) -> None:
        """Wait until the last checkpoint is whole."""
        self._writer.wait()

    def restore(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Bring model, optimizer and loss scaling to what ``newest_state`` has found."""
        scalars = extra["optimizer_scalars"]
        load_state(checkpoint, self._model, self._optimizer, scalars, self._readers)
        # Torch has put copies into the groups, of objects too.
        self._made = [_kept_values(group) for group in self._optimizer.param_groups]
        for group, values in zip(
            self._optimizer.param_groups, extra.get("optimizer_groups", ()), strict=False
        ):
            group.update(values)
        if self._scaler is not None and extra.get("scaler"):
            self._scaler.load_state_dict(extra["scaler"])
        if self._start.gang.is_first:
            progress = extra["progress"]
            agree_on_best(self._start.folder.checkpoints, progress["best_step"], progress["best"])

    def restore_best(self) -> int | None:
        """Bring the model to the best checkpoint, or leave it as it ended; returns the step."""
        start, folder = self._start, self._start.folder.checkpoints
        found = intact_best(folder, start.say) if start.gang.is_first else None
        step: int | None = start.gang.council.share(found)
        if step is not None:
            bring(start.gang, step_folder(folder, step))
            load_state(step_folder(folder, step), self._model, None, {}, self._readers)
        return step

    def check_kept(self) -> None:
        """TargetError where a module or the optimizer keeps what no checkpoint holds.

        Call it after the first step: an optimizer makes its state there.
        """
        who = type(self._optimizer).__name__
        kept = [
            *optimizer_scalars(self._model, self._optimizer).values(),
            *self._changed_groups(),
        ]
        told = {f"{who} keeps {entry}": value for each in kept for entry, value in each.items()}
        told |= {f"the model keeps {n}": value for n, value in model_scalars(self._model).items()}
        for what, value in told.items():
            if kept_text(value) is None:
                raise TargetError(
                    f"{what}, a {type(value).__name__}, which no checkpoint can hold: a training "
                    "that is resumed would differ.",
                    hint="checkpoints hold tensors by name, and numbers, texts, lists and dicts of "
                    "them.",
                )

    def _changed_groups(self) -> list[dict[str, Any]]:
        """What the optimizer has changed in its parameter groups. What it was made with is made
        anew by a start, which may have other settings.
        """
        return [
            {
                name: value
                for name, value in _kept_values(group).items()
                if not _is_same(made.get(name), value)
            }
            for group, made in zip(self._optimizer.param_groups, self._made, strict=True)
        ]

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **model_tensors(self._model),
            **optimizer_tensors(self._model, self._optimizer),
        }


def _kept_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is in a parameter group beside its parameters and the rate, which every step sets."""
    return {name: _copied(value) for name, value in group.items() if name not in _SET_ANEW}


def _copied(value: Any) -> Any:
    """``value`` as it is now. An object that is nothing of what checkpoints hold stays itself: a
    copy of it would differ from it.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    with suppress(RuntimeError, TypeError, ValueError):  # an array has no one answer
        return bool(one == other)
    return False


def newest_state(start: Start) -> tuple[Path | None, Mapping[str, Any]]:
    """The newest whole checkpoint and its JSON values, the same on every rank.

    Raises PlanMismatchError, on every rank, where it is of other code.
    """
    gang, folder, step = start.gang, start.folder.checkpoints, None
    if gang.is_first:
        put_back(folder)
        step = newest_intact(folder, start.say)
    step = gang.council.share(step)
    checkpoint = None if step is None else step_folder(folder, step)
    if checkpoint is not None:
        bring(gang, checkpoint)
    extra = {} if checkpoint is None else read_extra(checkpoint)
    check_code(
        extra.get("code", {}), start.code, gang, start.folder, start.say,
        allow_changed=start.allow_changed_code,
    )  # fmt: skip
    return checkpoint, extra


class _Config(Protocol):
    """The settings that both kinds of training have."""

    @property
    def seed(self) -> int: ...

    @property
    def model_seed(self) -> int | None: ...


def seed_model(config: _Config) -> None:
    """Seed what draws a model's first weights."""
    seed = config.seed if config.model_seed is None else config.model_seed
    seed_everything(mix(seed, MODEL))
