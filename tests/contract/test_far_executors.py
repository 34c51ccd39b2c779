"""The contract of executors where the workers are behind a link that takes its time."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ray_cluster import LINK_DELAY_S, THROUGH_SSH, wait_for
from tests.ssh_hosts import far_away, ssh_servers

from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.ray_hosts import RayHosts
from muster.run.folder import RunFolder

SUITE = Path(__file__).with_name("test_executors.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("delay_s", [0.005, 0.1])
def test_the_contract_holds_over_a_slow_link(delay_s: float) -> None:
    """All that goes between the coordinator and the workers takes so long, in each direction: what
    Ray and Muster say to each other, in the suite that every executor passes."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(SUITE), "-q", "-k", "ray", "-p", "no:cacheprovider"],
        capture_output=True, text=True, check=False,
        env={**os.environ, LINK_DELAY_S: str(delay_s)},
    )  # fmt: skip
    if "a cable with a delay needs" in done.stdout:
        pytest.skip("a cable with a delay needs root, iproute2 and /dev/net/tun")
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 24, done.stdout


#: What one turn of the scheduler needs: results, failures, orders while a task runs, and an end.
PART = "in_order or told_to_end or carries_its_traceback or returns_exactly or killing_is"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("delay_s", [0.005, 0.1])
@pytest.mark.parametrize(
    ("which", "least"),
    [
        pytest.param(f"ray and ({PART})", 6, marks=pytest.mark.thorough, id="a part"),
        pytest.param("ray", 24, marks=pytest.mark.slow, id="all of it"),
    ],
)
def test_the_contract_holds_through_ssh_over_a_slow_link(
    delay_s: float, which: str, least: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of Ray's connections to the workers go through the one of ssh."""
    with ssh_servers() as hosts, far_away(hosts, {"far": delay_s}):
        monkeypatch.setenv("MUSTER_SSH", hosts.ssh)
        token = secrets.token_hex(32)
        request = ClusterRequest(hosts="far:cpu:2", through_ssh=True, num_workers=2)
        ray = RayHosts(request, token, RunFolder(tmp_path / "contract"))
        try:
            wait_for(lambda: ray.is_up(1.0))
            done = subprocess.run(
                [sys.executable, "-m", "pytest", str(SUITE), "-q", "-k", which, "-m", "not gpu",
                 "-p", "no:cacheprovider"],
                capture_output=True, text=True, check=False,
                env={**os.environ, THROUGH_SSH: ray.address, "RAY_AUTH_MODE": "token",
                     "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"},
            )  # fmt: skip
        finally:
            ray.close()
        assert done.returncode == 0, done.stdout
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed and int(passed[1]) >= least, done.stdout
