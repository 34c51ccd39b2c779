"""A call of the farm: its tasks in chunks, each with its own result, going on after a kill."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster import Context
from muster.farm.task import Order
from muster.farm.worker.context import Surroundings
from muster.run.folder import RunFolder
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.ensemble import Failure
from muster_recipes.ssvae.plan import plan
from muster_recipes.ssvae.tasks import Progress, ssvae_runs, supervised_runs

#: What a second attempt measures anew.
TIMES = ("training_s",)


class Coordinator:
    """The other end of a worker's line: listens, and kills the worker at its n-th report."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.heard: list[str] = []
        self.kill_at = kill_at

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None:
        self.heard.append(text)
        if len(self.heard) == self.kill_at:
            raise KeyboardInterrupt

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        raise AssertionError("a call of this recipe logs nothing")

    def confirmed(self) -> int:
        return 0

    def should_stop(self) -> bool:
        return False

    def halted(self, task_id: int) -> None:
        return None

    def runs(self, task_id: int, pid: int | None) -> None:
        return

    def wanted(self, task_id: int) -> int:
        return 0

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        raise AssertionError("a call of this recipe is not divisible")


def context(folder: Path, line: Coordinator) -> Context:
    around = Surroundings(RunFolder(folder), "cpu", line, os.getpid())
    return Context(around, Order(1, 1, 1, "0" * 32, 1, b"{}"), {})


def tasks_of(method: str, **flags: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        "n_labels": (20,), "alpha_values": (1.0,), "corruption_rates": (0.0,), "num_seeds": 3,
        "num_epochs": 2, "eval_frequency": 1, "batch_size": 512, "num_samples": 1,
        "num_style": 2, "unlabelled": "sampled", "ensemble_size": 2, **flags,
    }  # fmt: skip
    return [dict(t.params) for t in plan(SsvaeConfig(**given)) if t.target == method]


def timeless(results: Sequence[Any]) -> list[Any]:
    return [{k: v for k, v in result.items() if k not in TIMES} for result in results]


def test_every_task_gets_its_measures_and_its_curve(tmp_path: Path) -> None:
    line = Coordinator()
    tasks = tasks_of("ssvae", num_epochs=3, eval_frequency=2)
    results = ssvae_runs(tasks, context(tmp_path, line))
    assert len(results) == 3
    assert line.heard[0] == "22 % 2 of 3 runs together, epoch 1/3"
    for result in results:
        assert isinstance(result, dict)
        assert result["curve_epoch"] == [2, 3]
        for name in ("objective", "accuracy", "elbo_nats"):
            assert len(result[f"curve_{name}"]) == 2
        assert result["curve_accuracy"][-1] == result["accuracy"]
        assert result["curve_elbo_nats"][-1] == pytest.approx(result["elbo_nats"])
        assert 0 <= result["calibration_error"] <= 1
        assert "style_leakage" in result and result["training_s"] > 0
    assert len({str(timeless([result])) for result in results}) == 3


def test_a_baseline_has_no_bound(tmp_path: Path) -> None:
    results = supervised_runs(tasks_of("supervised"), context(tmp_path, Coordinator()))
    for result in results:
        assert isinstance(result, dict)
        assert sorted(result) == [
            "accuracy", "calibration_error", "curve_accuracy", "curve_epoch", "curve_objective",
            "training_s",
        ]  # fmt: skip


def test_a_failed_run_is_an_exception_in_its_place_with_value_and_epoch(tmp_path: Path) -> None:
    tasks = tasks_of("ssvae", alpha_values=(1.0, 1e38), num_seeds=1)
    good, bad = ssvae_runs(tasks, context(tmp_path, Coordinator()))
    assert isinstance(good, dict)
    assert isinstance(bad, ArithmeticError)
    assert "the objective became -inf in epoch 1" in str(bad)


@pytest.mark.parametrize("lr", [1e39, 1e30])
@pytest.mark.parametrize("method", ["ssvae", "supervised"])
def test_a_last_step_that_leaves_the_finite_numbers_is_a_failure(
    tmp_path: Path, lr: float, method: str
) -> None:
    # One step: its objective is that of the first weights. Neither 1e39 nor 1e30² is a float32.
    tasks = tasks_of(method, lr=lr, num_seeds=1, num_epochs=1, batch_size=2000)
    call = ssvae_runs if method == "ssvae" else supervised_runs
    (result,) = call(tasks, context(tmp_path, Coordinator()))
    assert isinstance(result, ArithmeticError)
    what = "encoder_weight" if lr == 1e39 else "accuracy"
    assert re.match(rf"the {what} became (nan|-?inf) in epoch 1: ", str(result))


def test_a_call_whose_runs_all_fail_says_so_of_each(tmp_path: Path) -> None:
    tasks = tasks_of("ssvae", lr=1e18, num_seeds=2)
    results = ssvae_runs(tasks, context(tmp_path, Coordinator()))
    assert [type(result) for result in results] == [ArithmeticError] * 2


def test_the_scores_of_disentanglement_are_measured_when_asked_for(tmp_path: Path) -> None:
    tasks = tasks_of("ssvae", factor_scores=True, num_seeds=1, num_epochs=1)
    (result,) = ssvae_runs(tasks, context(tmp_path, Coordinator()))
    assert isinstance(result, dict)
    names = {"beta_vae_score", "factor_vae_score", "mutual_information_gap"}
    assert names <= set(result)


@pytest.mark.parametrize("call", [ssvae_runs, supervised_runs])
def test_a_killed_call_goes_on_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    monkeypatch.setattr("muster_recipes.ssvae.tasks.SAVE_EVERY_S", 0.0)
    tasks = tasks_of("ssvae" if call is ssvae_runs else "supervised")
    whole = call(tasks, context(tmp_path / "whole", Coordinator()))
    with pytest.raises(KeyboardInterrupt):
        call(tasks, context(tmp_path / "killed", Coordinator(kill_at=1)))
    line = Coordinator()
    resumed = call(tasks, context(tmp_path / "killed", line))
    assert "epoch 2/2" in line.heard[0]  # the first epoch was not trained again
    assert timeless(resumed) == timeless(whole)


def test_a_later_attempt_does_only_what_is_left(tmp_path: Path) -> None:
    tasks = tasks_of("ssvae", num_seeds=5)
    first = Progress(context(tmp_path, Coordinator()), len(tasks))
    begun, state = next(first.open_chunks(tasks, 2))
    assert list(begun) == tasks[:2] and state is None
    first.finish(begun, [{"accuracy": 0.5}, Failure(3, float("nan"), "elbo_nats")])

    second = Progress(context(tmp_path, Coordinator()), len(tasks))
    assert [list(chunk) for chunk, _ in second.open_chunks(tasks, 2)] == [tasks[2:4], tasks[4:]]
    assert second.result_of(tasks[0]) == {"accuracy": 0.5}
    failed = second.result_of(tasks[1])
    assert isinstance(failed, Failure) and failed.value != failed.value
    assert (failed.epoch, failed.what) == (3, "elbo_nats")
