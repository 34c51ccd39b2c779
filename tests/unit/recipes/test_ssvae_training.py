"""The task that ``muster train ssvae`` trains: its items, its model, and the same on two ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.recipes.digits.published_files import write_mnist
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs

from muster import TrainConfig, UsageError
from muster.cli.train_flags import flags_of_train, train_job
from muster_recipes.ssvae.config import RECIPE, Hyper, SsvaeTrainConfig
from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.measures import style_leakage
from muster_recipes.ssvae.noise import noise_of
from muster_recipes.ssvae.objective import objective
from muster_recipes.ssvae.pool import Pool, load
from muster_recipes.ssvae.task import Batch, RedrawnLabels, SsvaeNet, SsvaeTask, collate

pytestmark = pytest.mark.thorough

#: Few styles: a test trains the real model on the real digits.
SMALL = SsvaeTrainConfig(num_samples=2, num_style=3)
FEW = {"global_batch": 128, "lr": 1e-3, "schedule": "constant", "weight_decay": 0.0, "seed": 42,
       "epochs": 1, "precision": "fp32"}  # fmt: skip


def batch_of(task: SsvaeTask, split: Any, indices: range) -> Batch:
    dataset = task.dataset(split)
    return task.collate([dataset[index] for index in indices])


def test_the_labelled_images_are_the_chosen_ones_with_their_given_labels() -> None:
    config = SsvaeTrainConfig(n_labels=50, corruption_rate=0.4, label_seed=3)
    pool = load("digits")["train"]
    chosen = choose_labels(pool.labels, 50, 0.4, 3)
    for _ in range(2):  # in every epoch
        batch = batch_of(SsvaeTask(config), "train", range(len(pool.labels)))
        assert batch.is_labelled.nonzero()[:, 0].tolist() == sorted(chosen.index.tolist())
        assert torch.equal(batch.label[chosen.index], chosen.given)
    assert (chosen.given != chosen.true).sum() == 20
    assert torch.equal(batch.x, pool.x)


def test_noise_is_new_in_every_epoch_and_that_of_the_evaluation_never() -> None:
    task = SsvaeTask(SMALL)
    first, second = (batch_of(task, "train", range(20)) for _ in range(2))
    assert not torch.isin(first.key, second.key).any()
    assert len(set(first.key.tolist())) == 20
    first, second = (batch_of(task, "test", range(20)) for _ in range(2))
    assert torch.equal(first.key, second.key)
    assert not first.is_labelled.any(), "the model is not told what it is asked"


def test_redrawn_labels_come_in_whole_batches_and_are_wrong_anew() -> None:
    torch.manual_seed(0)
    pool = Pool(torch.rand(400, 4), torch.arange(400) % 10)
    dataset = RedrawnLabels(pool, num_labels=100, corruption_rate=0.3)
    batches = [collate([dataset[i] for i in range(20)]) for _ in range(400)]
    shares = torch.stack([batch.is_labelled.float().mean() for batch in batches])
    assert set(shares.tolist()) == {0.0, 1.0}
    assert abs(float(shares.mean()) - 0.25) < 5 * (0.25 * 0.75 / 400) ** 0.5
    labels = torch.stack([batch.label for batch in batches])
    is_wrong = labels != pool.labels[:20]
    assert abs(float(is_wrong.float().mean()) - 0.3) < 5 * (0.21 / 8000) ** 0.5
    # Uniform over the nine wrong classes: chi-square with 8 degrees of freedom, 1e-6 quantile 43.
    offsets = ((labels - pool.labels[:20]) % 10)[is_wrong]
    counts = torch.bincount(offsets, minlength=10)[1:].double()
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 43


def test_the_loss_is_minus_the_objective_of_the_functions() -> None:
    for kind in ("exact", "sampled"):
        config = dataclasses.replace(SMALL, unlabelled=kind, n_labels=400, alpha=7.0)
        task = SsvaeTask(config)
        torch.manual_seed(1)
        model = task.model()
        batch = batch_of(task, "train", range(30))
        assert 0 < batch.is_labelled.sum() < 30
        hyper = Hyper(num_pixels=64, num_samples=2, num_style=3, unlabelled=kind)
        weights = {name.removeprefix("weights."): w[None] for name, w in model.named_parameters()}
        expected = objective(
            weights,
            batch.x[None],
            batch.label[None],
            batch.is_labelled[None],
            torch.tensor([7.0]),
            noise_of(hyper, batch.key[None]),
            hyper,
        )
        torch.testing.assert_close(task.loss(model, batch), -expected.objective[0])


def test_evaluation_sums_over_the_classes_and_measures_the_true_labels() -> None:
    exact, sampled = (
        SsvaeTask(dataclasses.replace(SMALL, unlabelled=kind, corruption_rate=1.0))
        for kind in ("exact", "sampled")
    )
    torch.manual_seed(1)
    model = exact.model()
    with torch.no_grad():
        columns = exact.score(model, batch_of(exact, "test", range(50)))
        others = sampled.score(model, batch_of(sampled, "test", range(50)))
    assert torch.equal(columns["bound"], others["bound"])
    metrics = exact.summarise(columns)
    truth = load("digits")["test"]
    guess = columns["log_q"].argmax(1)
    assert metrics["accuracy"] == pytest.approx((guess == truth.labels[:50]).float().mean().item())
    assert metrics["elbo_nats"] == pytest.approx(columns["bound"].mean().item())
    assert 0 <= metrics["calibration_error"] <= 1
    assert -50 < metrics["elbo_nats"] < -40  # log 2 per pixel of an untrained decoder, 44.4


def test_the_model_follows_from_the_seed_of_torch() -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(dict(SsvaeTask(SMALL).model().named_parameters()))
    first, same, other = models
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_sixteen_bits_are_refused() -> None:
    task = SsvaeTask(SMALL)
    batch = batch_of(task, "train", range(2))
    with pytest.raises(UsageError, match="16 bits"), torch.autocast("cpu", torch.bfloat16):
        task.loss(task.model(), batch)


def test_the_defaults_are_those_of_the_specification() -> None:
    config = TrainConfig.of(RECIPE.defaults)
    assert (config.epochs, config.lr, config.global_batch, config.seed) == (75, 1e-3, 128, 42)
    assert (config.weight_decay, config.schedule) == (0.0, "constant")  # AdamW is Adam then
    model = SsvaeNet(Hyper(num_pixels=784), 50.0, seed=0)
    sizes = {name: tuple(weight.shape) for name, weight in model.weights.items()}
    assert sizes["encoder_weight"] == (784, 256) and sizes["classifier_weight"] == (256, 10)
    assert sizes["style_weight"] == (266, 20) and sizes["decoder_weight"] == (20, 256)
    assert sizes["pixels_weight"] == (256, 784)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dataset": "cifar10"}, "--dataset cifar10 is not known"),
        ({"n_labels": 0}, "--n-labels 0"),
        ({"n_labels": 5000}, "--n-labels 5000"),
        ({"alpha": -1.0}, "--alpha -1"),
        ({"alpha": float("nan")}, "--alpha nan"),
        ({"corruption_rate": 1.5}, "--corruption-rate 1.5"),
        ({"num_style": 0}, "--num-style 0"),
        ({"num_samples": 0}, "--num-samples 0"),
        ({"temperature": 0.5}, "no effect with --unlabelled exact"),
        ({"temperature": -0.5, "unlabelled": "sampled"}, "--temperature -0.5"),
        ({"label_seed": 1, "label_protocol": "per-batch"}, "--label-seed 1 has no effect with"),
        ({"label_seed": 2**63}, f"--label-seed: the seed {2**63} is out of range."),
        ({"split_seed": 2**63}, f"--split-seed: the seed {2**63} is out of range."),
        ({"data_dir": Path("here")}, "--data-dir here has no effect"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        SsvaeTrainConfig(**changes)
    assert text in str(caught.value)


def test_a_missing_data_set_names_both_ways(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"does not exist or holds no(.|\n)*muster-gpu\[datasets\]"
    ):
        SsvaeTrainConfig(dataset="MNIST", data_dir=tmp_path)


def test_a_folder_is_the_same_one_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    write_mnist(tmp_path / "files", packed=False)
    monkeypatch.chdir(tmp_path)
    config = SsvaeTrainConfig(dataset="mnist", data_dir=Path("files"), n_labels=10)
    assert config.data_dir == tmp_path / "files"


def test_style_leakage_is_measured_at_the_end(tmp_path: Path) -> None:
    task = SsvaeTask(SMALL)
    torch.manual_seed(1)
    model = task.model()
    assert isinstance(model, SsvaeNet)
    task.finish(model, str(tmp_path))
    splits = load("digits")
    weights = {name.removeprefix("weights."): w[None] for name, w in model.named_parameters()}
    hyper = Hyper(num_pixels=64, num_samples=2, num_style=3)
    expected = style_leakage(weights, splits["test"], splits["train"], hyper).item()
    found = json.loads((tmp_path / "style_leakage.json").read_text())
    assert found == {"style_leakage": pytest.approx(expected)}
    with torch.no_grad():
        model.weights["style_bias"].fill_(torch.nan)
    task.finish(model, str(tmp_path))
    assert json.loads((tmp_path / "style_leakage.json").read_text()) == {"style_leakage": None}


SPELLINGS = ["--num-epochs 3", "--num_epochs 3", "--num-epochs=3", "--epochs 3"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("task", ["ssvae", "digits"])
def test_num_epochs_is_epochs(task: str, spelling: str) -> None:
    job, _ = train_job(flags_of_train([task, *spelling.split()], "train", "{recipes}"))
    assert isinstance(job.config, TrainConfig) and job.config.epochs == 3


def test_a_task_with_a_flag_of_that_name_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "own_epochs.py").write_text(
        "from dataclasses import dataclass\n"
        "from muster import Task\n"
        "@dataclass\n"
        "class Own(Task):\n"
        "    num_epochs: int = 1\n"
        "    model = dataset = loss = score = None\n"
    )
    words = [f"{tmp_path}/own_epochs.py:Own", "--num-epochs", "5", "--epochs", "2"]
    job, _ = train_job(flags_of_train(words, "train", "{recipes}"))
    assert isinstance(job.config, TrainConfig)
    assert (job.config.epochs, job.values["num_epochs"]) == (2, 5)


def jobs() -> list[Job]:
    found = [
        Job(
            name=f"{kind}-{ranks}",
            ranks=ranks,
            # 11 steps leave 5 images for the last, 3 and 2 for two ranks.
            config={**FEW, "global_batch": 129},
            task=SsvaeTask(dataclasses.replace(SMALL, unlabelled=kind)),
        )
        for kind in ("exact", "sampled")
        for ranks in (1, 2)
    ]
    # Every label is wrong: after a few epochs, the more it learns, the worse.
    wrong = dataclasses.replace(SMALL, corruption_rate=1.0)
    found += [
        Job(
            name=f"report-{report}",
            ranks=1,
            config={**FEW, "epochs": 4, "eval_frequency": 1},
            task=SsvaeTask(dataclasses.replace(wrong, report=report)),
        )
        for report in ("last", "best")
    ]
    learns = SsvaeTask(dataclasses.replace(SMALL, n_labels=600))
    found.append(Job(name="learns", ranks=1, config={**FEW, "epochs": 4}, task=learns))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("ssvae"), jobs())


needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")


@needs_fork
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_two_ranks_learn_what_one_learns(trained: Outcomes, kind: str) -> None:
    one, two = trained.weights(f"{kind}-1"), trained.weights(f"{kind}-2")
    assert one.keys() == two.keys()
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(
        torch.tensor(trained.losses(f"{kind}-2")),
        torch.tensor(trained.losses(f"{kind}-1")),
        rtol=1e-5,
        atol=0,
    )


@needs_fork
def test_the_last_model_is_reported_unless_the_best_is_asked_for(trained: Outcomes) -> None:
    last, best = trained.done("report-last"), trained.done("report-best")
    curve = [line["accuracy"] for line in last["evaluations"]]
    assert curve == [line["accuracy"] for line in best["evaluations"]]
    assert curve[-1] < max(curve), "or this test shows nothing"
    assert (last["reported"], last["best"]["step"]) == ("last", None)
    assert last["metrics"]["val"]["accuracy"] == curve[-1]
    assert (best["reported"], best["metrics"]["val"]["accuracy"]) == ("best", max(curve))
    assert any("the last one" in line for line in trained.of("report-last").said)


@needs_fork
def test_it_learns(trained: Outcomes) -> None:
    found = trained.done("learns")["metrics"]["test"]
    assert found["accuracy"] > 0.75  # measured 0.86; chance is 0.1
    assert found["elbo_nats"] > -30  # measured -26; an untrained model has -44
