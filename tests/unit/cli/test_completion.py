"""What a shell proposes: the words that are known at each place, and nothing is started for it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from tests.conftest import MusterCli
from tests.fixtures.old_runs.old_runs import unpack

from muster.cli.main import COMMANDS

OLD = Path(__file__).parents[2] / "fixtures/old_runs/0.1.0"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a failed sweep in runs and a file of functions."""
    unpack(OLD / "sweep-failed.tar.xz", tmp_path)
    for path in tmp_path.glob("*.py"):
        path.unlink()
    (tmp_path / "work.py").write_text("def one(x):\n    ...\n\n\ndef other(x):\n    ...\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("muster sw", ["sweep"]),
        ("muster help tr", ["train", "track"]),
        ("muster sweep --gr", ["--grid"]),
        ("muster sweep ss", ["ssm", "ssvae"]),
        ("muster sweep ssm --student", ["--student-dims"]),
        ("muster sweep w", ["work.py:"]),
        ("muster sweep work.py:o", ["one", "other"]),
        ("muster train d", ["digits"]),
        ("muster train digits --strat", ["--strategy"]),
        ("muster train digits --strategy f", ["fsdp"]),
        ("muster train digits --strategy=f", ["fsdp"]),
        ("muster status ", ["runs/sweep-failed"]),
        ("muster logs --", ["--follow", "--lines", "--help", "--help-all"]),
        ("muster attach ", ["runs/sweep-failed"]),
        ("muster wait one ", ["runs/sweep-failed"]),
        ("muster status runs/sweep-failed --j", ["--json"]),
        ("muster resume runs/sweep-failed --dev", ["--devices"]),
        ("muster logs runs/sweep-failed ", ["2"]),
        ("muster completion ", ["bash", "zsh", "fish"]),
        ("muster run --sta", ["--stall-timeout", "--start"]),
        ("muster run --devices cpu:2 --sta", ["--stall-timeout", "--start"]),
        ("muster run work.py --sta", []),
        ("muster sweep --grid x=1 -- echo --", []),
        ("muster nonsense --", []),
        ("muster train nonsense.py:Nothing --strat", ["--strategy"]),
        ("muster status 'runs/sw", ["runs/sweep-failed"]),
        ("muster status runs/", ["runs/sweep-failed"]),
        ("muster status ./runs/s", ["./runs/sweep-failed"]),
    ],
)
def test_what_may_follow(
    line: str, expected: list[str], place: Path, muster_main: MusterCli
) -> None:
    done = muster_main("completion", "bash", "--line", line)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == expected
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["sweep-failed"]


def test_every_command_has_its_flags(place: Path, muster_main: MusterCli) -> None:
    """None of them acts, or asks, or fails, when its flags are asked for."""
    for command in COMMANDS:
        done = muster_main("completion", "fish", "--line", f"muster {command} --")
        assert done.returncode == 0, (command, done.stderr)
        assert "--help" in done.stdout.split(), command


def test_a_shell_that_is_not_known_is_refused(muster_main: MusterCli) -> None:
    done = muster_main("completion", "tcsh")
    assert done.returncode == 2 and "bash, zsh or fish" in done.stderr


def test_help_before_a_flag_without_its_value_is_shown(muster_main: MusterCli) -> None:
    """It ended in a traceback."""
    done = muster_main("train", "--help", "digits", "--strategy")
    assert done.returncode == 0 and "--strategy" in done.stdout


def test_names_that_a_shell_would_run_are_not_given_to_bash(
    place: Path, muster_main: MusterCli
) -> None:
    """bash puts what is proposed into the line as it is; zsh and fish quote it."""
    name = "runs/$(touch bad)"
    (place / "runs/sweep-failed").rename(place / name)
    found = {
        shell: muster_main("completion", shell, "--line", "muster status runs/").stdout.splitlines()
        for shell in ("bash", "zsh", "fish")
    }
    assert found == {"bash": [], "zsh": [name], "fish": [name]}
    assert "compadd -Q" not in muster_main("completion", "zsh").stdout


