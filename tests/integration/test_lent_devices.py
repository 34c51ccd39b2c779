"""Runs that give devices back and take others while they work: each kind, killed and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.old_runs.old_runs import unpack
from tests.json_schemas import check_printed
from tests.processes import Commands
from tests.unit.api.test_lending import facts

from muster.api.runs import Run
from muster.run.folder import RunFolder

Main = Callable[..., subprocess.CompletedProcess[str]]

OLD_RUNS = Path(__file__).parents[1] / "fixtures/old_runs"
SOURCE = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent

def gate():
    while not (HERE / "go").exists():
        time.sleep(0.01)

def held(seed: int):
    with (HERE / "began.txt").open("a") as file:
        print(seed, os.environ.get("CUDA_VISIBLE_DEVICES", ""), file=file)
    gate()
    return {"y": seed}

def trial(x: int):
    return held(x)

def saves(seed: int, ctx):
    step = (ctx.restore() or {"step": 0})["step"]
    with (HERE / "began.txt").open("a") as file:
        print(seed, step, file=file)
    while not (HERE / "go").exists():
        time.sleep(0.01)
        step += 1
        ctx.checkpoint({"step": step})
    return {"y": seed}

def stage(record):
    gate()
    return {"b": record["a"] + 1}
"""
SEARCH = ("--space", "x=int(1,1000)", "--maximize", "y", "--trials", "12")
KINDS = {
    "sweep": ("sweep", "t.py:held", "--seeds", "12"),
    "search": ("sweep", "t.py:trial", *SEARCH),
    "map": ("map", "t.py:stage", "--input", "in.jsonl", "--output", "o.jsonl", "--chunk-rows", "1"),
}


