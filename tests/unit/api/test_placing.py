"""On a cluster, options that choose devices of this machine have no effect and are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli
from tests.unit.api.test_lending import on_machine

from muster.api.start.options import SweepOptions
from muster.api.start.placing import would_take
from muster.base.errors import UsageError
from muster.base.settings import read_settings
from muster.devices.leases import Lease, acquire
from muster.farm.executors.cluster import ClusterRequest


@pytest.mark.parametrize("executor", ["slurm", "ray"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "cpu:2"}, "--devices cpu:2 has no effect"),
        ({"gpu_ids": "0"}, "--gpu-ids 0 has no effect"),
        ({"max_gpus": 2}, "--max-gpus 2 has no effect"),
        ({"per_gpu": "auto"}, "--per-gpu auto has no effect"),
        ({"per_gpu": 2, "gpus_per_task": 3}, "--per-gpu 2 and --gpus-per-task 3 have no effect"),
        ({"force": True}, "--force has no effect"),
    ],
)
def test_options_without_effect_are_refused(
    executor: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        would_take(SweepOptions(executor=executor, **options), read_settings())
    assert message + f" with --on {executor}." in str(refused.value)
    assert "--gpus-per-worker" in str(refused.value)


def test_a_slot_for_each_worker() -> None:
    options = SweepOptions(executor="slurm", cluster=ClusterRequest(num_workers=2))
    assert [slot.label for slot in would_take(options, read_settings()).slots] == [
        "slurm/0", "slurm/1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sweep job.py:f --grid x=1 --devices 2", 3),
        ("map job.py:f --input in.jsonl --output o.jsonl --gpu-ids 0,1", 3),
        ("train digits --gpus 2", 3),
        ("run --gpus 2 job.py", 3),
        ("sweep job.py:f --grid x=1", 0),  # on the CPU then
        ("sweep job.py:f --grid x=1 --devices 2 --wait", 0),
        ("sweep job.py:f --grid x=1 --devices 2 --force", 0),
        ("sweep job.py:f --grid x=1 --devices cpu:2", 0),
    ],
)
def test_a_dry_run_says_who_holds_the_devices(
    line: str, code: int, tmp_path: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = on_machine(tmp_path, monkeypatch, 2)
    (tmp_path / "job.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    held = [acquire(uuid, "other", settings) for uuid in ("GPU-0", "GPU-1")]
    done = muster_main(*line.split(), "--dry-run")
    for lease in held:
        assert isinstance(lease, Lease)
        lease.release()
    assert done.returncode == code, done.stdout + done.stderr
    is_told = "leased by run other of" in done.stdout + done.stderr
    assert is_told == (code == 3 or line.endswith("x=1")), done.stdout + done.stderr
