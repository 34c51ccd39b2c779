"""Starting costs nothing: no heavy import, and a time relative to the interpreter's own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from statistics import median

import pytest

pytestmark = pytest.mark.thorough

HEAVY = (
    "torch", "numpy", "pyarrow", "matplotlib", "ray", "sqlite3", "pandas", "scipy", "psutil",
)  # fmt: skip

IMPORT = ["-c", "import muster"]
HELP = ["-m", "muster", "--help"]


@functools.cache
def seconds_of_torch() -> float:
    return seconds(["-c", "import torch"])


def seconds(args: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *args], capture_output=True, check=True)
    return time.perf_counter() - begin


@pytest.mark.parametrize(("args", "limit_s"), [(IMPORT, 0.060), (HELP, 0.250)])
def test_starting_is_quick(args: list[str], limit_s: float) -> None:
    """``import muster`` < 60 ms above a bare interpreter, ``muster --help`` < 250 ms.

    The limits are those of a machine that starts a bare interpreter in 20 ms; on a slower or
    busier one they grow with what the bare interpreter takes in the same minutes.
    """
    bare, ours = [], []
    for _ in range(7):
        bare.append(seconds(["-c", "pass"]))
        ours.append(seconds(args))
    slowness = max(1.0, median(bare) / 0.020)
    assert median(ours) - median(bare) < limit_s * slowness
    assert median(ours) < 0.25 * seconds_of_torch()


@pytest.mark.parametrize(
    "start",
    [
        "import muster",
        "import muster; muster.Recipe, muster.sweep, muster.batched",
        "from muster.cli.main import main; main(['--help'])",
        "import muster.api.launch, muster.cli.commands.sweep",
        "from muster.cli.main import main; main(['list'])",
    ],
)
def test_nothing_heavy_is_imported(start: str) -> None:
    # The ledger needs sqlite3 once a sweep is prepared; the rest must never come.
    allowed = set() if "--help" in start or start == "import muster" else {"sqlite3"}
    code = f"{start}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert loaded & set(HEAVY) <= allowed


#: Found in profiles of a start: each takes milliseconds in every process, and is of no use there.
IDLE = {
    "muster.base.reaper": {"dataclasses", "inspect", "json", "secrets", "subprocess", "tempfile"},
    "muster.farm.worker.main": {"logging", "pickle", "secrets", "subprocess", "tempfile"},
    "muster.cli.main": {"dataclasses", "difflib", "inspect", "json", "logging", "pathlib"},
    # The help of a map needs nothing of what runs one.
    "muster.cli.commands.map": {"muster.api.map", "muster.api.launch", "muster.farm.plan"},
    # A dry run needs no more than this module.
    "muster.cli.commands.sweep": {
        "csv", "ctypes", "difflib", "email", "filelock", "importlib.metadata", "logging", "queue",
        "secrets", "socket", "sqlite3", "subprocess", "muster.api.start.notify",
        "muster.api.start.services", "muster.api.trackers.tracker", "muster.devices.leases",
        "muster.farm.coordinator", "muster.farm.decisions", "muster.monitor.files",
    },
    "muster.cli.commands.look": {"muster.api.report.content", "muster.api.sweeps.search_state"},
}  # fmt: skip


@pytest.mark.parametrize("module", IDLE)
def test_what_a_process_does_not_use_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not IDLE[module] & set(done.stdout.split())


def test_the_coordinator_of_a_sweep_never_imports_torch() -> None:
    code = """
import sys, tempfile, pathlib, muster
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "t.py").write_text("import torch\\ndef f(x: int):\\n    return {'y': float(torch.ones(x).sum())}\\n")
run = muster.sweep(f"{folder}/t.py:f", grid={"x": [1, 2]}, devices="cpu:1", run_dir=folder / "run")
assert run.exit_code == 0
print([name for name in ("torch", "numpy", "pyarrow") if name in sys.modules])
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
