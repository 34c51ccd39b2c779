"""What ``muster launch`` asks and the command it comes to, as tables and properties."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import UsageError
from muster.cli.launcher.answers import Answers, command_line, command_words
from muster.cli.launcher.asking import Flags
from muster.cli.launcher.questions import (
    Gpu,
    Machine,
    Question,
    answered,
    check_given,
    questions,
)

FREE = Gpu(number=0, name="NVIDIA A100", memory_total_mib=40960, memory_free_mib=40000)
BUSY = replace(FREE, number=1, memory_free_mib=100, busy="used by ada")
LAPTOP = Machine(
    gpus=(),
    why_no_gpu="No NVIDIA driver was found.",
    num_cores=4,
    tasks={
        "arith": {"lr": 2e-3},
        "digits": {"base_lr": 3e-3, "batch_size": 32},
        "har": {"base_lr": 1e-3, "lr_scaling": "linear"},
    },
    sweeps=("ssm",),
    agents={"ppo": {"num_envs": 8}, "clstm-ppo": {"lr": 1e-3}},
    maps={"embed": False, "reasoning": True},
)
BOX = replace(LAPTOP, gpus=(FREE, BUSY, replace(FREE, number=2), replace(FREE, number=3)))


def named(machine: Machine, answers: Answers, name: str) -> Question:
    return next(q for q in questions(machine, answers) if q.name == name)


def test_without_a_gpu_it_says_so_and_offers_cpu_ranks() -> None:
    question = named(LAPTOP, Answers(kind="train", target="digits"), "devices")
    assert "No NVIDIA driver was found" in question.text and "CPU ranks" in question.text
    assert answered(Answers(), question, "3").devices == "cpu:3"


def test_gpus_are_shown_with_free_memory_and_the_free_ones_are_marked() -> None:
    question = named(BOX, Answers(kind="train", target="digits"), "gpu_ids")
    assert question.default == "0,2,3"
    titles = [choice.title for choice in question.choices]
    assert "40,000 MiB free of 40,960" in titles[0]
    assert "used by ada" in titles[1]


def test_the_learning_rate_is_shown_as_each_rule_would_scale_it() -> None:
    answers = Answers(kind="train", target="digits", gpu_ids="0,2,3,1", batch_size=32)
    titles = {c.value: c.title for c in named(BOX, answers, "lr_scaling").choices}
    assert "0.003 (not scaled)" in titles["none"]
    assert "0.012 = base 0.003 x 4" in titles["linear"]
    assert "0.006 = base 0.003 x 2" in titles["sqrt"]


def test_one_device_is_not_asked_how_to_share() -> None:
    names = [q.name for q in questions(LAPTOP, Answers(kind="train", devices="cpu:1"))]
    assert "strategy" not in names and "lr_scaling" not in names and "lr" in names


def test_an_explicit_rate_is_not_scaled() -> None:
    names = [q.name for q in questions(BOX, Answers(kind="train", gpu_ids="0,1", lr=0.1))]
    assert "lr" not in names and "lr_scaling" not in names


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            Answers(kind="train", target="digits", gpu_ids="0,2", strategy="ddp", batch_size=64,
                    lr_scaling="linear", precision="bf16", run_dir="runs/a"),
            "train digits --gpu-ids 0,2 --strategy ddp --batch-size 64 --lr-scaling linear "
            "--precision bf16 --run-dir runs/a",
        ),
        (
            Answers(kind="run", target="my train.py", args="--lr 1e-3 --name 'a b'",
                    devices="cpu:2", run_dir="out"),
            "run --devices cpu:2 --run-dir out 'my train.py' --lr 1e-3 --name 'a b'",
        ),
        (
            Answers(kind="sweep", target="t.py:f", grid=("lr=1,2", "w=3"), seeds="3",
                    devices="cpu:4"),
            "sweep t.py:f --grid lr=1,2 w=3 --seeds 3 --devices cpu:4",
        ),
    ],
)  # fmt: skip
def test_answers_are_a_command(answers: Answers, words: str) -> None:
    assert command_line(answers) == f"muster {words}"
    assert list(command_words(answers)) == shlex.split(words)


@pytest.mark.parametrize(
    ("answers", "name", "text"),
    [
        (Answers(kind="train"), "target", "nowhere"),
        (Answers(kind="train"), "target", "nowhere.py:Task"),
        (Answers(kind="run"), "target", "nowhere.py"),
        (Answers(kind="train"), "batch_size", "0"),
        (Answers(kind="train"), "batch_size", "many"),
        (Answers(kind="train", devices="cpu:1"), "lr", "-1"),
        (Answers(kind="train", devices="cpu:1"), "lr", "nan"),
        (Answers(kind="sweep", target="t.py:f"), "grid", "lr"),
        (Answers(kind="train"), "devices", "none"),
        (Answers(kind="train", devices="cpu:1"), "precision", "tf32"),
    ],
)
def test_answers_that_cannot_be_meant_are_refused(answers: Answers, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        answered(answers, named(LAPTOP, answers, name), text)


def test_the_first_proposal_is_a_quick_one() -> None:
    assert named(LAPTOP, Answers(kind="train"), "target").default == "digits"


def test_a_recipes_own_rule_for_the_learning_rate_stays() -> None:
    har = Answers(kind="train", target="har", devices="cpu:2")
    assert named(LAPTOP, har, "lr_scaling").default == "linear"
    names = [q.name for q in questions(LAPTOP, replace(har, target="arith"))]
    assert "lr_scaling" not in names, "a rate that the recipe names is never scaled"
    assert named(LAPTOP, replace(har, target="arith"), "lr").default == "0.002"


def test_agents_and_maps_are_offered_with_questions_of_their_own() -> None:
    agent = Answers(kind="train", target="clstm-ppo", devices="cpu:2")
    assert [q.name for q in questions(LAPTOP, agent)] == ["lr", "run_dir"]
    assert "clstm-ppo" in named(LAPTOP, Answers(kind="train"), "target").help
    assert [q.name for q in questions(LAPTOP, Answers(kind="map", target="embed"))] == [
        "input", "output", "devices", "run_dir",
    ]  # fmt: skip
    own = Answers(kind="map", target="reasoning", devices="cpu:1")
    assert [q.name for q in questions(LAPTOP, own)] == ["output", "run_dir"]
    done = replace(own, input="a.jsonl", output="b.jsonl")
    assert command_line(done) == (
        "muster map reasoning --input a.jsonl --output b.jsonl --devices cpu:1"
    )


@pytest.mark.parametrize(
    ("answers", "flag"),
    [
        (Answers(kind="run", target=__file__, lr=0.1), "--lr"),
        (Answers(kind="train", target="har", grid=("a=1",)), "--grid"),
        (Answers(kind="sweep", target="ssm", args="--x"), "--args"),
        (Answers(kind="run", target="nowhere.py"), "--target"),
        (Answers(kind="train", target="har", batch_size=-1), "--batch-size"),
        (Answers(kind="train", target="har", devices="cpu:1", lr=-1.0), "--lr"),
        (Answers(kind="sweep", target="module:f", grid=("lr",)), "--grid"),
    ],
)
def test_flags_are_checked_like_typed_answers(answers: Answers, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        check_given(LAPTOP, answers)


def test_flags_that_can_be_meant_are_taken() -> None:
    check_given(BOX, Answers())
    check_given(BOX, Answers(kind="train", target="har", gpu_ids="0,1", batch_size=4, lr=1e-3,
                             strategy="ddp", precision="bf16", epochs=3, run_dir="x"))  # fmt: skip
    check_given(LAPTOP, Answers(kind="sweep", target="ssm", devices="cpu:2", per_gpu="2"))


@given(
    kind=st.sampled_from(["train", "agent", "run", "sweep", "map"]),
    machine=st.sampled_from([LAPTOP, BOX]),
    devices=st.none() | st.sampled_from(["cpu:1", "cpu:3", "auto", "2"]),
)
def test_defaults_always_come_to_a_command(
    kind: str, machine: Machine, devices: str | None
) -> None:
    """Whatever is answered, the questions end, and each is asked once."""
    target = {"train": "har", "agent": "ppo", "run": __file__, "sweep": "ssm",
              "map": "reasoning"}[kind]  # fmt: skip
    kind = "train" if kind == "agent" else kind
    answers, seen = Answers(kind=kind, target=target, devices=devices), []
    while pending := questions(machine, answers):
        seen.append(pending[0].name)
        answers = answered(answers, pending[0], Flags().ask(pending[0]))
    assert len(seen) == len(set(seen))
    assert command_words(answers)[0] == kind
    assert answers.run_dir == f"runs/{Path(target).stem}"
