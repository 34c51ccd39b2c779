"""What `muster monitor RUN` shows of a log where no figure can be written."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import MusterCli
from tests.tracked import gang_folder

from muster.monitor.files import csv_header, to_csv
from muster.monitor.sample import Row


def test_the_numbers_are_shown_where_the_figure_cannot_be_written(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    folder = gang_folder(tmp_path / "run")
    row = Row(
        time_utc="2026-01-31T08:00:00.000+00:00", elapsed_s=1.0, host="h", device="host",
        utilisation_percent=7.0,
    )  # fmt: skip
    folder.monitor_csv().write_bytes(csv_header() + to_csv([row, row]))
    (folder.path / "monitor.png").mkdir()
    done = muster_main("monitor", "run")
    assert done.returncode == 0, done.stderr
    assert "2 rows" in done.stdout and "7 %" in done.stdout and "figure:" not in done.stdout
    assert "monitor.png: Is a directory. No figure was made." in done.stderr
