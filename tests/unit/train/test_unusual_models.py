"""What people bring along is trained as a textbook has it, on one rank and on two, and goes on
from a checkpoint without a different bit; or it is refused before much is computed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.train.plain_training import train_plainly
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs
from tests.unit.train.toy_tasks import Toy
from tests.unit.train.unusual_tasks import NamedBatches, SkipsParameters, Streaming, Unusual

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

#: 37 samples in batches of 8 leave 5 for the last step of an epoch.
SMALL = {"global_batch": 8, "epochs": 3, "batch_size": 2, "lr": 0.02}
TRAINED: dict[str, Toy] = {
    "tied": Unusual(net="tied"),
    "frozen": Unusual(net="frozen"),
    "odd": Unusual(net="odd"),
    "complex": Unusual(net="complex"),
    "experts": SkipsParameters(net="experts"),
    "averaged": Unusual(net="averaged"),
    "versioned": Unusual(net="versioned"),
    "growing": Unusual(how="growing"),
    "holding": Unusual(how="holding"),
    "named": NamedBatches(),
}
#: Whose steps depend on the number of forwards, or round to few bits: no textbook for those.
WITHOUT_TEXTBOOK: dict[str, Toy] = {
    "counting": Unusual(net="counting"),
    "centred": Unusual(net="centred"),
    "remembering": Unusual(net="remembering"),
    "pausing-said": SkipsParameters(net="pausing"),
    "wide": Unusual(how="wide", dtype="bfloat16"),
}
ALONE: dict[str, Toy] = {
    "sparse": Unusual(net="sparse", how="sparse"),
    "sparse-sgd": Unusual(net="sparse", how="sgd"),
}
RUNS = [
    *((name, ranks) for name in (*TRAINED, *WITHOUT_TEXTBOOK) for ranks in (1, 2)),
    *((name, 1) for name in ALONE),
]
TASKS = {**TRAINED, **WITHOUT_TEXTBOOK, **ALONE}
REFUSED: dict[str, tuple[int, Toy, str]] = {
    "two": (1, Unusual(how="two"), "Unusual.optimizer gave list, not Optimizer."),
    "closure": (1, Unusual(how="closure"), "LBFGS, whose step needs a closure"),
    "foreign": (1, Unusual(how="foreign"), "has a parameter of shape (2,) that is not the model's"),
    "listing": (1, Unusual(how="listing"), "Listing keeps parts, a list"),
    "unstorable": (1, Unusual(net="unstorable"), "the model keeps _extra_state, a dict"),
    "stream": (1, Streaming(), "Streaming.dataset('train') gives a Stream, which"),
    "sparse-on-two": (2, Unusual(net="sparse", how="sgd"), "table.weight"),
    "pausing": (2, Unusual(net="pausing"), "did not use mostly.weight, mostly.bias:"),
}


def jobs() -> list[Job]:
    found = []
    for name, ranks in RUNS:
        whole = Job(name=f"{name}-{ranks}", ranks=ranks, task=TASKS[name], config=SMALL)
        stopping: Any = replace(TASKS[name], trouble="stop", at=7)  # type: ignore[type-var]
        found += [
            whole,
            replace(whole, name=f"{name}-{ranks}-stopped", folder=f"{name}-{ranks}-again",
                    task=stopping),
            replace(whole, name=f"{name}-{ranks}-again"),
        ]  # fmt: skip
    found += [
        Job(name=name, ranks=ranks, task=task, config=SMALL)
        for name, (ranks, task, _) in REFUSED.items()
    ]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("unusual"), jobs(), limit_s=60.0)


@pytest.mark.parametrize(("name", "ranks"), [run for run in RUNS if run[0] in {**TRAINED, **ALONE}])
def test_losses_are_the_textbooks(name: str, ranks: int, trained: Outcomes) -> None:
    wanted = train_plainly(TASKS[name], global_batch=8, epochs=3, lr=0.02)
    assert trained.losses(f"{name}-{ranks}") == pytest.approx(wanted.losses, rel=1e-9, abs=0)


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_resumed_not_a_bit_is_different(name: str, ranks: int, trained: Outcomes) -> None:
    whole, again = f"{name}-{ranks}", f"{name}-{ranks}-again"
    stop = trained.of(f"{whole}-stopped")
    assert stop.error is None and stop.results is None, stop.trace
    assert any("resume     from step 8" in line for line in trained.of(again).said)
    assert trained.losses(again) == trained.losses(whole)
    one, other = trained.weights(whole), trained.weights(again)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert trained.done(again)["metrics"] == trained.done(whole)["metrics"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_words(name: str, trained: Outcomes) -> None:
    ranks, _, words = REFUSED[name]
    outcomes = [trained.of(name, rank) for rank in range(ranks)]
    told = [each for each in outcomes if words in (each.error or "")]
    assert told, outcomes[0].trace
    assert "MusterError" in told[0].kinds and told[0].exit_code == 2
    assert not list(trained.folder(name).checkpoints.glob("step-*"))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """On its own: its first rank only ends when the second one's process does."""
    job = Job(name="late", ranks=2, task=Unusual(net="pausing-late"), config=SMALL)
    return run_jobs(tmp_path_factory.mktemp("late"), [job], limit_s=60.0)


def test_a_loss_that_skips_parameters_in_its_last_micro_batch_is_told_so(late: Outcomes) -> None:
    """All have gradients then, from the one before."""
    error = late.of("late", 1).error
    assert error is not None
    assert "did not use a parameter in its last micro-batch:" in error
