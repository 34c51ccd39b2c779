"""No word of a command line is dropped without a word: neither behind ``--``, nor on resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import MusterCli

from muster.base.errors import UsageError
from muster.base.flags import kind_of_word
from muster.cli.flags import ONE_TIME, ShownFlags
from muster.cli.main import COMMANDS, main
from muster.cli.parse import parse_groups
from muster.cli.train_flags import flags_of_train
from muster.pipeline.sinks.formats import spec_of

#: Of each command a line that is whole without what stands behind ``--``.
LINES = {
    "map": "map embed --input in.jsonl --output out.jsonl --model m",
    "train": "train digits --dry-run",
    "start": "start experiment.toml",
    "launch": "launch --print",
    "collect": "collect runs/a",
    "resume": "resume runs/a",
    "add": "add runs/a --seeds 3",
    "retry": "retry runs/a",
    "list": "list",
    "status": "status runs/a",
    "why": "why runs/a",
    "logs": "logs runs/a",
    "attach": "attach runs/a",
    "wait": "wait runs/a",
    "errors": "errors runs/a",
    "export": "export runs/a --to table.csv",
    "best": "best runs/a",
    "metrics": "metrics runs/a",
    "track": "track runs/a",
    "report": "report runs/a",
    "cancel": "cancel runs/a",
    "doctor": "doctor --quick",
    "devices": "devices",
    "queue": "queue",
    "hosts": "hosts check localhost",
    "web": "web",
    "mcp": "mcp",
    "completion": "completion bash",
}
#: What is behind ``--`` is theirs, or they hand it on; ``verify`` is below.
WITH_WORDS = {"sweep", "run", "plan", "monitor", "slurm-script", "init"}


@pytest.mark.parametrize("command", LINES)
def test_words_behind_the_dashes_are_refused(command: str, muster_main: MusterCli) -> None:
    """``muster train digits --dry-run -- --epochs 3 --bogus`` was a dry run of 10 epochs."""
    done = muster_main(*LINES[command].split(), "--", "--epochs", "3")
    assert done.returncode == 2
    assert f"muster {command}" in done.stderr and "after `--`: --epochs 3" in done.stderr


def test_they_are_refused_of_what_is_typed_on_top_and_by_verify() -> None:
    assert LINES.keys() | WITH_WORDS | {"verify"} == COMMANDS.keys()
    with pytest.raises(UsageError, match="after `--`: --bogus"):
        flags_of_train(["digits", "--", "--bogus"], "verify", "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan", "WHAT is missing"),
        ("plan params=7e9", "Hint: give --global-batch and --flops-per-sample."),
        ("plan params=7e9 --calibrate", "params=7e9 is a model without one"),
        ("slurm-script", "COMMAND is missing"),
        ("slurm-script map embed", "muster map has no script of its own"),
    ],
)
def test_what_is_missing_is_named(line: str, says: str, muster_main: MusterCli) -> None:
    """``plan`` told to add --calibrate, ``slurm-script`` that there is no command map."""
    done = muster_main(*line.split())
    assert done.returncode == 2 and says in done.stderr


def test_a_working_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback of ``os.getcwd``."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["sweep", "train.py:f", "--grid", "x=1", "--devices", "cpu:1"]) == 3
    assert "The folder that you are in has been removed." in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class Own:
    """Fields of the user's that are called like some of ours."""

    restart: int = 0
    quiet: str = ""
    overwrite: float = 0.5


@pytest.mark.parametrize("group", ["recipe", "task", "stage"])
def test_fields_of_the_users_are_repeated_whatever_they_are_called(group: str) -> None:
    """They were taken for our flags of that name, which are of the moment, and left out."""
    words = ["--restart", "3", "--quiet", "no", "--overwrite", "0.1", "--json"]
    parsed = parse_groups({group: Own, "shown": ShownFlags}, words, "try", "")
    assert parsed.argv(without=ONE_TIME) == ["muster", "try", *words[:-1]]


@pytest.mark.parametrize(
    ("word", "kind"),
    [("--notify=command:notify-send done", "flag"), ("--lr 3", "value"), ("-x y=3", "value")],
)
def test_a_value_that_is_joined_to_its_flag_may_have_spaces(word: str, kind: str) -> None:
    assert kind_of_word(word) == kind


def test_a_quoted_home_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--run-dir '~/a'`` and ``--run-dir=~/a``, which no shell expands, made a folder ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = flags_of_train(["digits", "--run-dir=~/a"], "train", "")
    assert parsed.options.run_dir == tmp_path / "a"
    assert parsed.words() == ["--run-dir", "~/a"], "as it was said"

    assert spec_of("~/b.jsonl").path == tmp_path / "b.jsonl"
    assert spec_of("~nobody-of-that-name/b.jsonl").path == Path("~nobody-of-that-name/b.jsonl")
