"""The picture of an agent's training: what it earns, how much it still tries, how it learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.base.atomic_files import replacing


def draw_curves(path: Path, lines: Sequence[dict[str, Any]], monitor: str, title: str) -> None:
    """Write a PNG from the lines of a metrics.jsonl."""
    from matplotlib.figure import Figure

    updates = [line for line in lines if line["kind"] == "update"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    axes = figure.subplots(2, 3)
    _plot(axes[0, 0], updates, "return", "C0", "training (all ranks)")
    _plot(axes[0, 0], evaluations, "return", "C1", "validation", marks="o")
    axes[0, 0].set_title("return of an episode")
    axes[0, 0].legend(frameon=False, fontsize=8)
    shown = monitor if monitor != "return" else "length"
    _plot(axes[0, 1], updates, shown, "C0", "training")
    _plot(axes[0, 1], evaluations, shown, "C1", "validation", marks="o")
    axes[0, 1].set_title(shown)
    for axis, name, colour, text in (
        (axes[0, 2], "entropy", "C2", "entropy of the policy (nats)"),
        (axes[1, 0], "kl", "C3", "KL to the policy that acted"),
        (axes[1, 1], "explained_variance", "C4", "explained variance of the value"),
    ):
        _plot(axis, updates, name, colour, name)
        axis.set_title(text)
    bottom = [0.0] * len(updates)
    steps = [line["step"] for line in updates]
    for phase, colour in (("acting", "C0"), ("stepping", "C1"), ("learning", "C2")):
        top = [b + line.get(f"{phase}_share", 0.0) for b, line in zip(bottom, updates, strict=True)]
        axes[1, 2].fill_between(steps, bottom, top, color=colour, alpha=0.5, lw=0, label=phase)
        bottom = top
    axes[1, 2].set_title("share of time")
    axes[1, 2].set_ylim(0, 1)
    axes[1, 2].legend(frameon=False, fontsize=8, loc="lower right")
    for axis in axes.flat:
        axis.set_xlabel("environment steps, all ranks")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=120, format="png")


def _plot(
    axis: Any, lines: Sequence[dict[str, Any]], name: str, colour: str, label: str, marks: str = ""
) -> None:
    known = [line for line in lines if line.get(name) is not None]
    x = [line["step"] for line in known]
    y = [line[name] for line in known]
    axis.plot(x, y, marker=marks or None, ms=3, lw=1.2, color=colour, label=label)
