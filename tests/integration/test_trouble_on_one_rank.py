"""What goes wrong on one rank of a training: it ends soon, with the rank and the cause by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")

TRAIN = ("--devices", "cpu:2", "--batch-size", "4", "--epochs", "4", "--no-tensorboard",
         "--run-dir", "run", "--stall-timeout", "120")  # fmt: skip
#: Of a rank that says itself what is wrong: it is the user's.
NOT_LEARNT = "Rank 1, step 6: Losing.loss does not depend on any parameter that can be trained."
OWN = "rank 1 of 2 failed: ValueError: there is no such gradient"
#: What goes wrong, more flags, the exit code, and words.
CASES: list[tuple[str, tuple[str, ...], int, str]] = [
    ("detached", (), 2, NOT_LEARNT),
    ("no-grad", (), 2, NOT_LEARNT),
    ("number", (), 2, "Rank 1, step 6: Losing.loss gave float for a batch of 4 samples"),
    ("none", (), 2, "Rank 1, step 6: Losing.loss gave NoneType for a batch of 4 samples"),
    ("mean", (), 2, "Rank 1, step 6: Losing.loss gave () for a batch of 4 samples"),
    ("unused", (), 2, "Rank 1, step 6: The loss of a step did not use second.weight, second.bias"),
    ("input-only", (), 2, "Rank 1, step 6: The loss of a step did not use first.weight"),
    ("nan", (), 1, "The loss became nan in step 6 (epoch 1) on rank 1."),
    ("weight=nan", (), 1, "The weights of the loss add up to nan in step 6 (epoch 1) on rank 1"),
    ("weight=-99", (), 1, "The weights of the loss add up to -95 in step 6 (epoch 1) on rank 1"),
    ("raises", (), 1, OWN),
    ("raises-deep", (), 1, OWN),
    ("hook", (), 1, OWN),
]
#: The same where gradients travel otherwise.
OTHERWISE: list[tuple[str, tuple[str, ...], int, str]] = [
    ("detached", ("--grad-accum-steps", "2"), 2, "Rank 1, step 3: Losing.loss does not depend"),
    ("raises", ("--grad-accum-steps", "2"), 1, OWN),
    ("detached", ("--strategy", "fsdp"), 2, "Losing.loss does not depend"),
    ("raises", ("--strategy", "fsdp"), 1, OWN),
    ("raises", ("--start", "exec"), 1, OWN),
    ("raises-deep", ("--start", "exec"), 1, OWN),
    ("raises", ("--holds",), 1, OWN),
    ("raises", ("--holds", "--start", "exec"), 1, OWN),
    ("detached", ("--holds",), 2, NOT_LEARNT),
]


#: Of those that take the same way through the code one is enough for each change; the others are
#: slow.
ALIKE = ("no-grad", "none", "mean", "weight=nan", "weight=-99", "raises-deep", "hook")
ALONE = [("detached", "2"), ("raises", "exec"), ("detached", "--holds")]
EVERY = [
    pytest.param(*one, marks=[pytest.mark.slow] * (one[0] in ALIKE if not one[1] else
                                                   (one[0], one[1][-1]) not in ALONE or
                                                   len(one[1]) > 2))
    for one in (*CASES, *OTHERWISE)
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "flags", "code", "words"),
    EVERY,
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else None,
)
def test_it_ends_soon_with_the_rank_and_the_cause(
    how: str, flags: tuple[str, ...], code: int, words: str, tmp_path: Path, muster_cli: MusterCli
) -> None:
    check(how, flags, code, words, "Losing", tmp_path, muster_cli)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("detached", 2, "Rank 1, step 6: Skipping.loss does not depend on any parameter"),
     ("input-only", 2, "Hint: the loss has to follow from all that the model gives"),
     pytest.param("raises", 1, OWN, marks=pytest.mark.slow)],
)  # fmt: skip
def test_so_it_does_where_unused_parameters_are_searched_for(
    how: str, code: int, words: str, tmp_path: Path, muster_cli: MusterCli
) -> None:
    check(how, (), code, words, "Skipping", tmp_path, muster_cli)


def check(
    how: str, flags: tuple[str, ...], code: int, words: str, name: str, folder: Path,
    muster_cli: MusterCli,
) -> None:  # fmt: skip
    (folder / "losing.py").write_text(read_program("losing_task.py"))
    done = muster_cli("train", f"losing.py:{name}", "--how", how, *TRAIN, *flags)
    assert done.returncode == code, done.stderr
    assert words in done.stderr, done.stderr
    assert "stalled" not in done.stderr and "wait for each other" not in done.stderr
    if "--holds" in flags:
        assert (folder / "left.txt").read_text() == "all of it"
        log = (folder / "run/logs/rank-1.log").read_text()
        # A mistake of the user's is told to the other ranks: they end, and the launcher ends this.
        assert ("this rank has failed and not ended for 30 s" in log) == (how == "raises"), log
    if how == "raises":  # to part may take long, and the others fail by it
        log = (folder / "run/logs/rank-1.log").read_text()
        assert log.index("ValueError: there is no such gradient") < log.index("the ranks part")
    steps = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    last = 2 if "2" in flags else 6 if "fsdp" in flags else 5  # its rehearsal asks for a loss less
    if how == "raises-deep":  # behind the last gradient: the step has all that it needs
        last += 1
    assert {line["step"] for line in steps} == set(range(1, last + 1))
    why = muster_cli("why", "run").stdout
    assert words.partition(": ")[2] in why, why
    # It has taken steps, so it has failed, and was not refused at its start.
    assert why.startswith("run: failed"), why
    if how == "nan":
        assert "There is no checkpoint." in why and "goes on from" not in why, why
