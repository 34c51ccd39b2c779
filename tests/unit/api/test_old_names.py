"""Names of modules that are on disk, or in the memory of a process that an update outlives."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import gymnasium  # noqa: F401 (before any test: it sets a variable of the environment)
import pytest

import muster

#: A snapshot of a notebook's cells in a run folder imports what they use by these, and its text is
#: part of the run's code: by another name, a resumed run would be refused as one of other code.
_IN_SNAPSHOTS = {
    "AgentRecipe": "muster.api.recipe",
    "MapRecipe": "muster.api.recipe",
    "Recipe": "muster.api.recipe",
    "RecipeTask": "muster.api.recipe",
    "Run": "muster.api.runs",
    "TrainRecipe": "muster.api.recipe",
    "fit": "muster.api.fit",
    "map": "muster.api.map",
    "sweep": "muster.api.launch",
}

#: Likewise what cells import from muster.executors and muster.agents, by the module it is of.
_OF_EXECUTORS = {
    "muster.farm.events": (
        "Divided",
        "Logged",
        "Progress",
        "Results",
        "Returned",
        "TargetBroken",
        "WorkerDied",
        "WorkerReady",
    ),
    "muster.farm.executors.base": ("Assignment", "Executor"),
    "muster.farm.executors.table": ("make_executor",),
    "muster.farm.task": ("Finished", "Outcome", "SlotSpec", "TargetSpec", "Task"),
}
_OF_AGENTS = {
    "muster.rank.freed_memory": ("bytes_to_keep",),
    "muster.rl.distributions": ("distribution", "draw"),
    "muster.rl.environment": (
        "BatchedEnv",
        "Change",
        "Continuous",
        "Discrete",
        "Entry",
        "EnvSpec",
        "Outcome",
        "Place",
        "VectorEnv",
    ),
    "muster.rl.evaluation": ("Episodes", "play", "summary"),
    "muster.rl.gymnasium_envs": ("EnvFace", "VectorEnvFace", "make_gymnasium"),
    "muster.rl.gymnasium_vector": ("GymnasiumEnvs",),
    "muster.rl.policy": (
        "ActorCritic",
        "Policy",
        "PolicyOutput",
        "RecurrentPolicy",
        "orthogonal_lstm",
    ),
    "muster.rl.sequences": (
        "SequencePlan",
        "lstm_outputs",
        "plan_sequences",
        "run_lstm",
        "step_lstm",
    ),
    "muster.rl.statistics": ("Interval", "Normaliser", "interval", "median_interval"),
    "muster.rl.streams": ("streams",),
    "muster.rl.task": ("AgentTask",),
}
#: Written down as values, or as the statement of the cell.
_VALUES = {"ACTION_MASK", "Event", "Maker", "Observation", "Split", "State"}


@pytest.mark.parametrize(
    ("face", "modules"), [("muster.executors", _OF_EXECUTORS), ("muster.agents", _OF_AGENTS)]
)
def test_what_extensions_of_cells_import_stays_where_it_was(
    face: str, modules: dict[str, tuple[str, ...]]
) -> None:
    public = importlib.import_module(face)
    pinned = {name: module for module, names in modules.items() for name in names}
    assert set(pinned) == set(public.__all__) - _VALUES
    for name, module in pinned.items():
        found = getattr(public, name)
        if isinstance(found, types.ModuleType):
            assert found.__name__ == module, name
        else:
            assert (name, found.__module__) == (name, module)
            assert getattr(importlib.import_module(module), name) is found, name


@pytest.mark.parametrize(("name", "module"), _IN_SNAPSHOTS.items())
def test_what_snapshots_of_cells_import_stays_where_it_was(name: str, module: str) -> None:
    public = getattr(muster, name)
    assert public.__module__ == module
    assert getattr(importlib.import_module(module), name) is public


def _called(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def test_a_process_from_before_the_move_reads_a_space(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "from typing import Annotated\n\nfrom muster import Space\n\n\n"
        "def f(x: Annotated[float, Space.log(1e-3, 1)]):\n    return x\n"
    )
    done = _called("muster.api.search", f"{tmp_path}/work.py:f", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"x"' in done.stdout


def test_a_driver_from_before_the_move_starts_its_part_of_a_gang(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello from a rank')\n")
    part = {
        "folder": str(tmp_path / "run"), "kind": "run", "code": {}, "about": {},
        "program": {"path": str(tmp_path / "hello.py"), "args": []},
        "options": {"devices": "cpu:1"},
    }  # fmt: skip
    (tmp_path / "part.json").write_text(json.dumps(part))
    done = _called("muster.api.gang_node", "part.json", folder=tmp_path)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert "hello from a rank" in [one["text"] for one in events if one["event"] == "line"], events
    assert events[-1]["event"] == "ending"


def test_a_coordinator_from_before_an_update_gets_its_table(tmp_path: Path) -> None:
    run = sweep_of_greetings(tmp_path)
    for name in ("results.csv", "results.parquet"):
        (run / name).unlink()
    done = _called("muster.farm.export", str(run), str(os.getpid()), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run / "results.csv").read_text().count("\n") == 3


def sweep_of_greetings(folder: Path) -> Path:
    words = ("sweep", "--grid", "x=1,2", "--run-dir", "run", "--devices", "cpu:1", "--quiet")
    done = _called("muster", *words, "--", "echo", "{x}", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("command", ["muster.api.trackers.guard"])
def test_commands_of_processes_that_outlive_an_update_are_there(command: str) -> None:
    assert callable(importlib.import_module(command).main)
