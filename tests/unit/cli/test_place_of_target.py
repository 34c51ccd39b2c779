"""The target of a command is found among its flags; no value of a flag is taken for it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import MusterCli
from tests.examples import examples

from muster.api.runs import Run
from muster.base.errors import UsageError
from muster.base.flags import Alias
from muster.cli.commands import add, resume, start
from muster.cli.commands.sweep import GROUPS, flags_of_sweep, is_target
from muster.cli.map_flags import flags_of_map, pipeline_in
from muster.cli.options import Option
from muster.cli.parse import parse_groups
from muster.cli.place_of_target import split_target
from muster.cli.train_flags import flags_of_train, task_in


class Command(NamedTuple):
    """``split``: how the command finds its target; ``read``: all that it parses, of which ``typed``
    is a line; ``targets`` and ``values`` are words that look like targets to it.
    """

    split: Callable[[list[str]], tuple[str, list[str]]]
    read: Callable[[], tuple[Option, ...]]
    targets: tuple[str, ...]
    values: tuple[str, ...]


COMMANDS = {
    "sweep": Command(
        lambda words: split_target(words, is_target, GROUPS.values),
        lambda: flags_of_sweep(["work.py:work"]).flags,
        ("work.py:work", "ssm", "package.module:work"),
        ("a:cpu", "ssm", "ssvae", "b.py:work", "3"),
    ),
    "map": Command(
        pipeline_in,
        lambda: flags_of_map(["embed"]).flags,
        ("embed", "clean.py:normalise"),
        ("embed", "reasoning", "a.py:cpu", "3"),
    ),
    "train": Command(
        task_in,
        lambda: (
            *flags_of_train(["digits"], "train", "").flags,
            *flags_of_train(["ppo"], "train", "").flags,
        ),
        ("digits", "ppo", "task.py:Task"),
        ("digits", "har", "ssvae", "a.py:cpu", "3"),
    ),
    "start": Command(
        start.file_in,
        lambda: parse_groups(start.GROUPS, ["e.toml"], "start", "").flags,
        ("e.toml", "a/b.yaml"),
        ("c.toml", "c.yml"),
    ),
}


@functools.cache
def taking_one(name: str) -> list[tuple[str, bool]]:
    """The names of the flags of a command that take one value, and whether an `=` has to join it.

    A recipe's own flags are not known before the recipe is.
    """
    found = []
    for option in COMMANDS[name].read():
        if option.group in ("recipe", "task") or option.flag.is_positional or option.arity != 1:
            continue
        found.append((option.name, option.flag.alone is not None))
        for alias in option.flag.aliases:
            if isinstance(alias, str):
                found.append((alias, option.flag.alone is not None))
            elif isinstance(alias, Alias) and alias.means is None:
                found.append((alias.name, False))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_value_of_every_flag_that_takes_one_is_no_target(name: str) -> None:
    command = COMMANDS[name]
    assert name == "start" or len(taking_one(name)) > 20
    values, targets = itertools.cycle(command.values), itertools.cycle(command.targets)
    for flag, is_joined in taking_one(name):
        if len(flag) == 1:
            continue
        for typed in {flag, flag.replace("-", "_")}:
            value, target = next(values), next(targets)
            said = [f"--{typed}={value}"]
            for words in [said] if is_joined else [said, [f"--{typed}", value]]:
                assert command.split([*words, target]) == (target, words), words
                assert command.split([target, *words]) == (target, words), words
                assert command.split(words) == ("", words), words


@pytest.mark.parametrize("name", COMMANDS)
@examples(100)
@given(data=st.data())
def test_a_target_is_found_between_any_flags(name: str, data: st.DataObject) -> None:
    command = COMMANDS[name]
    flags = st.sampled_from([flag for flag, is_joined in taking_one(name) if not is_joined])
    values = st.sampled_from(command.values)
    pair = st.tuples(flags, values, st.booleans(), st.booleans())

    def words(pairs: list[tuple[str, str, bool, bool]]) -> list[str]:
        made: list[str] = []
        for flag, value, joins, underscores in pairs:
            typed = f"--{flag.replace('-', '_') if underscores else flag}"
            made += [f"{typed}={value}"] if joins else [typed, value]
        return [*made, *["--quiet"] * data.draw(st.integers(0, 1))]

    before = words(data.draw(st.lists(pair, max_size=3)))
    behind = words(data.draw(st.lists(pair, max_size=3)))
    target = data.draw(st.sampled_from(command.targets))
    assert command.split([*before, target, *behind]) == (target, [*before, *behind])


@pytest.mark.parametrize(
    ("words", "target"),
    [
        # Flags with any number of values: what looks like a target and is no first value is it.
        ("--grid a=1 b=2 work.py:work", "work.py:work"),
        ("--grid a=1 work.py:work --seeds 3", "work.py:work"),
        ("--grid=a=1 ssm", "ssm"),
        ("--notify command:true work.py:work", "work.py:work"),
        ("--grid a=1 --name ssm work.py:work", "work.py:work"),
        ("--seeds 3 5 8 ssm", "ssm"),
        ("--student-dims 16 32 ssm", "ssm"),
        # A switch takes nothing, nor does a flag whose value only `=` can join to it.
        ("--dry-run work.py:work", "work.py:work"),
        ("--dry_run smm", "smm"),
        ("--wait work.py:work", "work.py:work"),
        ("--wait=2h work.py:work", "work.py:work"),
        ("--no-keep-going work.py:work", "work.py:work"),
        ("-h ssm", "ssm"),
        # Misspelt, and no flag can have it: it is told what it may have meant.
        ("--seeds 3 smm", "smm"),
        ("--seeds 3 wrok.py", "wrok.py"),
        ("--grid a=1 smm", ""),
        ("--hosts a:cpu", ""),
        ("--own a:cpu", "a:cpu"),
        ("--own a:cpu work.py:work", "a:cpu"),
        # Of several behind one flag that takes any number, the last.
        ("--notify command:beep command:boop work.py:work", "work.py:work"),
        ("--notify command:beep --seeds 2", ""),
        ("--notify=command:beep command:boop --seeds 2", ""),
        ("--try b.py:one c.py:two work.py:work --seeds 2", "work.py:work"),
        ("--grid a=1 work.py:work --try b.py:one c.py:two", "work.py:work"),
        # Behind --wait only what looks like a target.
        ("--wait 2h", ""),
        ("--wait 2h work.py:work", "work.py:work"),
    ],
)
def test_where_a_sweep_has_its_target(words: str, target: str) -> None:
    if words == "--own a:cpu work.py:work":  # of a flag that nobody knows: what is not behind it
        target = "work.py:work"
    found, rest = COMMANDS["sweep"].split(words.split())
    assert found == target
    assert sorted([*rest, *([found] if found else [])]) == sorted(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--notify command:true --seeds 2",
        "--notify command:beep command:true",
        "--seeds 2 --notify=command:true",
        "--on slurm --setup ./env.sh",
        "--on slurm --slurm-arg a:b c:d",
        "--resource a:b",
        "--try a.py:b c.py:d",
        "--on slurm --constraint ssm",
    ],
)
def test_before_a_program_values_are_values(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env.sh").write_text("")
    monkeypatch.chdir(tmp_path)
    line = words.split()
    assert split_target(line, is_target, GROUPS.values, has_program=True) == ("", line)


def test_a_program_and_values_that_look_like_a_target() -> None:
    words = "--notify command:true command:false --seeds 2 -- python x.py"
    parsed = flags_of_sweep(words.split())
    assert parsed.program == ("python", "x.py")
    assert parsed.options.notify == ("command:true", "command:false")


@pytest.mark.parametrize("words", ["work.py:work --seeds 2", "--seeds 2 work.py:work", "ssm"])
def test_a_target_and_a_program_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match="Both a target"):
        flags_of_sweep([*words.split(), "--", "python", "x.py"])


def test_a_run_is_found_among_the_flags_of_what_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """Its command is not known before the run is: the flags of all are."""
    (tmp_path / "work.py").write_text("def work(x: int) -> int:\n    return x\n")
    for name in ("one", "two"):
        line = f"sweep work.py:work --grid x=1 --devices cpu:1 --quiet --run-dir runs/{name}"
        assert muster_main(*line.split()).returncode == 0
    monkeypatch.chdir(tmp_path)

    def path(run: Run | None) -> str:
        return "" if run is None else run.path.name

    for words in ("--name two one", "one --name two", "--time two one", "--log-to two one"):
        assert path(resume.run_in(words.split())[0]) == "one", words
    assert path(add.run_in(["--list", "two", "one"])[0]) == "one"


def test_flags_of_commands_do_not_differ_in_how_many_values_they_take() -> None:
    """``muster resume`` knows a flag before it knows which command has made the run."""
    taken: dict[str, set[object]] = {}
    for name in ("sweep", "map", "train"):
        for option in COMMANDS[name].read():
            if option.group not in ("recipe", "task") and not option.flag.is_positional:
                taken.setdefault(option.name, set()).add(option.num_words(option.name))
    assert {name: found for name, found in taken.items() if len(found) > 1} == {}


@pytest.mark.parametrize("line", ["--hosts a:cpu {}", "--hosts=a:cpu {}", "{} --hosts a:cpu"])
def test_hosts_before_a_function_are_hosts(line: str) -> None:
    parsed = flags_of_sweep(line.format("work.py:work").split())
    assert (parsed.target, parsed.given("options")) == ("work.py:work", {"hosts": "a:cpu"})


@pytest.mark.parametrize("flag", ["--name ssm", "--name=ssm"])
def test_a_name_may_be_that_of_a_recipe(flag: str) -> None:
    parsed = flags_of_sweep([*flag.split(), "f.py:g"])
    assert (parsed.target, parsed.options.name) == ("f.py:g", "ssm")
