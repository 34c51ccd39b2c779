"""The same losses on 1, 2 and 4 ranks, and as a textbook's loop has them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from tests.unit.train.plain_training import train_plainly
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs
from tests.unit.train.toy_tasks import Counted, GatheredTypes, Nested, SecretlyBf16, Toy

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

#: 37 samples in batches of 8 leave 5 for the last step of an epoch; 50 steps in 10 epochs.
STEPS = {"global_batch": 8, "epochs": 10}
#: What a step does with its batch shows in fewer.
FEW = {"global_batch": 8, "epochs": 4}

#: task and settings that the textbook knows, and how the ranks cut the batch beside them.
CASES: dict[str, tuple[Toy, dict[str, Any], dict[str, Any]]] = {
    "plain": (Toy(), STEPS, {}),
    "clipped": (Toy(), {**STEPS, "max_grad_norm": 0.3, "warmup_epochs": 1.5, "lr": 0.02}, {}),
    "accumulated": (Toy(), FEW, {"batch_size": 1}),
    "uneven": (Toy(samples=31), {"global_batch": 7, "epochs": 4}, {"batch_size": 2}),
    "filtered": (Toy(none_every=3), FEW, {"batch_size": 1}),
    "tokens": (Toy(tokens=True, none_every=5), FEW, {"batch_size": 2}),
    "tiny": (Toy(samples=21), {"global_batch": 4, "epochs": 3}, {}),
    "unused": (Toy(unused=True), FEW, {"batch_size": 1}),
}
RANKS = (1, 2, 4)
#: Where four ranks meet what two do not: batches that cannot be shared evenly, and empty shares.
ON_FOUR = ("plain", "uneven", "filtered", "tiny")
RUNS = [(name, ranks) for ranks in RANKS for name in CASES if ranks < 4 or name in ON_FOUR]


def jobs() -> list[Job]:
    found = [
        Job(name=f"{name}-{ranks}", ranks=ranks, task=task, config={**known, **rest})
        for name, ranks in RUNS
        for task, known, rest in [CASES[name]]
    ]
    single = {name: Toy(dtype="float32") for name in ("single-1", "single-2", "single-4")}
    found += [
        Job(name=name, ranks=int(name[-1]), task=task, config=STEPS)
        for name, task in single.items()
    ]
    fsdp = {"strategy": "fsdp", **FEW}
    found += [
        Job(name="fsdp-2", ranks=2, task=Toy(), config={**fsdp, "batch_size": 1}),
        Job(
            name="fsdp-clipped-2",
            ranks=2,
            task=Toy(),
            config={**fsdp, **STEPS, "max_grad_norm": 0.3, "warmup_epochs": 1.5, "lr": 0.02},
        ),
        Job(
            name="fsdp-filtered-2",
            ranks=2,
            task=Toy(none_every=3),
            config={**fsdp, "batch_size": 1},
        ),
        Job(
            name="fsdp-tiny-4",
            ranks=4,
            task=Toy(samples=21),
            config={**fsdp, "global_batch": 4, "epochs": 3},
        ),
        *(
            Job(
                name=f"{strategy}-bf16-2",
                ranks=2,
                task=GatheredTypes(),
                config={**FEW, "strategy": strategy, "precision": "bf16"},
            )
            for strategy in ("ddp", "fsdp")
        ),
        *(
            Job(
                name=f"norm-{strategy}-bf16-2",
                ranks=2,
                task=GatheredTypes(batchnorm=True),
                config={**STEPS, "epochs": 2, "strategy": strategy, "precision": "bf16"},
            )
            for strategy in ("ddp", "fsdp")
        ),
        Job(name="nested-2", ranks=2, task=Nested(), config={**STEPS, "epochs": 2}),
        Job(name="nested-fsdp-2", ranks=2, task=Nested(), config={**fsdp, "epochs": 2}),
        Job(name="balanced-2", ranks=2, task=Toy(), config={**STEPS, "balance": "auto"}),
        Job(
            name="bf16-2",
            ranks=2,
            task=SecretlyBf16(),
            config={**STEPS, "epochs": 1, "precision": "bf16"},
        ),
        Job(
            name="counted-2",
            ranks=2,
            task=Counted(),
            config={**STEPS, "batch_size": 1, "epochs": 2},
        ),
        Job(name="random-val-1", ranks=1, task=Toy(noise=0.5), config={**STEPS, "epochs": 1}),
        Job(name="random-val-4", ranks=4, task=Toy(noise=0.5), config={**STEPS, "epochs": 1}),
        Job(
            name="norm-4",
            ranks=4,
            task=Toy(batchnorm=True, val=13, samples=40),
            config={"batch_size": 4, "epochs": 2},
        ),
        Job(name="short-val-4", ranks=4, task=Toy(val=3), config={**STEPS, "epochs": 1}),
        Job(
            name="none-val-4", ranks=4, task=Toy(none_below=6, val=7), config={**STEPS, "epochs": 1}
        ),
        Job(
            name="none-val-fsdp-2",
            ranks=2,
            task=Toy(none_below=6, val=8, samples=40),
            config={**fsdp, "epochs": 1, "batch_size": 1},
        ),
        Job(name="short-val-fsdp-4", ranks=4, task=Toy(val=3), config={**fsdp, "epochs": 1}),
    ]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("many"), jobs())


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_float64_losses_are_the_textbooks(name: str, ranks: int, trained: Outcomes) -> None:
    task, known, _ = CASES[name]
    wanted = train_plainly(task, **known)
    lines = trained.lines(f"{name}-{ranks}")
    trained.done(f"{name}-{ranks}")
    assert [line["loss"] for line in lines] == pytest.approx(wanted.losses, rel=1e-10, abs=0)
    assert [line["lr"] for line in lines] == pytest.approx(wanted.lrs, rel=1e-12)
    if wanted.norms:
        norms = [line["grad_norm"] for line in lines]
        assert norms == pytest.approx(wanted.norms, rel=1e-9)
        assert min(norms) < 0.3 < max(norms), "some steps are clipped and some are not"
    final = trained.weights(f"{name}-{ranks}")
    for parameter, value in wanted.model.state_dict().items():
        torch.testing.assert_close(final[f"model/{parameter}"], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "ranks"), [run for run in RUNS if run[0] not in ("filtered", "tokens", "unused")]
)
def test_the_epochs_loss_is_the_mean_over_its_samples(
    name: str, ranks: int, trained: Outcomes
) -> None:
    task, known, _ = CASES[name]
    wanted = train_plainly(task, **known)
    per_epoch = len(wanted.losses) // known["epochs"]
    means = []
    for first in range(0, len(wanted.losses), per_epoch):
        counts = [len(step) for step in wanted.seen[first : first + per_epoch]]
        losses = wanted.losses[first : first + per_epoch]
        means.append(sum(n * x for n, x in zip(counts, losses, strict=True)) / sum(counts))
    found = [line["train_loss"] for line in trained.lines(f"{name}-{ranks}", "evaluation")]
    assert found == pytest.approx(means, rel=1e-10)
    assert f"train loss {means[-1]:.4f}" in "\n".join(trained.of(f"{name}-{ranks}").said)


def test_float32_losses_agree_over_ranks(trained: Outcomes) -> None:
    one = trained.losses("single-1")
    assert len(one) == 50
    for ranks in (2, 4):
        assert trained.losses(f"single-{ranks}") == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("sharded", "case"),
    [("fsdp-2", "accumulated"), ("fsdp-clipped-2", "clipped"), ("fsdp-filtered-2", "filtered"),
     ("fsdp-tiny-4", "tiny")],
)  # fmt: skip
def test_a_sharded_model_has_the_same_losses(sharded: str, case: str, trained: Outcomes) -> None:
    task, known, _ = CASES[case]
    wanted = train_plainly(task, **known)
    assert trained.losses(sharded) == pytest.approx(wanted.losses, rel=1e-10, abs=0)


def test_a_sharded_model_in_bf16_gathers_half_the_bytes(trained: Outcomes) -> None:
    """What is learnt stays in fp32, and differs from ddp's by no more than bf16 rounds."""
    noted = trained.of("fsdp-bf16-2").noted
    assert noted["used_type"] == "torch.bfloat16" and noted["updated_type"] == "torch.float32"
    weights = trained.weights("fsdp-bf16-2")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    found, wanted = trained.losses("fsdp-bf16-2"), trained.losses("ddp-bf16-2")
    assert found == pytest.approx(wanted, rel=0.02)
    assert found[-1] < found[0]


