"""Each kind of run, killed right before and right after each file that it ends with gets its name:
the same command goes on, and what it comes to is, to the byte, that of a run nobody disturbed.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.programs import read_program

pytestmark = pytest.mark.slow

FILES = {
    "task.py": """
import torch
from torch import nn
import muster


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(4) + index % 3, index % 3


class T(muster.Task):
    defaults = {"epochs": 2, "batch_size": 2, "base_lr": 1e-2}

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def dataset(self, split):
        return Random()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def score(self, model, batch):
        return {"loss": self.loss(model, batch)}
""",
    "f.py": "def f(x: int, seed: int) -> dict:\n    return {'y': 10 * x + seed}\n",
    "s.py": """
def double(record):
    if record["n"] == 13:
        raise ValueError("thirteen")
    return {**record, "double": 2 * record["n"]}


def more(record):
    return {**record, "more": record["double"] + 1}


both = [double, more]
""",
    "in.jsonl": "".join(f"{json.dumps({'n': n})}\n" for n in range(40)),
}
TRAIN = ("train", "task.py:T", "--no-tensorboard", "--checkpoint-interval", "3steps")
MAP = ("map", "s.py:both", "--input", "in.jsonl", "--chunk-rows", "10", "--batch-size", "5")
WORDS = {
    "train": (*TRAIN, "--devices", "cpu:1", "--global-batch", "4"),
    "sweep": ("sweep", "f.py:f", "--grid", "x=1,2,3", "--seeds", "2", "--devices", "cpu:1"),
    "jsonl": (*MAP, "--output", "out.jsonl", "--devices", "cpu:1"),
    "parquet": (*MAP, "--output", "out.parquet", "--devices", "cpu:1"),
    "stages": (*MAP, "--output", "out.jsonl", "--devices", "cpu:1", "--stage-by-stage"),
}
NAMES = {
    "train": ("run.json", "step-00000006", "best.json", "latest.json", "training_results.json",
              "ending.json"),
    "sweep": ("run.json", "identity.json", "results.csv", "results.parquet"),
    "jsonl": ("run.json", "errors.jsonl", "out.jsonl"),
    "parquet": ("errors.jsonl", "out.parquet"),
    "stages": ("errors.jsonl", "stages/0/output.jsonl", "out.jsonl"),
}  # fmt: skip
CASES = [
    (kind, f"{when} {name}")
    for kind, names in NAMES.items()
    for name in names
    for when in ("before", "after")
]


def start(folder: Path, kind: str, environment: Mapping[str, str]) -> int:
    words = [*WORDS[kind], "--run-dir", "run", "--monitor-interval", "0", "--quiet"]
    with (folder / "said").open("ab") as said:
        return subprocess.run(
            [sys.executable, "-m", "muster", *words], cwd=folder, env=environment, stdout=said,
            stderr=said, timeout=300, check=False,
        ).returncode  # fmt: skip


def fill(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def outcome(folder: Path, kind: str) -> dict[str, Any]:
    """What counts of a run, without its times."""
    run = folder / "run"
    if kind == "train":
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        results = json.loads((run / "training_results.json").read_text())
        last = run / "checkpoints" / "step-00000012" / "manifest.json"
        return {
            "steps": [{**step, "seconds": 0} for step in steps],
            "results": {**results, "measured": {}, "device": ""},
            "weights": json.loads(last.read_text())["__0_0.distcp"],
            "kept": sorted(path.name for path in last.parents[1].iterdir() if path.is_dir()),
        }
    if kind == "sweep":
        with (run / "results.csv").open() as table:
            rows = list(csv.DictReader(table))
        return {"rows": [{**row, "seconds": "", "peak_mib": ""} for row in rows]}
    (output,) = folder.glob("out.*")
    errors = [path.read_text().splitlines() for path in sorted(run.rglob("errors.jsonl"))]
    return {"output": output.read_bytes(), "errors": [len(lines) for lines in errors]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, Any]]:
    @cache
    def of(kind: str) -> tuple[int, Any]:
        folder = tmp_path_factory.mktemp(kind)
        fill(folder)
        return start(folder, kind, os.environ), outcome(folder, kind)

    return of


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_the_same_command_comes_to_the_same(
    kind: str, moment: str, tmp_path: Path, undisturbed: Callable[[str], tuple[int, Any]]
) -> None:
    fill(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(read_program("killed_at.py"))
    source = str(Path(__file__).parents[2] / "src")
    killing = {
        **os.environ, "KILLED_AT": moment, "PYTHONPATH": f"{tmp_path / 'site'}:{source}",
    }  # fmt: skip
    assert start(tmp_path, kind, killing) == -signal.SIGKILL
    assert (tmp_path / "killed").exists()
    said = tmp_path / "said"
    code, expected = undisturbed(kind)
    assert start(tmp_path, kind, os.environ) == code, said.read_text()
    assert outcome(tmp_path, kind) == expected
    assert "Traceback" not in said.read_text()
    tables = [path for path in (tmp_path / "run").glob(".results.*") if path.suffix == ".tmp"]
    assert tables == []
