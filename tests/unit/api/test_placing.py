"""On a cluster, options that choose devices of this machine have no effect and are refused."""

from __future__ import annotations

from typing import Any

import pytest

from muster.api.options import SweepOptions
from muster.api.placing import would_take
from muster.base.errors import UsageError
from muster.base.settings import read_settings
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
