"""What holds for the flags and the help of every command."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import MusterCli
from tests.examples import examples

from muster.base.errors import UsageError
from muster.cli.help_page import MOST_FLAGS, flag_words, help_text
from muster.cli.main import COMMANDS, read_command
from muster.cli.options import Option, options_of
from muster.cli.parse import Parsed
from muster.cli.recipes import AGENTS, MAPS, RECIPES, TASKS
from muster.cli.train_flags import flags_of_train, train_job
from muster.cli.values import texts

PAGES = [
    *COMMANDS,
    *(f"sweep {name}" for name in RECIPES),
    *(f"{command} {name}" for command in ("train", "verify") for name in TASKS),
    *(f"train {name}" for name in AGENTS),
    *(f"map {name}" for name in MAPS),
]
FLAG = re.compile(r"^  --(?:\[no-\])?([a-z][\w-]*)", re.MULTILINE)


@pytest.mark.parametrize("command", PAGES)
def test_help_is_one_page_with_an_example(command: str, muster_main: MusterCli) -> None:
    words = command.split()
    short, whole = muster_main(*words, "--help"), muster_main(*words, "--help-all")
    assert short.returncode == whole.returncode == 0
    shown, every = FLAG.findall(short.stdout), FLAG.findall(whole.stdout)
    assert len(shown) == len(set(shown)) <= MOST_FLAGS
    assert len(every) == len(set(every)) and set(shown) <= set(every)
    assert f"  muster {words[0]}" in short.stdout
    for text in (short.stdout, whole.stdout):
        assert "None" not in text and "STR" not in text and "(default: )" not in text
    assert muster_main("help", *words).stdout == short.stdout


def test_flags_of_a_cluster_are_shown_where_it_is_asked_for(muster_main: MusterCli) -> None:
    short = muster_main("train", "digits", "--help").stdout
    asked = muster_main("train", "digits", "--on", "slurm", "--help").stdout
    assert "--partition" not in short and "--partition" in asked
    assert len(FLAG.findall(asked)) <= MOST_FLAGS
    of_ray = muster_main("sweep", "--on=ray", "--help").stdout
    assert "--placement-strategy" in of_ray and "--partition" not in of_ray


def test_aliases_are_understood_and_not_shown(muster_main: MusterCli) -> None:
    whole = muster_main("sweep", "--help-all").stdout
    assert "--devices auto|N|0,2|cpu:8" in whole
    for alias in ("--gpus ", "--num-gpus", "--world-size", "--no-multi-gpu"):
        assert alias not in whole


#: A command of each kind, with the words that it cannot do without.
MADE = {
    "muster sweep ssm": (),
    "muster sweep ssvae": (),
    "muster sweep -- echo {x}": ("--grid", "x=1"),
    "muster train digits": (),
    "muster train ppo": (),
    "muster map embed": ("--input", "in.jsonl", "--output", "out.jsonl", "--model", "m"),
    "muster map reasoning": ("--dataset", "arith", "--model", "m", "--output", "out.jsonl"),
    "muster run train.py --lr 1": (),
}
_TEXTS = {
    "devices": "cpu:2", "num_gpus": "2", "gpu_ids": "0,1", "cpus": "2", "run_dir": "runs/a b",
    "where": "a>=1", "resources": "ssd=1", "slurm_args": "nice=1", "grid": "y=1,2", "zip": "z=3,4",
    "part": "1/2", "max_worker_memory_mib": "900M", "seeds": "3,5", "time_limit": "4:00:00",
    "memory": "16G",
}  # fmt: skip


def words_for(option: Option) -> list[str]:
    """The flag with a value that its type allows."""
    if option.arity == 0:
        return [f"--{option.name}"]
    name = option.path[-1]
    if name in _TEXTS:
        return [f"--{option.name}", _TEXTS[name]]
    if option.default not in (None, MISSING, ()) and option.flag.read is None:
        return [f"--{option.name}", *texts(option.default)]
    if option.flag.alone is not None:
        return [f"--{option.name}=90"]
    shape = flag_words(option).split(" ", 1)[1]
    value = {"N": "3", "X": "0.5", "TIME": "90"}.get(shape.split()[0], shape.split("|")[0])
    return [f"--{option.name}", value]


@pytest.mark.parametrize("command", MADE)
@pytest.mark.thorough
@examples(8)
@given(data=st.data())
def test_a_command_is_read_and_said_again(command: str, data: st.DataObject) -> None:
    """What a stored command means is what it means when it is written from its options."""
    head, program = _split(command)
    try:
        needed = read_command([*head, *MADE[command], *program])
    except UsageError as error:
        pytest.skip(str(error))
    options = [o for o in needed.flags if not o.flag.is_positional]
    names = {o.name: o for o in reversed(options)}
    chosen = data.draw(st.lists(st.sampled_from(sorted(names)), max_size=5, unique=True))
    words = [word for name in chosen for word in words_for(names[name])]
    try:
        once = read_command([*head, *MADE[command], *words, *program])
    except UsageError:
        return  # they contradict each other, or have no effect here
    again = read_command(once.argv())
    assert again.argv() == once.argv()
    assert values_of(again) == values_of(once)


def _split(command: str) -> tuple[list[str], list[str]]:
    words = shlex.split(command)
    if words[1] == "run":
        return words[:2], words[2:]
    if "--" in words:
        return words[: words.index("--")], words[words.index("--") :]
    return words, []


def values_of(parsed: Parsed) -> dict[str, object]:
    return {group: parsed.given(group) for group in parsed.groups}


def test_every_flag_says_what_it_is_for() -> None:
    for command, needed in MADE.items():
        head, program = _split(command)
        parsed = read_command([*head, *needed, *program])
        for name, group in parsed.groups.items():
            for option in options_of(name, group):
                assert help_text(option), f"{command}: --{option.name}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digits --epoch 3",
         "muster train digits has no flag --epoch.\nHint: did you mean --epochs?"),
        ("sweep ssm --x", "muster sweep ssm has no flag --x.\n"),
        ("sweep ssm --x=3", "muster sweep ssm has no flag --x.\n"),
        ("sweep ssm -x", "muster sweep ssm has no flag -x.\n"),
        ("train digits --epochs", "--epochs needs a value: N."),
        ("train digits --epochs three", "--epochs three: write a whole number."),
        ("train digits --precision fp23",
         "--precision fp23: write auto, fp32, tf32, bf16 or fp16.\nHint: did you mean fp32?"),
        ("train digits har", "muster train digits does not know what to do with 'har'."),
        ("train digits --compile=yes", "--compile takes no value."),
        ("sweep t.py:f --per-gpu many", "--per-gpu many: write a whole number or auto."),
        ("list --root", "--root needs a value: DIR."),
        ("status", "RUN is missing."),
        ("export runs/x", "--to is missing."),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_in_a_sentence(
    words: str, message: str, muster_main: MusterCli
) -> None:
    done = muster_main(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"muster: {message}"), done.stderr
    assert "╭" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flag", ["--dry-run", "--run-dir x", "--all-ranks", "--monitor-interval 1"]
)
def test_verify_has_no_flags_that_do_nothing_there(flag: str) -> None:
    """They were taken; --dry-run even started it."""
    with pytest.raises(UsageError, match=f"has no flag {flag.split()[0]}"):
        train_job(flags_of_train(["digits", *flag.split()], "verify", ""))
