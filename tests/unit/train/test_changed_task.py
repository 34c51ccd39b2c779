"""A training whose code has changed: refused, mixed knowingly, or begun anew."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program

import muster
from muster.api.fit import train_here
from muster.api.gangs.train import check_job, job_of_target, plan_training
from muster.api.start.options import GangOptions
from muster.base.code import code_of
from muster.base.errors import PlanMismatchError, UsageError
from muster.base.target import parse_target
from muster.gang.topology import Topology
from muster.rl.config import PpoConfig
from muster.train.config import TrainConfig
from muster.train.loop import train
from muster.train.task import make_task

TASK = (Path(__file__).parents[2] / "programs" / "line_task.py").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "slope_helper.py").write_text("SLOPE = 2.0\n")
    return tmp_path


def fit(here: Path, say: Callable[[str], None] = print, **options: Any) -> Any:
    return muster.fit(
        "line.py:Line", epochs=1, batch_size=8, tensorboard=False, devices="cpu", say=say,
        run_dir=here / "r", **options,
    )  # fmt: skip


def checkpoint(here: Path) -> dict[str, Any]:
    [path] = (here / "r/checkpoints").glob("step-*/extra.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_edit_run_edit_run_is_refused_also_when_it_is_done(here: Path) -> None:
    assert fit(here).exit_code == 0
    assert sorted(checkpoint(here)["code"]) == ["line.py", "slope_helper.py"]
    fit(here)  # the same code: nothing is refused
    results = (here / "r/training_results.json").read_bytes()
    (here / "slope_helper.py").write_text("SLOPE = -2.0\n")
    with pytest.raises(PlanMismatchError, match=r"slope_helper\.py") as error:
        fit(here)
    assert "line.py" not in str(error.value)
    assert "--restart" in str(error.value)
    assert (here / "r/training_results.json").read_bytes() == results
    said: list[str] = []
    fit(here, said.append, allow_changed_code=True)
    assert "note       going on with changed code: slope_helper.py" in said
    (here / "slope_helper.py").write_text("SLOPE = 2.0\n")
    with pytest.raises(PlanMismatchError):
        fit(here)  # what was accepted was the other code, and that once
    said.clear()
    assert fit(here, said.append, restart=True).exit_code == 0
    [aside] = here.glob("r.before-*")
    assert (aside / "training_results.json").exists()
    assert said[0] == f"the run so far is kept in {aside}"
    fit(here)


def test_a_rank_refuses_what_changed_after_the_launcher_looked(here: Path) -> None:
    fit(here)
    job = job_of_target("line.py:Line", {}, TrainConfig(epochs=3, batch_size=8), run_dir=here / "r")
    check_job(job, GangOptions())
    (here / "line.py").write_text(TASK + "# edited\n")
    code = code_of([parse_target("line.py:Line")])
    with pytest.raises(PlanMismatchError, match=r"line\.py"):
        train(make_task(job.target, None, {}), job.config, job.folder, None, print, code=code)


def test_a_training_of_an_older_muster_goes_on(here: Path) -> None:
    fit(here)
    [path] = (here / "r/checkpoints").glob("step-*/extra.json")
    record = json.loads((here / "r/run.json").read_text())
    (here / "r/run.json").write_text(json.dumps({**record, "code": {}}))
    path.unlink()  # damaged as well: nothing is known of the code
    fit(here)


@pytest.mark.thorough
def test_the_code_of_an_agent_is_checked_as_well(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAOS_PIDS", str(here))
    (here / "recall.py").write_text("import slope_helper\n" + read_program("recall_agent.py"))
    defaults = {"num_envs": 8, "rollout_steps": 8, "batch_size": 4, "tensorboard": False}
    job = job_of_target(
        "recall.py:Recaller", {}, PpoConfig.of(defaults, num_steps=64), run_dir=here / "r"
    )
    assert train_here(job, None, print).exit_code == 0
    assert sorted(checkpoint(here)["code"]) == ["recall.py", "slope_helper.py"]
    results = (here / "r/training_results.json").read_bytes()
    (here / "slope_helper.py").write_text("SLOPE = -2.0\n")
    job = dataclasses.replace(job)  # which has read its files before
    with pytest.raises(PlanMismatchError, match=r"slope_helper\.py") as error:
        train_here(job, None, print)
    assert "recall.py" not in str(error.value)
    with pytest.raises(PlanMismatchError, match=r"slope_helper\.py"):
        plan_training(job, GangOptions())
    assert (here / "r/training_results.json").read_bytes() == results
    said: list[str] = []
    train_here(job, None, said.append, GangOptions(allow_changed_code=True))
    assert "note       going on with changed code: slope_helper.py" in said
    assert train_here(job, None, print, GangOptions(restart=True)).exit_code == 0
    assert train_here(job, None, print).exit_code == 0
    assert len(list(here.glob("r.before-*"))) == 1


def test_restart_under_another_launcher_is_refused(here: Path) -> None:
    """It starts its ranks again and again, with the same words."""
    job = job_of_target("line.py:Line", {}, TrainConfig(epochs=1), run_dir=here / "r")
    inside = Topology(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1,
        master_addr="127.0.0.1", master_port=1, restart_count=0, launcher="torchrun",
    )  # fmt: skip
    with pytest.raises(UsageError, match="torchrun"):
        train_here(job, inside, print, GangOptions(restart=True))


@pytest.mark.thorough
def test_the_command_and_resume_refuse_as_well(here: Path, muster_cli: MusterCli) -> None:
    words = ("train", "line.py:Line", "--epochs", "1", "--batch-size", "8", "--no-tensorboard",
             "--devices", "cpu:2", "--run-dir", "r")  # fmt: skip
    assert muster_cli(*words).returncode == 0
    (here / "slope_helper.py").write_text("SLOPE = -2.0\n")
    for command in (words, ("resume", "r"), (*words, "--dry-run")):
        done = muster_cli(*command)
        assert done.returncode == 2, done.stdout
        assert "slope_helper.py" in done.stderr
        assert "Traceback" not in done.stderr
    assert muster_cli(*words, "--restart").returncode == 0
    assert muster_cli(*words).returncode == 0
    assert len(list(here.glob("r.before-*"))) == 1
