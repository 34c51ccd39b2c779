"""The contract of executors where the workers are behind a link that takes its time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ray_cluster import LINK_DELAY_S

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
