"""Settings and attributes of a task that make no sense are told before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.errors import MusterError
from muster.cli.train_flags import flags_of_train
from muster.rl.config import PpoConfig
from muster.train.config import TrainConfig

TASK = """
import muster

class Mine(muster.Task):
    WRONG
    def model(self): ...
    def dataset(self, split): ...
    def loss(self, model, batch): ...
    def score(self, model, batch): ...
"""
AGENT = """
from muster.agents import AgentTask

class Mine(AgentTask):
    WRONG
    def environments(self, split, place): ...
    def policy(self, spec): ...
"""


@pytest.mark.parametrize(
    ("text", "wrong", "told"),
    [
        (TASK, 'defaults = {"epochs": "many"}', "--epochs is 'many', which is not a whole number"),
        (TASK, 'defaults = {"epochs": 2.5}', "--epochs is 2.5, which is not a whole number"),
        (TASK, 'defaults = {"lr": "1e-3"}', "--lr is '1e-3', which is not a number"),
        (TASK, 'defaults = {"schedule": "cosinus"}', "not one of constant, cosine, linear"),
        (TASK, 'defaults = {"tensorboard": "no"}', "--tensorboard is 'no', which is not true or"),
        (AGENT, 'defaults = {"gamma": "x"}', "--gamma is 'x', which is not a number"),
        (AGENT, 'defaults = {"num_envs": None}', "--num-envs is null, which is not a whole number"),
        (TASK, 'better = "up"', "has better = 'up'"),
        (AGENT, "better = None", "has better = None"),
    ],
)
def test_it_is_told(
    text: str, wrong: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(text.replace("WRONG", wrong))
    with pytest.raises(MusterError) as error:
        flags_of_train(["mine.py:Mine"], "train", "")
    assert told in str(error.value)
    assert error.value.exit_code == 2


def test_whole_numbers_of_any_type_stay_what_they_are() -> None:
    assert TrainConfig(epochs=3, lr=1, num_workers="auto").lr == 1
    assert PpoConfig(gamma=1, lr=1).gamma == 1


def test_a_whole_float_becomes_the_whole_number_that_was_meant() -> None:
    kept = TrainConfig(keep=3.0, batch_size=64.0)  # type: ignore[arg-type]
    assert [type(value) for value in (kept.keep, kept.batch_size)] == [int, int]
