"""What ``muster launch`` asks and the command it comes to, as tables and properties."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UsageError
from muster.cli.commands.launch import Flags
from muster.cli.help_page import field_texts
from muster.cli.questions import (
    Answers,
    Machine,
    Question,
    answered,
    command_of,
    next_question,
)
from muster.devices.inventory import Device, Holder, Inventory
from muster.train.config import TrainConfig

FREE = Device(
    index=0, uuid="GPU-0", name="NVIDIA A100", memory_total_mib=40960, memory_used_mib=960
)
BUSY = replace(FREE, index=1, uuid="GPU-1", memory_used_mib=40860,
               holders=(Holder(pid=7, user="ada", used_mib=40000),))  # fmt: skip
LAPTOP = Machine(inventory=Inventory(problem="No NVIDIA driver was found."), num_cores=4)
FOUR = tuple(
    replace(gpu, memory_used_mib=used, uuid=f"GPU-{n}", index=n)
    for n, (gpu, used) in enumerate([(FREE, 100), (BUSY, 40860), (FREE, 100), (FREE, 100)])
)
BOX = Machine(inventory=Inventory(devices=FOUR), num_cores=16)


def said(line: str) -> Answers:
    """The answers in ``kind=train target=har lr=0.1``; several words as in ``grid='a b'``."""
    pairs = [word.partition("=")[::2] for word in shlex.split(line)]
    many = ("grid", "args")
    return {name: tuple(text.split()) if name in many else (text,) for name, text in pairs}


def asked(machine: Machine, answers: Answers) -> list[Question]:
    """All questions, each answered with its default or, where there is none, in some way."""
    found = []
    while (question := next_question(machine, answers)) is not None:
        found.append(question)
        answers = answered(
            answers, question, "in.jsonl" if question.default is None else question.default
        )
    return found


def names(machine: Machine, line: str) -> list[str]:
    return [question.name for question in asked(machine, said(line))]


def named(machine: Machine, line: str, name: str) -> Question:
    return next(q for q in asked(machine, said(line)) if q.name == name)


def test_a_question_is_the_option_itself() -> None:
    question = named(BOX, "kind=train target=har gpu-ids=0,2", "strategy")
    texts = field_texts(TrainConfig)
    assert question.text == texts["strategy"]
    assert list(question.choices) == ["auto", "single", "dp", "ddp", "fsdp"]
    assert question.default == TrainConfig().strategy
    base = named(LAPTOP, "kind=train target=har", "base-lr")
    assert base.text == texts["base_lr"]
    assert base.default == "0.001", "the recipe's own default"
    known = {field.name for field in fields(TrainConfig)}
    assert {n.replace("-", "_") for n in names(LAPTOP, "kind=train target=har")} & known


def test_without_a_gpu_it_says_so_and_offers_cpu_ranks() -> None:
    question = named(LAPTOP, "kind=train target=har", "devices")
    assert "No NVIDIA driver was found" in question.text
    assert question.default == "cpu:2"


def test_gpus_are_shown_with_free_memory_and_the_free_ones_are_marked() -> None:
    question = named(BOX, "kind=train target=har", "gpu-ids")
    assert question.default == "0,2,3"
    assert "40,860 MiB free of 40,960" in question.choices["0"]
    assert "pid 7 (ada)" in question.choices["1"]


def test_the_learning_rate_is_shown_as_each_rule_would_scale_it() -> None:
    line = "kind=train target=har gpu-ids=0,2,3,1 batch-size=32"
    titles = named(BOX, line, "lr-scaling").choices
    assert "0.001 (not scaled)" in titles["none"]
    assert "0.004 = base 0.001 x 4" in titles["linear"]
    assert "0.002 = base 0.001 x 2" in titles["sqrt"]


def test_one_device_is_not_asked_how_to_share() -> None:
    found = names(LAPTOP, "kind=train target=har devices=cpu:1")
    assert "strategy" not in found and "lr-scaling" not in found and "base-lr" in found


def test_an_explicit_rate_is_not_scaled() -> None:
    found = names(BOX, "kind=train target=har gpu-ids=0,1 lr=0.1")
    assert not {"lr", "base-lr", "lr-scaling"} & set(found)


def test_a_rate_that_is_to_follow_the_batch_is_asked_instead_of_the_recipes_own() -> None:
    """All three were said, and the recipe's own, which is never scaled, was the one."""
    found = asked(BOX, said("kind=train target=digits gpu-ids=0,2 base-lr=0.1 batch-size=8"))
    assert "lr" not in [question.name for question in found]
    scaling = next(question for question in found if question.name == "lr-scaling")
    assert "0.8 = base 0.1 x 8" in scaling.choices["linear"]
    with pytest.raises(UsageError, match=r"--lr 0\.1 is never scaled"):
        next_question(BOX, said("kind=train target=digits gpu-ids=0,2 lr=0.1 lr-scaling=sqrt"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kind=train target=har gpu-ids=0,2 strategy=ddp batch-size=64 lr-scaling=linear "
         "precision=bf16 run-dir=runs/a",
         "train har --gpu-ids 0,2 --strategy ddp --batch-size 64 --lr-scaling linear "
         "--precision bf16 --run-dir runs/a"),
        (f"kind=run target={shlex.quote(__file__)} args=\"--lr 1e-3\" devices=cpu:2 run-dir=out",
         f"run --devices cpu:2 --run-dir out -- {shlex.quote(__file__)} --lr 1e-3"),
        (f"kind=sweep target={__file__}:f grid='lr=1,2 w=3' seeds=3 devices=cpu:4",
         f"sweep {__file__}:f --grid lr=1,2 w=3 --seeds 3 --devices cpu:4"),
        ("kind=map target=reasoning output=b.jsonl devices=cpu:1",
         "map reasoning --output b.jsonl --devices cpu:1"),
    ],
)  # fmt: skip
def test_answers_are_a_command(line: str, words: str) -> None:
    assert command_of(said(line)).argv() == ["muster", *shlex.split(words)]


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("kind=train", "target", "nowhere"),
        ("kind=train", "target", "nowhere.py:Task"),
        ("kind=sweep", "target", "nowhere.py:f"),
        ("kind=run", "target", "nowhere.py"),
        ("kind=train target=har", "batch-size", "0"),
        ("kind=train target=har", "batch-size", "many"),
        ("kind=train target=arith devices=cpu:1", "lr", "-1"),
        ("kind=train target=arith devices=cpu:1", "lr", "nan"),
        (f"kind=sweep target={__file__}:f", "grid", "lr"),
        (f"kind=sweep target={__file__}:f", "grid", "lr='1"),
        ("kind=train target=har", "devices", "none"),
        ("kind=train target=har devices=cpu:1", "precision", "fp8"),
        ("kind=map target=embed", "input", ""),
    ],
)
def test_answers_that_cannot_be_meant_are_refused(line: str, name: str, text: str) -> None:
    """In the words of the command that would refuse them."""
    answers = said(line)
    while (question := next_question(LAPTOP, answers)) is not None and question.name != name:
        answers = answered(answers, question, question.default or "")
    assert question is not None
    with pytest.raises(UsageError, match=f"--{name}|nowhere|lr=VALUE"):
        answered(answers, question, text)


