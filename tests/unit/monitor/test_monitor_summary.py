"""What samples come to, with figures that are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.monitor.figure import draw
from muster.monitor.files import Summary
from muster.monitor.sample import Row


def gpu(elapsed_s: float, **values: object) -> Row:
    minutes, seconds = divmod(int(elapsed_s), 60)
    return Row(
        time_utc=f"2026-01-31T09:{minutes:02d}:{seconds:02d}.000+00:00",
        elapsed_s=elapsed_s,
        host="box",
        device="gpu0",
        **values,  # type: ignore[arg-type]
    )


def test_means_peaks_and_energy() -> None:
    rows = [
        gpu(0, utilisation_percent=0.0, power_w=100.0, memory_used_mib=10, temperature_c=40),
        gpu(10, utilisation_percent=100.0, power_w=300.0, memory_used_mib=30, temperature_c=70),
        gpu(20, utilisation_percent=50.0, power_w=300.0, memory_used_mib=20, temperature_c=60),
    ]
    (found,) = Summary(rows).devices()
    assert (found.num_samples, found.duration_s) == (3, 20.0)
    assert (found.mean_utilisation_percent, found.max_utilisation_percent) == (50.0, 100.0)
    assert (found.max_memory_used_mib, found.max_temperature_c) == (30, 70)
    # 10 s at 200 W on average and 10 s at 300 W are 5000 Ws.
    assert found.energy_wh == pytest.approx(5000 / 3600, abs=1e-4)


def test_the_time_between_two_monitors_costs_nothing() -> None:
    rows = [gpu(0, power_w=100.0), gpu(36, power_w=100.0)] * 2
    (found,) = Summary(rows).devices()
    assert (found.energy_wh, found.duration_s) == (2.0, 72.0)


def test_a_lost_gpu_counts_but_has_no_figures() -> None:
    rows = [gpu(0, power_w=100.0, utilisation_percent=80.0), gpu(5, lost="gone")]
    (found,) = Summary(rows).devices()
    assert (found.num_samples, found.num_lost) == (2, 1)
    assert (found.mean_utilisation_percent, found.energy_wh) == (80.0, None)


@pytest.mark.parametrize(
    ("throttle", "percent"),
    [("none", 0.0), ("clocks set by user", 0.0), ("power cap", 100.0),
     ("clocks set by user+thermal (hardware)", 100.0), (None, None)],
)  # fmt: skip
def test_throttled_is_what_nobody_wanted(throttle: str | None, percent: float | None) -> None:
    assert Summary([gpu(0, throttle=throttle)]).devices()[0].throttled_percent == percent


def test_a_figure_is_drawn_of_whatever_is_known(tmp_path: Path) -> None:
    host = Row(time_utc="2026-01-31T09:00:00.000+00:00", elapsed_s=0.0, host="box", device="host")
    for name, rows in {
        "nothing": [host],
        "one": [gpu(0, power_w=3.0)],
        "lost": [gpu(0, utilisation_percent=3.0), gpu(5, lost="gone")],
        "many": [gpu(n % 3500, utilisation_percent=1.0, power_w=2.0) for n in range(7000)],
    }.items():
        draw(tmp_path / f"{name}.png", rows, name)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