def test_a_sharded_model_with_batchnorm_in_bf16_is_gathered_in_fp32(trained: Outcomes) -> None:
    found = trained.losses("norm-fsdp-bf16-2")
    assert trained.of("norm-fsdp-bf16-2").noted["used_type"] == "torch.float32"
    assert found == pytest.approx(trained.losses("norm-ddp-bf16-2"), rel=0.02)


def test_a_sharded_model_is_whole_for_the_tasks_last_word(trained: Outcomes) -> None:
    """And parts within parts can be sharded."""
    learnt = []
    for name in ("nested-2", "nested-fsdp-2"):
        trained.done(name)
        values = json.loads((trained.folder(name).model / "learnt.json").read_text())
        learnt.append({key: torch.tensor(value) for key, value in values.items()})
    assert learnt[0].keys() == learnt[1].keys()
    for name in learnt[0]:
        torch.testing.assert_close(learnt[1][name], learnt[0][name], rtol=1e-6, atol=1e-9)


def test_shares_by_speed_change_no_loss(trained: Outcomes) -> None:
    assert trained.losses("balanced-2") == pytest.approx(trained.losses("plain-1"), rel=1e-10)
    assert any(line.startswith("balance") for line in trained.of("balanced-2").said)


def test_all_ranks_come_to_the_same_results(trained: Outcomes) -> None:
    for name in ("plain-4", "filtered-4", "norm-4", "fsdp-tiny-4"):
        first = trained.done(name)
        for rank in range(1, 4):
            other = trained.done(name, rank)
            assert other["metrics"] == first["metrics"]
            assert other["evaluations"] == first["evaluations"]
            assert other["best"] == first["best"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("plain-1", range(11)), ("plain-2", range(11)), ("plain-4", range(11)),
     ("short-val-4", range(3)), ("none-val-4", [6]), ("short-val-fsdp-4", range(3)),
     ("none-val-fsdp-2", [6, 7]), ("filtered-4", [0, 2, 3, 5, 6, 8, 9])],
)  # fmt: skip
def test_evaluation_sees_every_sample_once(name: str, wanted: Any, trained: Outcomes) -> None:
    assert trained.done(name)["metrics"]["val"]["seen"] == list(wanted)


