"""What is called after an epoch or at the end is called once before the first step."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.unit.train import mistaken_tasks as tasks
from tests.unit.train.rank_jobs import last_weights
from tests.unit.train.toy_tasks import Toy
from torch import nn

from muster.base.errors import UsageError
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.items import _is_same, outline
from muster.train.loop import train
from muster.train.setup import _drops

SETTINGS: dict[str, Any] = {"epochs": 2, "global_batch": 8, "tensorboard": False}


def trained(folder: Path, task: Toy) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    place = RunFolder(folder)
    place.create()
    results = train(task, TrainConfig(**SETTINGS), place, None, said.append, checkpoint_s=None)
    assert results is not None
    return results, said


def line_of(task: type, text: str) -> int:
    lines, _ = inspect.findsource(task)
    return next(n for n, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("task", "hook", "cause", "where"),
    [
        (tasks.TypoInScore, "TypoInScore.score", "name 'modell' is not defined", '"loss": modell'),
        (tasks.WrongShapeInScore, "WrongShapeInScore.score", "RuntimeError", "zeros(1000)"),
        (tasks.TypoInSummarise, "TypoInSummarise.summarise", "KeyError: 'los'", '["los"]'),
        (tasks.DeepTypoInSummarise, "DeepTypoInSummarise.summarise", "maen", ".maen()"),
        (tasks.TypoInFinish, "TypoInFinish.finish", "'modell' is not defined", "modell.state"),
        (tasks.FinishTakesNoFolder, "FinishTakesNoFolder.finish", "positional argument", None),
    ],
)
def test_a_mistake_ends_before_the_first_step_with_its_name_and_line(
    task: type[Toy], hook: str, cause: str, where: str | None, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        trained(tmp_path, task())
    message = str(caught.value)
    assert f"{hook} failed in the rehearsal before the first step" in message
    assert cause in message
    if where is not None:
        assert f"mistaken_tasks.py:{line_of(task, where)})" in message
    assert not RunFolder(tmp_path).metrics.exists()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (tasks.UnstorableSummary, "UnstorableSummary.summarise gives something that the results"),
        (
            tasks.ListIsMonitored,
            "what ListIsMonitored.summarise gives for it is a list",
        ),
        (tasks.NothingOfThatName, "write monitor = 'loss' in the class"),
        (tasks.NumberFromScore, "NumberFromScore.score gave float, not Mapping."),
        (tasks.NoOptimizer, "NoOptimizer.optimizer gave NoneType, not Optimizer."),
    ],
)
def test_what_cannot_be_monitored_or_kept_is_said_before_the_first_step(
    task: type[Toy], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        trained(tmp_path, task())
    assert message in str(caught.value)
    assert not RunFolder(tmp_path).metrics.exists()


def test_what_few_samples_may_cause_does_not_end_a_training(tmp_path: Path) -> None:
    results, said = trained(tmp_path, tasks.NeedsBothClasses())
    assert isinstance(results["metrics"]["val"]["loss"], float), "a tensor of one number is one"
    [note] = [line for line in said if "could not be rehearsed" in line]
    assert "NeedsBothClasses.summarise" in note
    assert "ValueError: only one class is present" in note


def test_a_rehearsal_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    """Bit for bit the run whose methods touch nothing while they are rehearsed."""
    found = {}
    for meddles in (False, True):
        folder = tmp_path / str(meddles)
        results, said = trained(folder, tasks.Meddles(meddles=meddles))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            del line["seconds"]
        files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        assert any(line.startswith("rehearsal") for line in said)
        found[meddles] = lines, results["metrics"], files, last_weights(RunFolder(folder))
    assert found[True][:3] == found[False][:3]
    assert "model/finished" in found[True][2]
    for name, value in found[False][3].items():
        assert torch.equal(found[True][3][name], value), name


def test_a_data_set_with_a_generator_of_its_own_is_told(tmp_path: Path) -> None:
    for task, is_told in (
        (tasks.HoldsGenerator(), True),
        (Toy(noise=0.5), False),
        (Toy(), False),
        (Toy(none_every=3), False),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        _, said = trained(folder, task)
        told = [line for line in said if "generator of the data set's own" in line]
        assert len(told) == is_told, task


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.3), True),
        (nn.LSTM(2, 2, num_layers=2), False),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
    ],
)
def test_layers_that_draw_masks_are_known(model: nn.Module, draws: bool) -> None:
    assert any(map(_drops, model.modules())) is draws


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0]), torch.tensor([2.0]), False),
        (torch.tensor([1]), torch.tensor([1, 1]), False),
        ((torch.ones(2), 3), (torch.ones(2), 3), True),
        ({"x": [1.0, "a"]}, {"x": [1.0, "b"]}, False),
        (float("nan"), float("nan"), True),
        (None, None, True),
        (numpy.arange(3), numpy.arange(3), True),
        (numpy.arange(3), numpy.arange(3) + 1, False),
        (object(), object(), True),
    ],
)
def test_items_are_compared_by_what_they_hold(first: Any, second: Any, same: bool) -> None:
    assert _is_same(first, second) is same


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        (["/scratch/host-a/cat/1.png", 3], ["/scratch/host-b/cat/1.png", 3]),
        (numpy.arange(40)[::-1], numpy.arange(40)[::-1].copy()),
        (torch.tensor([1j, 2.0]).conj(), torch.tensor([-1j, 2.0])),
    ],
    ids=["another-order-of-keys", "a-file-in-a-folder-of-the-host", "backwards", "conjugate"],
)
def test_ranks_with_one_item_in_two_forms_have_the_same(here: Any, there: Any) -> None:
    assert outline(here).is_like(outline(there))


@pytest.mark.parametrize("kind", ["float64", "Int64", "category"])
def test_a_column_of_a_table_is_an_item(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    first, other = pandas.Series([1, 2], dtype=kind), pandas.Series([1, 5], dtype=kind)
    assert outline(first).is_like(outline(first.copy()))
    assert kind != "float64" or not outline(first).is_like(outline(other))
