"""``muster plan`` as it is typed: real steps, real runs, real files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import pytest
from tests.conftest import MusterCli
from tests.json_schemas import check_printed

import muster
from muster.cli.main import main


class Done(NamedTuple):
    """As of a process that has ended."""

    returncode: int
    stdout: str
    stderr: str


class PlanHere(Protocol):
    def __call__(self, *words: str) -> Done: ...


@pytest.fixture
def plan_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> PlanHere:
    """Runs ``muster plan`` in this very process and in ``tmp_path``, which takes no time."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        capfd.readouterr()
        try:
            code = main(["plan", *words])
        except SystemExit as error:
            code = int(error.code or 0)
        return Done(code, *capfd.readouterr())

    return run


SMALL = ("--width", "8", "--no-augment")
ORIGINS = {"measured", "given", "table", "assumed"}
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
    "tie_word_embeddings": False,
}  # fmt: skip


def numbers_without_origin(value: Any, path: str = "") -> list[str]:
    """Where a record has a number of a figure that does not say where it is from."""
    if isinstance(value, dict):
        if "value" in value:
            return [] if value.get("origin") in ORIGINS else [path]
        found = []
        for key, item in value.items():
            found += numbers_without_origin(item, f"{path}/{key}")
        return found
    if isinstance(value, list):
        return [
            w for n, item in enumerate(value) for w in numbers_without_origin(item, f"{path}/{n}")
        ]
    return [path] if isinstance(value, float) else []


