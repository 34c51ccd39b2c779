"""What stands in for the agents of a raylet, without Ray."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from muster.farm.executors.ray_lean import NOBODY

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no shell")


def test_a_stand_in_ends_with_the_raylet_that_holds_its_input() -> None:
    """A raylet that was killed left two sleeping processes, for ever."""
    nobody = subprocess.Popen([*shlex.split(NOBODY), "--added=1"], stdin=subprocess.PIPE)
    assert nobody.stdin is not None
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            nobody.wait(0.2)  # the raylet would end with it
        nobody.stdin.close()
        assert nobody.wait(20) == 0
    finally:
        nobody.kill()
        nobody.wait()


def test_a_stand_in_stays_where_the_raylet_holds_no_input() -> None:
    nobody = subprocess.Popen(shlex.split(NOBODY), stdin=subprocess.DEVNULL)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            nobody.wait(0.2)
    finally:
        nobody.kill()
        nobody.wait()
