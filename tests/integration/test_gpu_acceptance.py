"""The acceptance on a GPU, rehearsed on the CPU: every step works, whatever the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from muster_recipes.ssm import sampler_cuda
from muster_recipes.ssm.sampler import Block

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_acceptance"


@pytest.mark.skipif(sys.platform != "linux", reason="GPUs of Linux")
def test_every_step_in_small(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=1100, cwd=tmp_path,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [line for line in lines if line["status"] != "ok"]
    assert not wrong, json.dumps(wrong, indent=1)
    assert sorted(line["step"] for line in lines) == list(range(15))
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    assert sorted(map(json.loads, written), key=str) == sorted(lines, key=str)


def test_a_step_that_hangs_or_has_no_time_costs_the_others_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "0,14", "--deadline", "1", "--out", "out"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines] == ["skipped", "skipped"]
    assert done.returncode == 0


@pytest.mark.quick
def test_a_packed_package_works_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from acceptance import wheels

    monkeypatch.setattr(wheels, "_WANTED", ("docstring-parser",))
    assert wheels.pack(tmp_path / "wheels") == 0
    [wheel] = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith("docstring_parser-") and wheel.name.endswith("py3-none-any.whl")
    wheels._unpack(wheel, tmp_path / "place")
    program = "import docstring_parser; print(docstring_parser.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = ['place']; {program}"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.startswith(("place", str(tmp_path))), done.stderr


@pytest.mark.quick
def test_the_kernel_is_launched_with_what_the_sampler_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from acceptance.machine_steps import _drawn

    h, w, dim, students, _, seed, eps = _drawn(4, 16, 100, "cpu")
    block = Block(h=h.tolist(), w=w.tolist(), dim=dim, num_samples=students, seed=seed, eps=1e-3)
    [wanted] = sampler_cuda.staged([block], torch.device("cpu"))
    torch.testing.assert_close((h, w, eps), wanted, rtol=0, atol=0)
