"""What a user has chosen, and the command that this means. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

#: The kinds of work, with what they are for.
KINDS: Mapping[str, str] = {
    "train": "train one model or agent on one device or on many",
    "run": "start a program of yours on many devices, as torchrun does",
    "sweep": "run many independent experiments, one per setting and seed",
    "map": "put every record of a data set through functions or models",
}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One field per question; None: not answered (yet), and not part of the command then.

    ``target``: what to train, run or sweep; ``args``: words after it. ``devices`` and
    ``gpu_ids``, of which one is given: as those flags take them. ``batch_size`` is per device.
    ``grid``: NAME=V1,V2 texts. ``input`` and ``output``: of a map.
    """

    kind: str | None = None
    target: str | None = None
    args: str | None = None
    devices: str | None = None
    gpu_ids: str | None = None
    strategy: str | None = None
    batch_size: int | None = None
    lr: float | None = None
    lr_scaling: str | None = None
    precision: str | None = None
    epochs: int | None = None
    grid: tuple[str, ...] | None = None
    seeds: str | None = None
    per_gpu: str | None = None
    input: str | None = None
    output: str | None = None
    run_dir: str | None = None

    def given(self) -> dict[str, Any]:
        """The answers there are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


#: Which answers become flags, by kind of work and in this order.
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "train": (
        "devices", "gpu_ids", "strategy", "batch_size", "lr", "lr_scaling", "precision", "epochs",
        "run_dir",
    ),
    "run": ("devices", "gpu_ids", "run_dir"),
    "sweep": ("grid", "seeds", "devices", "gpu_ids", "per_gpu", "run_dir"),
    "map": ("input", "output", "devices", "gpu_ids", "run_dir"),
}  # fmt: skip


def used_by(kind: str) -> tuple[str, ...]:
    """The answers that a kind of work has a use for."""
    return ("kind", "target", *(("args",) if kind == "run" else ()), *_FLAGS[kind])


def command_words(answers: Answers) -> tuple[str, ...]:
    """The words after ``muster``. The flags of ``run`` come before its script.

    >>> command_words(Answers(kind="train", target="digits", devices="cpu:2", lr=0.003))
    ('train', 'digits', '--devices', 'cpu:2', '--lr', '0.003')
    """
    assert answers.kind is not None and answers.target is not None
    flags: list[str] = []
    for name in _FLAGS[answers.kind]:
        value = getattr(answers, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", *_texts(value)]
    target = [answers.target]
    rest = shlex.split(answers.args or "")
    if answers.kind == "run":
        return ("run", *flags, *target, *rest)
    return (answers.kind, *target, *rest, *flags)


def plan_words(answers: Answers) -> tuple[str, ...]:
    """The words after ``muster`` that estimate a training by measuring a few of its steps.

    >>> plan_words(Answers(kind="train", target="digits", gpu_ids="0,2", batch_size=64))
    ('plan', 'digits', '--calibrate', '--devices', '2', '--global-batch', '128')
    """
    assert answers.kind == "train" and answers.target is not None
    devices = answers.devices or "auto"
    if answers.gpu_ids is not None:
        devices = str(len(answers.gpu_ids.split(",")))
    words = ["plan", answers.target, "--calibrate"]
    words += [] if devices == "auto" else ["--devices", devices]
    if answers.batch_size is not None and devices != "auto":
        ranks = num_ranks(answers, 0, 1)
        words += ["--global-batch", str(ranks * answers.batch_size)]
    return tuple(words)


def command_line(answers: Answers) -> str:
    """The command as one would type it."""
    return shlex.join(("muster", *command_words(answers)))


def num_ranks(answers: Answers, num_gpus: int, num_cores: int) -> int:
    """How many devices the answers mean here: for what a question shows, not for a run.

    >>> num_ranks(Answers(devices="cpu:3"), 8, 16), num_ranks(Answers(gpu_ids="0,2,3"), 8, 16)
    (3, 3)
    """
    if answers.gpu_ids is not None:
        return len(answers.gpu_ids.split(","))
    text = answers.devices or "auto"
    if text.startswith("cpu"):
        _, _, count = text.partition(":")
        return int(count) if count.isdigit() else num_cores
    if text == "auto":
        return num_gpus or 1
    return len(text.split(",")) if "," in text else int(text) if text.isdigit() else 1


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
