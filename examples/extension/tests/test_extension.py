"""Each part by itself; nothing has to be installed but Muster and pytest."""

import asyncio
from pathlib import Path

from muster_example.check import scratch
from muster_example.engine import Echo
from muster_example.recipe import SQUARES, Config
from muster_example.tracker import Lines

import muster
from muster.checks import Facts
from muster.generation import EngineSpec, Request
from muster.trackers import Ended, Place, Point, Tracked


def test_the_recipe_plans_what_it_counts() -> None:
    config = Config(widths=(1, 2, 3))
    assert len(list(SQUARES.planned(config))) == SQUARES.count(config) == 3


def test_the_executor_runs_a_sweep(tmp_path: Path) -> None:
    run = muster.sweep(SQUARES, executor="muster_example.executor:Counted", devices="cpu:1",
                       run_dir=tmp_path / "run")  # fmt: skip
    assert run.exit_code == 0
    assert (tmp_path / "run" / "sent.txt").read_text() == "task\n" * 2


def test_the_check_is_silent_where_nothing_is_known() -> None:
    assert list(scratch(Facts())) == []


def test_the_tracker_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def opened():
        place = Place(tmp_path, tmp_path / "tb")
        return Lines(place).open(Tracked(id="one", name="one", group="all"))

    first = opened()
    first.log([Point("loss", 3, 0.0, 0.5)])
    first.leave()
    second = opened()
    assert second.last_steps == {"loss": 3}
    second.finish(Ended(state="done"))


def test_the_engine_answers() -> None:
    answer = asyncio.run(Echo(EngineSpec(engine="echo")).generate(Request(prompt="a b")))
    assert (answer.text, answer.finish_reason) == ("A B", "stop")