def test_the_first_proposal_is_a_quick_one() -> None:
    question = next_question(LAPTOP, said("kind=train"))
    assert question is not None and question.default == "digits"
    assert "clstm-ppo" in question.text


def test_a_recipes_own_rule_for_the_learning_rate_stays() -> None:
    assert named(LAPTOP, "kind=train target=har devices=cpu:2", "lr-scaling").default == "linear"
    found = names(LAPTOP, "kind=train target=arith devices=cpu:2")
    assert "lr-scaling" not in found, "a rate that the recipe names is never scaled"
    assert named(LAPTOP, "kind=train target=arith devices=cpu:2", "lr").default == "0.002"


def test_a_recipes_own_flags_are_offered_in_one_question() -> None:
    question = named(LAPTOP, "kind=train target=digits", "args")
    assert "--model cnn|mlp, --width N" in question.text and question.default == ""
    answers = said("kind=train target=digits devices=cpu:1")
    while (asked_now := next_question(LAPTOP, answers)) is not None and asked_now != question:
        answers = answered(answers, asked_now, asked_now.default or "")
    with pytest.raises(UsageError, match="--width"):
        answered(answers, question, "--width wide")
    found = command_of(answered(answers, question, "--model mlp --width 8")).argv()
    assert shlex.join(found).endswith("--model mlp --width 8")
    assert "args" not in names(LAPTOP, "kind=sweep target=module:f grid='a=1'")