def test_metrics_do_not_depend_on_the_ranks(trained: Outcomes) -> None:
    one = trained.done("plain-1")["metrics"]["val"]["loss"]
    for ranks in (2, 4):
        assert trained.done(f"plain-{ranks}")["metrics"]["val"]["loss"] == pytest.approx(
            one, rel=1e-9
        )


def test_random_validation_data_is_the_same_on_any_number_of_ranks(trained: Outcomes) -> None:
    one = trained.done("random-val-1")["metrics"]["val"]["loss"]
    four = trained.done("random-val-4")["metrics"]["val"]["loss"]
    assert four == pytest.approx(one, rel=1e-9)


def test_what_was_best_is_what_the_checkpoint_gives_again(trained: Outcomes) -> None:
    """BatchNorm's statistics differ between ranks within a step; those that count are saved."""
    results = trained.done("norm-4")
    assert results["metrics"]["val"]["loss"] == pytest.approx(results["best"]["value"], rel=1e-12)


def test_small_batches_of_batchnorm_are_warned_about(trained: Outcomes) -> None:
    said = "\n".join(trained.of("norm-4").said)
    assert "BatchNorm over micro-batches of 4 samples" in said
    assert "statistics of each rank's own micro-batch" in said


def test_unused_parameters_are_named(trained: Outcomes) -> None:
    said = "\n".join(trained.of("unused-2").said)
    assert "spare.bias, spare.weight" in said


def test_bf16_is_really_in_force_on_every_rank(trained: Outcomes) -> None:
    for rank in range(2):
        trained.done("bf16-2", rank)
        assert trained.of("bf16-2", rank).noted["seen_type"] == "torch.bfloat16"


def test_one_reduction_of_gradients_per_optimizer_step(trained: Outcomes) -> None:
    trained.done("counted-2")
    assert trained.of("counted-2").noted["reductions"] == 1


def test_only_rank_0_speaks(trained: Outcomes) -> None:
    assert trained.of("plain-4", 0).said
    assert trained.of("plain-4", 3).said == []


def test_the_contract_is_said(trained: Outcomes) -> None:
    said = trained.of("accumulated-2").said
    assert any("2 ranks x 1 per rank x 4 accumulation = global batch 8" in line for line in said)
