"""The acceptance on a GPU, rehearsed on the CPU: every step works, whatever the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_acceptance"


@pytest.mark.skipif(sys.platform != "linux", reason="GPUs of Linux")
@pytest.mark.parametrize(
    "numbers", [(0, 9), pytest.param(tuple(range(15)), marks=pytest.mark.slow)]
)
def test_every_step_in_small(numbers: tuple[int, ...], tmp_path: Path) -> None:
    only = ["--only", ",".join(map(str, numbers))]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", *only, "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=380, cwd=tmp_path,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [line for line in lines if line["status"] != "ok"]
    assert not wrong, json.dumps(wrong, indent=1)
    assert sorted(line["step"] for line in lines) == [*numbers]
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    assert sorted(map(json.loads, written), key=str) == sorted(lines, key=str)


def test_a_step_that_hangs_or_has_no_time_costs_the_others_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "0,14", "--deadline", "1", "--out", "out"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines] == ["left out", "left out"]
    assert lines[0]["error"] in [f"it needs 15 s, and {left} s are left" for left in (0, 1)]
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
def test_goals_are_held_or_missed_and_only_rehearsed_without_a_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from acceptance.main import _goals

    found = [
        {"step": 5, "goals": {"small MLP, share of the raw loop": 0.91}},
        {"step": 6, "goals": {"share of time that saving takes": 0.03}},
        {"step": 9, "goals": {"innocent failures, faults of devices": 1}},
        {"step": 11, "status": "left out"},
    ]
    for rehearse, verdicts in ((False, ["held", "missed"]), (True, ["only rehearsed"] * 2)):
        lines = {
            line[6:54].strip(): line for line in _goals(found, rehearse=rehearse).splitlines()[2:]
        }
        assert lines["small MLP, share of the raw loop"].endswith(verdicts[0])
        assert lines["share of time that saving takes"].endswith(verdicts[1])
        assert lines["innocent failures, faults of devices"].endswith("missed")
        assert lines["generation, times one at a time"].endswith("not measured")


@pytest.mark.quick
def test_several_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits before a round until its turn has come, and settles before it is timed."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from acceptance.programs.tasks import Clock

    sizes = {"WARM": "2", "STEPS": "3", "SETTLE": "1", "ROUNDS": "2"}
    places = {"CLOCK": str(tmp_path / "a.json"), "TURNS": str(tmp_path), "WAY": "a"}
    for name, value in {**sizes, **places}.items():
        monkeypatch.setenv(name, value)
    clock = Clock()
    for number in range(2):
        (tmp_path / f"a-{number}").touch()
    for step in range(1, 12):
        clock.tick()
        done = json.loads((tmp_path / "a.json").read_text()) if step >= 7 else []
        assert len(done) == (step >= 7) + (step >= 11), step
        assert (tmp_path / "a-ready").exists() == (step >= 3)
