"""How figures look, whoever draws them: panels, axes, colours, and files that are whole or absent.

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

from muster.base.atomic_files import replacing
from muster.base.errors import how_to_install
from muster.base.shown_text import one_line

__all__ = [
    "BLACK", "BLUE", "COLOURS", "GREEN", "GREY", "MARKS", "ORANGE", "PINK", "SKY", "YELLOW",
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


@contextmanager
def or_remark(say: Callable[[str], object]) -> Iterator[None]:
    """Where matplotlib is missing, a line says what brings it, and what draws here is left out."""
    try:
        yield
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
    """Into each of ``paths``, a PNG or, where it ends in .pdf, a PDF; whole or not at all."""
    for path in paths:
        with replacing(path) as beside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn
            figure.savefig(beside, dpi=150, format="pdf" if path.suffix == ".pdf" else "png")
    return list(paths)


def png_and_pdf(path: Path) -> tuple[Path, Path]:
    """``path``, which has no suffix, as both."""
    return path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.pdf")
