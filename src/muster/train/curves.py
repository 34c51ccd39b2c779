"""The picture of a training: losses, the monitored metric and the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster import plotting

_MOST_POINTS = 2000


def draw_curves(path: Path, lines: Sequence[dict[str, Any]], monitor: str, title: str) -> None:
    """Write a PNG from the lines of a metrics.jsonl."""
    steps = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figure, (left, middle, right) = plotting.panels(1, 3, (11, 3.6))
    thin = steps[:: max(1, len(steps) // _MOST_POINTS)]
    x = [line["step"] for line in thin]
    left.plot(x, [line["loss"] for line in thin], lw=0.6, alpha=0.45, color=plotting.BLUE)
    left.plot(
        x,
        _smooth([line["loss"] for line in thin]),
        color=plotting.BLUE,
        label="training (smoothed)",
    )
    if evaluations and "loss" in evaluations[0]:
        at = [line["step"] for line in evaluations]
        left.plot(
            at,
            [line["loss"] for line in evaluations],
            "o-",
            ms=3,
            color=plotting.ORANGE,
            label="validation",
        )
    if thin and min(line["loss"] for line in thin) > 0:
        left.set_yscale("log")
    plotting.legend(left)
    name = monitor if monitor != "loss" else next(iter(_others(evaluations)), monitor)
    known = [line for line in evaluations if name in line]
    middle.plot(
        [line["step"] for line in known],
        [line[name] for line in known],
        "o-",
        ms=3,
        color=plotting.GREEN,
    )
    right.plot(x, [line["lr"] for line in thin], color=plotting.PINK)
    titles = ("loss", f"validation {name}", "learning rate")
    for axis, text in zip((left, middle, right), titles, strict=True):
        plotting.dress(axis, title=text, x="optimizer step")
    figure.suptitle(title, fontsize=10)
    plotting.save(figure, path)


def _others(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    skipped = {"kind", "step", "epoch", "samples", "seconds", "loss"}
    return [name for name in (evaluations[0] if evaluations else {}) if name not in skipped]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the curve, without a start-up bias."""
    weight = 1 - 1 / max(2.0, len(values) / 50)
    total = norm = 0.0
    smoothed = []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
