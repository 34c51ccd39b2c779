"""The benchmarks run and say what they measured; their figures are no matter of pass or fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Libraries; what made a fixture.
NO_BENCHMARKS = {"measuring", "dashboard_peers", "record_digits_grid"}
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in NO_BENCHMARKS)
#: More than ten seconds each: for `make test-slow`.
LONG = {
    "chaos", "cluster_overhead", "dashboard", "ddp_throughput", "faults", "generate",
    "house_overhead", "launch", "map_overhead", "plan_error", "ray_overhead", "resume",
    "rl_throughput", "scaling", "search", "search_stop", "ssvae_ensemble", "trackers",
}  # fmt: skip
CASES = [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in NAMES]


@pytest.mark.parametrize("name", CASES)
def test_a_quick_run_ends_with_a_table_and_a_record(name: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--json", record],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
    assert json.loads(record.read_text())
