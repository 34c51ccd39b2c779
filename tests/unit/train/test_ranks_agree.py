"""State that may differ between ranks: at the end all have the same, or it was refused in words."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.train.differing_tasks import AGENT, Differing, DifferingAgent, Skipping
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

STEPS = {"global_batch": 8, "batch_size": 1, "epochs": 3}
MOVED = "The ranks' parameters are no longer the same"
ALIKE = "The ranks' models are not alike"

#: What two ranks refuse, and words of the error, in a training and in an agent.
REFUSED_TRAININGS: dict[str, list[str]] = {
    "shape-on-one": [ALIKE, "first.weight [4, 3]", "[5, 3]"],
    "type-on-one": [ALIKE, "second.weight", "float32"],
    "order-on-one": [ALIKE, "second.weight", "where rank 0 has first.weight"],
    "more-on-one": [ALIKE, "third.weight"],
    "buffer-on-one": [ALIKE, "count"],
    "frozen-on-one": [ALIKE, "first.weight", "frozen"],
    "thaws-on-one": [ALIKE, "first.weight", "frozen"],
    "stiffens-on-one": [ALIKE, "first.weight", "frozen"],
    "freezes-on-one": [ALIKE, "first.weight", "frozen"],
    "grows-on-one": [ALIKE, "late"],
    "keeps-on-one": [ALIKE, "kept"],
    "draws": [MOVED, "second.bias"],
    "noise": [MOVED],
    "decay-on-one": [MOVED, "after step 1"],
    "moments-on-one": [MOVED],
    "train-data-on-one": ["train data", "rank 1 has another", "[0], [1]"],
    "val-data-on-one": ["val data", "rank 1 has another", "[0], [1]"],
    "train-count-on-one": ["the number of training samples", "rank 0: 37, rank 1: 38"],
    "val-count-on-one": ["the number of val samples", "rank 0: 11, rank 1: 12"],
}
REFUSED_AGENTS: dict[str, list[str]] = {
    "shape-on-one": [ALIKE, "net.actor.0.weight"],
    "more-on-one": [ALIKE, "third.weight"],
    "buffer-on-one": [ALIKE, "count"],
    "frozen-on-one": [ALIKE, "net.critic", "frozen"],
    "thaws-late": [MOVED, "net.critic"],
    "freezes-late": ["did not use a parameter", "in every minibatch"],
    "thaws-on-one": [ALIKE, "net.critic", "frozen"],
    "freezes-on-one": [ALIKE, "net.critic", "frozen"],
    "grows-on-one": [ALIKE, "late"],
    "keeps-on-one": [ALIKE, "kept"],
    "draws": [MOVED, "net.critic"],
    "unused": ["third.weight"],
    "lazy": ["net.critic.weight"],
}
#: What is trained, to the same on all ranks; and what a start makes anew, so that it can go on.
TRAINED = ("thaws", "freezes", "lazy", "keeps", "grows")
RESUMED = TRAINED[:3]
#: On how many ranks each is resumed: on how many does not depend on what changes.
RESUMED_ON = {"thaws": (2, 4), "freezes": (4,), "lazy": (2,), "keeps": (2,)}


def jobs() -> list[Job]:
    found = [
        Job(name=f"refused-{how}", ranks=2, task=Differing(how=how), config=STEPS)
        for how in REFUSED_TRAININGS
    ]
    found += [
        Job(name=f"agent-{how}", ranks=2, task=DifferingAgent(how=how), config={**AGENT})
        for how in REFUSED_AGENTS
    ]
    for how in TRAINED:
        whole = Job(name=how, ranks=2, task=Differing(how=how), config=STEPS)
        found += [whole, replace(whole, name=f"{how}-on-1", ranks=1)]
        if how != "lazy":
            many = Job(name=f"agent-{how}", ranks=2, task=DifferingAgent(how=how), config={**AGENT})
            wide = {**AGENT, "num_envs": 8, "batch_size": 4}
            found += [many, replace(many, name=f"agent-{how}-on-1", ranks=1, config=wide)]
    short = Skipping(how="thaws", trouble="forward", at=6, on=1)
    found.append(
        Job(name="thaws-then-short", ranks=2, task=short, config={**STEPS, "batch_size": 2})
    )
    for how, places in RESUMED_ON.items():
        whole = Job(name="", ranks=2, task=Differing(how=how), config=STEPS)
        stopped: Any = replace(whole.task, trouble="stop", at=8, on=1)
        for ranks in places:
            place = f"{how}-resumed-on-{ranks}"
            found += [
                replace(whole, name=f"{place}-stopped", folder=place, task=stopped),
                replace(whole, name=place, ranks=ranks),
            ]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("differing"), jobs())


def check_refused(trained: Outcomes, name: str, words: list[str]) -> None:
    for rank in (0, 1):
        found = trained.of(name, rank)
        assert "MusterError" in found.kinds, found.trace or "it has trained"
        assert all(word in (found.error or "") for word in words), found.error
        assert "Hint:" in (found.error or "")


@pytest.mark.parametrize("how", REFUSED_TRAININGS)
def test_a_training_whose_ranks_differ_is_refused(trained: Outcomes, how: str) -> None:
    check_refused(trained, f"refused-{how}", REFUSED_TRAININGS[how])


@pytest.mark.parametrize("how", REFUSED_AGENTS)
def test_an_agent_whose_ranks_differ_is_refused(trained: Outcomes, how: str) -> None:
    check_refused(trained, f"agent-{how}", REFUSED_AGENTS[how])


@pytest.mark.parametrize(
    ("how", "place"),
    [(how, "") for how in TRAINED]
    + [(how, f"-resumed-on-{ranks}") for how in RESUMED for ranks in RESUMED_ON[how]],
)
def test_what_changes_on_all_ranks_is_trained_as_on_one(
    trained: Outcomes, how: str, place: str
) -> None:
    """Fresh, and resumed on as many ranks and on others."""
    name, num_ranks = f"{how}{place}", 4 if place.endswith("4") else 2
    trained.done(name)
    digests = {trained.of(name, rank).noted["digest"] for rank in range(num_ranks)}
    assert len(digests) == 1
    assert same_weights(trained, name, f"{how}-on-1")


@pytest.mark.parametrize("how", [how for how in TRAINED if how != "lazy"])
def test_what_changes_on_all_ranks_of_an_agent_is_trained_as_on_one(
    trained: Outcomes, how: str
) -> None:
    trained.done(f"agent-{how}")
    assert same_weights(trained, f"agent-{how}", f"agent-{how}-on-1")


def test_a_rank_short_of_memory_knows_how_many_parameters_others_search(trained: Outcomes) -> None:
    """It joins their search for unused parameters: of more of them once some have thawed."""
    assert trained.done("thaws-then-short")["micro_batch"] == 1
    assert same_weights(trained, "thaws-then-short", "thaws-on-1")


def test_what_a_new_start_does_not_make_is_refused_there(trained: Outcomes) -> None:
    found = trained.of("keeps-resumed-on-2")
    assert "is of another model: kept is not in the model" in (found.error or ""), found.trace


def same_weights(trained: Outcomes, name: str, other: str) -> bool:
    one, two = trained.weights(name), trained.weights(other)
    for key, value in one.items():
        if not key.startswith("rank"):  # of single environments
            torch.testing.assert_close(two[key], value, rtol=1e-7, atol=1e-9, msg=key)
    return True
