"""Items of any kind are trained from: the look at them compares what it can, and ends nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.odd_items import COMPARED, LEFT_OUT, MAKERS, OddItems, Sample, make
from tests.unit.train.plain_training import train_plainly
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs
from tests.unit.train.toy_tasks import Toy
from torch.utils.data import Dataset

from muster.rank.seeding import DataOrder, Position
from muster.run.folder import RunFolder
from muster.train.config import BatchPlan, TrainConfig
from muster.train.feed import Feed, Fetcher
from muster.train.items import Outline, _is_same, differing, outline, outlines
from muster.train.loop import train

STEPS: dict[str, Any] = {"global_batch": 8, "epochs": 1}
#: One that holds itself has no parts to be looked at one by one.
ALL = " ".join(name for name in MAKERS if name != "itself")


@pytest.mark.parametrize("name", MAKERS)
def test_an_item_is_like_itself(name: str) -> None:
    first, second = make(name, 3), make(name, 3)
    assert outline(first).is_like(outline(second))
    assert _is_same(first, second)


@pytest.mark.parametrize("name", COMPARED)
def test_another_item_is_not_like_it(name: str) -> None:
    first, other = make(name, 3), make(name, 4)
    assert not outline(first).is_like(outline(other))
    assert not _is_same(first, other)


@pytest.mark.parametrize("root", ["/", "file:///"])
def test_a_file_is_in_a_hosts_own_folder(root: str) -> None:
    here, there, other = (f"{root}{name}" for name in ("a/1.png", "b/1.png", "a/2.png"))
    assert outline(here).is_like(outline(there))
    assert not outline(here).is_like(outline(other))


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ({"x": 1, "y": [2, 3]}, {"y": [2, 4], "x": 1}, "['y'][1]"),
        ((torch.ones(2), 1), (torch.zeros(2), 1), "[0]"),
        (Sample(torch.ones(2), "a"), Sample(torch.ones(2), "b"), ".text"),
        ([{"a": 1}, {"b": 1}], [{"a": 2}, {"c": 1}], "[0]['a'], [1]['b'], [1]['c']"),
        (list(range(9)), list(range(1, 10)), "[0], [1], [2], [3], [4] and 4 more"),
        (1, 2, ""),
        (1, {"a": 1}, "['a']"),
        ({object(): 1}, {object(): 2}, ""),
        (make("itself", 1), make("itself", 2), ""),
    ],
)
def test_what_is_other_in_an_item_is_named(first: Any, other: Any, said: str) -> None:
    assert differing(outlines(first), outlines(other)) == said


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_cannot_be_compared_is_named(name: str) -> None:
    assert outline([make(name, 3)]).left_out == (type(make(name, 3)).__name__,) or name == "itself"


@pytest.mark.parametrize("name", [name for name in COMPARED if name != "two"])
def test_what_can_be_compared_is_not_left_out(name: str) -> None:
    assert outline(make(name, 3)).left_out == ()


def test_a_rank_that_can_look_at_less_has_no_other_data() -> None:
    whole, less = Outline("a", [1.0]), Outline("b", [], ("Tensor",))
    assert whole.is_like(less) and less.is_like(whole)


@pytest.mark.parametrize("kinds", [ALL, "itself"])
def test_it_is_trained_from_in_one_process(kinds: str, tmp_path: Path) -> None:
    place, said = RunFolder(tmp_path), list[str]()
    place.create()
    config = TrainConfig(**STEPS, tensorboard=False)
    results = train(OddItems(kinds=kinds), config, place, None, said.append, checkpoint_s=None)
    assert results is not None and results["steps"] == 5
    assert not any("change at every fetch" in line for line in said)


@pytest.mark.parametrize("kind", ["coo", "csr", "jagged", "quantized"])
def test_batches_that_hold_it_are_fetched(kind: str) -> None:
    class Odd(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return make(kind, index), torch.tensor(index)

        def __len__(self) -> int:
            return 20

    def collated(samples: Any) -> Any:
        return [odd for odd, _ in samples], torch.stack([index for _, index in samples])

    order = DataOrder(20, seed=0)
    fetcher = Fetcher(Odd(), collated, 0, is_random=False)
    feed = Feed(fetcher, order, 0, torch.device("cpu"))
    plan = BatchPlan(global_batch=2, micro_batch=2, accumulation=1, shares=(1.0,))
    feed.at(Position(0, 0), plan)
    taken = [feed.take().data for _ in range(3)]
    assert [int(i) for _, indices in taken for i in indices] == order.indices(0, 0, 6)
    assert [_is_same(odd, make(kind, int(i))) for odds, indices in taken
            for odd, i in zip(odds, indices, strict=True)] == [True] * 6  # fmt: skip


def jobs() -> list[Job]:
    odd, turned = OddItems(kinds=ALL), OddItems(kinds=ALL, is_turned=True, on=1)
    return [
        Job(name="all", ranks=2, task=odd, config=STEPS),
        Job(name="itself", ranks=2, task=OddItems(kinds="itself"), config=STEPS),
        Job(name="turned", ranks=2, task=turned, config=STEPS),
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("odd"), jobs())


on_ranks = pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")


@on_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["all", "itself"])
def test_it_is_trained_from_on_ranks(name: str, trained: Outcomes) -> None:
    wanted = train_plainly(Toy(), global_batch=8, epochs=1)
    assert trained.losses(name) == pytest.approx(wanted.losses, rel=1e-10, abs=0)
    kinds = (
        "tuple"  # all of it: it has no parts
        if name == "itself"
        else "Closed, Tensor, Unwilling, Willing, dict, int, object, set, type"
    )
    said = [
        f"the ranks have not compared what {split} data has of {kinds}"
        for split in ("train", "val")
    ]
    assert trained.of(name).noted["heard"].splitlines() == said
    assert trained.of(name, 1).noted["heard"] == ""


@on_ranks
@pytest.mark.thorough
def test_another_order_of_them_on_one_rank_is_seen(trained: Outcomes) -> None:
    for rank in (0, 1):
        assert "do not have the same train data" in (trained.of("turned", rank).error or "")


def test_of_an_item_that_refers_to_a_whole_table_the_beginning_is_compared() -> None:
    table = [[n, str(n)] for n in range(200_000)]
    seen = outline(table)
    assert seen.left_out == ("what is behind 100,000 values",)
    assert seen.is_like(outline(table)) and not seen.is_like(outline([[1, "0"], *table[1:]]))
    assert seen.is_like(outline([*table[:-1], [1, "0"]]))  # nobody has looked there
