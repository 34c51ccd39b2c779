"""The figure of an agent's training: returns, entropy, and how the policy and the value learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster import plotting


def draw_curves(path: Path, lines: Sequence[dict[str, Any]], monitor: str, title: str) -> None:
    """Write a PNG from the lines of a metrics.jsonl."""
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
    figure.suptitle(title, fontsize=10)
    plotting.save(figure, path)


def _plot(
    axis: Any, lines: Sequence[dict[str, Any]], name: str, colour: str, label: str, marks: str = ""
) -> None:
    known = [line for line in lines if line.get(name) is not None]
    x = [line["step"] for line in known]
    y = [line[name] for line in known]
    axis.plot(x, y, marker=marks or None, ms=3, lw=1.2, color=colour, label=label)
