"""What strangers mistype is answered with words that work when they are typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.conftest import MusterCli

FILES = {
    "train.py": "def run(lr: float, width: int = 64, seed: int = 0):\n    return {'loss': lr}\n",
    "upper.py": "def upper(record):\n    return record\n",
    "other.py": "def needs(ctx, model):\n    return 1\n\n\ndef none():\n    return 1\n",
    "words.jsonl": '{"text": "one"}\n',
    "script.py": "print('hello')\n",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("line", "hint", "instead"),
    [
        (
            "sweep train.py:run --grid lr 0.1",
            "write --grid lr=0.1.",
            "sweep train.py:run --grid lr=0.1",
        ),
        ("sweep train.py:run --grid lr= 0.1,0.2", "write --grid lr=0.1,0.2.", ""),
        ("sweep train.py:run --grid lr = 0.1", "write --grid lr=0.1.", ""),
        ("sweep train.py:run --grid lr=0.1 0.2", "write --grid lr=0.1,0.2.", ""),
        ("sweep train.py:run --zip lr 0.1 0.2", "write --zip lr=0.1,0.2.", ""),
        ("sweep train.py:run lr=0.1", "write --grid lr=0.1.", ""),
        ("sweep train.py:run --grid lr=1 --devices cpu 2", "write --devices cpu:2.", ""),
        ("sweep train.py:run --grid lr=1 --devices cpus:2", "cpu:8 is eight workers", ""),
        ("sweep train.py:run --grid lr=1 --name a b", "--name takes one value, and has a", ""),
        ("sweep train.py:run --wait 2h --grid lr=1", "write --wait=2h.",
         "sweep train.py:run --wait=2h --grid lr=1"),
        ("sweep --wait 2h train.py:run", "write --wait=2h.", ""),
        ("train digits --wait 2h", "write --wait=2h.", "train digits --wait=2h"),
        ("train digits --gpus 2 3", "--gpus takes one value, and has 2: auto", ""),
        ("export rA out.csv", "write --to out.csv.", ""),
        ("export rA out.txt", "`muster export --help` says what it takes.", ""),
        ("sweep train.py:run --grid lr=1 --epochs 3", "it is a flag of muster train.", ""),
        ("sweep train.py:run --grid lr=1 --input x", "it is a flag of muster map.", ""),
        ("sweep --num-seeds 2 smm", "did you mean 'ssm'?", "sweep ssm --num-seeds 2"),
        ("sweep train.py:run dry_run=1", "write --dry-run.",
         "sweep train.py:run --grid lr=1 --dry-run"),
        ("sweep train.py:run keep_going=false", "write --no-keep-going.",
         "sweep train.py:run --grid lr=1 --no-keep-going"),
        ("sweep train.py:run wait=2h", "write --wait=2h.",
         "sweep train.py:run --grid lr=1 --wait=2h"),
        ("sweep --grid lr=1 --no-such smm", "did you mean 'ssm'?", ""),
        ("sweep --name sim --grid lr=1", "There is nothing to run", ""),
        ("sweep --grid lr=1 --name=sim --run-dir smm", "There is nothing to run", ""),
        ("sweep --notify sim --constraint sim", "There is nothing to run", ""),
        ("sweep run train.py", "begin with it: muster run", ""),
        (
            "sweep script.py --seeds 3 words.jsonl",
            "write muster sweep --seeds 3 -- python script.py words.jsonl --seed {seed}",
            "sweep --seeds 3 -- python script.py words.jsonl --seed {seed}",
        ),
        (
            "sweep --seeds 3 python script.py {seed}",
            "write muster sweep --seeds 3 -- python script.py {seed}",
            "sweep --seeds 3 -- python script.py {seed}",
        ),
        (
            "sweep --grid lr=1 b=2 --seeds=2 python script.py",
            "--grid lr=1 b=2 --seeds=2 -- python script.py --lr {lr} --b {b} --seed {seed}",
            "",
        ),
        (
            "sweep script.py --notify command:true --grid lr=1",
            "write muster sweep --notify command:true --grid lr=1 -- python script.py --lr {lr}",
            "sweep --notify command:true --grid lr=1 -- python script.py --lr {lr}",
        ),
        (
            "sweep --grid lr=1 --notify command:true script.py --epochs 3",
            "--grid lr=1 --notify command:true -- python script.py --epochs 3 --lr {lr}",
            "",
        ),
        ("map upper.py:upper words.jsonl", "write --input words.jsonl.", ""),
        ("map upper.py:upper --input words.jsonl o.jsonl", "write --output o.jsonl.", ""),
        ("map upper.py:upper -i words.jsonl", "did you mean --input?", ""),
        ("map words.jsonl upper.py:upper", "write `muster map file.py:stage --input words", ""),
        ("map other.py:needs --input words.jsonl --output o.jsonl", "def stage(record)", ""),
        ("map other.py:none --input words.jsonl --output o.jsonl", "def stage(record)", ""),
        ("map upper.py:upper --input words.jsonl --output o.jsonl --seeds 3",
         "it is a flag of muster sweep.", ""),
        ("train digits epochs=3", "write --epochs 3.", "train digits --epochs 3"),
        ("train digits --devices cpu 2", "write --devices cpu:2.", "train digits --devices cpu:2"),
        ("train digits --grid lr=0.1", "it is a flag of muster sweep.", ""),
        ("train python script.py", "`muster run`", ""),
        ("run script.py:main", "muster run script.py", "run script.py"),
        ("run python script.py", "muster run script.py", ""),
        ("run scrpt.py", "did you mean script.py?", ""),
        ("run digits", "write: muster train digits", "train digits"),
        ("run --devices cpu 2 script.py", "--devices cpu:2", ""),
        ("run --nproc 2 script.py", "did you mean --gpus?", ""),
        ("run --epochs 3 script.py", "it is a flag of muster train.", ""),
        ("run --no-python no-such-program", "There is no program no-such-program here.", ""),
        ("run .", "is a folder without a file __main__.py", ""),
    ],
)  # fmt: skip
def test_the_answer_says_what_to_type(
    line: str, hint: str, instead: str, muster_main: MusterCli
) -> None:
    done = muster_main(*shlex.split(line))
    assert done.returncode == 2 and hint in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    if instead:
        words, dashes, program = instead.partition(" -- ")
        again = muster_main(*shlex.split(f"{words} --dry-run{dashes}{program}"))
        if instead.startswith("run "):
            again = muster_main("run", "--dry-run", *shlex.split(instead)[1:])
        assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    "line",
    [
        *(f"{command} rA rB" for command in
          ("status", "report", "best", "attach", "errors", "export", "metrics", "resume")),
        "start a.toml b.toml",
        "plan digits har",
    ],
)  # fmt: skip
def test_the_place_of_a_word_is_not_called_a_flag(line: str, muster_main: MusterCli) -> None:
    done = muster_main(*line.split())
    assert done.returncode == 2 and "takes one value" not in done.stderr, done.stderr
    assert line.split()[-1] in done.stderr
