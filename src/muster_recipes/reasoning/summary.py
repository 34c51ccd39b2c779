"""What the finished records say together, in one pass and constant memory, and its picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import plotting
from muster_recipes.reasoning.grades import WEIGHTS
from muster_recipes.reasoning.versions import is_accepted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 20
VERIFICATIONS = ("correct", "wrong", "unparsed", "no_reference")
_COLOURS = {
    "correct": plotting.GREEN,
    "wrong": plotting.ORANGE,
    "unparsed": plotting.YELLOW,
    "no_reference": plotting.GREY,
}


def summarise(rows: Iterable[Mapping[str, Any]], threshold: float = 0.8) -> dict[str, Any]:
    """Shares, means and histograms of finished records.

    ``verified_share`` is of the records with a reference answer. Means are over the records that
    have the value; None where none has. A histogram is a list of counts over ``NUM_BINS`` equal
    bins from 0 to 1, the last with its upper end.
    """
    counts: Counter[str] = Counter()
    verdicts: Counter[str] = Counter(dict.fromkeys(VERIFICATIONS, 0))
    sums = dict.fromkeys([*WEIGHTS, "quality"], 0.0)
    known: Counter[str] = Counter()
    criteria = {name: [0] * NUM_BINS for name in WEIGHTS}
    quality = {name: [0] * NUM_BINS for name in VERIFICATIONS}
    for row in rows:
        counts["records"] += 1
        counts["accepted"] += is_accepted(row, threshold)
        counts["ungraded"] += bool(row["ungraded"])
        counts["rewritten"] += row["iterations"] > 0
        counts["improved"] += _is_improved(row)
        counts["prompt_tokens"] += row["tokens"]["prompt"]
        counts["completion_tokens"] += row["tokens"]["completion"]
        verdicts[row["verification"]] += 1
        for name, value in {**(row["scores"] or {}), "quality": row["quality"]}.items():
            if value is not None:
                sums[name] += value
                known[name] += 1
                bins = criteria[name] if name in criteria else quality[row["verification"]]
                bins[min(int(value * NUM_BINS), NUM_BINS - 1)] += 1
    with_reference = counts["records"] - verdicts["no_reference"]
    names = ("records", "accepted", "ungraded", "rewritten", "improved")
    return {
        **{name: counts[name] for name in names},
        "accepted_share": _share(counts["accepted"], counts["records"]),
        "verified_share": _share(verdicts["correct"], with_reference),
        "verification": dict(verdicts),
        "mean_quality": _share(sums["quality"], known["quality"]),
        "mean_scores": {name: _share(sums[name], known[name]) for name in WEIGHTS},
        "tokens": {
            "prompt": counts["prompt_tokens"],
            "completion": counts["completion_tokens"],
        },
        "histograms": {"scores": criteria, "quality": quality},
    }


def draw(summary: Mapping[str, Any], path: Path) -> Path:
    """One picture: quality by verification, and each criterion; ``path`` ends in .png."""
    scores: Mapping[str, list[int]] = summary["histograms"]["scores"]
    is_graded = any(any(bins) for bins in scores.values())
    if not is_graded:
        figure, (first,) = plotting.panels(1, 1, (7, 4.5))
        others = []
    else:
        mosaic = [["quality", *list(WEIGHTS)[:2]], ["quality", *list(WEIGHTS)[2:]]]
        figure, axes = plotting.mosaic(mosaic, (12, 6.5), width_ratios=[1.5, 1, 1])
        first, others = axes["quality"], [(axes[name], name) for name in WEIGHTS]
    _quality(first, summary)
    for axis, name in others:
        _histogram(axis, scores[name], bottom=None, colour=plotting.BLUE, label=None)
        _finish(axis, name.replace("_", " "), summary["mean_scores"][name])
    figure.suptitle(_title(summary))
    plotting.save(figure, path)
    return path


def _quality(axis: Axes, summary: Mapping[str, Any]) -> None:
    bottom = [0] * NUM_BINS
    for name in VERIFICATIONS:
        bins = summary["histograms"]["quality"][name]
        if any(bins):
            label = f"{name.replace('_', ' ')} ({sum(bins):,})"
            _histogram(axis, bins, bottom=bottom, colour=_COLOURS[name], label=label)
            bottom = [a + b for a, b in zip(bottom, bins, strict=True)]
    _finish(axis, "quality", summary["mean_quality"])
    axis.set_ylabel("records")
    if any(bottom):
        plotting.legend(axis, title="answer against reference")


def _histogram(
    axis: Axes, bins: list[int], *, bottom: list[int] | None, colour: str, label: str | None
) -> None:
    width = 1 / NUM_BINS
    left = [number * width for number in range(NUM_BINS)]
    axis.bar(
        left, bins, width, bottom=bottom or 0, align="edge", color=colour, label=label,
        edgecolor="white", linewidth=0.5,
    )  # fmt: skip


def _finish(axis: Axes, name: str, mean: float | None) -> None:
    plotting.dress(axis, title=name if mean is None else f"{name}, mean {mean:.2f}", lines="y")
    axis.set_axisbelow(True)
    axis.set_xlim(0, 1)


def _title(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary['records']:,} records"]
    for name in ("verified", "accepted"):
        share = summary[f"{name}_share"]
        if share is not None:
            parts.append(f"{share:.1%} {name}")
    unknown = summary["records"] - sum(map(sum, summary["histograms"]["quality"].values()))
    if unknown:
        parts.append(f"{unknown:,} without a quality, left out")
    return ", ".join(parts)


def _is_improved(row: Mapping[str, Any]) -> bool:
    """Whether a rewritten version is on top."""
    shown = ("reasoning", "thinking", "answer", "quality", "verification")
    first = row["versions"][0]
    return row["iterations"] > 0 and any(row[name] != first[name] for name in shown)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None
