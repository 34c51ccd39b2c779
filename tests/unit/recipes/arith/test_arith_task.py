"""The task: batches, losses, scores, greedy decoding and a training that learns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from muster import UsageError
from muster_recipes.arith.config import ArithConfig
from muster_recipes.arith.llama import Llama, solve, solved_share
from muster_recipes.arith.problems import prompt, read_answer
from muster_recipes.arith.task import ArithTask
from muster_recipes.arith.tokenizer import BOS, EOS, PAD, decode, encode

pytestmark = pytest.mark.thorough

SMALL = ArithConfig(
    difficulty=1, max_value=9, num_train=256, num_val=32, num_test=32, hidden_size=48,
    num_layers=2, num_heads=2, intermediate_size=96,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, and much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task() -> ArithTask:
    return ArithTask(SMALL)


@pytest.fixture(scope="module")
def trained(task: ArithTask) -> Llama:
    """One operation on one-digit numbers, learnt by heart."""
    torch.manual_seed(0)
    model = task.model()
    assert isinstance(model, Llama)
    optimizer = task.optimizer(model, 4e-3, 0.0)
    data = task.dataset("train")
    samples = [data[i] for i in range(len(data))]
    for step in range(300):
        order = torch.randint(len(samples), (64,)).tolist()
        total, weight = task.loss(model, task.collate([samples[i] for i in order]))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / 300)
    return model.eval()


def test_targets_are_the_solution_and_the_end(task: ArithTask) -> None:
    data = task.dataset("train")
    samples = [data[i] for i in range(5)]
    batch = task.collate(samples)
    assert batch["inputs"].shape == batch["targets"].shape
    for row, i in enumerate(range(5)):
        problem = data.problem(i)
        targets = batch["targets"][row]
        wanted = targets[targets != -100].tolist()
        assert wanted == [*encode(problem.solution), EOS]
        first = int((targets != -100).nonzero()[0])
        assert decode(batch["inputs"][row, : first + 1].tolist()) == prompt(problem.text)
        assert batch["inputs"][row, 0] == BOS
        # An input and the target beside it are neighbours in the text.
        whole = batch["inputs"][row]
        assert whole[first + 1 : first + len(wanted)].tolist() == wanted[:-1]
        assert set(whole[first + len(wanted) :].tolist()) <= {PAD}


@torch.no_grad()
def test_loss_and_scores_do_not_depend_on_how_the_data_is_batched(task: ArithTask) -> None:
    torch.manual_seed(1)
    model = task.model()
    data = task.dataset("val")
    samples = [data[i] for i in range(len(data))]
    whole = task.score(model, task.collate(samples))
    parts = [task.score(model, task.collate(samples[i : i + 5])) for i in range(0, 32, 5)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in whole}
    for name, values in whole.items():
        assert values.shape == (32,)
        torch.testing.assert_close(values, joined[name])
    metrics = task.summarise(joined)
    total, weight = task.loss(model, task.collate(samples))
    assert metrics["loss"] == pytest.approx(float(total) / float(weight), rel=1e-5)
    by_hand = F.cross_entropy(
        model(task.collate(samples)["inputs"]).flatten(0, 1),
        task.collate(samples)["targets"].flatten(),
    )
    assert metrics["loss"] == pytest.approx(float(by_hand), rel=1e-5)


def test_exact_counts_whole_solutions(task: ArithTask) -> None:
    metrics = task.summarise(
        {
            "nll": torch.tensor([0.0, 6.0, 3.0]),
            "right": torch.tensor([4, 3, 2]),
            "tokens": torch.tensor([4, 4, 2]),
        }
    )
    assert metrics["exact"] == pytest.approx(2 / 3)
    assert metrics["token_accuracy"] == pytest.approx(0.9)
    assert metrics["loss"] == pytest.approx(0.9)


def test_held_out_problems_have_the_difficulty_asked_for() -> None:
    task = ArithTask(ArithConfig(difficulty=3, num_train=60, num_val=20, num_test=20))
    for split in ("val", "test"):
        data = task.dataset(split)  # type: ignore[arg-type]
        assert {len(data.problem(i).steps) for i in range(20)} == {3}
    train = task.dataset("train")
    counts = Counter(len(train.problem(i).steps) for i in range(48))
    assert counts == {1: 8, 2: 8, 3: 29, 4: 3}


@torch.no_grad()
def test_exact_is_what_greedy_decoding_finds(task: ArithTask, trained: Llama) -> None:
    data = task.dataset("test")
    problems = [data.problem(i) for i in range(len(data))]
    solutions = solve(trained, [p.text for p in problems])
    same = sum(s == p.solution for s, p in zip(solutions, problems, strict=True))
    columns = task.score(trained, task.collate([data[i] for i in range(len(data))]))
    metrics = task.summarise(columns)
    assert metrics["exact"] == pytest.approx(same / len(problems))
    assert solutions == [solve(trained, [p.text])[0] for p in problems]


def test_training_learns_and_finish_reports_it(
    task: ArithTask, trained: Llama, tmp_path: Path
) -> None:
    train = task.dataset("train")
    known = [train.problem(i) for i in range(64)]
    assert solved_share(trained, known) >= 0.9
    task.finish(trained, str(tmp_path))
    solved = json.loads((tmp_path / "solved.json").read_text())
    assert list(solved) == ["1", "2", "3"]
    assert solved["3"] < 0.5, "three operations were never shown"


def test_an_unfinished_solution_is_cut_and_has_no_answer(trained: Llama) -> None:
    [solution] = solve(trained, ["3+4"], max_new_tokens=3)
    assert len(solution) == 3
    assert read_answer(solution) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"difficulty": 0}, "--difficulty 0 is not a number of operations from 1 to 12"),
        ({"max_value": 8}, "--max-value 8 is not from 9 to 9999"),
        ({"num_train": 0}, "--num-train 0 is too small"),
        ({"hidden_size": 100, "num_heads": 3}, "divisible by 2 × --num-heads 3"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ArithConfig(**changes)