class Place(Commands):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.run = path / "r"
        (path / "t.py").write_text(SOURCE)
        (path / "in.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(12)))

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        return super().begin(*words, "--quiet")

    def states(self) -> dict[str, str]:
        """What the last picture of the run says of each slot."""
        try:
            live = json.loads((self.run / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return {line["slot"]: line["state"] for line in live["workers"]}

    @property
    def began(self) -> list[list[str]]:
        path = self.path / "began.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def all_are(*running: str) -> Callable[[dict[str, str]], bool]:
    """Whether exactly these slots have workers with tasks."""
    return lambda states: sorted(s for s in states if states[s] == "running") == sorted(running)


@pytest.mark.parametrize(
    "kind", ["sweep", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("search", "map"))]
)
def test_a_run_gives_back_takes_is_killed_and_goes_on(
    kind: str, place: Place, muster_main: Main
) -> None:
    flags = ("--devices", "cpu:3", "--monitor-interval", "0", "--run-dir", "r")
    process = place.begin(*KINDS[kind], *flags)
    place.until(lambda: all_are("cpu:0", "cpu:1", "cpu:2")(place.states()))
    said = muster_main("devices", "r", "--release", "1")
    assert "gives back cpu:2, after the task in hand" in said.stdout, said.stderr
    place.until(lambda: place.states()["cpu:2"] == "ending")
    stays = [line.split()[-1] for line in muster_main("devices", "r").stdout.splitlines()[1:4]]
    assert stays == ["yes", "yes", "no"]
    assert "takes cpu:2, cpu:3" in muster_main("devices", "r", "--add", "2").stdout
    place.until(lambda: place.states().get("cpu:3") == "running")
    said = muster_main("devices", "r", "--only", "1,3", "--json")
    assert check_printed("devices", said.stdout)["gives_back"] == ["cpu:0", "cpu:2"]
    refused = muster_main("devices", "r", "--only", "1,77")
    assert (refused.returncode, "no CPU worker 77" in refused.stderr) == (2, True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    said = muster_main("devices", "r", "--add", "1")
    assert "it has cpu:0, cpu:1, cpu:2 then" in said.stdout, "two, and one more, numbered anew"
    said = muster_main("devices", "r", "--release", "2")
    assert "gives back cpu:1, cpu:2, when it goes on" in said.stdout, said.stderr
    process = place.begin("resume", "r", "--devices", "cpu:3")  # goes before that
    place.until(lambda: all_are("cpu:0", "cpu:1", "cpu:2")(place.states()))
    assert "gives back" in muster_main("devices", "r", "--only", "0").stdout
    (place.path / "go").touch()
    assert process.wait(300) == 0, (place.path / "said.txt").read_text()
    if kind == "map":
        rows = [json.loads(line) for line in (place.path / "o.jsonl").read_text().splitlines()]
        assert [row["b"] for row in rows] == [i + 1 for i in range(12)]
        return
    assert Run(place.run).status().counts["done"] == 12
    assert Run(place.run).status().num_retried == 0
    assert len({words[0] for words in place.began}) == 12


@pytest.mark.slow  # the leases have a quick test, with requests at random
def test_a_gpu_goes_from_one_run_to_another(
    place: Place, muster_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.path / "facts.json").write_bytes(facts(2))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(place.path / "facts.json"))
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(place.path / "leases"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first = place.begin(
        "sweep", "t.py:saves", "--seeds", "2", "--monitor-interval", "0", "--run-dir", "r"
    )
    place.until(lambda: len(place.began) == 2)
    place.until(lambda: place.states().get("cuda:1") == "running")
    said = muster_main("devices", "r", "--release", "1", "--now")
    assert "gives back cuda:1, after its next checkpoint" in said.stdout
    place.until(lambda: place.states()["cuda:1"] == "given back")
    second = place.begin(
        "sweep", "t.py:held", "--seeds", "1", "--devices", "1", "--monitor-interval", "0",
        "--run-dir", "s",
    )  # fmt: skip
    place.until(lambda: len(place.began) == 3)
    assert place.began[2][1] == "GPU-1"
    refused = muster_main("devices", "r", "--add", "1")
    assert refused.returncode == 2
    assert "cuda:1: leased by run s" in refused.stderr
    (place.path / "go").touch()
    assert (first.wait(300), second.wait(300)) == (0, 0)
    seeds = [seed for seed, _ in place.began]
    again = [int(step) for seed, step in place.began[3:]]
    assert len(again) == 1 and again[0] > 0, f"it goes on from its checkpoint: {seeds}"
    assert Run(place.run).status().counts["done"] == 2


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["sweep", "map", "train", "agent"])
def test_a_dry_run_shows_the_devices_that_are_typed(
    kind: str, tmp_path: Path, muster_main: Main
) -> None:
    """It showed those that `muster devices` was asked for where the run was begun with the same."""
    unpack(OLD_RUNS / f"0.1.0/{kind}-stopped.tar.xz", tmp_path)
    folder = RunFolder(tmp_path / f"runs/{kind}-stopped")
    begun = "cpu:2" if kind == "train" else "cpu:1"
    against = {"devices": begun, "gpu_ids": None, "max_gpus": None}
    devices = [f"cpu:{number}" for number in range(5)]
    record = {"kind": "cpu", "devices": devices, "labels": devices, "against": against}
    folder.devices_json.write_text(json.dumps(record))
    words = ("resume", str(folder.path), "--dry-run")
    asked, typed = muster_main(*words), muster_main(*words, "--devices", begun)
    assert asked.returncode == typed.returncode == 0, asked.stderr + typed.stderr
    assert ", cpu:4" in asked.stdout and "cpu:4" not in typed.stdout
    assert json.loads(folder.devices_json.read_bytes()) == record


@pytest.mark.quick
def test_what_contradicts_itself_is_refused(muster_main: Main) -> None:
    refused = muster_main("devices", "--release", "1")
    assert (refused.returncode, "no run is named" in refused.stderr) == (2, True)
    refused = muster_main("devices", "--now")
    assert (refused.returncode, "--now has no effect alone" in refused.stderr) == (2, True)
    refused = muster_main("devices", "r", "--release", "1", "--add", "2")
    assert (refused.returncode, "each choose" in refused.stderr) == (2, True)
