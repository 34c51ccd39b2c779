"""Why workers have to wait, where there is no terminal to show it."""

from __future__ import annotations

import pytest

from muster.cli.output import PlainScreen, waiting_lines
from muster.farm.view import RunView, WorkerLine


def worker(slot: int, progress: str, state: str = "starting") -> WorkerLine:
    return WorkerLine(f"slurm/{slot}", state, "", None, None, progress, 0)


def view(*workers: WorkerLine) -> RunView:
    return RunView("run", 1, 0, 0, 0, 0, 0, 1.0, None, None, "running", workers, ())


WAITS = "waits for SLURM: {} (job 7_{})"


def test_workers_that_wait_for_the_same_share_a_line() -> None:
    shown = view(
        worker(0, WAITS.format("Resources", 0)),
        worker(1, WAITS.format("Resources", 1)),
        worker(2, WAITS.format("PartitionConfig", 2)),
        worker(3, "epoch 3", "running"),
        worker(4, ""),
    )
    assert list(waiting_lines(shown).values()) == [
        "slurm/0 waits for SLURM: Resources (job 7_0), like 1 more",
        "slurm/2 waits for SLURM: PartitionConfig (job 7_2)",
    ]


def test_a_reason_is_printed_once_until_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.show(view(worker(0, WAITS.format("Priority", 0))))
    screen.show(
        view(worker(0, WAITS.format("Priority", 0)), worker(1, WAITS.format("Priority", 1)))
    )
    screen.show(view(worker(1, WAITS.format("Priority", 1))))
    screen.show(view(worker(1, WAITS.format("Resources", 1))))
    lines = [line for line in capsys.readouterr().err.splitlines() if "waits" in line]
    assert lines == [
        "slurm/0 waits for SLURM: Priority (job 7_0)",
        "slurm/1 waits for SLURM: Resources (job 7_1)",
    ]