def test_agents_and_maps_are_asked_what_they_have() -> None:
    assert names(LAPTOP, "kind=train target=clstm-ppo devices=cpu:2") == [
        "lr", "run-dir", "args",
    ]  # fmt: skip
    found = names(LAPTOP, "kind=map target=embed")
    assert found == ["input", "output", "devices", "run-dir", "args"]
    assert named(LAPTOP, "kind=map target=embed", "output").default == "embeddings.parquet"
    assert names(LAPTOP, "kind=sweep target=ssm devices=cpu:1") == ["run-dir", "args"]


def test_a_setting_without_a_default_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the command that came out was refused for lack of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import muster\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Config:\n"
        "    width: int\n"
        '    """How wide it is."""\n'
        "def area(width): return {'area': width}\n"
        "RECIPE = muster.Recipe(name='own', config=Config, targets={'area': 'own.py:area'},\n"
        "    plan=lambda c: [muster.RecipeTask('area', {'width': c.width})], count=lambda c: 1,\n"
        "    summarise=lambda c, rows: [], draw=lambda c, table, folder: [])\n"
    )
    question = next_question(LAPTOP, said("kind=sweep target=own.py:RECIPE"))
    assert question is not None
    assert (question.name, question.text, question.default) == ("width", "How wide it is.", None)
    with pytest.raises(UsageError, match="--width wide: write a whole number"):
        answered(said("kind=sweep target=own.py:RECIPE"), question, "wide")
    with pytest.raises(UsageError, match="--width is missing"):
        Flags().ask(question, lambda text: None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"kind=run target={__file__} lr=0.1 args=", "no flag --lr"),
        ("kind=train target=har grid=a=1", "no flag --grid"),
        ("kind=sweep target=ssm args=--no-such", "muster sweep ssm has no flag --no-such"),
        ("kind=sweep target=module:f args='--grid a=1'", "--args has no effect with --kind sweep"),
        ("kind=run target=nowhere.py args=", "There is no script nowhere.py"),
        ("kind=train target=har batch-size=-1", "--batch-size must be greater than 0"),
        ("kind=train target=arith devices=cpu:1 lr=-1.0", "--lr must be greater than 0"),
        ("kind=sweep target=module:f grid=lr", "lr=VALUE"),
    ],
)
def test_flags_are_checked_like_typed_answers(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        next_question(LAPTOP, said(line))


@examples(12)
@given(
    work=st.sampled_from([
        "kind=train target=har", "kind=train target=ppo", f"kind=run target={__file__}",
        "kind=sweep target=ssm", "kind=map target=reasoning",
    ]),
    machine=st.sampled_from([LAPTOP, BOX]),
    devices=st.sampled_from(["", " devices=cpu:1", " devices=cpu:3", " devices=auto"]),
)  # fmt: skip
def test_defaults_always_come_to_a_command(work: str, machine: Machine, devices: str) -> None:
    """Whatever is answered, the questions end, and each is asked once."""
    answers, seen = said(work + devices), []
    while (question := next_question(machine, answers)) is not None:
        seen.append(question.name)
        text = Flags().ask(question, lambda text: None) if question.default is not None else "in"
        answers = answered(answers, question, text)
    assert len(seen) == len(set(seen))
    argv = command_of(answers).argv()
    assert [f"kind={argv[1]}", "muster"] == [work.split()[0], argv[0]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kind=train target=--help", "--target --help: --help is a flag"),
        ("kind=map target=-h", "--target -h: -h is a flag"),
        (f"kind=run target={__file__} args=--help run-dir=--quiet", "--run-dir --quiet: --quiet"),
        (f"kind=sweep target={__file__}:f grid='lr=1,2 --restart'", "--restart is a flag"),
        (f"kind=sweep target={__file__}:f seeds=--", "-- is a flag"),
    ],
)
def test_a_flag_is_no_answer(line: str, says: str) -> None:
    """``--help`` as a target printed the help of train and ended; ``--restart`` was taken on."""
    with pytest.raises(UsageError, match=says):
        next_question(LAPTOP, said(line))


def test_a_flag_that_is_typed_is_asked_for_again() -> None:
    question = next_question(LAPTOP, said("kind=train"))
    assert question is not None
    with pytest.raises(UsageError, match="--help is a flag"):
        answered(said("kind=train"), question, "--help")
    words = said(f"kind=run target={shlex.quote(__file__)} args='--help --lr -1' devices=cpu:1")
    assert command_of(words).program[1:] == ("--help", "--lr", "-1"), "the program's own"


def test_what_takes_several_words_shows_their_shape() -> None:
    question = named(LAPTOP, f"kind=sweep target={__file__}:f devices=cpu:1", "grid")
    assert question.text.endswith("May be given several times. Write NAME=V1,V2,…")