def test_nothing_of_the_users_is_imported_for_a_proposal(
    place: Path, muster_main: MusterCli
) -> None:
    (place / "own.py").write_text(
        "open('imported', 'w').close()\nRECIPE = 1\n\n\n@staticmethod\ndef f(x): ...\n\n\n"
        "class Task: ...\n"
    )
    for words in ("train own.py:RECIPE", "train own.py:Task", "sweep own.py:f", "map own.py:f"):
        done = muster_main("completion", "bash", "--line", f"muster {words} --dev")
        assert "--devices" in done.stdout.split(), words
        assert not (place / "imported").exists(), words


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``muster`` is this one."""
    program = tmp_path / "bin/muster"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:] = {sys.path!r}\n"
        "from muster.cli.main import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
    }


@pytest.mark.thorough
def test_bash_completes_at_the_tab(place: Path, on_path: dict[str, str]) -> None:
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"], cwd=str(place), env=on_path,  # type: ignore[arg-type]
        encoding="utf-8", timeout=120,
    )  # fmt: skip
    try:
        shell.sendline("PS1='ready'; bind 'set enable-bracketed-paste off'; echo go on")
        shell.expect("go on\r\n")
        shell.sendline("source <(muster completion bash); echo sour''ced")
        shell.expect("sourced\r\n")
        for typed, grown in (
            ("muster status runs/sw", "muster status runs/sweep-failed "),
            ("muster sweep work.py:on", "muster sweep work.py:one "),
            ("muster train digits --strategy=fs", "muster train digits --strategy=fsdp "),
        ):
            shell.send(f"echo {typed}".removeprefix("echo ") + "\t")
            shell.expect_exact(grown)
            shell.sendcontrol("u")
        # A name that the shell would run as a command: `touch bad` when the line is entered.
        (place / "runs/sweep-failed").rename(place / "runs/$(touch bad)")
        (place / "muster").write_text("#!/bin/sh\ntouch foreign\n")
        (place / "muster").chmod(0o755)
        shell.send("muster status runs/\t\n")
        shell.send("./muster sta\t")
        shell.sendcontrol("u")
        shell.sendline("echo the e''nd")
        shell.expect_exact("the end")
        assert not (place / "bad").exists() and not (place / "foreign").exists()
    finally:
        shell.close(force=True)


#: How a shell is started without the settings of whoever runs the tests, and given its script.
_OTHERS = {
    "zsh": (["-f", "-i"], "autoload -Uz compinit; compinit -D; source <(muster completion zsh)"),
    "fish": (["--no-config", "-i"], "muster completion fish | source"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(_OTHERS))
def test_the_other_shells_complete_at_the_tab(
    name: str, place: Path, on_path: dict[str, str]
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (apt-get install {name})")
    words, setting_up = _OTHERS[name]
    environment = {**on_path, "HOME": str(place)}
    shell = pexpect.spawn(
        name, words, cwd=str(place), env=environment, encoding="utf-8", timeout=120  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        shell.sendline(f"{setting_up}; echo sour''ced")
        shell.expect("sourced\r\n")
        for number, (typed, grown) in enumerate(
            (
                ("sweep work.py:on", ["sweep", "work.py:one"]),
                ("sweep w", ["sweep", "work.py:behind"]),  # what is behind the colon comes next
                ("train digits --strategy=fs", ["train", "digits", "--strategy=fsdp"]),
                ("train digits --strategy fs", ["train", "digits", "--strategy", "fsdp"]),
                ("comple\tfi", ["completion", "fish"]),
                ("status runs/sw", ["status", "runs/sweep-failed"]),
                ("map work.py:one --input wo", ["map", "work.py:one", "--input", "work.py"]),
            )
        ):
            # What the shell has made of the line is told by a program of that name.
            program = place / "bin" / "told"
            program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {place}/told-{number}\n")
            program.chmod(0o755)
            shell.send(f"muster {typed}\t")
            shell.send("behind" if grown[-1].endswith("behind") else "")
            shell.send("\x01" + "told ")  # in front of the line
            shell.send(f"\x05; echo li''ne-{number}\n")
            shell.expect_exact(f"line-{number}\r\n")
            made = (place / f"told-{number}").read_text().splitlines()
            assert made == ["muster", *grown], (name, typed)
        (place / "runs/sweep-failed").rename(place / "runs/$(touch bad)")
        shell.send("muster status runs/\t\n")
        shell.sendline("echo the e''nd")
        shell.expect_exact("the end\r\n")
        assert not (place / "bad").exists(), "the name was run as a command"
    finally:
        shell.close(force=True)
