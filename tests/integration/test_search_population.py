"""Population-based training from the command line: the example of its paper, and its schedule."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from tests.json_schemas import check_printed

import muster

Main = Callable[..., CompletedProcess[str]]

#: The example of the paper (its figure 2), by a function and by a program.
CLIMB = """
import json, os, sys
from pathlib import Path

def climb(state, moved):
    state = {**state, "step": state["step"] + 1, moved: state[moved] * 0.9}
    return state, 1.2 - state["a"] ** 2 - state["b"] ** 2

def run(moved: str, ctx):
    state = ctx.restore() or {"step": 0, "a": 0.9, "b": 0.9}
    while state["step"] < 40:
        state, quality = climb(state, moved)
        ctx.log(state["step"], quality=quality)
        ctx.checkpoint(state)
    return {"quality": quality}

def killed(moved: str, ctx):
    # Where it is to rest it is killed when it has saved, and before anybody knows.
    state = ctx.restore() or {"step": 0, "a": 0.9, "b": 0.9}
    while state["step"] < 40:
        state, quality = climb(state, moved)
        ctx.log(state["step"], quality=quality)
        try:
            ctx.checkpoint(state)
        except BaseException:
            mark = Path(f"killed-{ctx.task}-{state['step']}")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            raise
    return {"quality": quality}

if __name__ == "__main__":
    import time
    saved = Path(os.environ["MUSTER_CHECKPOINT_DIR"], "state.json")
    state = {"step": 0, "a": 0.9, "b": 0.9}
    if saved.exists():
        state = json.loads(saved.read_text())
    while state["step"] < 6:
        state, quality = climb(state, sys.argv[1])
        beside = saved.with_suffix(".new")
        beside.write_text(json.dumps(state))
        beside.replace(saved)
        with open(os.environ["MUSTER_METRICS"], "a") as file:
            print(json.dumps({"step": state["step"], "quality": quality}), file=file)
        while state["step"] == 3:
            time.sleep(0.05)  # until it is told to rest
"""

FLAGS = ("--devices", "cpu:1", "--quiet", "--monitor-interval", "0", "--run-dir", "runs/it")
SEARCH = ("--space", "moved=choice(a,b)", "--maximize", "quality", "--trials", "2")


def test_it_beats_every_constant_setting_and_says_by_which_schedule(
    tmp_path: Path, muster_main: Main
) -> None:
    (tmp_path / "climb.py").write_text(CLIMB)
    done = muster_main(
        "sweep", "climb.py:run", *SEARCH, "--stop", "pbt:min=4,max=40", "--search-seed", "4", *FLAGS
    )
    assert done.returncode == 0, done
    run = muster.Run(tmp_path / "runs" / "it")
    [best] = check_printed("best", muster_main("best", "runs/it", "--json").stdout)
    assert best["values"]["quality"] > 1 > 0.4, "what a grid of both comes to"
    assert best["command"] is None
    state = {"a": 0.9, "b": 0.9}
    begun = 0
    for part in best["schedule"]:
        until = int(part["until"] or 40)
        state[part["params"]["moved"]] *= 0.9 ** (until - begun)
        begun = until
    again = 1.2 - state["a"] ** 2 - state["b"] ** 2
    assert abs(best["values"]["quality"] - again) < 1e-9, "its schedule is what it did"
    shown = muster_main("best", "runs/it").stdout
    assert "no one command runs it again" in shown and "to the end" in shown
    heirs = {row["task"]: row["from_task"] for row in run.results().to_pylist() if row["from_task"]}
    assert len(heirs) == 9
    for series in run.series():
        steps = list(series.curve.step)
        assert steps == list(range(steps[0], steps[-1] + 1)), "none twice, none left out"
        assert (steps[0] > 1) == (series.task in heirs), "its curve begins at its parent's step"
    report = muster_main("report", "runs/it")
    assert report.returncode == 0, report
    page = (tmp_path / "runs" / "it" / "report" / "index.html").read_text()
    assert f"The settings of trial {best['trial']}, in their order" in page
    assert "began with the checkpoint of a better one" in muster_main("status", "runs/it").stdout


def test_one_that_is_killed_before_its_rest_is_known_goes_no_step_further(
    tmp_path: Path, muster_main: Main
) -> None:
    """Two hundred kills of a search have shown heirs that began a step behind the mark."""
    # To 40 it would take minutes: after each kill a trial waits longer before it begins again.
    (tmp_path / "climb.py").write_text(CLIMB.replace("< 40", "< 16"))
    found = []
    for name in ("run", "killed"):
        done = muster_main(
            "sweep", f"climb.py:{name}", *SEARCH, "--stop", "pbt:min=4,max=16",
            "--search-seed", "4", *FLAGS[:-1], f"runs/{name}", "--retries", "100",
        )  # fmt: skip
        assert done.returncode == 0, done
        [best] = json.loads(muster_main("best", f"runs/{name}", "--json").stdout)
        found.append((best["values"], best["schedule"]))
    assert found[0] == found[1]
    assert len([*tmp_path.glob("killed-*")]) > 5


def test_a_program_goes_on_from_what_another_has_saved(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "climb.py").write_text(CLIMB)
    done = muster_main(
        "sweep", *SEARCH, "--stop", "pbt:min=3,max=6", "--search-seed", "1", *FLAGS,
        "--", sys.executable, "climb.py", "{moved}",
    )  # fmt: skip
    assert done.returncode == 0, done
    run = muster.Run(tmp_path / "runs" / "it")
    rows = run.results().to_pylist()
    assert [row["state"] for row in rows].count("stopped") == 1
    [heir] = [row for row in rows if row["from_task"]]
    lasts = {
        one.task: (one.curve.step[0], one.curve.step[-1])
        for one in muster.Run(tmp_path / "runs" / "it").series()
    }
    assert lasts[heir["task"]] == (4, 6)
