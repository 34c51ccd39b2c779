"""What goes wrong on ranks: memory, models that drift apart, tasks that are not as they must be."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from tests.unit.train.plain_training import train_plainly
from tests.unit.train.rank_jobs import Job, Outcomes, run_jobs
from tests.unit.train.toy_tasks import (
    GoesAround,
    GoesHalfAround,
    MeanLoss,
    MeanScore,
    NoSuchMetric,
    Toy,
)

from muster import MusterError
from muster.base.errors import TargetError, UsageError

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]

STEPS = {"global_batch": 8, "epochs": 3, "max_grad_norm": 0.5}

#: Ranks, task and settings; and the micro-batch it must come down to.
SHORT: dict[str, tuple[int, Toy, dict[str, Any], int]] = {
    "alone": (1, Toy(fits=3), {}, 2),
    "all": (2, Toy(fits=2), {}, 2),
    "one-rank": (2, Toy(fits=2, on=1), {}, 2),
    "forward": (2, Toy(trouble="forward", at=6, on=1), {"batch_size": 2}, 1),
    "last-forward": (2, Toy(trouble="forward", at=6, micro=1, on=0), {"batch_size": 2}, 1),
    "backward": (2, Toy(trouble="backward", at=6, on=1), {"batch_size": 4}, 2),
    "last-backward": (2, Toy(trouble="backward", at=6, micro=1, on=0), {"batch_size": 2}, 1),
    "mid-backward": (2, Toy(trouble="deep", at=6, on=1), {"batch_size": 4}, 2),
    "unused": (2, Toy(trouble="forward", at=6, on=1, unused=True), {"batch_size": 2}, 1),
    "unused-backward": (2, Toy(trouble="deep", at=6, on=0, unused=True), {"batch_size": 4}, 2),
    "first-step": (4, Toy(trouble="backward", at=0, on=3), {"batch_size": 2}, 1),
    "filtered": (2, Toy(fits=2, none_every=3), {}, 2),
}  # fmt: skip

#: Task and settings that no rank can train; the error and words in it.
WRONG: dict[str, tuple[int, Toy, dict[str, Any], type[MusterError], list[str]]] = {
    "around": (2, GoesAround(), {}, MusterError,
        ["GoesAround.loss does not call the model that it is given", "a model of its own"]),
    "around-in-part": (2, GoesHalfAround(), {}, MusterError,
        ["GoesHalfAround.loss does not call the model that it is given"]),
    "drift": (2, Toy(trouble="drift", on=1), {}, MusterError,
        ["no longer the same after step 1", "layers.0.weight"]),
    "nothing-fits": (2, Toy(trouble="never", on=1), {"batch_size": 2}, MusterError,
        ["Not even one sample per rank fits", "113 parameters"]),
    "mean": (2, MeanLoss(), {}, TargetError, ["MeanLoss.loss gave", "reduction='none'"]),
    "mean-score": (2, MeanScore(), {}, TargetError, ["MeanScore.score gave () for 'loss'"]),
    "no-metric": (2, NoSuchMetric(), {}, TargetError,
        ["acuracy", "metrics are loss, seen", "monitor = 'loss'"]),
    "empty": (2, Toy(samples=0), {}, TargetError, ["dataset('train') is empty"]),
    "all-none": (2, Toy(none_below=37), {}, TargetError, ["are all None"]),
    "all-none-val": (2, Toy(none_below=20), {}, TargetError, ["None"]),
    "large": (2, Toy(samples=7), {}, UsageError, ["global batch of 8 is larger", "7 samples"]),
    "crumbs": (4, Toy(), {"global_batch": 3}, UsageError, ["--global-batch 3", "4"]),
    "three-numbers": (2, Toy(), {"batch_size": 3, "grad_accum_steps": 2}, UsageError,
        ["2 ranks x --batch-size 3 x --grad-accum-steps 2 = 12", "--global-batch 8"]),
    "one-device": (2, Toy(), {"strategy": "single"}, UsageError, ["2 ranks were started"]),
    "sync-bn": (2, Toy(batchnorm=True), {"sync_batchnorm": True}, UsageError, ["GPUs only"]),
    "tf32": (2, Toy(), {"precision": "tf32"}, UsageError, ["Ampere"]),
}  # fmt: skip


def jobs() -> list[Job]:
    found = [
        Job(name=name, ranks=ranks, task=task, config={**STEPS, **config})
        for name, (ranks, task, config, _) in SHORT.items()
    ]
    sharded = {**STEPS, "strategy": "fsdp"}
    found += [
        Job(name="longer", ranks=2, task=Toy(fits=2), config=STEPS),
        Job(name="longer-again", ranks=2, task=Toy(), config={**STEPS, "epochs": 4},
            folder="longer"),
        Job(name="fsdp-short", ranks=2, task=Toy(fits=2), config=sharded, folder="fsdp"),
        Job(name="fsdp-again", ranks=2, task=Toy(fits=2), config=sharded, folder="fsdp"),
    ]  # fmt: skip
    found += [
        Job(name=f"wrong-{name}", ranks=ranks, task=task, config={**STEPS, **config})
        for name, (ranks, task, config, _, _) in WRONG.items()
    ]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_jobs(tmp_path_factory.mktemp("trouble"), jobs())


@pytest.mark.parametrize("name", SHORT)
def test_out_of_memory_changes_no_loss(name: str, trained: Outcomes) -> None:
    _, task, _, micro_batch = SHORT[name]
    plain = Toy(none_every=task.none_every, unused=task.unused)
    wanted = train_plainly(plain, global_batch=8, epochs=3, max_grad_norm=0.5)
    assert trained.losses(name) == pytest.approx(wanted.losses, rel=1e-10, abs=0)
    results = trained.done(name)
    assert results["micro_batch"] == micro_batch
    assert results["global_batch"] == 8
    said = "\n".join(trained.of(name).said)
    assert "memory     ran out with micro-batches of" in said
    remembered = json.loads(trained.folder(name).memory_json.read_text())
    assert remembered["micro_batch"] == micro_batch
    steps = [line["step"] for line in trained.lines(name)]
    assert steps == list(range(1, 16))


def test_what_fits_is_remembered_at_the_next_start(trained: Outcomes) -> None:
    trained.done("longer-again")
    said = "\n".join(trained.of("longer-again").said)
    assert "micro-batches of 2, which was found to fit in an earlier start" in said
    assert "ran out" not in said


def test_a_sharded_model_starts_again_with_what_fits(trained: Outcomes) -> None:
    assert "StartAgain" in trained.of("fsdp-short", 1).kinds
    wanted = train_plainly(Toy(), global_batch=8, epochs=3, max_grad_norm=0.5)
    assert trained.losses("fsdp-again") == pytest.approx(wanted.losses, rel=1e-10, abs=0)


@pytest.mark.parametrize("name", WRONG)
def test_every_rank_says_what_is_wrong(name: str, trained: Outcomes) -> None:
    ranks, _, _, kind, words = WRONG[name]
    for rank in range(ranks):
        outcome = trained.of(f"wrong-{name}", rank)
        assert kind.__name__ in outcome.kinds, outcome.trace or "it has trained"
        assert outcome.exit_code == kind.exit_code
        for word in words:
            assert word in (outcome.error or "")
        assert "Hint:" in (outcome.error or "")


def test_numbers_when_nothing_fits(trained: Outcomes) -> None:
    error = trained.of("wrong-nothing-fits", 1).error or ""
    assert re.search(r"allocate \d+ bytes", error), error
