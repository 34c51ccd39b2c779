"""The pictures of a sweep: which are drawn, what stands in them, and that it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from muster_recipes.ssvae import figure
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.summary import Cell, cells, summarise

pytestmark = pytest.mark.thorough


def _config(**changes: Any) -> SsvaeConfig:
    chosen = {
        "n_labels": (100, 1000),
        "alpha_values": (1.0, 50.0),
        "corruption_rates": (0.0, 0.2, 0.5),
        "num_seeds": 2,
    }
    return SsvaeConfig(**chosen | changes)


def _accuracy(cell: Cell) -> float:
    """Different in every cell, and of one decimal in per cent."""
    by_alpha = 0.0 if cell.alpha is None else cell.alpha / 1000
    return round(0.5 + cell.n_labels / 5000 - cell.corruption_rate / 4 + by_alpha, 3)


def _table(config: SsvaeConfig, failed: tuple[Cell, ...] = ()) -> list[dict[str, Any]]:
    """Two seeds 1 % above and below the mean; all runs of the cells ``failed`` have failed."""
    rows = []
    for cell in cells(config):
        for sign, seed in zip((-1, 1), config.all_seeds, strict=False):
            accuracy = None if cell in failed else _accuracy(cell) + 0.01 * sign
            state = "failed" if cell in failed else "done"
            rows.append(
                {
                    **cell._asdict(),
                    "seed": seed,
                    "state": state,
                    "error": None,
                    "accuracy": accuracy,
                }
            )
    return summarise(config, rows)


def _names(paths: list[Path]) -> list[str]:
    assert all(path.stat().st_size > 1000 for path in paths)
    assert [path.suffix for path in paths] == [".png", ".pdf"] * (len(paths) // 2)
    return [path.stem for path in paths[::2]]


def test_a_full_sweep_has_heat_maps_and_both_kinds_of_curves(tmp_path: Path) -> None:
    config = _config()
    paths = figure.draw(config, _table(config), tmp_path)
    assert _names(paths) == ["ssvae-heatmap", "ssvae-corruption", "ssvae-labels"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")


def test_only_what_varies_has_an_axis(tmp_path: Path) -> None:
    for changes, names in (
        ({"n_labels": (100,)}, ["ssvae-corruption"]),
        ({"corruption_rates": (0.1,)}, ["ssvae-labels"]),
        ({"n_labels": (100,), "corruption_rates": (0.1,)}, ["ssvae-alpha"]),
        (
            {"n_labels": (100,), "corruption_rates": (0.1,), "alpha_values": (5.0,)}
            | {"num_seeds": 1, "supervised": False},
            ["ssvae-alpha"],
        ),
    ):
        config = _config(**changes)
        assert _names(figure.draw(config, _table(config), tmp_path)) == names


def test_nothing_is_drawn_while_nothing_is_known(tmp_path: Path) -> None:
    assert figure.draw(_config(), summarise(_config(), []), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_every_cell_of_a_heat_map_holds_its_number_in_its_colour() -> None:
    config = _config()
    missing = Cell("ssvae", 1000, 50.0, 0.2)
    drawn = figure._heatmaps(_table(config, failed=(missing,)))
    panels = {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.patches}
    assert list(panels) == ["α = 1", "α = 50", "supervised only"]
    means = [_accuracy(cell) for cell in cells(config) if cell != missing]
    low, high = min(means), max(means)
    for cell in cells(config):
        axes = panels["supervised only" if cell.alpha is None else f"α = {cell.alpha:g}"]
        place = (
            config.corruption_rates.index(cell.corruption_rate),
            config.n_labels.index(cell.n_labels),
        )
        (patch,) = [p for p in axes.patches if (p.get_x() + 0.5, p.get_y() + 0.5) == place]
        numbers = [text.get_text() for text in axes.texts if text.get_position() == place]
        if cell == missing:
            assert patch.get_hatch()
            assert numbers == []
            continue
        assert not patch.get_hatch()
        assert numbers == [f"{100 * _accuracy(cell):.1f}"]
        expected = colormaps["viridis"]((_accuracy(cell) - low) / (high - low))
        assert patch.get_facecolor() == pytest.approx(expected, abs=0.02)


def test_curves_have_the_mean_and_the_deviation_of_every_cell() -> None:
    drawn = figure._curves(_table(_config()), figure.RATES, line=figure.LABELS, panel=figure.ALPHAS)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["α = 1", "α = 50"]
    bars = drawn.axes[1].containers
    assert len(bars) == 4  # two numbers of labels, each with its baseline
    line, _, (segments,) = bars[2].lines
    means = [_accuracy(Cell("ssvae", 1000, 50.0, rate)) for rate in (0.0, 0.2, 0.5)]
    assert list(line.get_ydata()) == pytest.approx([100 * mean for mean in means])
    assert list(line.get_xdata()) == pytest.approx([0.0, 0.2, 0.5], abs=0.01)
    for segment, mean in zip(segments.get_segments(), means, strict=True):
        spread = 100 * 0.01 * 2**0.5  # ddof 1 of two values 2 % apart
        assert [y for _, y in segment] == pytest.approx([100 * mean - spread, 100 * mean + spread])
    baseline, _, _ = bars[3].lines
    assert baseline.get_linestyle() == "--"
    assert baseline.get_color() == line.get_color()
    alone = [100 * _accuracy(Cell("supervised", 1000, None, rate)) for rate in (0.0, 0.2, 0.5)]
    assert list(baseline.get_ydata()) == pytest.approx(alone)


def test_a_missing_cell_is_left_out_of_a_curve() -> None:
    table = _table(_config(), failed=(Cell("ssvae", 100, 1.0, 0.2),))
    drawn = figure._curves(table, figure.LABELS, line=figure.ALPHAS, panel=figure.RATES)
    line = drawn.axes[1].containers[0].lines[0]
    assert list(line.get_ydata()) == pytest.approx([100 * _accuracy(Cell("ssvae", 1000, 1.0, 0.2))])


def test_the_title_says_how_many_seeds_there_are_and_what_is_missing() -> None:
    config = _config()
    whole = figure._title(config, _table(config), "mean")
    assert whole == "Test accuracy in % on digits, mean over 2 seeds"
    part = figure._title(config, _table(config, failed=(Cell("ssvae", 100, 1.0, 0.2),)), "mean")
    assert part == f"{whole}\nwithout a result: 2 of 36 runs, 2 failed"
    one = _config(num_seeds=1)
    assert figure._title(one, _table(one), "mean") == "Test accuracy in % on digits, of one seed"


def test_the_title_counts_runs_of_earlier_commands() -> None:
    before = _config(n_labels=(50,), supervised=False)
    rows = [{**cell._asdict(), "seed": seed, "state": "done", "error": None, "accuracy": 0.9}
            for cell in cells(before) for seed in before.all_seeds]  # fmt: skip
    rows[0] |= {"state": "failed", "accuracy": None}
    config = _config(n_labels=(100,), supervised=False, num_seeds=1)
    title = figure._title(config, summarise(config, rows), "mean")
    # 6 cells with two seeds each are there, 6 with one are asked for.
    assert title.endswith("over 1 to 2 seeds\nwithout a result: 7 of 18 runs, 1 failed")


CROWDED = {
    "n_labels": (50, 100, 200, 400, 600, 800, 900, 1000),
    "corruption_rates": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6),
    "alpha_values": (0.1, 10.0, 50.0),
}


@pytest.mark.parametrize("changes", [{}, CROWDED, CROWDED | {"alpha_values": (50.0,)}])
def test_no_text_touches_another_or_leaves_the_picture(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    config = _config(**changes)
    figure.draw(config, _table(config), tmp_path)
    for each in {id(figure_): figure_ for figure_ in drawn}.values():
        FigureCanvasAgg(each).draw()
        boxes = [
            (text.get_text(), text.get_window_extent())
            for text in each.findobj(Text)
            if text.get_visible() and text.get_text()
        ]
        for place, (text, box) in enumerate(boxes):
            assert 0 <= box.x0 and box.x1 <= each.bbox.width, text
            assert 0 <= box.y0 and box.y1 <= each.bbox.height, text
            touching = [other for other, at in boxes[place + 1 :] if box.overlaps(at)]
            assert not touching, (text, touching)
