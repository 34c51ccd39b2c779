"""``curves.png``: how a training went, of a model or of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster import plotting

_MOST_POINTS = 2000


def draw_curves(path: Path, lines: Sequence[dict[str, Any]], monitor: str, title: str) -> None:
    """Write a PNG from the lines of a metrics.jsonl, which an agent's updates are in or not."""
    is_agent = any(line["kind"] == "update" for line in lines)
    figure = (_of_agent if is_agent else _of_model)(lines, monitor)
    figure.suptitle(title, fontsize=10)
    plotting.save(figure, path)


def _of_model(lines: Sequence[dict[str, Any]], monitor: str) -> Any:
    """Losses, the monitored metric and the learning rate over the steps."""
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
    return figure


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


def _of_agent(lines: Sequence[dict[str, Any]], monitor: str) -> Any:
    """Returns, entropy, and how the policy and the value learn."""
    updates = [line for line in lines if line["kind"] == "update"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figure, axes = plotting.panels(2, 3, (12, 6.2))
    earned, watched, entropy, kl, explained, shares = axes
    _plot(earned, updates, "return", plotting.BLUE, "training (all ranks)")
    _plot(earned, evaluations, "return", plotting.ORANGE, "validation", marks="o")
    plotting.legend(earned)
    shown = monitor if monitor != "return" else "length"
    _plot(watched, updates, shown, plotting.BLUE, "training")
    _plot(watched, evaluations, shown, plotting.ORANGE, "validation", marks="o")
    for axis, name, colour in (
        (entropy, "entropy", plotting.GREEN),
        (kl, "kl", plotting.PINK),
        (explained, "explained_variance", plotting.YELLOW),
    ):
        _plot(axis, updates, name, colour, name)
    bottom = [0.0] * len(updates)
    steps = [line["step"] for line in updates]
    for phase, colour in (
        ("acting", plotting.BLUE),
        ("stepping", plotting.ORANGE),
        ("learning", plotting.GREEN),
    ):
        top = [b + line.get(f"{phase}_share", 0.0) for b, line in zip(bottom, updates, strict=True)]
        shares.fill_between(steps, bottom, top, color=colour, alpha=0.5, lw=0, label=phase)
        bottom = top
    shares.set_ylim(0, 1)
    plotting.legend(shares, loc="lower right")
    titles = (
        "return of an episode", shown, "entropy of the policy (nats)",
        "KL to the policy that acted", "explained variance of the value", "share of time",
    )  # fmt: skip
    for axis, text in zip(axes, titles, strict=True):
        plotting.dress(axis, title=text, x="environment steps, all ranks")
    return figure


def _plot(
    axis: Any, lines: Sequence[dict[str, Any]], name: str, colour: str, label: str, marks: str = ""
) -> None:
    known = [line for line in lines if line.get(name) is not None]
    x = [line["step"] for line in known]
    y = [line[name] for line in known]
    axis.plot(x, y, marker=marks or None, ms=3, lw=1.2, color=colour, label=label)
