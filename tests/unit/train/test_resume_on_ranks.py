"""A training that was stopped goes on as if it had not been: the same bits on the same ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.plain_training import train_plainly
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs
from tests.unit.train.toy_tasks import InfiniteGradient, Overflows, Toy

from muster.base.errors import PlanMismatchError
from muster.rank.checkpoint import find_damage
from muster.rank.checkpoint_files import find_steps, read_extra, step_folder

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

SMALL = {"global_batch": 8, "epochs": 4, "batch_size": 1, "warmup_epochs": 1.0}
RESTLESS = Toy(dropout=0.3, noise=0.2)

#: What is stopped at step 8 (in the middle of the second epoch) and then goes on.
EXACT: dict[str, tuple[int, Toy, dict[str, Any]]] = {
    "one": (1, RESTLESS, SMALL),
    "two": (2, RESTLESS, SMALL),
    "four": (4, RESTLESS, SMALL),
    "loaders": (2, RESTLESS, {**SMALL, "num_workers": 2, "epochs": 3}),
    "norm": (2, Toy(batchnorm=True, samples=40, dropout=0.3), {**SMALL, "batch_size": 4}),
    "norm-fsdp": (
        2,
        Toy(batchnorm=True, samples=40, dropout=0.3),
        {**SMALL, "batch_size": 4, "strategy": "fsdp"},
    ),
    "fp16": (2, Overflows(), {**SMALL, "precision": "fp16"}),
    "patient": (2, Toy(), {**SMALL, "lr": 1e-30, "min_lr": 0.0, "patience": 2, "epochs": 9}),
    "filtered": (2, Toy(none_every=3, noise=0.2), SMALL),
}  # fmt: skip


def damage_newest(run_folder: Path) -> None:
    folder = run_folder / "checkpoints"
    newest = step_folder(folder, find_steps(folder)[0])
    part = newest / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def damage_all_but_the_third(run_folder: Path) -> None:
    """The newest is cut short and the one before it has no manifest."""
    folder = run_folder / "checkpoints"
    newest, second = (step_folder(folder, step) for step in find_steps(folder)[:2])
    part = newest / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-7])
    (second / "manifest.json").unlink()


def jobs() -> list[Job]:
    found = []
    for name, (ranks, task, config) in EXACT.items():
        whole = Job(name=name, ranks=ranks, task=task, config=config)
        interrupted = replace(task, trouble="stop", at=7, on=min(1, ranks - 1))
        found += [
            whole,
            replace(whole, name=f"{name}-stopped", folder=f"{name}-again", task=interrupted),
            replace(whole, name=f"{name}-again"),
        ]
    noisy = Job(name="moved", ranks=2, task=Toy(noise=0.2), config=SMALL)
    found += [noisy]
    for ranks in (1, 4):
        place = f"moved-to-{ranks}"
        found += [
            replace(noisy, name=f"{place}-stopped", folder=place,
                    task=replace(noisy.task, trouble="stop", at=7)),  # type: ignore[type-var]
            replace(noisy, name=place, ranks=ranks),
        ]  # fmt: skip
    for name, ranks, size in (("masks-ranks", 2, 1), ("masks-micro", 1, 2)):
        stops = replace(RESTLESS, trouble="stop", at=7, on=ranks - 1)
        short = {**SMALL, "epochs": 2}
        found += [
            Job(name=f"{name}-stopped", ranks=ranks, task=stops, config=short, folder=name),
            Job(name=name, ranks=1, task=RESTLESS, config={**short, "batch_size": size}),
        ]
    # From one way of spreading the model to the next, three times.
    clipped = {**SMALL, "max_grad_norm": 0.3}
    chain = [("ddp", 2, 3), ("fsdp", 2, 8), ("single", 1, 12), ("fsdp", 4, 15), ("ddp", 2, None)]
    for position, (strategy, ranks, at) in enumerate(chain):
        task = Toy() if at is None else Toy(trouble="stop", at=at)
        found.append(
            Job(name=f"chain-{position}", ranks=ranks, folder="chain", task=task,
                config={**clipped, "strategy": strategy})
        )  # fmt: skip
    for name, hurt in (("bitrot", damage_newest), ("torn", damage_all_but_the_third)):
        found += [
            Job(name=f"{name}-stopped", ranks=2, task=replace(RESTLESS, trouble="stop", at=7, on=0),
                config=SMALL, folder=name, checkpoint_steps=1),
            Job(name=name, ranks=2, task=RESTLESS, config=SMALL, before=hurt, checkpoint_steps=1),
        ]  # fmt: skip
    wrong = InfiniteGradient(at=7, on=1)
    sharded = {**SMALL, "strategy": "fsdp"}
    board = {**SMALL, "tensorboard": True}
    found += [
        Job(name="other-lr", ranks=1, task=RESTLESS, config={**SMALL, "lr": 0.5},
            folder="one-again"),
        Job(name="other-data", ranks=1, task=Toy(samples=38), config=SMALL, folder="one-again"),
        Job(name="once-more", ranks=2, task=RESTLESS, config=SMALL, folder="two-again"),
        Job(name="kept", ranks=2, task=Toy(), config={**SMALL, "keep": 2, "lr": 0.05},
            checkpoint_steps=1),
        Job(name="nan", ranks=2, task=Toy(trouble="nan", at=7, on=1), config=SMALL,
            checkpoint_steps=2),
        Job(name="nan-again", ranks=2, task=Toy(), config=SMALL, folder="nan",
            checkpoint_steps=2),
        Job(name="bad-gradient", ranks=2, task=wrong, config=SMALL, checkpoint_steps=1),
        Job(name="bad-gradient-fsdp", ranks=2, task=wrong, config=sharded, checkpoint_steps=1),
        Job(name="fp16-fsdp", ranks=2, task=Overflows(), config={**sharded, "precision": "fp16"}),
        Job(name="board-stopped", ranks=2, task=Toy(trouble="stop", at=7), config=board,
            folder="board"),
        Job(name="board", ranks=2, task=Toy(), config=board),
    ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("resume"), jobs())


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


@pytest.mark.parametrize("name", EXACT)
def test_on_the_same_ranks_not_a_bit_is_different(name: str, trained: Outcomes) -> None:
    stop = trained.of(f"{name}-stopped")
    assert stop.error is None and stop.results is None, stop.trace
    assert any("at step 8, saved" in line for line in stop.said)
    assert any("resume     from step 8" in line for line in trained.of(f"{name}-again").said)
    assert trained.losses(f"{name}-again") == trained.losses(name)
    assert_same_bits(trained.weights(f"{name}-again"), trained.weights(name))
    one, other = trained.done(name), trained.done(f"{name}-again")
    for key in ("metrics", "best", "steps", "samples", "final_loss", "evaluations"):
        assert other[key] == one[key], key


def test_that_results_depend_on_the_number_of_ranks_is_said_once(trained: Outcomes) -> None:
    def said(name: str, ranks: int) -> list[str]:
        lines = [line for rank in range(ranks) for line in trained.of(name, rank).said]
        return [line for line in lines if "dropout" in line]

    [line] = said("four", 4)
    assert line.startswith("note       dropout draws a mask per rank: losses differ")
    assert "than 4 by more than rounding" in line
    assert said("one", 1) == []
    # Gone on with other ranks or micro-batches, the masks are others from there on.
    for name, ranks, before in (
        ("masks-ranks", 1, "2 ranks x 1"),
        ("masks-micro", 1, "1 rank x 1"),
    ):
        [line] = said(name, ranks)
        assert f"differ from those of {before}, as it was before" in line


@pytest.mark.parametrize("name", EXACT)
def test_no_step_is_recorded_twice(name: str, trained: Outcomes) -> None:
    trained.done(f"{name}-again")
    for kind in ("train", "evaluation"):
        steps = [line["step"] for line in trained.lines(f"{name}-again", kind)]
        assert steps == sorted(set(steps))
        assert steps == [line["step"] for line in trained.lines(name, kind)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_other_ranks_the_same_samples_come_in_the_same_order(
    ranks: int, trained: Outcomes
) -> None:
    """The data is random per sample, so a sample out of place would change the losses."""
    assert trained.losses(f"moved-to-{ranks}") == pytest.approx(trained.losses("moved"), rel=1e-9)
    assert any("resume     from step 8" in line for line in trained.of(f"moved-to-{ranks}").said)


def test_a_checkpoint_loads_under_every_strategy(trained: Outcomes) -> None:
    for position in range(4):
        outcome = trained.of(f"chain-{position}")
        assert outcome.error is None and outcome.results is None, outcome.trace
    wanted = train_plainly(Toy(), global_batch=8, epochs=4, warmup_epochs=1.0, max_grad_norm=0.3)
    assert trained.losses("chain-4") == pytest.approx(wanted.losses, rel=1e-10, abs=0)
    final = trained.weights("chain-4")
    for parameter, value in wanted.model.state_dict().items():
        torch.testing.assert_close(final[f"model/{parameter}"], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "steps", "complaints"),
    [("bitrot", [7], ["of step 8 is damaged (__0_0.distcp does not have its checksum)"]),
     ("torn", [6], ["of step 8 is damaged (__0_0.distcp has", "of step 7 is damaged"])],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    name: str, steps: list[int], complaints: list[str], trained: Outcomes
) -> None:
    said = "\n".join(trained.of(name).said)
    for complaint in complaints:
        assert complaint in said
    assert f"resume     from step {steps[0]}" in said
    assert trained.losses(name) == trained.losses("two")
    assert_same_bits(trained.weights(name), trained.weights("two"))


def test_a_finished_training_only_says_its_results_again(trained: Outcomes) -> None:
    assert trained.done("once-more")["metrics"] == trained.done("two")["metrics"]
    assert trained.done("once-more")["steps"] == 20
    assert_same_bits(trained.weights("once-more"), trained.weights("two"))


def test_the_last_ones_and_the_best_are_kept_and_all_are_intact(trained: Outcomes) -> None:
    results = trained.done("kept")
    folder = trained.folder("kept").checkpoints
    best = json.loads((folder / "best.json").read_text())
    evaluations = results["evaluations"]
    wanted = min(evaluations, key=lambda line: line["loss"])
    assert best == {"step": wanted["step"], "value": wanted["loss"]}
    assert set(find_steps(folder)) == {19, 20, best["step"]}
    assert [find_damage(step_folder(folder, step)) for step in find_steps(folder)] == [None] * len(
        find_steps(folder)
    )
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("rank", [0, 1])
def test_patience_ends_all_ranks_together(rank: int, trained: Outcomes) -> None:
    results = trained.done("patient", rank)
    assert results["ended_because"] == "no improvement in 2 evaluations"
    assert results["epochs"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_no_number_ends_all_ranks_and_keeps_what_was_good(
    rank: int, trained: Outcomes
) -> None:
    outcome = trained.of("nan", rank)
    error = outcome.error or ""
    assert "NonFinite" in outcome.kinds, outcome.trace
    assert outcome.exit_code == 1
    assert "became nan in step 8 (epoch 2)" in error
    assert "checkpoint of step 6 is kept" in error
    assert "All parameters and gradients are finite" in error or "gradient" in error
    assert any("resume     from step 6" in line for line in trained.of("nan-again").said)
    wanted = train_plainly(Toy(), global_batch=8, epochs=4, warmup_epochs=1.0)
    assert trained.losses("nan-again") == pytest.approx(wanted.losses, rel=1e-10, abs=0)


@pytest.mark.parametrize("name", ["bad-gradient", "bad-gradient-fsdp"])
def test_parameters_that_are_no_numbers_are_never_saved(name: str, trained: Outcomes) -> None:
    for rank in range(2):
        error = trained.of(name, rank).error or ""
        assert "NonFinite" in trained.of(name, rank).kinds, trained.of(name, rank).trace
        assert "layers.0.weight" in error
        assert "checkpoint of step 7 is kept" in error
    weights = trained.weights(name)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


@pytest.mark.parametrize("name", ["fp16", "fp16-fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(name: str, trained: Outcomes) -> None:
    results = [trained.done(name, rank) for rank in range(2)]
    assert results[0]["steps"] == results[1]["steps"] == 19, "20 windows, one was skipped"
    folder = trained.folder(name).checkpoints
    extra = read_extra(step_folder(folder, find_steps(folder)[0]))
    assert extra["progress"]["attempts"] == 20
    assert extra["scaler"]["scale"] == 65536.0 / 2
    assert all(bool(torch.isfinite(v).all()) for v in trained.weights(name).values())


def test_other_settings_are_refused_and_nothing_is_changed(trained: Outcomes) -> None:
    for name, words in (("other-lr", "--lr 0.001, now 0.5"), ("other-data", "now 38")):
        outcome = trained.of(name)
        assert "PlanMismatchError" in outcome.kinds, outcome.trace
        assert outcome.exit_code == PlanMismatchError.exit_code
        assert words in (outcome.error or "")


def test_tensorboard_shows_every_step_once_after_a_resume(trained: Outcomes) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained.done("board")
    events = EventAccumulator(str(trained.folder("board").tensorboard))
    events.Reload()
    steps = [event.step for event in events.Scalars("evaluation/loss")]
    assert steps == [5, 10, 15, 20]
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == sorted(set(steps))
    assert len(list(trained.folder("board").tensorboard.iterdir())) == 2, "one writer per start"