def test_a_task_is_measured_planned_trained_and_compared(
    muster_cli: MusterCli, plan_here: PlanHere, tmp_path: Path
) -> None:
    planned = muster_cli(
        "plan", "digits", "--calibrate", "--calibrate-steps", "12", "--devices", "cpu:2",
        "--global-batch", "64", "--for-run", "runs/first", "--json", "--", *SMALL,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    plan = check_printed("plan", planned.stdout)
    assert plan["inputs"]["time per sample"]["origin"] == "measured"
    assert plan["inputs"]["longer with all at work"]["origin"] == "measured"
    assert plan["inputs"]["gloo-loopback: latency"]["origin"] == "assumed"
    one, two = plan["predictions"]
    assert one["step"]["origin"] == "measured" and two["step"]["origin"] == "assumed"
    assert (one["samples_per_device"], two["samples_per_device"]) == (64, 32)
    # 1,295 samples are 21 steps an epoch; the recipe has 20 epochs.
    assert plan["num_steps"] == 21 * 20
    assert numbers_without_origin({**plan, "mixed": None}) == []
    assert json.loads((tmp_path / "runs/first/plan.json").read_text()) == plan

    early = plan_here("runs/first")
    assert early.returncode == 3
    assert "has a plan, but its training has not begun" in early.stderr
    trained = muster_cli(
        "train", "digits", "--devices", "cpu:2", "--global-batch", "64", "--max-steps", "12",
        "--run-dir", "runs/first", "--no-tensorboard", "--quiet", *SMALL,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    compared = plan_here("runs/first", "--json")
    assert compared.returncode == 0, compared.stderr
    found = check_printed("plan", compared.stdout)
    assert found["num_devices"] == 2
    assert found["notes"] == ["planned for 420 steps, run for 12"]
    lines = {line["name"]: line for line in found["lines"]}
    step = lines["step (median)"]
    assert step["predicted"] == two["step"]["value"]
    assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)
    shown = plan_here("runs/first")
    assert "predicted  rests on  measured" in shown.stdout


@pytest.mark.quick
def test_a_large_model_on_cards_that_are_not_here(plan_here: PlanHere, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ("hf:config.json", "--sequence-length", "4096", "--global-batch", "512",
             "--samples", "1e6")  # fmt: skip
    done = plan_here(*words, "--devices", "H100 SXM x16", "--devices-per-node", "8",
                      "--network", "net400", "--strategy", "fsdp", "--batch-size", "1",
                      "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = check_printed("plan", done.stdout)
    assert [row["num_devices"] for row in plan["predictions"]] == [2, 3, 4, 5, 6, 7, 8, 16]
    # 6.7e9 x 16 bytes are 107 GB, and activations; in bf16 FSDP gathers a layer and no copy of all.
    assert plan["too_small"] == [1]
    first = plan["predictions"][0]
    # 1.8877e14 FLOP x 256 samples / (989.5e12 x 0.435) = 112 s for a step; 1,954 of them. The
    # published transformers reach 0.435 of the peak in the mean, and nine of ten less than 0.763.
    whole = 1.8877e14 * 256 / 989.5e12
    assert first["compute"]["value"] == pytest.approx(whole / 0.435, rel=1e-3)
    assert plan["fastest"][0]["compute"]["value"] == pytest.approx(whole / 0.7627, rel=1e-3)
    assert plan["num_steps"] == 1954
    assert first["energy"]["value"] == pytest.approx(first["wall"]["value"] * 700 * 2)
    assert first["cost"]["value"] == pytest.approx(first["wall"]["value"] / 3600 * 3.0 * 2)
    assert plan["memory"]["fits"] is True
    table = plan_here(*words, "--devices", "H100 SXM x2")
    assert "rests on" not in table.stdout and "does NOT fit" in table.stdout
    assert "No row for 1, 2 devices: the model does not fit there." in table.stdout


def test_memory_says_what_would_make_it_fit(plan_here: PlanHere) -> None:
    done = plan_here("params=7e9", "--memory", "--devices", "H100 SXM x4")
    assert done.returncode == 1
    assert "does NOT fit" in done.stdout and "--strategy fsdp over the 4 devices" in done.stdout
    sharded = ("--strategy", "fsdp", "--activation-mib", "500", "--json")
    done = plan_here("params=7e9", "--memory", "--devices", "H100 SXM x4", *sharded)
    assert done.returncode == 0
    (plan,) = check_printed("plan", done.stdout)
    assert plan["fits"] is True and plan["parts"]["weights"]["value"] == 7e9  # 4 bytes / 4 devices
    assert plan["parts"]["gathered unit"]["origin"] == "assumed"
    assert numbers_without_origin(plan) == []


def test_unlike_cards_in_one_gang(plan_here: PlanHere) -> None:
    words = ("params=1e8", "--flops-per-sample", "1e12", "--global-batch", "64")
    done = plan_here(*words, "--devices", "RTX 4090 x1, RTX 3090", "--json")
    assert done.returncode == 0, done.stderr
    mixed = check_printed("plan", done.stdout)["mixed"]
    # 165.2 against 71 TFLOP/s: 64 x 165.2 / 236.2 = 44.8 samples for the faster one.
    assert mixed["balanced"]["shares"] == [45, 19]
    assert mixed["lost"] == pytest.approx(1 - (45 / 165.2) / (32 / 71), rel=1e-6)
    assert mixed["origin"] == "assumed"


def test_the_makespan_of_a_sweep(
    muster_cli: MusterCli, plan_here: PlanHere, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(
        "import time\ndef f(x: int):\n    time.sleep(0.02 * x)\n    return {'y': x}\n"
    )
    grid = ("t.py:f", "--grid", "x=1,2,3,4")
    done = muster_cli("sweep", *grid, "--devices", "cpu:2", "--run-dir", "sw", "--quiet")
    assert done.returncode == 0, done.stderr
    done = plan_here("sw", "--workers", "1,2,100", "--json")
    assert done.returncode == 0, done.stderr
    plan = check_printed("plan", done.stdout)
    assert (plan["num_measured"], plan["num_assumed"], plan["origin"]) == (4, 0, "measured")
    one, two, many = (row["in_order"]["value"] for row in plan["predictions"])
    took = [row["seconds"] for row in muster.Run(tmp_path / "sw").results().to_pylist()]
    busy = [0.0, 0.0]  # until when each of two workers is, who take them one after the other
    for seconds in took:
        busy[busy.index(min(busy))] += seconds
    assert one == pytest.approx(sum(took)) == pytest.approx(4 * plan["mean"]["value"])
    assert two == pytest.approx(max(busy)) and one > two
    assert many == plan["longest"]["value"] == pytest.approx(max(took))
    assert "longest first" in plan_here("sw").stdout


@pytest.mark.quick
def test_prices_are_a_file_to_edit(plan_here: PlanHere, tmp_path: Path) -> None:
    assert plan_here("--write-prices").returncode == 0
    prices = tmp_path / "prices.toml"
    text = prices.read_text()
    assert "edit me" in text
    prices.write_text('[[card]]\nname = "T4"\nper_hour = 36\ndate = "2026-01-01"\nsource = "me"\n')
    done = plan_here("params=1e6", "--flops-per-sample", "26e12", "--devices", "T4",
                      "--precision", "fp16", "--global-batch", "1", "--steps", "10",
                      "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["predictions"]
    # Of work of no named kind a quarter of the peak is assumed:
    # 26e12 / (65e12 x 0.25) = 1.6 s a step; 16 s at 36 an hour are 0.16.
    assert row["cost"]["value"] == pytest.approx(0.16)
    assert plan_here("--write-prices").returncode == 2


def test_cards_of_this_machine_are_meant_by_a_number(
    plan_here: PlanHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "NVIDIA L40S"} for n in range(2)]
    (tmp_path / "facts.json").write_text(json.dumps({"devices": gpus}))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = plan_here("params=1e9", "--memory", "--json")
    (plan,) = check_printed("plan", done.stdout)
    assert (plan["device"], plan["num_devices"]) == ("L40S", 2)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("digits",), 2, "--global-batch"),
        (("digits", "--global-batch", "64", "--devices", "cpu:2"), 2, "--calibrate"),
        (("digitz",), 2, "did you mean 'digits'"),
        (("runs/none",), 2, "Unknown run 'runs/none'"),
        (("digits", "--devices", "RTX 4190 x2", "--calibrate"), 2, "did you mean 'RTX 4090'"),
        (("digits", "--calibrate", "--", "--widht", "3"), 2, "--widht"),
        (("latin.py:Task", "--calibrate", "--devices", "cpu:1"), 2, "no model"),
        (("params=1e6", "--", "--width", "3"), 2, "only a task has flags of its own"),
        (("params=1e6", "--workers", "2"), 2, "only the run of a sweep has workers"),
        (("hf:none.json", "--memory"), 3, "There is no model config"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    plan_here: PlanHere,
    words: tuple[str, ...],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "facts.json").write_text('{"devices": [], "problem": "no driver"}')
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    bytes_ = 'import os\nos.write(2, b"\\xff\\n")\nraise RuntimeError("no model")\n'
    (tmp_path / "latin.py").write_text(bytes_)
    done = plan_here(*words)
    assert done.returncode == code, done.stderr
    assert text in done.stderr and "Traceback" not in done.stderr


def test_a_killed_plan_leaves_no_training_behind(tmp_path: Path) -> None:
    words = ("plan", "digits", "--calibrate", "--calibrate-steps", "100000", "--devices", "cpu:1")
    with subprocess.Popen(
        [sys.executable, "-m", "muster", *words, "--", "--epochs", "100000"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed process leaves its folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as plan:
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 300
        while len(started) < 3 and time.monotonic() < deadline:  # launcher, agent, rank
            started = psutil.Process(plan.pid).children(recursive=True)
            time.sleep(0.05)
        plan.send_signal(signal.SIGKILL)
    assert len(started) >= 3
    _, alive = psutil.wait_procs(started, timeout=300)
    assert [process.cmdline() for process in alive] == []


def test_a_task_counted_on_the_cpu_is_planned_for_a_card(muster_cli: MusterCli) -> None:
    done = muster_cli("plan", "digits", "--calibrate", "--memory", "--devices", "L4 x1",
                      "--batch-size", "256", "--", "--width", "8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"activations +\d+\.\d+ [KM]iB +measured", done.stdout)
    assert "L4 has" in done.stdout and "memory: fits" in done.stdout
