"""How figures look, whoever draws them: panels, axes, colours, and files that are whole or absent;
and the curves of a training.

The only place of muster itself that needs matplotlib, imported when something is drawn. Recipes
may draw with it too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from muster import plotting
from muster.base.atomic_files import replacing
from muster.base.errors import how_to_install
from muster.base.shown_text import one_line

__all__ = [
    "BLACK", "BLUE", "COLOURS", "GREEN", "GREY", "MARKS", "ORANGE", "PINK", "SKY", "Undrawable",
    "YELLOW",
    "dress", "grid", "legend", "log_ticks", "mosaic", "note_counts", "or_remark", "panels",
    "png_and_pdf", "safe", "save", "shade", "small_letters", "ticks", "whole_numbers",
]  # fmt: skip

#: Okabe and Ito's colours, which stay apart for all kinds of colour vision.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK, GREY)
MARKS = "os^vDPX*"
_MOST_LABEL = 120
_MOST_TICK = 18


_SMALL: Any = {"font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 7}


class Undrawable(Exception):
    """A figure that matplotlib gives up, as where the numbers lie further apart than a float can
    say."""


@contextmanager
def or_remark(say: Callable[[str], object]) -> Iterator[None]:
    """What draws here is left out with a line that says why: matplotlib is missing, and what brings
    it, or it cannot draw these numbers.
    """
    try:
        yield
    except Undrawable as error:
        say(f"A figure is missing, because matplotlib cannot draw its numbers: {error}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        install = how_to_install("figures")
        say(f"There are no figures, because matplotlib is not installed: {install}")


def small_letters() -> AbstractContextManager[None]:
    """What is drawn in this context is for a figure of about 4 inches."""
    import matplotlib

    return matplotlib.rc_context(_SMALL)


def shade(share: float) -> Any:
    """A colour between dark violet (0) and light green (1), which is brighter where it is more."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.05 + 0.85 * share)


def panels(
    rows: int, columns: int, size: tuple[float, float], *, used: int | None = None, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure of ``size`` inches and its axes, row by row; only the first ``used`` are kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    used = len(axes) if used is None else used
    for axis in axes[used:]:
        axis.remove()
    return figure, axes[:used]


def mosaic(names: Any, size: tuple[float, float], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A figure whose axes have names, row by row; one that is named twice spans both places."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplot_mosaic(names, **options)


def grid(num: int, most_columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """``num`` panels of ``size`` inches each, in at most ``most_columns`` columns."""
    columns = min(most_columns, num)
    rows = math.ceil(num / columns)
    return panels(rows, columns, (size[0] * columns, size[1] * rows), used=num)


def dress(axis: Any, *, title: str = "", x: str = "", y: str = "", lines: str = "both") -> None:
    """What all axes have in common: a title on the left, no frame, faint lines."""
    if title:
        axis.set_title(title, loc="left", fontsize=10)
    if x:
        axis.set_xlabel(x)
    if y:
        axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, axis=lines, alpha=0.25, linewidth=0.6)


def legend(axis: Any, **options: Any) -> None:
    """A legend without a frame; none where no line has a name."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(**{"frameon": False, "fontsize": 8, **options})


def log_ticks(axis: Any, values: Sequence[float], texts: Sequence[str]) -> None:
    """A logarithmic x axis with a mark at each of ``values`` and nowhere else."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(values, texts)


def whole_numbers(axis: Any) -> None:
    """An axis (``axes.xaxis``) that counts: it has no mark between two whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def note_counts(
    axis: Any, points: Sequence[tuple[float, float]], texts: Sequence[str], colour: str
) -> None:
    """``n/N`` beside points that only some of the seeds have reached."""
    for point, text in zip(points, texts, strict=True):
        axis.annotate(
            text, point, textcoords="offset points", xytext=(6, 4), fontsize=7, color=colour
        )


def safe(text: str) -> str:
    """One short line of a user's text; a dollar sign would begin a formula."""
    return one_line(text, _MOST_LABEL).replace("$", r"\$")


def ticks(names: Sequence[str]) -> list[str]:
    """Users' names cut to what fits beside an axis."""
    cut = (name if len(name) <= _MOST_TICK else f"{name[: _MOST_TICK - 1]}…" for name in names)
    return [safe(name) for name in cut]


def save(figure: Any, *paths: Path) -> list[Path]:
    """Into each of ``paths``, a PNG or, where it ends in .pdf, a PDF; whole or not at all.

    Undrawable where matplotlib gives up.
    """
    for path in paths:
        with replacing(path) as beside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn
            # The distance of two numbers: what it comes to is said by what follows.
            warnings.filterwarnings("ignore", message="overflow encountered")
            try:
                figure.savefig(beside, dpi=150, format="pdf" if path.suffix == ".pdf" else "png")
            except (OverflowError, ValueError) as error:
                raise Undrawable(str(error)) from error
    return list(paths)


def png_and_pdf(path: Path) -> tuple[Path, Path]:
    """``path``, which has no suffix, as both."""
    return path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.pdf")


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
